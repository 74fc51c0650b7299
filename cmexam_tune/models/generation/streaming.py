"""A batch while it is written: each row's text so far, and the log-probabilities of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cmexam_tune.models.features import Ids

LEAST = -9999.0
"""Stands for the log-probability of what cannot come, as in OpenAI's protocol."""


@dataclass(frozen=True)
class Token:
    """A token that was written; log-probabilities are the model's own, before temperature, top_k and top_p."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    """The most probable tokens at this place and their log-probabilities, best first."""
    start: int
    """Characters of text before it."""


@dataclass
class Watch:
    """What is wanted of one row beside its text."""

    tell: Callable[[str], None] | None = None
    """Called after every token with the text so far, which may end in half a character."""
    top: int | None = None
    """How many of the most probable tokens are noted at each place; None: no log-probabilities."""
    tokens: list[Token] = field(default_factory=list)


class Watching:
    """Follows a batch: `before` is a logits processor, `after` a stopping criterion that ends nothing."""

    def __init__(
        self, watches: Sequence[Watch | None], width: int, read: Callable[[Ids], str], spell: Callable[[int], str]
    ) -> None:
        """Take what is wanted of each row, the width of the prompt, and what gives the text of ids and of one id."""
        self.rows = [(row, watch) for row, watch in enumerate(watches) if watch is not None]
        self.width, self.read, self.spell = width, read, spell
        self._logs: torch.Tensor | None = None
        for _, watch in self.rows:
            watch.tokens.clear()

    def before(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the distribution and return the scores [batch, vocabulary] as they are."""
        if any(watch.top is not None for _, watch in self.rows):
            self._logs = scores.float().log_softmax(-1).clamp(min=LEAST)
        return scores

    def after(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Tell who watches about the newest token of ids [batch, prompt + new]."""
        for row, watch in self.rows:
            ids: Ids = input_ids[row, self.width :].tolist()
            if watch.top is not None and self._logs is not None:
                best = self._logs[row].topk(min(watch.top, self._logs.shape[1]))
                top = zip(map(self.spell, best.indices.tolist()), best.values.tolist(), strict=True)
                start, own = len(self.read(ids[:-1])), float(self._logs[row, ids[-1]])
                watch.tokens.append(Token(self.spell(ids[-1]), own, tuple(top), start))
            if watch.tell is not None:
                watch.tell(self.read(ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def within(tokens: Sequence[Token], length: int | None) -> tuple[Token, ...]:
    """Return the tokens that begin among the first `length` characters of their text; None: all."""
    return tuple(token for token in tokens if length is None or token.start < length)
