"""Caches that decoding starts from: with a P-tuning prefix in them."""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cmexam_tune.models.prefix import PrefixEncoder, find_encoder


class PrefixLayer(DynamicLayer):
    """Keys and values of one layer behind those of a prefix, which no length counts, so that positions stay."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the prefix `[1, kv_heads, tokens, head_dim]`."""
        super().__init__()
        self.prefix = (key, value)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put the prefix in front of the first keys and values, in their type."""
        super().lazy_initialization(key_states, value_states)
        key, value = (part.to(key_states).expand(key_states.shape[0], -1, -1, -1) for part in self.prefix)
        self.keys, self.values = key, value

    def get_seq_length(self) -> int:
        """Return how many tokens are in it."""
        # Before the first keys come the layer is empty: the prefix is put in with them.
        return max(super().get_seq_length() - self.prefix[0].shape[-2], 0)


class PrefixCache(DynamicCache):
    """A cache that holds the prefix, so that attention need not put it in front for every token and layer again."""

    holds_prefix = True

    def __init__(self, encoder: PrefixEncoder, config: Any) -> None:
        """Fill the first places with what the encoder returns."""
        super().__init__(config=config)
        states = encoder().permute(1, 2, 0, 3)[:, None]
        self.layers = [PrefixLayer(states[2 * i], states[2 * i + 1]) for i in range(len(self.layers))]


def empty(model: Any) -> DynamicCache:
    """Return the cache that a model starts from: with its prefix, if it has one and keeps all keys of every layer."""
    cache = DynamicCache(config=model.config)
    encoder = find_encoder(model)
    return cache if encoder is None or not keeps_all(cache) else PrefixCache(encoder, model.config)


def keeps_all(cache: DynamicCache) -> bool:
    """Return whether every layer keeps all keys; one with a window or a state of its own depends on what follows."""
    return all(type(layer) in (DynamicLayer, PrefixLayer) for layer in cache.layers)
