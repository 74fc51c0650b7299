"""The answers that a question allows, as token trees, and reading a decoder's scores along them with its cache."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cmexam_tune.models import cache
from cmexam_tune.models.causal import left_padded
from cmexam_tune.models.features import Ids


@dataclass
class Node:
    """A point inside the legal answers; a leaf has `letters` and no children."""

    children: "dict[int, Node]" = field(default_factory=dict)
    letters: str | None = None

    def add(self, ids: Sequence[int], letters: str) -> None:
        """Put one answer, token by token, under this node."""
        node = self
        for token in ids:
            node = node.children.setdefault(token, Node())
        node.letters = letters

    @property
    def depth(self) -> int:
        """Tokens of the longest way down."""
        return max((1 + child.depth for child in self.children.values()), default=0)


def walk(root: Node, ids: Sequence[int]) -> Node:
    """Return the point that `ids` lead to, or the leaf that they reach on the way."""
    for token in ids:
        if not root.children:
            break
        root = root.children[token]
    return root


def tree(answers: Mapping[str, Ids]) -> tuple[Ids, Node]:
    """Return what all answers start with, at least one token short of the shortest, and the tree of what follows."""
    lead: Ids = []
    for tokens in zip(*(row[:-1] for row in answers.values()), strict=False):
        if len(set(tokens)) > 1:
            break
        lead.append(tokens[0])
    root = Node()
    for letters, row in answers.items():
        root.add(row[len(lead) :], letters)
    return lead, root


class Reader:
    """One batch of prompts going through a decoder, with its cache."""

    def __init__(self, model: Any, rows: Sequence[Ids], pad: int) -> None:
        """Take prompts as ids; they are padded on the left and nothing is computed yet."""
        self._model = model
        self._ids, self._mask = left_padded(rows, pad, model.device)
        self._cache = cache.empty(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def prefill(self, keep: int) -> torch.Tensor:
        """Run the prompts and return the log-probabilities after each of their last `keep` tokens, [b, keep, v]."""
        return self._run(None, keep)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each row and return the log-probabilities after it, [b, v]."""
        column = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, column], dim=1)
        self._mask = torch.cat([self._mask, torch.ones_like(column)], dim=1)
        return self._run(1, 1)[:, 0]

    def drop(self) -> None:
        """Take the last token of every row away again."""
        self._ids, self._mask = self._ids[:, :-1], self._mask[:, :-1]
        self._cache.crop(-1)

    def _run(self, new: int | None, keep: int) -> torch.Tensor:
        model = self._model
        # What `generate` does for one step, so that a family's own positions and inputs are used.
        positions = model._prepare_position_ids_for_generation(self._ids, {"attention_mask": self._mask})
        inputs = model.prepare_inputs_for_generation(
            self._ids,
            next_sequence_length=new,
            past_key_values=self._cache,
            attention_mask=self._mask,
            position_ids=positions,
            is_first_iteration=new is None,
            use_cache=True,
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        logits = model(**inputs).logits[:, -keep:].float()
        return torch.log_softmax(logits, dim=-1)


def totals(reader: Reader, roots: Sequence[Node], after: torch.Tensor) -> list[dict[str, float]]:
    """Return the summed log-probability of every leaf under each row's root.

    The trees are walked together, depth first: each inner node costs one token of computation for the batch, and the
    prompt none.

    Args:
        reader: the batch, read up to the roots.
        roots: one tree for each row.
        after: log-probabilities [b, v] at the roots.
    """
    found: list[dict[str, float]] = [{} for _ in roots]
    _walk(reader, list(roots), after, [0.0] * len(roots), found)
    return found


def _walk(
    reader: Reader,
    nodes: list[Node | None],
    after: torch.Tensor,
    sums: list[float],
    found: list[dict[str, float]],
) -> None:
    tokens = sorted({token for node in nodes if node is not None for token in node.children})
    if not tokens:
        return
    columns = after[:, torch.tensor(tokens, device=after.device)].tolist()
    for column, token in enumerate(tokens):
        children = [None if node is None else node.children.get(token) for node in nodes]
        totals_here = [total + columns[row][column] for row, total in enumerate(sums)]
        for row, child in enumerate(children):
            if child is not None and child.letters is not None:
                found[row][child.letters] = totals_here[row]
        if any(child is not None and child.children for child in children):
            _walk(reader, children, reader.feed([token] * len(nodes)), totals_here, found)
            reader.drop()
