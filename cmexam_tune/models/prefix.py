"""The P-tuning v2 mechanism: trained keys and values in front of every layer's own, for any model of transformers.

An attention function is registered with transformers' `AttentionInterface` under `IMPLEMENTATION`. It puts the layer's
prefix in front of keys and values and opens the mask for it. The prefix need not be in a cache, so gradient
checkpointing, packing, beam search and ZeRO work as without it; for prediction `generation.kv_cache.PrefixCache` holds
it all the same, which saves time.

Layout (the same as PEFT's and as the ChatGLM authors'): the encoder returns `[n, layers * 2 * kv_heads * head_dim]`,
viewed as `[n, 2 * layers, kv_heads, head_dim]`; entry 2i is the key of layer i, entry 2i + 1 its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.models.attention import TAKING_MASKS, additive, repeated_sdpa
from cmexam_tune.models.device import shares_heads

IMPLEMENTATION = "prefix_sdpa"
MODULE = "prefix_encoder"
"""Name of the encoder inside the base model; it is the authors' in `transformer.prefix_encoder.*` of ChatGLM-6B."""


class Shape(NamedTuple):
    """Sizes of a prefix."""

    tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    embedding: int
    """Width of the embedding under the projection (without one it is `width`)."""

    @property
    def token_dim(self) -> int:
        """Width of one layer's keys."""
        return self.kv_heads * self.head_dim

    @property
    def width(self) -> int:
        """Numbers for each virtual token."""
        return self.layers * 2 * self.token_dim

    @classmethod
    def of(cls, config: PreTrainedConfig, tokens: int) -> "Shape":
        """Return the sizes that a model with `config` needs for `tokens` virtual tokens."""
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        embedding = getattr(config, "prefix_embedding_dim", None) or kv_heads * head_dim
        return cls(tokens, config.num_hidden_layers, kv_heads, head_dim, embedding)


@dataclass(eq=False)
class Prefix:
    """What travels with a forward pass: `states` is `[tokens, 2 * layers, kv_heads, head_dim]`."""

    states: torch.Tensor | None
    """None: the cache holds it already."""
    tokens: int
    dropout: float
    _masks: dict[tuple[int, int, int, torch.dtype], tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict
    )
    """What `mask` has made, with what it was made of."""

    def mask(self, layer_mask: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor:
        """Return the mask of a layer with the prefix in front; layers that are given the same share it.

        Args:
            layer_mask: the layer's own; None: causal.
            query: `[batch, heads, queries, head_dim]`.
            keys: how many there are behind the prefix.
        """
        length = query.shape[2]
        key = (id(layer_mask), length, keys, query.dtype)
        if key not in self._masks:
            visible = layer_mask
            if visible is None:
                visible = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
                visible = visible[None, None]
            self._masks[key] = layer_mask, additive(visible, query.dtype, self.tokens)
        return self._masks[key][1]


class PrefixEncoder(nn.Module):
    """Embedding of the virtual tokens, with or without the two-layer projection; parameters in float32.

    Parameter names and initialisation (torch's) are the authors': `embedding.weight`, `trans.0.*`, `trans.2.*`.
    Source: Liu et al., "P-Tuning v2" (2022), and the trainers of ChatGLM-6B and ChatGLM2-6B.
    """

    def __init__(self, shape: Shape, hidden: int | None, dropout: float, shift_positions: bool) -> None:
        """Make an encoder; `hidden` is the width inside the projection, None for none."""
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.shift_positions = shift_positions
        self.embedding = nn.Embedding(shape.tokens, shape.embedding if hidden else shape.width)
        self.trans: nn.Sequential | None = None
        if hidden:
            self.trans = nn.Sequential(nn.Linear(shape.embedding, hidden), nn.Tanh(), nn.Linear(hidden, shape.width))
        self._last: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """Return the prefix, `[n, 2 * layers, kv_heads, head_dim]`, in the parameters' dtype also under autocast."""
        weight = self.embedding.weight
        with torch.autocast(weight.device.type, enabled=False):
            states: torch.Tensor = self.embedding(torch.arange(self.shape.tokens, device=weight.device))
            if self.trans is not None:
                states = self.trans(states)
        return states.view(self.shape.tokens, 2 * self.shape.layers, self.shape.kv_heads, self.shape.head_dim)

    def inject(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook of the base model: add the prefix, and move the positions behind it where that is usual."""
        past = kwargs.get("past_key_values")
        seen = 0 if past is None else int(past.get_seq_length())
        # While decoding without a `PrefixCache`, the projection need not run again for every token.
        decoding = seen > 0 and not torch.is_grad_enabled()
        states = self._last if decoding else None
        if states is None and not getattr(past, "holds_prefix", False):
            states = self()
        self._last = None if torch.is_grad_enabled() else states
        kwargs["prefix"] = Prefix(states, self.shape.tokens, self.dropout)
        if self.shift_positions:
            positions = kwargs.get("position_ids")
            if positions is None:
                tokens = args[0] if args else kwargs.get("input_ids")
                tokens = kwargs["inputs_embeds"] if tokens is None else tokens
                positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None]
            kwargs["position_ids"] = positions + self.shape.tokens
        return args, kwargs


def install(model: PreTrainedModel, encoder: PrefixEncoder) -> PreTrainedModel:
    """Put a prefix encoder into the base model.

    Raises:
        ConfigError: the model does not use transformers' attention interface, another attention than SDPA, or carries a
            prefix already.
    """
    if not model._can_set_attn_implementation():
        raise ConfigError(f"{type(model).__name__} does not use transformers' attention interface: use lora instead.")
    implementation = model.config._attn_implementation
    if implementation not in (*TAKING_MASKS, IMPLEMENTATION):
        raise ConfigError(f"ptuning works with model.attn_implementation: sdpa, not {implementation!r}.")
    model.set_attn_implementation(IMPLEMENTATION)
    base: nn.Module = model.base_model
    if MODULE in dict(base.named_children()):
        raise ConfigError(
            "the model carries a prefix already (model.adapter_name_or_path): train another method on it."
        )
    base.add_module(MODULE, encoder.to(model.device))
    base.register_forward_pre_hook(encoder.inject, with_kwargs=True)
    return model


def find_encoder(model: PreTrainedModel) -> PrefixEncoder | None:
    """Return the prefix encoder that `install` put into `model`, or None."""
    encoder = getattr(model.base_model, MODULE, None)
    return encoder if isinstance(encoder, PrefixEncoder) else None


def encoder_of(model: PreTrainedModel) -> PrefixEncoder:
    """Return the prefix encoder that `install` put into `model`."""
    encoder = model.base_model.get_submodule(MODULE)
    assert isinstance(encoder, PrefixEncoder)
    return encoder


def copy_state(targets: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy tensors that were read from `path` into the parameters of those names.

    Raises:
        UserError: a tensor has no target, or one of another shape.
    """
    for name, value in stored.items():
        if name not in targets:
            raise UserError(f"{path}: the model has no {name!r}; was it trained with other tuning settings?")
        if targets[name].shape != value.shape:
            raise UserError(
                f"{path}: {name} is {list(value.shape)}, the model needs {list(targets[name].shape)}: "
                "another num_virtual_tokens, projection or base model."
            )
        with torch.no_grad():
            targets[name].copy_(value)


def flat_embeddings(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `[n, width]`, what the encoder with these parameters returns, computed in float32."""
    states = state["embedding.weight"].float()
    if "trans.0.weight" in state:
        hidden = torch.tanh(functional.linear(states, state["trans.0.weight"].float(), state["trans.0.bias"].float()))
        states = functional.linear(hidden, state["trans.2.weight"].float(), state["trans.2.bias"].float())
    return states


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix: Prefix | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention with the layer's part of `prefix` in front of keys and values.

    Args:
        module: the attention module; its `layer_idx` selects the part.
        query: `[batch, heads, queries, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`, rotated; the prefix is used as it is.
        value: as `key`.
        attention_mask: True or 0 where visible, `[batch, 1, queries, keys]`; None: causal or full, as transformers has.
        prefix: of all layers.
        kwargs: passed on.

    Returns:
        `[batch, queries, heads, head_dim]`, and None in place of the weights, which SDPA does not give.
    """
    attend = sdpa_attention_forward if shares_heads() else repeated_sdpa
    if prefix is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    if prefix.states is not None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        pair = prefix.states[:, 2 * layer : 2 * layer + 2].to(key.device, key.dtype)
        pair = pair.permute(1, 2, 0, 3)[:, None].expand(2, key.shape[0], -1, -1, -1)
        pair = functional.dropout(pair, prefix.dropout, module.training)
        key, value = torch.cat([pair[0], key], dim=2), torch.cat([pair[1], value], dim=2)
    length, seen = query.shape[2], key.shape[2] - prefix.tokens
    causal = kwargs.pop("is_causal", None)
    causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
    # SDPA's own `is_causal` starts its triangle at the first key, which is the prefix's, and would hide tokens.
    if attention_mask is not None or (causal and length > 1):
        attention_mask = prefix.mask(attention_mask, query, seen)
    return attend(module, query, key, value, attention_mask, is_causal=False, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
