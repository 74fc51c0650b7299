"""Options of one row of a batch (stop strings, seed, streaming), and what is recorded while it is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cmexam_tune.models.completion import LEAST, Token
from cmexam_tune.models.features import Ids


@dataclass(frozen=True)
class RowOptions:
    """What is wanted of one row; rows that differ only in these are written in one batch."""

    stop: tuple[str, ...] = ()
    """Texts at which the row ends, beside the template's own. They are left out of its text."""
    seed: int | None = None
    """Where it samples: the same seed gives the same text in any batch. None: the batch's seed and the row's id."""
    top: int | None = None
    """How many of the most probable tokens are noted at each place; None: no log-probabilities. Not with beams."""
    echo: bool = False
    """Whether the prompt's tokens are noted like those of the text, and the text's last token even if it ends it."""
    choices: tuple[str, ...] = ()
    """The only texts that the row may have; none: it is free. Not with beams."""
    tell: Callable[[str], None] | None = None
    """Called after every token with the text so far, which may end in half a character. Not with beams."""


class Watching:
    """Follows a batch without beams: `before` is a logits processor, `after` a stopping criterion that ends nothing."""

    def __init__(
        self, options: Sequence[RowOptions], width: int, read: Callable[[Ids], str], spell: Callable[[int], str]
    ) -> None:
        """Take what is wanted of each row, the width of the prompt, and what gives the text of ids and of one id."""
        self.options, self.width, self.read, self.spell = options, width, read, spell
        self.tokens: list[list[Token]] = [[] for _ in options]
        """Of each row, what was written so far; empty where no log-probabilities are wanted."""
        self._logs: torch.Tensor | None = None

    def before(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note the distribution and return the scores [batch, vocabulary] as they are."""
        if any(row.top is not None for row in self.options):
            self._logs = scores.float().log_softmax(-1).clamp(min=LEAST)
        return scores

    def note(self, row: int, token: int, logs: torch.Tensor, start: int) -> Token:
        """Return a token as a row wants it noted.

        Args:
            row: its place in the batch.
            token: its id.
            logs: log-probabilities [vocabulary] at its place.
            start: characters of text before it.
        """
        best = logs.topk(min(self.options[row].top or 0, len(logs)))
        top = zip(map(self.spell, best.indices.tolist()), best.values.tolist(), strict=True)
        return Token(self.spell(token), float(logs[token]), tuple(top), start)

    def after(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Note and tell the newest token of ids [batch, prompt + new]."""
        for row, options in enumerate(self.options):
            if options.top is None and options.tell is None:
                continue
            ids: Ids = input_ids[row, self.width :].tolist()
            if options.top is not None and self._logs is not None:
                self.tokens[row].append(self.note(row, ids[-1], self._logs[row], len(self.read(ids[:-1]))))
            if options.tell is not None:
                options.tell(self.read(ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def within(tokens: Sequence[Token], length: int | None) -> tuple[Token, ...]:
    """Return the tokens that begin among the first `length` characters of their text; None: all."""
    return tuple(token for token in tokens if length is None or token.start < length)
