"""Baichuan, Qwen-1 and InternLM: sizes as published, formulas and split matrices by hand.

pytest -q tests/test_released.py
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import checkpoint, layouts
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.released import baichuan

SMALL = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
KINDS: dict[str, dict[str, Any]] = {
    "baichuan": {"model_type": "baichuan", "max_position_embeddings": 64},
    "baichuan2_alibi": {"model_type": "baichuan", "model_max_length": 64, "tokenizer_class": "BaichuanTokenizer"},
    "qwen": {"model_type": "qwen", "kv_channels": 8, "seq_length": 64},
    "internlm": {"model_type": "internlm"},
    "internlm2": {"model_type": "internlm2", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
}
FUSED = {"baichuan": "W_pack", "baichuan2_alibi": "W_pack", "qwen": "c_attn", "internlm2": "wqkv"}
IDS = torch.tensor([[5, 9, 3, 30, 7, 7, 21]])


def make(kind: str) -> Any:
    """A small model with random weights, as transformers' auto classes make it from the released keys."""
    values = {**SMALL, **KINDS[kind]}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return model


LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_13B = {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40}
ROTATED = {"max_position_embeddings": 4096}
# The released sizes; numbers as in the READMEs of Baichuan, and what the released networks count for the others.
PUBLISHED = [
    ("baichuan", {**LLAMA_7B, **ROTATED, "vocab_size": 64000}, 7_000_559_616),
    ("baichuan", {**LLAMA_13B, "model_max_length": 4096, "vocab_size": 64000}, 13_264_901_120),
    ("baichuan", {**LLAMA_7B, **ROTATED, "vocab_size": 125696}, 7_505_973_248),
    ("baichuan", {**LLAMA_13B, "model_max_length": 4096, "vocab_size": 125696}, 13_896_668_160),
    ("qwen", {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 24, "num_attention_heads": 16,
              "vocab_size": 151936}, 1_836_828_672),
    ("qwen", {**LLAMA_7B, "intermediate_size": 22016, "vocab_size": 151936}, 7_721_324_544),
    ("qwen", {"n_embd": 4096, "ffn_hidden_size": 22016, "n_layer": 32, "n_head": 32, "padded_vocab_size": 151936,
              "seq_length": 2048}, 7_721_324_544),
    ("qwen", {"hidden_size": 8192, "intermediate_size": 49152, "num_hidden_layers": 80, "num_attention_heads": 64,
              "vocab_size": 152064}, 72_287_920_128),
    ("internlm", {**LLAMA_7B, "vocab_size": 103168}, 7_321_948_160),
    ("internlm", {**LLAMA_13B, "intermediate_size": 13824, "num_hidden_layers": 60, "bias": False,
                  "vocab_size": 103168}, 20_088_714_240),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "parameters"), PUBLISHED)
def test_released_sizes(kind: str, values: dict[str, Any], parameters: int) -> None:
    config = AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    if kind == "baichuan":
        assert config.alibi == (config.hidden_size == 5120)
        assert isinstance(model.lm_head, baichuan.NormHead) == (config.vocab_size == 125696)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_loaded_by_its_config_alone(kind: str, tmp_path: Path) -> None:
    """Also where config.json names Python that is not there: nothing of it is asked for."""
    model = make(kind)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["auto_map"] = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    path.write_text(json.dumps(values))
    named = ModelConfig("llama", str(tmp_path))
    again = checkpoint.read_weights(AutoModelForCausalLM, named, checkpoint.read_config(named)).eval()
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    names = load_file(tmp_path / "model.safetensors")
    if kind in FUSED:
        assert any(f".{FUSED[kind]}." in name for name in names)
        assert not any("q_proj" in name for name in names)


def test_groups_of_internlm2_lie_one_after_the_other(tmp_path: Path) -> None:
    """Row by row: three queries, a key and a value of the first group, then those of the second."""
    model = make("internlm2")
    model.save_pretrained(tmp_path)
    fused = load_file(tmp_path / "model.safetensors")["model.layers.1.attention.wqkv.weight"]
    attention = model.model.layers[1].self_attn
    q, k, v = (part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    rows = [*q[:24], *k[:8], *v[:8], *q[24:], *k[8:], *v[8:]]
    assert torch.equal(fused, torch.stack(rows))


@pytest.mark.parametrize("kind", FUSED)
def test_lora_on_a_fused_matrix(kind: str, tmp_path: Path) -> None:
    """Updating the parts is what W + BA says of the fused matrix; the recipe's default is the fused matrix, too."""
    method = LoRA()
    torch.manual_seed(2)
    tuned: Any = method.attach(make(kind), Llama(), method.Settings(r=2, lora_alpha=4)).eval()
    assert set(tuned.peft_config["default"].target_modules) == {FUSED[kind]}
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    layouts.write_lora(tuned, tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    plain = make(kind)
    plain.save_pretrained(tmp_path / "base")
    state = load_file(tmp_path / "base" / "model.safetensors")
    for name, b in factors.items():
        if "lora_B" in name:
            target = name.removeprefix("base_model.model.").replace("lora_B.", "")
            state[target] = state[target] + 2 * b @ factors[name.replace("lora_B", "lora_A")]
    plain.load_state_dict(layouts.read(plain, state))
    assert (plain(input_ids=IDS).logits - make(kind)(input_ids=IDS).logits).abs().max() > 0.01
    assert torch.allclose(tuned(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-4)
    opened = layouts.open_lora(make(kind), str(tmp_path / "adapter")).merge_and_unload().eval()
    assert torch.allclose(opened(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=1e-4)


def test_a_name_that_two_modules_share_means_both() -> None:
    """QwenLM's fine-tuning script names `c_attn`, `attn.c_proj`, `w1`, `w2`; PEFT takes `c_proj` for both."""
    layout = layouts.of(make("qwen"))
    assert layout is not None
    assert layout.names("c_proj") == ["self_attn.o_proj", "mlp.down_proj"]
    assert layout.names("attn.c_proj") == ["self_attn.o_proj"]
    assert layout.names("w1") == ["mlp.up_proj"]
    assert layout.names("w2") == ["mlp.gate_proj"]


def test_alibi_by_hand() -> None:
    """Softmax of scores minus slope times distance, head by head, against the layer."""
    assert baichuan.slopes(40)[:3].tolist() == pytest.approx([2**-0.25, 2**-0.5, 2**-0.75])
    assert baichuan.slopes(40)[32:35].tolist() == pytest.approx([2**-0.125, 2**-0.375, 2**-0.625])
    model = make("baichuan2_alibi")
    attention, hidden = model.model.layers[0].self_attn, torch.randn(1, 5, 24)
    captured: dict[str, Any] = {}
    hook = attention.register_forward_pre_hook(lambda m, a, k: captured.update(k), with_kwargs=True)
    out = model.model.layers[0].self_attn.register_forward_hook(lambda m, a, o: captured.update(out=o[0]))
    model(inputs_embeds=hidden)
    hook.remove()
    out.remove()
    states = captured["hidden_states"][0]
    heads = []
    for head, slope in enumerate((2**-4, 2**-8, 2**-2)):
        rows = slice(8 * head, 8 * head + 8)
        q, k, v = (states @ m.weight[rows].T for m in (attention.q_proj, attention.k_proj, attention.v_proj))
        scores = torch.full((5, 5), -math.inf)
        for i in range(5):
            for j in range(i + 1):
                scores[i, j] = q[i] @ k[j] / math.sqrt(8) - slope * (i - j)
        heads.append(scores.softmax(-1) @ v)
    assert torch.allclose(attention.o_proj(torch.cat(heads, -1)), captured["out"][0], atol=1e-5)


def test_alibi_in_bfloat16_keeps_the_distances() -> None:
    """Where a text is 1,000 tokens long, 8 bits count single columns no more; distances to the last token they do."""
    steps = torch.arange(600, 1000)
    by_column = (baichuan.slopes(8)[0] * steps).bfloat16()
    by_distance = (baichuan.slopes(8)[0] * (steps - 999)).bfloat16()
    assert by_column[-16:].unique().numel() < 12
    assert by_distance[-16:].unique().numel() == 16


def test_flash_attention_has_no_alibi(tmp_path: Path) -> None:
    make("baichuan2_alibi").save_pretrained(tmp_path)
    named = ModelConfig("llama", str(tmp_path), attn_implementation="flash_attention_2")
    with pytest.raises(UserError, match=r"flash_attention_2 has no ALiBi"):
        checkpoint.read_weights(AutoModelForCausalLM, named, checkpoint.read_config(named))


def test_gradients_go_through_the_normalised_head() -> None:
    head = baichuan.NormHead(6, 4, bias=False)
    hidden, weight = torch.randn(3, 6), head.weight.detach().clone().requires_grad_()
    lengths = weight.pow(2).sum(1, keepdim=True).sqrt()
    (hidden @ (weight / lengths).T).pow(2).sum().backward()
    head(hidden).pow(2).sum().backward()
    assert torch.allclose(head.weight.grad, weight.grad, atol=1e-5)  # type: ignore[arg-type]
    # A change of length changes no logit, so the gradient stands on the rows.
    assert (head.weight.grad * head.weight).sum(1).abs().max() < 1e-5  # type: ignore[operator]
    assert isinstance(head, nn.Linear)
