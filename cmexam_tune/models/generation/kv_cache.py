"""Keys and values: of a P-tuning prefix, of what prompts begin with, and of prompts behind which answers are scored."""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call"

import copy
import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models import device
from cmexam_tune.models.causal import left_padded
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation.allowed_answers import AnswerTrie
from cmexam_tune.models.precision import check_numbers
from cmexam_tune.models.prefix import PrefixEncoder, Shape, find_encoder

CHUNK = 256
"""Tokens whose log-probabilities are held at once."""
USED, MOST = 0.8, 256
"""Share of the free memory that is counted on, and most rows of a batch: from there on nothing gets faster."""
SHORTEST = 32
"""Tokens from which on a common beginning is read apart."""
WORTH = 0.25
"""Share of all tokens that reading beginnings apart must save."""


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


def rows_that_fit(model: Any, tokens: int, copies: int = 1) -> int | None:
    """Return how many rows of `tokens` tokens fit the card's free memory, a power of 2; None without a card.

    A token's keys and values of all layers are kept; of a prompt also one layer's activations, about 12 vectors of the
    hidden size and 4 of the intermediate one, and of each row the last logits, three times in float32.

    Args:
        model: what is asked, on its card.
        tokens: of the longest prompt with its answer.
        copies: beams of a row.
    """
    free = device.free_memory()
    if free is None:
        return None
    config, number = model.config, model.dtype.itemsize
    shape = Shape.of(config, 0)
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    a_token = number * (2 * shape.layers * shape.token_dim + 12 * config.hidden_size + 4 * inner)
    rows: int = int(USED * free) // (copies * (tokens * a_token + 3 * 4 * config.vocab_size))
    return int(1 << min(max(rows, 1), MOST).bit_length() - 1)


def empty(model: Any) -> DynamicCache:
    """Return the cache that a model starts from: with its prefix, if it has one and keeps all keys of every layer."""
    cache = DynamicCache(config=model.config)
    encoder = find_encoder(model)
    return cache if encoder is None or not keeps_all(cache) else PrefixCache(encoder, model.config)


def keeps_all(cache: DynamicCache) -> bool:
    """Return whether every layer keeps all keys; a sliding window or a recurrent state would depend on what follows."""
    return all(type(layer) in (DynamicLayer, PrefixLayer) for layer in cache.layers)


@dataclass(frozen=True)
class SharedPrefix:
    """What the prompts of a batch begin with, in groups, and its keys and values, computed once for each group."""

    length: int
    """Tokens, the same in all groups."""
    cache: DynamicCache
    """A row for each group."""
    groups: Sequence[int] = ()
    """Group of each prompt; empty where all are in one, however many they are."""

    def rows(self, prompts: int, copies: int = 1) -> DynamicCache:
        """Return a cache with a row for each prompt, or several (beams); one group is not copied until it grows."""
        rows = copy.copy(self.cache)
        rows.layers = [copy.copy(layer) for layer in self.cache.layers]
        places = [group for group in self.groups for _ in range(copies)]
        layer: Any
        for layer in rows.layers:
            states = layer.keys, layer.values
            layer.keys, layer.values = (
                part[places] if places else part.expand(prompts * copies, -1, -1, -1) for part in states
            )
        return rows


class PrefillScorer:
    """One batch of prompts going through a decoder, with its cache."""

    def __init__(self, model: Any, rows: Sequence[Ids], pad: int, start: SharedPrefix | None = None) -> None:
        """Take prompts as ids, and what they all begin with if that was read; nothing is computed yet."""
        self._model = model
        self._ids, self._mask = left_padded(rows, pad, model.device, start.length if start else 0)
        self.cache = start.rows(len(rows)) if start else empty(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(self, keep: int) -> torch.Tensor:
        """Run the prompts; return log-probabilities behind their last `keep` tokens, float32 [batch, keep, vocab]."""
        return self._run(True, keep)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each row and return the log-probabilities behind it, float32 [batch, vocabulary]."""
        return self.extend([[token] for token in tokens])[:, 0]

    def extend(self, rows: Sequence[Ids]) -> torch.Tensor:
        """Append equally many tokens to each row; return what `prefill` does behind these."""
        new = torch.tensor(rows, device=self._ids.device)
        self._ids = torch.cat([self._ids, new], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(new)], dim=1)
        return self._run(False, new.shape[1])

    def drop(self) -> None:
        """Take the last token of every row away again."""
        self._ids, self._mask = self._ids[:, :-1], self._mask[:, :-1]
        self.cache.crop(-1)

    def answer_scores(self, tries: Sequence[AnswerTrie], after: torch.Tensor) -> list[dict[str, float]]:
        """Return the summed log-probability of every leaf of each row's tree.

        The trees are walked together, depth first: each inner node costs one token of computation for the batch, and
        the prompt none.

        Args:
            tries: one tree for each row.
            after: log-probabilities [batch, vocabulary] at their roots.
        """
        scores: list[dict[str, float]] = [{} for _ in tries]
        self._walk(list(tries), after, [0.0] * len(tries), scores)
        return scores

    def _walk(
        self,
        nodes: Sequence[AnswerTrie | None],
        after: torch.Tensor,
        sums: Sequence[float],
        scores: list[dict[str, float]],
    ) -> None:
        tokens = sorted({token for node in nodes if node is not None for token in node.children})
        if not tokens:
            return
        # One transfer from the device for all children of all rows.
        columns = after[:, torch.tensor(tokens, device=after.device)].tolist()
        for column, token in enumerate(tokens):
            children = [None if node is None else node.children.get(token) for node in nodes]
            totals = [total + columns[row][column] for row, total in enumerate(sums)]
            for row, child in enumerate(children):
                if child is not None and child.letters is not None:
                    scores[row][child.letters] = totals[row]
            if any(child is not None and child.children for child in children):
                self._walk(children, self.feed([token] * len(nodes)), totals, scores)
                self.drop()

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


def prompt_log_probs(model: object, ids: Ids, pad: int) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities behind each token of a prompt, float32 [vocabulary].

    They are computed for `CHUNK` tokens at a time: those of a long prompt would fill a card.

    Raises:
        ConfigError: a model that has read all of its prompt before the first token (ChatGLM-6B).
    """
    if getattr(model, "reads_both_ways", False):
        raise ConfigError("this model reads its prompt in both directions: its tokens have no probabilities.")
    scorer = PrefillScorer(model, [ids[:CHUNK]], pad)
    yield from scorer.prefill(len(ids[:CHUNK]))[0]
    for first in range(CHUNK, len(ids), CHUNK):
        yield from scorer.extend([ids[first : first + CHUNK]])[0]


def read_shared_prefix(
    model: object, prompts: Sequence[Ids], groups: Sequence[Hashable], pad: int, start: SharedPrefix | None = None
) -> SharedPrefix | None:
    """Read what the prompts of each group begin with once, where that saves a good part of the work; else `start`.

    A model that reads its prompt in both directions (ChatGLM-6B) has other keys for it before another question.

    Args:
        model: what is asked.
        prompts: as ids.
        groups: of each prompt; every group's beginning is taken as long as the shortest of them.
        pad: id of the padding.
        start: what all prompts begin with, if that was read already.
    """
    if getattr(model, "reads_both_ways", False):
        return None
    members: dict[Hashable, list[Ids]] = {}
    for group, prompt in zip(groups, prompts, strict=True):
        members.setdefault(group, []).append(prompt)
    before = start.length if start else 0
    length = min(map(_alike, members.values()))
    saved = (length - before) * (len(prompts) - len(members))
    little = saved < WORTH * sum(len(prompt) - before for prompt in prompts)
    if length - before < SHORTEST or little or not keeps_all(empty(model)):
        return start
    reader = PrefillScorer(model, [prompts[0][:length] for prompts in members.values()], pad, start)
    reader.prefill(1)
    places = {group: place for place, group in enumerate(members)}
    return SharedPrefix(length, reader.cache, [places[group] for group in groups] if len(members) > 1 else ())


def _alike(prompts: Sequence[Ids]) -> int:
    """Return how many tokens all begin with; the last of the shortest stays out, for something must be left to read."""
    first, last = min(prompts), max(prompts)  # all others lie between them, letter by letter
    most = min(len(prompt) for prompt in prompts) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)
