"""Classifiers: rows, losses against a loop over questions, legal answers, and labels that travel."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import SHARED, checkpoint, make_config, question, questions
from torch.nn import functional
from transformers import RobertaConfig, RobertaModel

from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.families.bert import Bert, position_limit, read_logits

lora = LoRA()
bert = Bert()

HEADS = ("choice", "label", "multilabel")


def opened(head: str, asked: list[Question] | None = None, **changes: Any) -> tuple[Loaded, Config]:
    config = make_config("bert", model__head=head, prompt__max_source_length=100, tuning={"method": "head"}, **changes)
    torch.manual_seed(0)
    loaded = bert.load(config.model, questions(12) if asked is None else asked)
    loaded.model.eval()  # type: ignore[no-untyped-call]
    return loaded, config


@pytest.mark.parametrize("head", HEADS)
def test_loss_is_the_mean_of_the_questions_losses(head: str) -> None:
    loaded, config = opened(head)
    encoded = bert.encode(loaded, questions(12), config.prompt, config.model)
    batch = bert.collate(loaded, [[row] for row in encoded.rows])
    alone = [float(bert.loss(loaded.model, bert.collate(loaded, [[row]])).detach()) for row in encoded.rows]
    assert float(bert.loss(loaded.model, batch).detach()) == pytest.approx(sum(alone) / len(alone), rel=1e-5)
    # By hand, without batches, padding or our collate.
    labels = list(loaded.model.config.id2label.values())  # type: ignore[union-attr]
    for row, q, found in zip(encoded.rows, questions(12), alone, strict=True):
        scores = torch.cat(
            [
                loaded.model(input_ids=torch.tensor([ids]), token_type_ids=segments(loaded, ids)).logits
                for ids in row["input_ids"]
            ]
        )
        if head == "label":
            expected = functional.cross_entropy(scores, torch.tensor([labels.index(q.answer or "")]))
        elif head == "choice":
            wanted = torch.tensor([float(letter in (q.answer or "")) for letter in q.options])
            expected = functional.binary_cross_entropy_with_logits(scores[:, 0], wanted)
        else:
            legal = [i for i, letter in enumerate(labels) if letter in q.options]
            wanted = torch.tensor([float(labels[i] in (q.answer or "")) for i in legal])
            expected = functional.binary_cross_entropy_with_logits(scores[0, legal], wanted)
        assert found == pytest.approx(float(expected.detach()), rel=1e-4)


def segments(loaded: Loaded, ids: list[int]) -> torch.Tensor:
    first = ids.index(loaded.tokenizer.sep_token_id) + 1
    return torch.tensor([[0] * first + [1] * (len(ids) - first)])


def test_segments_are_the_tokenizers() -> None:
    loaded, config = opened("choice")
    q = question(1)
    (row,) = bert.encode(loaded, [q], config.prompt, config.model).rows
    batch = bert.collate(loaded, [[row]])
    theirs = loaded.tokenizer([q.stem] * 5, list(q.options.values()), padding=True, return_tensors="pt")
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], theirs[name]), name


@pytest.mark.parametrize("head", HEADS)
def test_stems_are_cut_options_are_not(head: str) -> None:
    loaded, config = opened(head)
    q = question(1, stem="甲" * 400 + "最可能的诊断是")
    encoded = bert.encode(loaded, [q], config.prompt, config.model)
    assert encoded.truncation.stems_cut == 1 and encoded.truncation.longest_source == 100
    texts = [loaded.tokenizer.decode(ids).replace(" ", "") for ids in encoded.rows[0]["input_ids"]]
    for i, (letter, option) in enumerate(q.options.items()):
        assert f"{letter}{option}".lower() in texts[0] if head != "choice" else option.lower() in texts[i]
    long = replace(q, options={**q.options, "A": "长" * 120})
    assert bert.encode(loaded, [long], config.prompt, config.model).truncation.too_long == (q.id,)


@pytest.mark.parametrize("head", HEADS)
def test_answers_are_legal_and_do_not_depend_on_the_batch(head: str) -> None:
    loaded, config = opened(head)
    with torch.no_grad():
        loaded.model.classifier.bias.normal_()  # type: ignore[union-attr, operator]
    asked = {q.id: q for q in [*questions(12), question(90, "长" * 700)]}
    found = []
    for size in (1, 5, 64):
        changed = replace(config, generation=replace(config.generation, batch_size=size))
        found.append({p.question_id: p for p in bert.answer(loaded, list(asked.values()), changed)})
    assert found[0] == found[1] == found[2] and set(found[0]) == set(asked)
    for prediction in found[0].values():
        q = asked[prediction.question_id]
        assert prediction.answer and set(prediction.answer) <= set(q.options)
        assert answer_parsing.parse(prediction.text, q) == prediction.answer
        if q.kind == "single":
            assert len(prediction.answer) == 1


def test_answers_leave_the_card_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, config = opened("choice")
    copied, copy = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.shape) or copy(tensor))
    assert len(list(bert.answer(loaded, questions(12), config))) == 12
    assert len(copied) == 1


@pytest.mark.parametrize(
    ("head", "kind", "logits", "expected"),
    [
        ("choice", None, [3.0, -1.0, 2.0, -3.0], "AC"),
        ("choice", "single", [3.0, -1.0, 4.0, -3.0], "C"),
        ("choice", None, [-3.0, -1.0, -2.0, -3.0], "B"),
        ("multilabel", "multiple", [-3.0, 1.0, -2.0, 0.5, 9.0], "BD"),
        ("multilabel", None, [-3.0, -1.0, -2.0, -0.5, 9.0], "D"),
        ("label", None, [0.0, 1.0, 2.0, 9.0], "AC"),
        ("label", "single", [0.0, 1.0, 2.0, 9.0], "B"),
    ],
)
def test_what_logits_mean(head: str, kind: str | None, logits: list[float], expected: str) -> None:
    labels = {"choice": ["correct"], "multilabel": list("ABCDE"), "label": ["A", "B", "AC", "E"]}[head]
    assert read_logits(question(1, letters="ABCD", kind=kind), head, labels, torch.tensor(logits)) == expected


def test_no_label_fits_is_unreadable() -> None:
    assert read_logits(question(1, letters="ABCD"), "label", ["E", "AE"], torch.tensor([1.0, 2.0])) == ""


@pytest.mark.parametrize("head", HEADS)
def test_all_heads_learn(head: str) -> None:
    """The option marked as right in its text is the answer: every head can learn that."""
    asked = []
    for i in range(16):
        right = "ABCD"[i * 7 % 4]
        options = {letter: "正确" if letter == right else "以上都不是" for letter in "ABCD"}
        asked.append(Question(f"q:{i}", f"关于{i}的说法", options, right))
    loaded, config = opened(head, asked)
    rows = bert.encode(loaded, asked, config.prompt, config.model).rows
    optimizer = torch.optim.AdamW(loaded.model.parameters(), 2e-3)
    batch = bert.collate(loaded, [[row] for row in rows])
    for _ in range(120):
        bert.loss(loaded.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    right_answers = {q.id: q.answer for q in asked}
    assert all(p.answer == right_answers[p.question_id] for p in bert.answer(loaded, asked, config))


@pytest.mark.parametrize("head", ["label", "multilabel"])
def test_labels_come_from_training_and_stay_with_the_model(head: str, tmp_path: Path) -> None:
    loaded, config = opened(head)
    expected = {"label": ["A", "B", "C", "E", "F", "AC"], "multilabel": list("ABCDEF")}[head]
    assert list(loaded.model.config.id2label.values()) == expected  # type: ignore[union-attr]
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = bert.load(replace(config.model, model_name_or_path=str(tmp_path), head=None))
    assert again.model.config.id2label == loaded.model.config.id2label
    assert list(bert.answer(again, questions(5), config)) == list(bert.answer(loaded, questions(5), config))
    with pytest.raises(UserError, match=f"trained with model.head={head}"):
        bert.load(replace(config.model, model_name_or_path=str(tmp_path), head="choice"))
    named = bert.load(replace(config.model, config={"id2label": {"0": "B", "1": "AD"}}))
    assert named.model.config.id2label == {0: "B", 1: "AD"}
    unseen = question(1, answer="ABCDE")
    if head == "label":
        assert bert.encode(loaded, [unseen], config.prompt, config.model).truncation.unrenderable == (unseen.id,)


def _roberta(folder: Path) -> str:
    loaded, _ = opened("choice")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=len(loaded.tokenizer), max_position_embeddings=104, pad_token_id=0, **size)
    RobertaModel(config, add_pooling_layer=False).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def test_what_lies_in_the_head_is_not_trained_whole_twice(tmp_path: Path) -> None:
    loaded, _ = opened("label", model__model_name_or_path=_roberta(tmp_path))
    with pytest.raises(UserError, match=r"classifier\.\S*dense lies inside another module"):
        lora.attach(loaded.model, bert, lora.Settings(4, 8, 0.0, modules_to_save=("dense",)))


def test_roberta_positions(tmp_path: Path) -> None:
    loaded, config = opened("choice", model__model_name_or_path=_roberta(tmp_path))
    assert position_limit(loaded.model.config) == 103
    long = [question(1, stem="长" * 300), replace(question(2), options={"A": "长" * 300, "B": "短"}, answer="B")]
    assert len(list(bert.answer(loaded, long, config))) == 2
    over = replace(config.prompt, max_source_length=104)
    with pytest.raises(ConfigError, match="103 positions"):
        bert.encode(loaded, questions(2), over, config.model)


WRONG: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("decoder", lambda d: {"model_name_or_path": checkpoint("llama")}, "model.family=llama"),
    ("no folder", lambda d: {"model_name_or_path": str(d / "none")}, "no such folder"),
    ("adapter", lambda d: {"adapter_name_or_path": str(d)}, "starts from a whole model"),
    ("no head", lambda d: {"head": None}, "choice, label, multilabel"),
]


@pytest.mark.parametrize(("changes", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_models(tmp_path: Path, changes: Callable[[Path], dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bert.load(replace(make_config("bert").model, **changes(tmp_path)), questions(3))


@pytest.mark.parametrize("head", ["label", "multilabel"])
def test_an_untrained_head_cannot_answer(head: str) -> None:
    with pytest.raises(UserError, match="training questions"):
        opened(head, [])


def test_an_adapter_run_keeps_its_labels(tmp_path: Path) -> None:
    from cmexam_tune import predict
    from cmexam_tune.core import jsonl
    from cmexam_tune.train import train

    jsonl.write(tmp_path / "q.jsonl", questions(12))
    config = make_config(
        "bert",
        model__head="label",
        data={"train": [str(tmp_path / "q.jsonl")]},
        training={"num_train_epochs": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "report_to": "none"},
        out=str(tmp_path / "run"),
    )
    run = train(config)
    out = predict.predict(run.path, tmp_path / "q.jsonl", tmp_path / "p.jsonl")
    assert len(out.read_text(encoding="utf-8").splitlines()) == 12


@pytest.mark.skipif(not (SHARED / "data" / "cmexam" / "val.csv").is_file(), reason="the real questions are not here")
def test_real_questions_fit_192_tokens() -> None:
    from cmexam_tune.exams import cmexam

    real = [q for q, _ in zip(cmexam.read([SHARED / "data" / "cmexam" / "val.csv"]), range(400), strict=False)]
    loaded, config = opened("choice", real)
    encoded = bert.encode(loaded, real, replace(config.prompt, max_source_length=192), config.model)
    assert len(encoded.rows) == len(real) and encoded.truncation.longest_source <= 192
