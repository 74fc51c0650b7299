"""Scaled dot-product attention as transformers has it, with one mask for all layers and heads repeated where needed."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cmexam_tune.models import device

ADDITIVE, REPEATED = "additive_sdpa", "repeated_sdpa"
TAKING_MASKS = ("sdpa", "eager", ADDITIVE, REPEATED)
"""Implementations that a mask of numbers `[batch, heads, queries, keys]` may be given to."""
ALIGNMENT = 16
"""The kernel that saves memory copies masks whose rows do not begin at multiples of so many numbers."""


def suited(implementation: str) -> str:
    """Return the attention to use where a config asks for `implementation`."""
    if implementation != "sdpa" or not device.takes_numbers_as_mask():
        return implementation
    return ADDITIVE if device.shares_heads() else REPEATED


def repeated_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Repeat the heads of keys and values `[batch, kv_heads, keys, head_dim]`, then attend.

    Without a mask transformers leaves shared heads to the kernel (`enable_gqa`), which not every card has.

    Returns:
        `[batch, queries, heads, head_dim]`, and None in place of the weights.
    """
    groups = query.shape[1] // key.shape[1]
    # A module without groups: transformers has nothing left to share.
    plain: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(
        plain, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs
    )


def additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor | None:
    """Return what transformers' `sdpa_mask` does, as numbers; None where the kernel needs no mask.

    Every layer would turn a mask of booleans into numbers again, and keep its own for the backward pass.
    """
    visible = sdpa_mask(*args, **kwargs)
    return None if visible is None else additive(visible, dtype)


def additive(mask: torch.Tensor, dtype: torch.dtype, front: int = 0) -> torch.Tensor:
    """Return a mask as numbers that are added to the scores, in the type that attention computes in.

    Args:
        mask: `[batch, heads, queries, keys]`: booleans, True where visible, or numbers.
        dtype: of the model's activations; under autocast its type counts.
        front: so many more keys in front, which everything sees.
    """
    place = mask.device.type
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else dtype
    width = front + mask.shape[-1]
    whole = torch.zeros(*mask.shape[:-1], width + -width % ALIGNMENT, dtype=dtype, device=mask.device)
    if mask.dtype == torch.bool:
        # Not -inf: a row of padding sees nothing, and would be NaN in some kernels.
        whole[..., front:width].masked_fill_(~mask, torch.finfo(dtype).min)
    else:
        whole[..., front:width] = mask
    return whole[..., :width]


AttentionInterface.register(ADDITIVE, sdpa_attention_forward)
AttentionInterface.register(REPEATED, repeated_sdpa)
for _name in (ADDITIVE, REPEATED):
    AttentionMaskInterface.register(_name, additive_mask)
