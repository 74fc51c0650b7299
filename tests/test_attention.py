"""One mask for all layers, laid out as the kernel wants it, and the same answers as transformers' own attention."""

from typing import Any

import pytest
import torch
from kit import make_config
from transformers import AutoModelForCausalLM, LlamaConfig

from cmexam_tune.models import attention
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family

LAYERS, WIDTH, PREFIX = 4, 40, 5
LLAMA = Family.named("llama")


def model(implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    make: Any = AutoModelForCausalLM.from_config
    return make(config, attn_implementation=implementation, dtype=dtype)


def packed() -> dict[str, torch.Tensor]:
    """Two rows of two questions each."""
    positions = torch.cat([torch.arange(25), torch.arange(WIDTH - 25)])
    return {"input_ids": torch.arange(2 * WIDTH).view(2, WIDTH) % 64, "position_ids": positions.expand(2, -1)}


def saved_masks(loaded: Any, inputs: dict[str, torch.Tensor], keys: int) -> list[torch.Tensor]:
    """Return the tensors `[..., queries, keys]` of different memory that a forward pass keeps for the backward one."""
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 4 and tensor.shape[-2:] == (WIDTH, keys):
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loaded(**inputs)
    return list(kept.values())


def test_packed_rows_keep_one_mask() -> None:
    (mask,) = saved_masks(model(attention.ADDITIVE), packed(), WIDTH)
    assert all(step % attention.ALIGNMENT == 0 for step in mask.stride()[:-1] if step)
    assert len(saved_masks(model("sdpa"), packed(), WIDTH)) == LAYERS, "transformers' own has become as frugal"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_prefix_keeps_one_mask(checkpointing: bool) -> None:
    settings = make_config(tuning={"method": "ptuning", "num_virtual_tokens": PREFIX}).tuning.settings
    prefixed = Method.named("ptuning").attach(model(attention.ADDITIVE), LLAMA, settings).train()
    if checkpointing:
        prefixed.gradient_checkpointing_enable()
    masks = saved_masks(prefixed, {"input_ids": packed()["input_ids"]}, PREFIX + WIDTH)
    assert len(masks) <= 1
    assert all(step % attention.ALIGNMENT == 0 for mask in masks for step in mask.stride()[:-1] if step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_answers_are_those_of_transformers(rows: str, dtype: torch.dtype) -> None:
    inputs = packed()
    if rows == "padded":
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, :7] = 0
        inputs = {"input_ids": inputs["input_ids"], "attention_mask": mask}
    with torch.no_grad():
        ours, theirs = (model(name, dtype)(**inputs).logits for name in (attention.ADDITIVE, "sdpa"))
    assert torch.isfinite(ours).all()
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    torch.testing.assert_close(ours[real], theirs[real])


def test_under_autocast_the_mask_has_its_type() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (mask,) = saved_masks(model(attention.ADDITIVE), packed(), WIDTH)
    assert mask.dtype == torch.bfloat16


def test_chatglm_keeps_one_mask() -> None:
    loaded = Family.named("chatglm").load(make_config("chatglm").model).model.train()
    mask, gmask = int(loaded.config.bos_token_id), int(loaded.config.gmask_token_id)
    row = [*[5] * (WIDTH - 12), gmask, mask, *[7] * 10]
    saved = saved_masks(loaded, {"input_ids": torch.tensor([row, row])}, WIDTH)
    assert len(saved) == 1 and loaded.config.num_layers > 1
