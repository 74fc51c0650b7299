"""Decoders: rows, padded and packed batches with the same loss and gradients, templates, and every wrong checkpoint."""

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, question, questions
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from cmexam_tune import prompts, tiny
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import causal
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.features import IGNORE_INDEX

llama = Llama()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return llama.load(make_config().model)


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss summed over labels, and its gradients, for a batch however it is laid out."""
    model.zero_grad()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1]
    loss = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        batch["labels"][:, 1:].reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    loss.backward()
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


GROUPINGS: list[Callable[[Sequence[Any]], list[list[Any]]]] = [
    lambda r: [list(r)],
    lambda r: [list(r[:1]), list(r[1:6]), list(r[6:])],
]


@pytest.mark.parametrize("family", ["llama", "chatglm", "chatglm2"])
@pytest.mark.parametrize("method", ["full", "lora", "ptuning"])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_packed_equals_unpacked(family: str, method: str, grouping: Callable[[Sequence[Any]], list[list[Any]]]) -> None:
    name = "chatglm" if family.startswith("chatglm") else family
    settings = {
        "full": {"method": "full"},
        "lora": {"method": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0},
        "ptuning": {"method": "ptuning", "num_virtual_tokens": 3},
    }[method]
    config = make_config(name, tuning=settings, model__model_name_or_path=checkpoint(family))
    module: Any = Family.named(name)
    model, tokenizer = module.load(config.model)
    model = Method.named(method).attach(model, module, config.tuning.settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    one = Loaded(model.eval(), tokenizer)
    rows = module.encode(one, questions(8), config.prompt, config.model).rows
    apart = gradients(model, module.collate(one, [[row] for row in rows]))
    together = gradients(model, module.collate(one, grouping(rows)))
    single = sum(gradients(model, module.collate(one, [[row]]))[0] for row in rows)
    assert apart[0] == pytest.approx(single, rel=1e-5) and together[0] == pytest.approx(single, rel=1e-5)
    for key, value in apart[1].items():
        assert torch.allclose(value, together[1][key], atol=2e-4, rtol=1e-3), key


def test_collate_layout(loaded: Loaded) -> None:
    rows = [
        {"question_id": str(n), "input_ids": list(range(5, 5 + n)), "labels": [-100, *range(6, 5 + n)]}
        for n in (3, 4, 2)
    ]
    apart = llama.collate(loaded, [[row] for row in rows])
    # Causal attention never looks at padding on the right; families that need to know of it take the shared batch.
    assert set(apart) == {"input_ids", "labels"}
    masked = causal.collate(loaded, [[row] for row in rows])
    assert set(masked) == {"input_ids", "labels", "attention_mask"}
    assert masked["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert apart["labels"][2].tolist() == [-100, 6, -100, -100]
    packed = llama.collate(loaded, [rows[:2], rows[2:]])
    assert set(packed) == {"input_ids", "labels", "position_ids"}
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]
    assert packed["labels"][0].tolist() == [-100, 6, 7, -100, 6, 7, 8]
    # A row that would label its first token must not be predicted from the question before it.
    odd = {**rows[0], "labels": rows[0]["input_ids"]}
    assert llama.collate(loaded, [[odd, odd]])["labels"][0, [0, 3]].tolist() == [-100, -100]


def test_prompt_tokens_have_no_label_and_answer_tokens_do(loaded: Loaded) -> None:
    config = make_config(prompt__style="answer_explain", prompt__template="alpaca", prompt__max_target_length=200)
    asked = questions(6)
    for row, q in zip(llama.encode(loaded, asked, config.prompt, config.model).rows, asked, strict=True):
        example = prompts.render(q, "answer_explain")
        start = sum(label == IGNORE_INDEX for label in row["labels"])
        prompt, completion = row["input_ids"][:start], row["input_ids"][start:]
        assert row["labels"][start:] == completion
        assert loaded.tokenizer.decode(prompt, skip_special_tokens=True) == prompts.wrap(example.prompt, "alpaca")
        assert loaded.tokenizer.decode(completion[:-1]) == example.completion
        assert prompt[0] == loaded.tokenizer.bos_token_id and completion[-1] == loaded.tokenizer.eos_token_id


def test_padding_that_is_eos_does_not_take_the_label_of_eos(loaded: Loaded) -> None:
    tokenizer = llama.load(make_config().model).tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    config = make_config()
    one = Loaded(loaded.model, tokenizer)
    rows = llama.encode(one, questions(4), config.prompt, config.model).rows
    batch = llama.collate(one, [[row] for row in rows])
    for i, row in enumerate(rows):
        assert batch["labels"][i, len(row["labels"]) - 1] == tokenizer.eos_token_id
        assert (batch["labels"][i, len(row["labels"]) :] == IGNORE_INDEX).all()


@pytest.mark.parametrize("system", [None, "你是医生"])
def test_chat_template_of_the_tokenizer(loaded: Loaded, system: str | None) -> None:
    tokenizer = llama.load(make_config().model).tokenizer
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config = make_config(prompt__system=system)
    (row,) = llama.encode(Loaded(loaded.model, tokenizer), [question(1)], config.prompt, config.model).rows
    start = sum(label == IGNORE_INDEX for label in row["labels"])
    middle = f"[system]{system}" if system else ""
    expected = f"<s>{middle}[user]{prompts.prompt(question(1), 'answer')}[assistant]"
    assert tokenizer.decode(row["input_ids"][:start]) == expected
    none = replace(config.prompt, template="none", system=None)
    (bare,) = llama.encode(Loaded(loaded.model, tokenizer), [question(1)], none, config.model).rows
    assert "[user]" not in tokenizer.decode(bare["input_ids"])


def test_config_changes_reach_the_model() -> None:
    config = make_config(model__config={"attention_dropout": 0.25})
    assert llama.load(config.model).model.config.attention_dropout == 0.25


def test_an_adapter_is_merged_before_tuning(loaded: Loaded, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = make_config()
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(checkpoint("llama")),
        LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    ).eval()
    tuned.save_pretrained(str(tmp_path))
    merged = llama.load(replace(config.model, adapter_name_or_path=str(tmp_path))).model
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, tuned(input_ids=ids).logits, atol=1e-5)
        assert not torch.allclose(merged(ids).logits, loaded.model(ids).logits, atol=1e-3)
    assert not any("lora" in name for name, _ in merged.named_parameters())


def _broken(folder: Path, file: str, content: bytes) -> str:
    import shutil

    shutil.copytree(checkpoint("llama"), folder / "m")
    (folder / "m" / file).write_bytes(content)
    return str(folder / "m")


def _without_layer(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    path = Path(_broken(folder, "extra", b""))
    weights = {k: v for k, v in load_file(path / "model.safetensors").items() if "layers.1." not in k}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def _t5(folder: Path) -> str:
    size = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    T5ForConditionalGeneration(T5Config(**size)).save_pretrained(folder / "t5")
    return str(folder / "t5")


def _unknown(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "martian", "auto_map": {"AutoModel": "x.Y"}}))
    return str(folder)


def _adapter(folder: Path) -> str:
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


WRONG: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("no folder", lambda d: {"model_name_or_path": str(d / "none")}, "no such folder"),
    ("file", lambda d: {"model_name_or_path": __file__}, "a file, not a folder"),
    ("not on the hub", lambda d: {"model_name_or_path": "nobody/nothing"}, "neither a folder here"),
    ("empty folder", lambda d: {"model_name_or_path": str(d)}, "no config.json"),
    ("encoder", lambda d: {"model_name_or_path": checkpoint("bert")}, "model.family=bert"),
    ("encoder-decoder", lambda d: {"model_name_or_path": _t5(d)}, "encoder-decoder"),
    ("unknown type", lambda d: {"model_name_or_path": _unknown(d)}, "trust_remote_code"),
    ("an adapter", lambda d: {"model_name_or_path": _adapter(d)}, "adapter_name_or_path"),
    ("cut weights", lambda d: {"model_name_or_path": _broken(d, "model.safetensors", b"\x00" * 9)}, "cannot be loaded"),
    ("missing weights", lambda d: {"model_name_or_path": _without_layer(d)}, "not in the checkpoint"),
    ("broken config", lambda d: {"model_name_or_path": _broken(d, "config.json", b"{")}, "config.json|cannot be used"),
    ("config key", lambda d: {"config": {"hiden_size": 3}}, "did you mean 'hidden_size'"),
    ("no adapter", lambda d: {"adapter_name_or_path": str(d)}, "no PEFT adapter"),
    ("a head", lambda d: {"head": "choice"}, "no head"),
]


@pytest.mark.parametrize(("changes", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Callable[[Path], dict[str, Any]], message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=message):
        llama.load(replace(make_config().model, **changes(tmp_path)))


def test_tiny_sizes_and_seeds(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path / "m", hidden=32, layers=3, vocab=9000, seed=4)
    config = AutoConfig.from_pretrained(path)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (32, 3, 9000)
    with pytest.raises(UserError, match="--overwrite"):
        tiny.build("llama", path)
    with pytest.raises(UserError, match="did you mean 'llama'"):
        tiny.build("lama", tmp_path / "x")
    tokenizer = llama.load(make_config(model__model_name_or_path=str(path)).model).tokenizer
    for text in ("答案: ACD", "维生素B12缺乏 α-2\n😀"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert all(len(tokenizer.tokenize(letter)) == 1 for letter in "ABCDEF答案解释")


class _Code:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("owned"),)


CODE = pickle.dumps({"transformer.prefix_encoder.embedding.weight": _Code()})
"""A pickle that makes a file when it is read."""
DAMAGED: list[tuple[str, bytes]] = [
    ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}'),
    ("config.json", b'{"model_type": "llama", "num_hidden_layers": -1}'),
    ("config.json", b'{"model_type": "llama", "num_hidden_layers": 1000000000}'),
    ("config.json", b'{"model_type": "llama", "num_attention_heads": 3, "hidden_size": 64}'),
    ("config.json", b'{"model_type": ["llama"]}'),
    ("config.json", b'{"model_type": "llama", "rope_parameters": 7, "rope_scaling": 7}'),
    ("config.json", b'["llama"]'),
    ("config.json", b"[" * 100_000),
    ("config.json", b"\xff\xfe"),
    ("generation_config.json", b"[1, 2"),
    ("generation_config.json", b'{"eos_token_id": "end", "temperature": [1]}'),
    ("tokenizer.json", b"{}"),
    ("tokenizer.json", b"null"),
    ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}'),
    ("tokenizer_config.json", b"7"),
    ("tokenizer_config.json", b'{"tokenizer_class": 7}'),
    ("tokenizer_config.json", b'{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": [1]}'),
    ("special_tokens_map.json", b"[[]]"),
    ("model.safetensors.index.json", b'{"weight_map": {"lm_head.weight": "../../secret.safetensors"}}'),
    ("model.safetensors.index.json", b'{"weight_map": {"lm_head.weight": "/etc/passwd"}}'),
    ("model.safetensors.index.json", b'{"weight_map": ["x"]}'),
    ("model.safetensors", b"PK\x03\x04"),
    ("adapter_config.json", b"{"),
]


@pytest.mark.parametrize("place", range(len(DAMAGED)), ids=[f"{file}-{i}" for i, (file, _) in enumerate(DAMAGED)])
def test_a_damaged_checkpoint_is_one_message(tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file, content = DAMAGED[place]
    folder = _broken(tmp_path, file, content)
    with pytest.raises(UserError) as caught:
        llama.load(make_config(model__model_name_or_path=folder).model)
    assert folder in str(caught.value) and len(str(caught.value)) < 800
    if "weight_map" in str(content) and "." in str(content):
        assert "not in its folder" in str(caught.value) or "weight_map" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b'{"peft_type": "LORA", "r": "many", "target_modules": 7}'),
        ("adapter_config.json", b'{"peft_type": "MAGIC"}'),
        ("adapter_model.safetensors", b"\x00" * 20),
        ("adapter_model.safetensors", None),
        ("adapter_model.bin", b"junk"),
        ("adapter_model.bin", CODE),
    ],
)
def test_a_damaged_adapter_is_one_message(tmp_path: Path, file: str, content: bytes | None) -> None:
    from peft import LoraConfig, get_peft_model

    config = make_config()
    base = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    (tmp_path / (file if file.endswith("json") else "adapter_model.safetensors")).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match="adapter") as caught:
        llama.load(replace(config.model, adapter_name_or_path=str(tmp_path)))
    assert "weights_only" not in str(caught.value) and not Path("owned").exists()
    assert content is not CODE or "ask its author for safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b"\xff" * 64), ("model.safetensors", b""), ("pytorch_model.bin", b"junk"),
        ("pytorch_model.bin", CODE), ("pytorch_model.bin", b"PK\x03\x04"),
    ],
)  # fmt: skip
def test_a_damaged_prefix_is_one_message(tmp_path: Path, file: str, content: bytes) -> None:
    from cmexam_tune.models.families.chatglm.authors_prefix import load_authors_prefix

    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=file) as caught:
        load_authors_prefix(tmp_path)
    assert "weights_only" not in str(caught.value) and not Path("owned").exists()


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_model_without_numbers_answers_nothing(family: str) -> None:
    """It would otherwise choose the first letter for every question."""

    config = make_config(family)
    module = Family.named(family)
    loaded = module.load(config.model)
    torch.nn.init.constant_(next(p for name, p in loaded.model.named_parameters() if "embed" in name), torch.nan)
    for mode in ("generate", "constrained", "likelihood"):
        changed = replace(config, generation=replace(config.generation, mode=mode))
        with pytest.raises(UserError, match="NaN"):
            list(module.answer(loaded, [question(1), question(2)], changed))
