"""Half precision on a CPU, every family and method: train, predict, export, predict with the export, evaluate."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import training_kit

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from transformers import RobertaConfig, RobertaModel

from cmexam_tune import prompts, tiny
from cmexam_tune.config import Config
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.export import export, logits
from cmexam_tune.inference import loading, merging
from cmexam_tune.models import precision
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.families.chatglm import tiny_chatglm
from cmexam_tune.models.generation.kv_cache import PrefillScorer
from cmexam_tune.predict import predict
from cmexam_tune.train import train
from cmexam_tune.training import checkpoints
from cmexam_tune.training.run_directory import run as runs

LORA = {"method": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "bias": {**LORA, "bias": "all"},
    "saved": LORA,
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 3, "prefix_projection": True},
    "full": {"method": "full"},
    "head": {"method": "head"},
}
FAMILIES = {"llama": "llama", "chatglm": "chatglm", "chatglm2": "chatglm", "bert": "bert",
            "qwen": "llama", "chatglm3": "chatglm", "roberta": "bert"}  # fmt: skip
"""Layout -> `model.family`; the last three are variations, for `-m slow`."""
WHOLE = {
    "llama": ["lm_head", "embed_tokens"],
    "qwen": ["embed_tokens"],
    "bert": ["pooler"],
    "roberta": ["key"],
}
CASES = [(layout, method) for layout, family in FAMILIES.items() for method in METHODS
         if method != "head" or family == "bert"]  # fmt: skip
HALVES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("half"), count=6)


def base(folder: Path, layout: str) -> Path:
    path, size = folder / layout, {"hidden": 32, "layers": 2}
    if path.exists():
        return path
    if layout == "chatglm3":
        return tiny_chatglm.build(path, tiny.texts(), version=3, **size)
    if layout != "roberta":
        return tiny.build(layout, path, **size)
    tiny.build("bert", path, **size)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(vocab_size=6000, max_position_embeddings=514, pad_token_id=0, **shape)
    RobertaModel(config, add_pooling_layer=False).save_pretrained(path)
    return path


def trained(folder: Path, case: tuple[str, str], dtype: str, out: Path) -> runs.Run:
    """Two steps with an evaluation by exam accuracy, which generates."""
    layout, method = case
    tuning = dict(METHODS[method])
    if method == "saved":
        tuning["modules_to_save"] = WHOLE.get(layout, ["final_layernorm"])
    changes: dict[str, Any] = {
        "model__family": FAMILIES[layout], "model__model_name_or_path": str(base(folder, layout)),
        "model__dtype": dtype, "tuning": tuning, "prompt__style": "answer", "training__max_steps": 2,
        "training__learning_rate": 1e-2, "training__eval_strategy": "steps", "training__eval_steps": 2,
        "training__save_steps": 2, "training__metric_for_best_model": "exam_accuracy",
        "data__validation": [str(folder / "val.jsonl")], "data__max_eval_samples": 2,
        "generation": {"max_new_tokens": 3, "batch_size": 8},
    }  # fmt: skip
    if FAMILIES[layout] == "bert":
        changes["model__head"] = "choice"
    return train(training_kit.recipe(folder, out=str(out), **changes))


def exports(layout: str, method: str) -> Iterator[dict[str, Any]]:
    """Every format that the case has."""
    if method in ("full", "head"):
        yield {"format": "hf"}
    elif method == "ptuning":
        yield {"format": "peft"}
        if FAMILIES[layout] == "chatglm":
            yield {"format": "chatglm"}
    else:
        yield {"merge": True}
        yield {"format": "peft"}


def opened(config: Config, out: Path, options: dict[str, Any]) -> Config | None:
    """Return a recipe that answers with an export; PEFT's prefixes and classifiers are not read back by `predict`."""
    adapter = options.get("format") in ("peft", "chatglm")
    if options.get("format") == "peft" and (config.model.family == "bert" or config.tuning.method == "ptuning"):
        return None
    key = "adapter_name_or_path" if adapter else "model_name_or_path"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{key: str(out)}))


def difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the largest difference of logits, as a share of the largest."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


def params() -> Iterator[Any]:
    for place, case in enumerate(CASES):
        for half, dtype in enumerate(HALVES):
            # Every second case, in either half in turn.
            fast = (place + 2 * half) % 4 == 0 and case[0] in ("llama", "chatglm", "chatglm2", "bert")
            yield pytest.param(case, dtype, id="-".join([*case, dtype]), marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("case", "dtype"), [*params()])
def test_run_and_exports_answer_alike(
    folder: Path, case: tuple[str, str], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported model is the run's to the bit; only whole modules and norms, trained in float32, are rounded once.

    An export has one type, the base's. Then logits may differ by that rounding, 2**-7 of the largest in bfloat16 and
    2**-10 in float16, and a text where two tokens are nearer than that.
    """
    # In bfloat16 rounding moves up to 0.011 in a tiny ChatGLM, whose weights are large: it would stay unmerged.
    monkeypatch.setattr(merging, "TOLERANCE", 0.02)
    run = trained(folder, case, dtype, tmp_path / "run")
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
    tuned = load_file(checkpoints.newest_first(run.path)[0] / "trainable.safetensors")
    assert {value.dtype for value in tuned.values()} == {torch.float32}
    asked = folder / "val.jsonl"
    first = predict(run.path, asked, tmp_path / "run.jsonl")
    accuracy = evaluate(first, asked).overall["accuracy"]
    mine = loading.load(loading.open_source(run.path))
    rounded = case[1] == "saved" or (case[1] == "bias" and case[0] in ("chatglm", "bert", "roberta"))
    with precision.inference(mine.model):
        expected = logits(mine)
    for number, options in enumerate(exports(*case)):
        config = opened(run.config, export(run.path, tmp_path / f"export{number}", **options), options)
        if config is None:
            continue  # `export` itself has compared the logits, with PEFT alone where that has such a model
        other = loading.load(loading.open_source(config))
        assert difference(logits(other), expected) <= (torch.finfo(other.model.dtype).eps if rounded else 0)
        again = predict(config, asked, tmp_path / f"export{number}.jsonl")
        found = evaluate(again, asked).overall
        if not rounded:
            assert again.read_bytes() == first.read_bytes()
            assert found["accuracy"] == accuracy
        assert found["n"] == 6
    alone_and_in_batches(mine, run.config, list(jsonl.read(asked, Question)))


def alone_and_in_batches(loaded: Loaded, config: Config, questions: Sequence[Question]) -> None:
    """Rounding is all that a batch changes: the same weights in float32 answer alike alone and in a batch of eight.

    In half precision the logits of both lie equally near to float32's; a random model's near-ties fall either way.
    """
    family: Any = runs.parts(config)[0]
    exact = Loaded(copy.deepcopy(loaded.model).float(), loaded.tokenizer)
    modes = ("generate",) if config.model.family == "bert" else ("generate", "constrained", "likelihood")
    for mode in modes:
        found = []
        for model, size in ((exact, 1), (exact, 8), (loaded, 1), (loaded, 8)):
            generation = dataclasses.replace(config.generation, mode=mode, batch_size=size)
            answered: list[Prediction] = list(
                family.answer(model, questions, dataclasses.replace(config, generation=generation))
            )
            found.append({one.question_id: one for one in answered})
            assert len(found[-1]) == len(questions) and (mode == "generate" or all(one.answer for one in answered))
        for question_id, one in found[0].items():
            other = found[1][question_id]
            # They are written with four digits, the last of which rounding may turn.
            assert (other.probabilities or {}) == pytest.approx(one.probabilities or {}, rel=2e-3), mode
            assert dataclasses.replace(other, probabilities=one.probabilities) == one, mode
    wanted = after_prompts(exact, config, questions, 1)
    for size in (1, 8):
        for model, limit in ((exact, 1e-5), (loaded, 8 * torch.finfo(getattr(torch, config.model.dtype)).eps)):
            assert difference([after_prompts(model, config, questions, size)], [wanted]) <= limit, size


def after_prompts(loaded: Loaded, config: Config, questions: Sequence[Question], size: int) -> Any:
    """Return what the model says after the prompts, `size` of them in a batch: log-probabilities or scores."""
    family: Any = runs.parts(config)[0]
    found = []
    for start in range(0, len(questions), size):
        some = questions[start : start + size]
        with precision.inference(loaded.model):
            if config.model.family == "bert":
                rows = family.encode(loaded, some, config.prompt, config.model).rows
                found.append(family.scores(loaded.model, family.collate(loaded, [[row] for row in rows])))
                continue
            decoder = family.engine(loaded, config)
            ids = [item.ids + decoder.codec.lead for item in decoder.ask(prompts.default_prompts(some, config))]
            found.append(PrefillScorer(decoder.model, ids, decoder.pad).prefill(1)[:, 0])
    return torch.cat(found)


def test_one_place_decides(folder: Path, tmp_path: Path) -> None:
    """Mixed weights compute in the half precision of the frozen ones; plain ones as they are; without gradients."""
    for case, wanted in ((("bert", "lora"), torch.bfloat16), (("llama", "ptuning"), None)):
        _, loaded = runs.load(trained(folder, case, "bfloat16", tmp_path / case[0]).path)
        with precision.inference(loaded.model):
            assert torch.is_autocast_enabled("cpu") == (wanted is not None)
            assert wanted is None or torch.get_autocast_dtype("cpu") == wanted
            assert torch.is_inference_mode_enabled()


@pytest.mark.parametrize(("layout", "matrices"), [("llama", 14), ("chatglm2", 12)])
def test_lora_on_weights_of_four_bits(
    folder: Path, layout: str, matrices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes' own layers hold the weights; what is trained is float32, learns, and the saved run answers."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # What bitsandbytes rounds on a CPU grows with the weights, which are large in a tiny ChatGLM.
    monkeypatch.setattr(tiny_chatglm, "SPREAD", 0.02)
    base = tiny.build(layout, folder / f"{layout}_wide", hidden=192, layers=2)
    changes = {
        "model__family": FAMILIES[layout], "model__model_name_or_path": str(base), "model__load_in_4bit": True,
        "prompt__style": "answer", "training__num_train_epochs": 6, "training__learning_rate": 2e-2, "tuning": LORA,
    }  # fmt: skip
    run = train(training_kit.recipe(folder, out=str(folder / f"{layout}_nf4"), **changes))
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    loaded = loading.load(loading.open_source(run.path))
    quantised = [m for m in loaded.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(quantised) == matrices and all(m.weight.quant_type == "nf4" for m in quantised)
    questions = list(jsonl.read(folder / "val.jsonl", Question))[:2]
    config = dataclasses.replace(run.config, generation=dataclasses.replace(run.config.generation, mode="likelihood"))
    assert len(list(runs.parts(run.config)[0].answer(loaded, questions, config))) == 2
    out = export(run.path, folder / f"{layout}_nf4_merged", merge=True)
    assert all(value.dtype.is_floating_point for value in load_file(out / "model.safetensors").values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuning": {"method": "full"}}, "read by LoRA only"),
        ({"training__deepspeed": "zero3"}, "ZeRO-3 cannot share out"),
        ({"model__adapter_name_or_path": "x/y/z"}, "cannot be merged into weights of 4 bits"),
        ({"model__family": "chatglm"}, "has no weights of 4 bits"),
    ],
)
def test_four_bits_that_cannot_be(folder: Path, changes: dict[str, Any], words: str) -> None:
    place = str(base(folder, changes.get("model__family", "llama")))
    changes = {"model__load_in_4bit": True, "model__model_name_or_path": place, **changes}
    with pytest.raises(ConfigError, match=words):
        train(training_kit.recipe(folder, out=str(folder / "no"), **changes))
