"""LoRA merged for prediction, and heads repeated where a card cannot share them: the same logits, or left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import checkpoint, make_config
from transformers import LlamaConfig, LlamaForCausalLM

from cmexam_tune.inference import merging
from cmexam_tune.models import attention, device
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.models.families.llama import Llama

llama = Llama()


def tuned(family: str, dtype: str = "float32", strength: float = 0.05, **more: Any) -> Loaded:
    name = family.removesuffix("2")
    settings = {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **more}
    config = make_config(name, model__model_name_or_path=checkpoint(family), model__dtype=dtype, tuning=settings)
    module = Family.named(name)
    base, tokenizer = module.load(config.model)
    torch.manual_seed(1)
    model = Method.named("lora").attach(base, module, config.tuning.settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * strength)
    return Loaded(model, tokenizer)


def logits(loaded: Loaded) -> torch.Tensor:
    ids = torch.tensor([loaded.tokenizer("答案: AC 肺炎")["input_ids"]])
    return merging.probabilities(loaded.model, ids)


def whole(loaded: Loaded) -> Loaded:
    merged = merging.merged(loaded)
    assert merged is not None
    return merged


@pytest.mark.parametrize("family", ["llama", "chatglm", "chatglm2"])
@pytest.mark.parametrize("more", [{}, {"bias": "all"}, {"use_dora": True}])
def test_merged_equals_apart(family: str, more: dict[str, Any]) -> None:
    loaded = tuned(family, **more)
    apart = logits(loaded)
    merged = whole(loaded)
    assert torch.allclose(logits(merged), apart, atol=1e-6)
    assert not any("lora_" in name for name, _ in merged.model.named_parameters())


def test_what_is_trained_whole_stays() -> None:
    loaded = tuned("llama", modules_to_save=["lm_head"])
    apart = logits(loaded)
    assert torch.allclose(logits(whole(loaded)), apart, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_merged_where_little_moves(dtype: str) -> None:
    loaded = tuned("llama", dtype)
    apart = logits(loaded)
    merged = whole(loaded)
    assert merged.model is not loaded.model
    assert (logits(merged) - apart).abs().sum(-1).max() / 2 <= merging.TOLERANCE


def not_finite(loaded: Loaded) -> None:
    weight = next(p for name, p in loaded.model.named_parameters() if "layers.1" in name and "lora_B" in name)
    weight.data[0, 0] = torch.inf


@pytest.mark.parametrize("spoil", [not_finite, None], ids=["not finite", "too much moves"])
def test_otherwise_it_is_refused(
    spoil: Callable[[Loaded], None] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = tuned("llama", "bfloat16")
    if spoil is None:
        monkeypatch.setattr(merging, "TOLERANCE", 0.0)
    else:
        spoil(loaded)
    assert merging.merged(loaded) is None
    assert "LoRA stays apart" in capsys.readouterr().err


def grouped() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()


def test_shared_heads_are_repeated_on_older_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same logits; torch's attention is called with as many keys as queries, and never asked to share them."""
    model, ids = grouped(), torch.arange(24).view(2, 12)
    with torch.no_grad():
        plain = model(ids).logits
    seen: list[tuple[int, int, bool]] = []
    inner = torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append((query.shape[1], key.shape[1], bool(more.get("enable_gqa", False))))
        return inner(query, key, value, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        model(ids)
        assert seen.pop() == (4, 2, True)
        model.set_attn_implementation(attention.REPEATED)
        seen.clear()
        assert torch.allclose(model(ids).logits, plain, atol=1e-6)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        masked = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        assert torch.allclose(masked[:, 3:], model(ids, attention_mask=mask).logits[:, 3:], atol=1e-6)
    assert set(seen[:4]) == {(4, 4, False)}


@pytest.mark.parametrize(("capability", "used"), [((7, 0), attention.REPEATED), ((8, 0), attention.ADDITIVE)])
def test_the_card_decides(capability: tuple[int, int], used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = make_config(model__dtype="float32")
    assert llama.load(config.model).model.config._attn_implementation == used
    assert attention.suited("eager") == "eager"


def test_a_prefix_repeats_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tuning={"method": "ptuning", "num_virtual_tokens": 5})
    model = grouped()
    torch.manual_seed(2)
    tuned_model = Method.named("ptuning").attach(model, llama, config.tuning.settings).eval()
    loaded = Loaded(tuned_model, llama.load(config.model).tokenizer)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        plain = loaded.model(ids).logits
        monkeypatch.setattr("cmexam_tune.models.prefix.shares_heads", lambda: False)
        assert torch.allclose(loaded.model(ids).logits, plain, atol=1e-6)
