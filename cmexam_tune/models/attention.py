"""Scaled dot-product attention as transformers has it, except on cards whose fused kernels cannot share heads."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

REPEATED = "repeated_sdpa"
FIRST_WITH_GROUPS = (8, 0)
"""Compute capability from which FlashAttention runs, the one fused kernel that shares key and value heads."""


def needs_repeating() -> bool:
    """Return whether this process's card has no fused kernel for shared heads.

    Without a mask transformers leaves shared heads to the kernel (`enable_gqa`). On older cards (V100) only the kernel
    that saves memory is there, which wants a key for each query head; torch then takes the slow path with the whole
    matrix of scores. Repeating the heads keeps the kernel.
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < FIRST_WITH_GROUPS


def suited(implementation: str) -> str:
    """Return the attention to use where a config asks for `implementation`."""
    return REPEATED if implementation == "sdpa" and needs_repeating() else implementation


def repeated_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Repeat the heads of keys and values `[batch, kv_heads, keys, head_dim]`, then attend.

    Returns:
        `[batch, queries, heads, head_dim]`, and None in place of the weights.
    """
    groups = query.shape[1] // key.shape[1]
    # A module without groups: transformers has nothing left to share.
    plain: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(
        plain, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs
    )


AttentionInterface.register(REPEATED, repeated_sdpa)
AttentionMaskInterface.register(REPEATED, sdpa_mask)
