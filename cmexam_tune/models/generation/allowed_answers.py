"""The answers that a question allows, as a tree of tokens: what may follow on what was written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor, StoppingCriteria

from cmexam_tune.models.features import Ids


@dataclass
class AnswerTrie:
    """A place inside the allowed answers; a leaf has `letters` and no children."""

    children: "dict[int, AnswerTrie]" = field(default_factory=dict)
    letters: str | None = None

    @classmethod
    def of(cls, answers: Mapping[str, Ids]) -> "tuple[Ids, AnswerTrie]":
        """Return what all answers start with, at least one token short of the shortest, and the tree of the rest.

        Args:
            answers: letters -> tokens of the answer. None may start with all tokens of another one.
        """
        start: Ids = []
        for tokens in zip(*(ids[:-1] for ids in answers.values()), strict=False):
            if len(set(tokens)) > 1:
                break
            start.append(tokens[0])
        root = cls()
        for letters, ids in answers.items():
            node = root
            for token in ids[len(start) :]:
                node = node.children.setdefault(token, cls())
            node.letters = letters
        return start, root

    @property
    def depth(self) -> int:
        """Tokens of the longest way down."""
        return max((1 + child.depth for child in self.children.values()), default=0)

    def walk(self, ids: Sequence[int]) -> "AnswerTrie":
        """Return the place that `ids` lead to, or the leaf that they reach on the way: behind it stands padding."""
        node = self
        for token in ids:
            if not node.children:
                break
            node = node.children[token]
        return node


class AnswerComplete(StoppingCriteria):
    """Ends a row that has written one of its allowed answers."""

    def __init__(self, tries: Sequence[AnswerTrie], width: int) -> None:
        """Take the allowed answers of each row, and the width of the prompts in tokens."""
        self.tries, self.width = tries, width

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        new = input_ids[:, self.width :].tolist()
        done = [not trie.walk(ids).children for trie, ids in zip(self.tries, new, strict=True)]
        return torch.tensor(done, device=input_ids.device)


class OnlyAllowed(LogitsProcessor):
    """Leaves each row the tokens that lead to one of its allowed answers; rows without any are free."""

    def __init__(self, tries: Sequence[AnswerTrie | None], width: int, pad: int) -> None:
        """Take the allowed answers of each row, the width of the prompts in tokens, and what stands behind answers."""
        self.tries, self.width, self.pad = tries, width, pad

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, vocabulary] that are -inf where a row may not go."""
        masked = scores.clone()
        for row, trie in enumerate(self.tries):
            if trie is not None:
                allowed = list(trie.walk(input_ids[row, self.width :].tolist()).children) or [self.pad]
                masked[row] = -torch.inf
                masked[row, allowed] = scores[row, allowed]
        return masked
