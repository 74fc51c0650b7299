"""The answers that a question allows, as token trees, and their scores along them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation.prefill import Reader


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
    # Without its last token: every answer must keep one of its own, or its leaf would be the root.
    for tokens in zip(*(row[:-1] for row in answers.values()), strict=False):
        if len(set(tokens)) > 1:
            break
        lead.append(tokens[0])
    root = Node()
    for letters, row in answers.items():
        root.add(row[len(lead) :], letters)
    return lead, root


def totals(reader: Reader, roots: Sequence[Node], after: torch.Tensor) -> list[dict[str, float]]:
    """Return the summed log-probability of every leaf under each row's root.

    The trees are walked together, depth first: each inner node costs one token of computation for the batch, and the
    prompt none.

    Args:
        reader: the batch, read up to the roots.
        roots: one tree for each row.
        after: log-probabilities [b, v] at the roots.
    """
    scores: list[dict[str, float]] = [{} for _ in roots]
    _walk(reader, list(roots), after, [0.0] * len(roots), scores)
    return scores


def _walk(
    reader: Reader,
    nodes: list[Node | None],
    after: torch.Tensor,
    sums: list[float],
    scores: list[dict[str, float]],
) -> None:
    tokens = sorted({token for node in nodes if node is not None for token in node.children})
    if not tokens:
        return
    # One copy to the host for the whole node: each costs a wait for the card.
    columns = after[:, torch.tensor(tokens, device=after.device)].tolist()
    for column, token in enumerate(tokens):
        children = [None if node is None else node.children.get(token) for node in nodes]
        totals_here = [total + columns[row][column] for row, total in enumerate(sums)]
        for row, child in enumerate(children):
            if child is not None and child.letters is not None:
                scores[row][child.letters] = totals_here[row]
        # Rows whose tree does not go this way are fed the token too, and nothing is read of them.
        if any(child is not None and child.children for child in children):
            _walk(reader, children, reader.feed([token] * len(nodes)), totals_here, scores)
            reader.drop()


def summed(logs: torch.Tensor, lead: Ids) -> float:
    """Return the summed log-probability of `lead`, the last tokens that were read; `logs` [keep, v] end after them."""
    # The last row of `logs` predicts what follows `lead`, so that of its first token is as many rows before.
    return sum(float(logs[place, token]) for place, token in enumerate(lead, len(logs) - 1 - len(lead)))
