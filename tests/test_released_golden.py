"""Baichuan, Qwen-1 and InternLM against outputs of the authors' code (files outside the project; skipped where absent).

pytest -q tests/test_released_golden.py
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import UserError
from cmexam_tune.models import checkpoint, layouts
from cmexam_tune.models.released import baichuan

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "llm"
pytestmark = pytest.mark.skipif(
    not (GOLDEN / "qwen1_golden.safetensors").exists(), reason=f"no golden files of the authors' code in {GOLDEN}"
)
MODELS = ("baichuan_7b", "baichuan2_7b", "baichuan_13b", "baichuan2_13b", "qwen1", "internlm1", "internlm2")
ALIBI = ("baichuan_13b", "baichuan2_13b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in MODELS:
        folder = made[name] = tmp_path_factory.mktemp(name)
        shutil.copyfile(GOLDEN / f"{name}_config.json", folder / "config.json")
        shutil.copyfile(GOLDEN / f"{name}_tiny.safetensors", folder / "model.safetensors")
    return made


def golden(name: str) -> dict[str, Any]:
    return load_file(GOLDEN / f"{name}_golden.safetensors")


def loaded(folder: Path, **settings: Any) -> Any:
    model = ModelConfig("llama", str(folder), **settings)
    source = checkpoint.Checkpoint(model)
    return source.weights(AutoModelForCausalLM, source.config()).eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_losses_and_greedy_ids(name: str, attention: str, folders: dict[str, Path]) -> None:
    model, g = loaded(folders[name], attn_implementation=attention), golden(name)
    with torch.no_grad():
        for i in range(3):
            logits = model(input_ids=g[f"single.{i}.input_ids"]).logits
            assert (logits - g[f"single.{i}.logits"]).abs().max() < 1e-4
        out = model(input_ids=g["single.0.input_ids"], labels=g["single.0.labels"], output_hidden_states=True)
        assert abs(out.loss - g["single.0.loss"]) < 1e-5
        for layer in range(4):
            assert (out.hidden_states[layer] - g[f"single.0.hidden.{layer}"]).abs().max() < 1e-4
        mask = g["padded.attention_mask"]
        out = model(input_ids=g["padded.input_ids"], attention_mask=mask, labels=g["padded.labels"])
        assert (out.logits - g["padded.logits"])[mask.bool()].abs().max() < 1e-4
        assert abs(out.loss - g["padded.loss"]) < 1e-5
    for cache in (True, False):
        for case in ("single.0", "single.1", "single.2", "padded"):
            ids = g[f"{case}.input_ids"]
            new = model.generate(
                input_ids=ids,
                attention_mask=g["padded.attention_mask"] if case == "padded" else torch.ones_like(ids),
                max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=cache, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            assert torch.equal(new[:, ids.shape[1] :], g[f"greedy.{case}.new_ids"]), (case, cache)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training(name: str, checkpointing: bool, folders: dict[str, Path]) -> None:
    """Gradients of fused matrices too: ours, joined as the layout writes them."""
    model, g = loaded(folders[name]), golden(name)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    out = model(input_ids=g["train.input_ids"], labels=g["train.labels"], use_cache=False)
    assert (out.logits - g["train.logits"]).abs().max() < 1e-4
    assert abs(out.loss - g["train.loss"]) < 1e-5
    out.loss.backward()
    gradients = layouts.write(model, {key: value.grad for key, value in model.named_parameters()})
    names = [key for key in g if key.startswith("train.grad.")]
    assert len(names) >= 2
    for key in names:
        difference = (gradients[key.removeprefix("train.grad.")] - g[key]).norm() / g[key].norm()
        assert difference < 1e-5, (key, float(difference))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_checkpoint_is_the_released_one(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = loaded(folders[name])
    model.save_pretrained(tmp_path)
    before, after = load_file(folders[name] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    # Buffers with frequencies are computed.
    assert set(after) == {key for key in before if not key.endswith("inv_freq")}
    assert all(torch.equal(after[key], before[key]) for key in after)
    ids = golden(name)["single.0.input_ids"]
    assert torch.equal(loaded(tmp_path)(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("name", ALIBI)
def test_alibi(name: str, folders: dict[str, Path]) -> None:
    """Beyond the length of the released buffer, packed questions, and the published slopes."""
    model, g = loaded(folders[name]), golden(name)
    assert torch.equal(baichuan.slopes(5), g["alibi.slopes"])
    with torch.no_grad():
        assert (model(input_ids=g["long.input_ids"]).logits - g["long.logits"]).abs().max() < 1e-4
        lengths = torch.unique_consecutive(g["packed.attention_mask"][0], return_counts=True)[1].tolist()
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = model(input_ids=g["packed.input_ids"], position_ids=positions, use_cache=False).logits
        assert (packed - g["packed.logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["baichuan2_7b", "baichuan2_13b"])
def test_norm_head(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Evaluating changes no weight, and a checkpoint that the released code normalised gives the same logits."""
    model, g = loaded(folders[name]), golden(name)
    ids = g["single.0.input_ids"]
    with torch.no_grad():
        assert (model(input_ids=ids).logits - g["normhead.second_eval.logits"]).abs().max() < 1e-4
        assert torch.equal(model.lm_head.weight, g["normhead.weight_before_eval"])
        assert (model.train()(input_ids=ids).logits - g["normhead.train_after_eval.logits"]).abs().max() < 1e-4
        shutil.copyfile(folders[name] / "config.json", tmp_path / "config.json")
        state = {**load_file(folders[name] / "model.safetensors"), "lm_head.weight": g["normhead.weight_after_eval"]}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        assert (loaded(tmp_path)(input_ids=ids).logits - g["single.0.logits"]).abs().max() < 1e-4


def test_qwen_beyond_its_length_is_refused_or_plain(folders: dict[str, Path]) -> None:
    g = golden("qwen1")
    base = g["long.base_ids"][None]
    model = loaded(folders["qwen1"])
    with torch.no_grad():
        logits = model(input_ids=base[:, :64]).logits[:, -8:]
        assert (logits - g["long.ntk1_logn1.len64.last8_logits"]).abs().max() < 1e-4
        with pytest.raises(UserError, match=r"65 tokens .* seq_length=64 .* prompt\.num_shots"):
            model(input_ids=base[:, :65])
        plain = loaded(folders["qwen1"], config={"use_dynamic_ntk": False, "use_logn_attn": False})
        for length in (65, 125, 133, 199):
            logits = plain(input_ids=base[:, :length]).logits[:, -8:]
            assert (logits - g[f"long.ntk0_logn0.len{length}.last8_logits"]).abs().max() < 1e-4
        logits = model.train()(input_ids=base[:, :125]).logits[:, -8:]
        assert (logits - g["long.train_mode.len125.last8_logits"]).abs().max() < 1e-4
