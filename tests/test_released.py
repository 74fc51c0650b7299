"""Baichuan, Qwen-1 and InternLM: sizes as published, formulas and split matrices by hand.

pytest -q tests/test_released.py
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from released_models import FUSED, KINDS, make
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import checkpoint, layouts
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.families.llama import Llama
from cmexam_tune.models.released import baichuan

IDS = torch.tensor([[5, 9, 3, 30, 7, 7, 21]])


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


def read(model: ModelConfig) -> Any:
    source = checkpoint.Checkpoint(model)
    return source.weights(AutoModelForCausalLM, source.config())


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
    again = read(named).eval()
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each model that transformers has a class for, saved as that class."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS if not kind.endswith("_alibi")}
    for kind, folder in folders.items():
        make(kind).in_transformers().save_pretrained(folder)
    return folders


LOADS = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    expected = load_file(folder + "/expected")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert "cmexam_tune" not in sys.modules
    print(type(model).__name__, float((model(input_ids=expected["ids"]).logits - expected["logits"]).abs().max()))
"""


def test_they_are_what_transformers_has(plain: dict[str, Path]) -> None:
    for kind, folder in plain.items():
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert type(model).__module__.startswith("transformers.")
        assert (model(input_ids=IDS).logits - make(kind)(input_ids=IDS).logits).abs().max() < 1e-5
    config = json.loads((plain["qwen"] / "config.json").read_text())
    assert config["max_position_embeddings"] == 64, "beyond seq_length they differ"
    lengths = load_file(plain["baichuan2"] / "model.safetensors")["lm_head.weight"].norm(dim=1)
    assert torch.allclose(lengths, torch.ones(40))


@pytest.mark.slow
def test_plain_transformers_loads_them(plain: dict[str, Path]) -> None:
    """In a process that knows nothing of this package."""
    for kind, folder in plain.items():
        save_file({"ids": IDS, "logits": make(kind)(input_ids=IDS).logits.detach()}, folder / "expected")
    words = [sys.executable, "-c", LOADS, *map(str, plain.values())]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=True)
    names, differences = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    assert names == ("LlamaForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "LlamaForCausalLM")
    assert max(map(float, differences)) < 1e-5


def test_transformers_has_no_alibi() -> None:
    with pytest.raises(ValueError, match="no class of transformers"):
        make("baichuan_alibi").in_transformers()


@pytest.mark.parametrize("kind", ["baichuan", "baichuan2", "qwen", "internlm2"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), r".*\.1\..*\.(k|o)_proj", ("q_proj", "k_proj", "v_proj")])
def test_lora_by_the_names_of_transformers(kind: str, targets: Any, plain: dict[str, Path], tmp_path: Path) -> None:
    """Every matrix has an update of its own; the adapter is one for the same model in transformers' class."""
    method = LoRA()
    torch.manual_seed(3)
    tuned: Any = method.attach(make(kind), Llama(), method.Settings(r=2, lora_alpha=4, target_modules=targets)).eval()
    factors = [p for name, p in tuned.named_parameters() if "lora_" in name]
    assert len(factors) == (4 if isinstance(targets, str) else 4 * len(targets))
    with torch.no_grad():
        for parameter in factors:
            parameter.copy_(torch.randn_like(parameter) / 4)
    method.save(tuned, tmp_path)
    logits = tuned(input_ids=IDS).logits
    assert (logits - make(kind)(input_ids=IDS).logits).abs().max() > 0.01
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(plain[kind]), str(tmp_path)).eval()
    assert (alone(input_ids=IDS).logits - logits).abs().max() < 1e-5
    again = method.attach(make(kind), Llama(), method.Settings(r=2, lora_alpha=4, target_modules=targets)).eval()
    method.load(again, tmp_path)
    assert torch.equal(again(input_ids=IDS).logits, logits)
    merged = layouts.open_lora(make(kind), str(tmp_path)).merge_and_unload().eval()
    assert (merged(input_ids=IDS).logits - logits).abs().max() < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    assert any(FUSED.get(kind, "W_pack") in name for name in load_file(tmp_path / "merged" / "model.safetensors"))


def test_names_of_both_kinds_are_refused() -> None:
    method = LoRA()
    with pytest.raises(UserError, match=r"c_attn is the checkpoint's name and o_proj that of transformers \(.*c_proj"):
        method.attach(make("qwen"), Llama(), method.Settings(target_modules=("c_attn", "o_proj")))


def test_no_lora_beside_a_normalised_head(tmp_path: Path) -> None:
    """There W + BA is not what the sum of both would compute; trained whole it is right."""
    method = LoRA()
    for targets in (("W_pack", "lm_head"), ("q_proj", "lm_head")):
        with pytest.raises(UserError, match=r"lm_head .*\(NormHead\).*tuning\.modules_to_save"):
            method.attach(make("baichuan2"), Llama(), method.Settings(target_modules=targets))
    method.attach(make("baichuan"), Llama(), method.Settings(target_modules=("W_pack", "lm_head")))
    settings = method.Settings(modules_to_save=("lm_head",))
    tuned: Any = method.attach(make("baichuan2"), Llama(), settings).eval()
    with torch.no_grad():
        for parameter in (parameter for parameter in tuned.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn_like(parameter) / 4)
    method.save(tuned, tmp_path)
    merged = layouts.open_lora(make("baichuan2"), str(tmp_path)).merge_and_unload().eval()
    assert isinstance(merged.lm_head, baichuan.NormHead)
    assert (merged(input_ids=IDS).logits - tuned(input_ids=IDS).logits).abs().max() < 1e-4


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


def add_by_column(base: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook: the scores as the released code holds them, slope times column in bfloat16."""
    columns = kwargs["attention_mask"].shape[-1]
    by_column = baichuan.slopes(base.config.num_attention_heads).bfloat16()[:, None, None] * torch.arange(columns)
    later = torch.ones(columns, columns, dtype=torch.bool).triu(1)
    scores = by_column.bfloat16().expand(-1, columns, columns)
    kwargs["attention_mask"] = scores.masked_fill(later, torch.finfo(torch.bfloat16).min)[None]
    return args, kwargs


@pytest.mark.parametrize("kind", ["baichuan_alibi", "baichuan2_alibi"])
def test_alibi_in_half_precision(kind: str) -> None:
    """Of 1,024 tokens the second half against float32; what docs/released.md says of both ways to count."""
    sizes = {"hidden_size": 80, "num_attention_heads": 5, "intermediate_size": 160, "vocab_size": 400}
    ids = torch.randint(3, 400, (2, 1024), generator=torch.Generator().manual_seed(0))

    def logits(dtype: torch.dtype, columns: bool = False) -> torch.Tensor:
        model = make(kind, positions=1024, num_hidden_layers=3, **sizes).to(dtype)
        if columns:
            model.model.register_forward_pre_hook(add_by_column, with_kwargs=True)
        with torch.no_grad():
            return model(input_ids=ids).logits[:, 512:].float()  # type: ignore[no-any-return]

    exact = logits(torch.float32)
    error = {dtype: (logits(dtype) - exact).abs().mean() / exact.std() for dtype in (torch.bfloat16, torch.float16)}
    by_column = logits(torch.bfloat16, columns=True)
    print(kind, error, (by_column - exact).abs().mean() / exact.std())
    assert error[torch.bfloat16] < 0.01
    assert error[torch.float16] < 0.002
    assert (by_column - exact).abs().mean() / exact.std() > 0.1
    same = [(other.argmax(-1) == exact.argmax(-1)).float().mean() for other in (logits(torch.bfloat16), by_column)]
    assert same[0] > 0.95
    assert same[1] < 0.8


def test_flash_attention_has_no_alibi(tmp_path: Path) -> None:
    make("baichuan2_alibi").save_pretrained(tmp_path)
    named = ModelConfig("llama", str(tmp_path), attn_implementation="flash_attention_2")
    with pytest.raises(UserError, match=r"flash_attention_2 has no ALiBi"):
        read(named)


def test_more_words_keep_the_normalised_head() -> None:
    """transformers puts a plain matrix in its place, as for an adapter that brings a larger vocabulary."""
    model = make("baichuan2")
    ids = torch.tensor([[3, 4, 5, 6]])
    words = model.config.vocab_size
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.resize_token_embeddings(words + 8)
        after = model(input_ids=ids).logits
    assert isinstance(model.lm_head, baichuan.NormHead)
    assert torch.allclose(after[..., :words], before, atol=1e-6) and after.shape[-1] == words + 8


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
