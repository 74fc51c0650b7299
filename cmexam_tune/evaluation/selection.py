"""Which questions of a file are scored: all, its first ones, or those that were answered."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question


@dataclass(frozen=True)
class Selection:
    """A part of a questions file; scores of it are not the exam's."""

    n: int
    of: int
    """Questions in the file."""
    how: str

    @property
    def sentence(self) -> str:
        """What a reader has to know before the first number."""
        return f"only {self.n:,} of {self.of:,} questions are scored: {self.how}"


def select(
    questions: Sequence[Question], answered: Sequence[Collection[str]], limit: int | None, answered_only: bool
) -> tuple[list[Question], Selection | None]:
    """Return the questions that are scored, and the selection, None where it is all of them.

    Args:
        questions: the whole file.
        answered: for each run the ids that it has a prediction for.
        limit: only the first so many.
        answered_only: only those that every run has a prediction for.

    Raises:
        UserError: a limit below 1, or no question is left.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: at least 1 is needed.")
    chosen = list(questions[:limit])
    how = [] if limit is None else [f"the first {limit:,} of the file (--limit)"]
    if answered_only:
        chosen = [question for question in chosen if all(question.id in ids for ids in answered)]
        how.append("those with a prediction " + ("in every run " * (len(answered) > 1)) + "(--answered-only)")
    if not chosen:
        raise UserError(f"{', '.join(how) or 'the questions'}: no question is left to score.")
    if len(chosen) == len(questions):
        return chosen, None
    return chosen, Selection(len(chosen), len(questions), ", ".join(how))
