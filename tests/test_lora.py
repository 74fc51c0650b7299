"""LoRA: witnesses are PEFT's own loading and its merged weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config, questions
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models.adapters.full import Full
from cmexam_tune.models.adapters.head import Head
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.families import Family
from cmexam_tune.models.families.llama import Llama

full = Full()
head = Head()
lora = LoRA()
llama = Llama()

IDS = torch.arange(5, 45)[None]


def attached(dtype: str = "float32", **settings: Any) -> PreTrainedModel:
    values = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **settings}
    model = llama.load(make_config(model__dtype=dtype).model).model
    return lora.attach(model, llama, lora.Settings(**values)).eval()  # type: ignore[no-any-return, no-untyped-call]


def disturb(model: Any) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()  # type: ignore[no-any-return]


def test_a_fresh_adapter_changes_nothing() -> None:
    base = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    assert torch.equal(logits(attached()), logits(base))
    assert torch.allclose(logits(attached(use_dora=True)), logits(base), atol=1e-5)


def test_a_module_trained_whole_inside_another_is_refused() -> None:
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj lies inside another module"):
        attached(modules_to_save=("mlp", "down_proj"), target_modules=("q_proj",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"target_modules": "["}, r"tuning.target_modules: '\[' is no pattern"),
     ({"modules_to_save": ("",)}, "no module called ''"), ({"target_modules": "nothing.*"}, "LoRA cannot be put")],
)  # fmt: skip
def test_names_that_are_none(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        attached(**settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"target_modules": "all-linear"}, {"target_modules": ("down_proj",), "bias": "all"}, {"use_rslora": True},
     {"use_dora": True}, {"modules_to_save": ("lm_head",)}],
    ids=str,
)  # fmt: skip
def test_saved_loaded_and_in_plain_peft(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = attached(**settings)
    fresh = logits(model)
    disturb(model)
    tuned = logits(model)
    assert not torch.allclose(tuned, fresh, atol=1e-2)
    lora.save(model, tmp_path)
    again = attached(**settings)
    lora.load(again, tmp_path)
    assert torch.equal(logits(again), tuned)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint("llama")), str(tmp_path)).eval()
    assert torch.allclose(logits(plain), tuned, atol=1e-5)
    alone = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path)).eval()
    assert torch.allclose(logits(alone), tuned, atol=1e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_the_adapter_is_trained_and_in_float32(dtype: str) -> None:
    model = attached(dtype, modules_to_save=("lm_head",))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained if "lora_" in name}
    assert layers == set(llama.lora_targets)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {getattr(torch, dtype)}


def test_a_gathered_state_dict_is_what_is_saved(tmp_path: Path) -> None:
    model = attached()
    gathered = {name: torch.full_like(p, 0.5) for name, p in model.named_parameters() if p.requires_grad}
    lora.save(model, tmp_path, gathered)
    lora.load(model, tmp_path)
    assert all((p == 0.5).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, r"tuning\.r: should be greater than or equal to 1"),
        ({"lora_alpha": 0}, r"tuning\.lora_alpha: should be greater than or equal to 1"),
        ({"lora_dropout": 1.0}, r"tuning\.lora_dropout: should be less than 1"),
        ({"bias": "some"}, "known"),
    ],
)
def test_wrong_numbers(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tuning={"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **settings})


def test_layers_that_are_not_there() -> None:
    with pytest.raises(UserError, match="query_key_value"):
        attached(target_modules=("query_key_value",))


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    lora.save(attached(), tmp_path / "a")
    for other in ({"r": 8}, {"target_modules": ("q_proj",)}):
        with pytest.raises(UserError, match="holds no LoRA adapter for this model"):
            lora.load(attached(**other), tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="holds no LoRA adapter"):
        lora.load(attached(), tmp_path / "b")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="holds no LoRA adapter"):
        lora.load(attached(), tmp_path / "a")


def test_full_trains_everything_in_float32_and_reads_back(tmp_path: Path) -> None:
    model = full.attach(llama.load(make_config(model__dtype="bfloat16").model).model, llama, full.Settings()).eval()
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    disturb(model)
    full.save(model, tmp_path / "m")
    again = full.attach(llama.load(make_config().model).model, llama, full.Settings()).eval()
    assert not torch.allclose(logits(again), logits(model), atol=1e-2)
    full.load(again, tmp_path / "m")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(UserError, match="holds no weights"):
        full.load(again, tmp_path)


@pytest.mark.parametrize(("settings", "trained"), [({}, "all"), ({"freeze_encoder": True}, "classifier")])
def test_head(settings: dict[str, Any], trained: str) -> None:
    config = make_config("bert", model__head="label", tuning={"method": "head", **settings})
    bert: Any = Family.named("bert")
    model = head.attach(bert.load(config.model, questions(6)).model, bert, config.tuning.settings)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {n for n, _ in model.named_parameters() if trained == "all" or n.startswith(trained)} and names


def test_a_decoder_has_no_head() -> None:
    with pytest.raises(ConfigError, match=r"model\.family=bert"):
        head.attach(llama.load(make_config().model).model, llama, head.Settings())
