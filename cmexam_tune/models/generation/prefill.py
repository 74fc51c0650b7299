"""Reading prompts with a decoder's cache: token by token along answers, and once what many prompts begin with."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cmexam_tune.models.causal import left_padded
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import kv_cache as cache
from cmexam_tune.models.precision import check_numbers

SHORTEST = 32
"""Tokens from which on a common beginning is read apart."""


@dataclass(frozen=True)
class Start:
    """What the prompts of a batch begin with, and its keys and values, computed once."""

    ids: Ids
    cache: DynamicCache

    def rows(self, count: int) -> DynamicCache:
        """Return a cache of `count` equal rows; nothing is copied until something is added to it."""
        rows = copy.copy(self.cache)
        rows.layers = [copy.copy(layer) for layer in self.cache.layers]
        layer: Any
        for layer in rows.layers:
            layer.keys = layer.keys.expand(count, -1, -1, -1)
            layer.values = layer.values.expand(count, -1, -1, -1)
        return rows


class Reader:
    """One batch of prompts going through a decoder, with its cache."""

    def __init__(self, model: Any, rows: Sequence[Ids], pad: int, start: Start | None = None) -> None:
        """Take prompts as ids, and what they all begin with if that was read; nothing is computed yet."""
        self._model = model
        self._ids, self._mask = left_padded(rows, pad, model.device, start.ids if start else ())
        self.cache = start.rows(len(rows)) if start else cache.empty(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(self, keep: int) -> torch.Tensor:
        """Run the prompts; return log-probabilities after each of their last `keep` tokens, float32 [b, keep, v]."""
        return self._run(True, keep)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each row and return the log-probabilities after it, float32 [b, v]."""
        column = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, column], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(column)], dim=1)
        return self._run(False, 1)[:, 0]

    def drop(self) -> None:
        """Take the last token of every row away again."""
        self._ids, self._mask = self._ids[:, :-1], self._mask[:, :-1]
        self.cache.crop(-1)

    def _run(self, first: bool, keep: int) -> torch.Tensor:
        model = self._model
        # What `generate` does for one step, so that a family's own positions and inputs are used.
        positions = model._prepare_position_ids_for_generation(self._ids, {"attention_mask": self._mask})
        inputs = model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=self._ids.shape[1] - self.cache.get_seq_length(),
            past_key_values=self.cache,
            attention_mask=self._mask,
            position_ids=positions,
            is_first_iteration=first,
            use_cache=True,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        logits = model(**inputs).logits[:, -keep:].float()
        if first:
            check_numbers(logits)
        return torch.log_softmax(logits, dim=-1)


def shared(model: Any, prompts: Sequence[Ids], pad: int) -> Start | None:
    """Read what all prompts begin with; None where that is too short to gain by, or the model cannot share it.

    A model that reads its prompt in both directions (ChatGLM-6B) has other keys for it before another question.
    """
    if getattr(model, "reads_both_ways", False):
        return None
    first, last = min(prompts), max(prompts)  # all others lie between them, letter by letter
    # One token at least is left of every prompt: the logits after it are what is read.
    most = min(len(prompt) for prompt in prompts) - 1
    length = next((i for i in range(most) if first[i] != last[i]), most)
    longest_rest = max(len(prompt) for prompt in prompts) - length
    if length < SHORTEST or 2 * length < longest_rest or not cache.keeps_all(cache.empty(model)):
        return None
    reader = Reader(model, [first[:length]], pad)
    reader.prefill(1)
    return Start(first[:length], reader.cache)
