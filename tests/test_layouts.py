"""Weights and LoRA adapters in the authors' layouts: plain formulas, and matrices put together by hand, as witnesses.

pytest -q tests/test_layouts.py
"""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import layouts
from cmexam_tune.models.adapters.lora import LoRA
from cmexam_tune.models.adapters.ptuning import PTuning
from cmexam_tune.models.families import chatglm
from cmexam_tune.models.families.chatglm.authors_prefix import PROJECTED
from cmexam_tune.models.families.llama import merge_adapter

lora = LoRA()
ptuning = PTuning()
CHATGLM = chatglm.ChatGLM()

OWN = Path(__file__).resolve().parent / "golden_chatglm"
PLAIN = runpy.run_path(str(OWN / "recompute.py"))
CONFIG = json.loads((OWN / "v2" / "config.json").read_text())
KEY = "base_model.model.transformer.encoder.layers.{}.self_attention.query_key_value.lora_{}.weight"
ADAPTER = "adapter_model.safetensors"
R, ALPHA = 3, 6
IDS = load_file(OWN / "v2" / "outputs.safetensors")["1.ids"]


def base() -> Any:
    return chatglm.load_model(OWN / "v2")


def attached(**settings: Any) -> Any:
    torch.manual_seed(5)
    values = {"r": R, "lora_alpha": ALPHA, "lora_dropout": 0.0, **settings}
    return lora.attach(base(), CHATGLM, lora.Settings(**values)).eval()


def disturb(model: Any) -> Any:
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS[None]).logits[0]  # type: ignore[no-any-return]


def factors() -> dict[str, torch.Tensor]:
    """A LoRA on the fused matrix, under the names of released adapters."""
    torch.manual_seed(7)
    rows = load_file(OWN / "v2" / "model.safetensors")[
        "transformer.encoder.layers.0.self_attention.query_key_value.bias"
    ]
    made = {}
    for layer in range(CONFIG["num_layers"]):
        made[KEY.format(layer, "A")] = torch.randn(R, CONFIG["hidden_size"])
        made[KEY.format(layer, "B")] = 0.1 * torch.randn(len(rows), R)
    return made


def released(folder: Path, **changes: Any) -> Path:
    """The folder of an adapter as PEFT writes it beside the authors' network."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(factors(), folder / "adapter_model.safetensors", {"format": "pt"})
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": R, "lora_alpha": ALPHA, "lora_dropout": 0.0,
              "target_modules": ["query_key_value"], "inference_mode": True, **changes}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def formula(adapter: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the plain formulas with the update added to the fused matrix."""
    weights = load_file(OWN / "v2" / "model.safetensors")
    for layer in range(CONFIG["num_layers"]):
        name = f"transformer.encoder.layers.{layer}.self_attention.query_key_value.weight"
        update = adapter[KEY.format(layer, "B")].double() @ adapter[KEY.format(layer, "A")].double()
        weights[name] = weights[name].double() + ALPHA / R * update
    return PLAIN["logits_v2"](CONFIG, weights, IDS.tolist())  # type: ignore[no-any-return]


def test_a_released_adapter_on_the_fused_matrix_is_what_it_says(tmp_path: Path) -> None:
    expected = formula(factors())
    assert (logits(base()) - expected).abs().max() > 0.1
    opened = layouts.open_lora(base(), str(released(tmp_path / "a"))).eval()
    assert (logits(opened) - expected).abs().max() < 1e-4
    assert (logits(opened.merge_and_unload()) - expected).abs().max() < 1e-4
    named = ModelConfig("chatglm", str(OWN / "v2"), adapter_name_or_path=str(tmp_path / "a"))
    merged, _ = merge_adapter(base(), None, named, words=False)
    assert (logits(merged) - expected).abs().max() < 1e-4
    tuned = attached()
    lora.load(tuned, tmp_path / "a")
    assert (logits(tuned) - expected).abs().max() < 1e-4


def test_training_is_that_of_one_lora_on_the_fused_matrix(tmp_path: Path) -> None:
    """Gradients of the plain formulas in float64, and after steps of Adam the file still says what the model does."""
    tuned = attached()
    lora.load(tuned, released(tmp_path / "a"))
    exact = {name: value.double().requires_grad_() for name, value in factors().items()}
    weight = torch.randn(len(IDS), CONFIG["padded_vocab_size"], dtype=torch.double)
    (formula(exact) * weight).sum().backward()
    (logits(tuned) * weight).sum().backward()
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == sum(value.numel() for value in exact.values())
    split = layouts.of(tuned).read({name: value.grad for name, value in exact.items()}, tuned.config)
    for name, parameter in trained.items():
        expected = split[name.replace(".default", "")]
        assert (parameter.grad - expected).abs().max() < 1e-4 * max(1, expected.abs().max()), name
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        logits(tuned).square().mean().backward()
        optimizer.step()
    lora.save(tuned, tmp_path / "b")
    stored = load_file(tmp_path / "b" / ADAPTER)
    assert {name: value.shape for name, value in stored.items()} == {n: v.shape for n, v in factors().items()}
    assert (logits(tuned) - formula(stored)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"target_modules": "all-linear"}, {"target_modules": ("query_key_value", "dense", "dense_4h_to_h")},
        {"target_modules": r".*\.1\.self_attention\.(query_key_value|dense)"}, {"use_dora": True},
        {"bias": "all"}, {"modules_to_save": ("output_layer", "self_attention.dense")}, {"use_rslora": True},
        {"target_modules": ("word_embeddings", "layers.0.self_attention.query_key_value")},
    ],
    ids=str,
)  # fmt: skip
def test_an_adapter_is_written_under_the_names_of_its_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    tuned = disturb(attached(**settings))
    assert (logits(tuned) - logits(base())).abs().max() > 1e-2
    lora.save(tuned, tmp_path)
    stored = load_file(tmp_path / ADAPTER)
    assert all(name.startswith("base_model.model.transformer.") for name in stored)
    assert not any("_proj" in name for name in stored)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    targets = settings.get("target_modules", ["query_key_value"])
    assert written["target_modules"] == targets or set(written["target_modules"]) == set(targets)
    again = attached(**settings)
    lora.load(again, tmp_path)
    assert torch.equal(logits(again), logits(tuned))
    opened = layouts.open_lora(base(), str(tmp_path)).eval()
    assert (logits(opened) - logits(tuned)).abs().max() < 1e-5
    lora.save(again, tmp_path / "again")
    other = load_file(tmp_path / "again" / ADAPTER)
    assert stored.keys() == other.keys() and all(torch.equal(other[name], value) for name, value in stored.items())


def test_ranks_of_single_layers_are_named_as_in_the_checkpoint(tmp_path: Path) -> None:
    name = "layers.1.self_attention.query_key_value"
    tuned = layouts.add_lora(base(), LoraConfig(r=R, target_modules=["query_key_value"], rank_pattern={name: 5}))
    layouts.write_lora(tuned, tmp_path)
    stored = load_file(tmp_path / ADAPTER)
    assert [len(stored[KEY.format(layer, "A")]) for layer in (0, 1)] == [R, 5]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"] == {name: 5}


def test_a_projected_prefix_is_written_under_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    """They are those of the authors' own P-tuning checkpoints."""
    settings = ptuning.Settings(4, prefix_projection=True)
    tuned = ptuning.attach(base(), CHATGLM, settings).eval()
    ptuning.save(tuned, tmp_path)
    stored = load_file(tmp_path / "trained.safetensors")
    names = {f"transformer.prefix_encoder.{name}" for name in PROJECTED}
    assert stored.keys() == names
    again = ptuning.attach(base(), CHATGLM, settings).eval()
    assert not torch.equal(logits(again), logits(tuned))
    ptuning.load(again, tmp_path)
    assert torch.equal(logits(again), logits(tuned))


def test_what_zero3_gathers_has_each_shared_matrix_once(tmp_path: Path) -> None:
    tuned = disturb(attached())
    gathered = {name: p.detach().clone() for name, p in tuned.named_parameters() if p.requires_grad}
    assert sum(".lora_A." in name for name in gathered) == CONFIG["num_layers"]
    lora.save(tuned, tmp_path, gathered)
    again = attached()
    lora.load(again, tmp_path)
    assert torch.equal(logits(again), logits(tuned))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": ("q_proj", "query_key_value")},
            r"query_key_value is the checkpoint.s name and q_proj that",
        ),
        ({"target_modules": ("W_pack",)}, "W_pack"),
        ({"modules_to_save": ("lm_head",)}, r"lm_head that of transformers \(transformer.output_layer in the ch"),
        ({"modules_to_save": ("nothing",)}, "no module called 'nothing'"),
    ],
)
def test_other_names_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        attached(**settings)


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    for changes, message in (({"r": 5}, "mismatch"), ({"target_modules": ["dense"]}, "differ in name")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            layouts.open_lora(base(), str(released(tmp_path, **changes)))
    values = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="only LoRA"):
        layouts.open_lora(base(), str(tmp_path))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def test_the_layout_of_the_docs_reads_and_writes_weights_and_adapters(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "extending.md").read_text("utf-8")
    (tmp_path / "packed.py").write_text(page.split("# my_lab/packed.py\n")[1].split("```")[0], "utf-8")
    network = runpy.run_path(str(tmp_path / "packed.py"))["PackedForCausalLM"]
    plain = llama()
    state = dict(plain.state_dict())
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        state[f"{at}W_pack.weight"] = torch.cat([state.pop(f"{at}{part}_proj.weight") for part in "qkv"])
    state = {name.replace("model.layers", "transformer.h"): value for name, value in state.items()}
    plain.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = network.from_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    for made in (model, network(plain.config)):
        made.load_state_dict(plain.state_dict())
        made.save_pretrained(tmp_path / "out")
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
    tuned = layouts.add_lora(model, LoraConfig(r=2, target_modules=["W_pack"]))
    layouts.write_lora(tuned, tmp_path / "adapter")
    shapes = {name: tuple(value.shape) for name, value in load_file(tmp_path / "adapter" / ADAPTER).items()}
    key = "base_model.model.transformer.h.{}.self_attn.W_pack.lora_{}.weight"
    rows = {"A": (2, 16), "B": (16 + 2 * 8, 2)}
    assert shapes == {key.format(layer, factor): shape for layer in (0, 1) for factor, shape in rows.items()}


class Apart(GlmForCausalLM):
    """GLM whose gates are matrices of their own, as LLaMA's."""


layouts.register(
    Apart, layouts.Layout(WeightConverter(["mlp.gate", "mlp.up"], ["mlp.gate_up_proj"], [Concatenate(dim=0)]))
)


def test_what_a_checkpoint_has_apart_is_joined_but_gets_no_lora_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GlmConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    plain: Any = GlmForCausalLM(config).eval()
    state = dict(plain.state_dict())
    gate, up = state.pop("model.layers.0.mlp.gate_up_proj.weight").chunk(2)
    state |= {"model.layers.0.mlp.gate.weight": gate.clone(), "model.layers.0.mlp.up.weight": up.clone()}
    config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model: Any = Apart.from_pretrained(tmp_path)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
    for targets in (["gate"], "all-linear"):
        with pytest.raises(ValueError, match="one matrix here"):
            layouts.add_lora(model, LoraConfig(target_modules=targets))
