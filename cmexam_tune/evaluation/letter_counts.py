"""Credit for a part of the right letters, beside the exact score."""

from collections.abc import Sequence
from dataclasses import dataclass

from cmexam_tune.evaluation.grading import Graded


@dataclass(frozen=True)
class PartialCredit:
    """Scores of questions with one, with several, or with any number of right letters, in percent."""

    n: int
    accuracy: float
    """Exactly the right letters, as the profile counts them."""
    jaccard: float
    """Mean over questions of letters both given and right, divided by letters given or right."""
    precision: float
    """Share of the letters given that are right, over all questions; 0 where none was given."""
    recall: float
    """Share of the right letters that were given, over all questions."""


def partial_credit(graded: Sequence[Graded]) -> dict[str, PartialCredit]:
    """Return the scores of `all` questions in the denominator, of `single` (one right letter) and `multiple`.

    A part without questions is left out. Not what the paper prints but the published answer says which is which.
    """
    counted = [one for one in graded if one.counted]
    parts = {
        "all": counted,
        "single": [one for one in counted if len(one.question.answer or "") == 1],
        "multiple": [one for one in counted if len(one.question.answer or "") > 1],
    }
    return {name: _credit(some) for name, some in parts.items() if some}


def _credit(graded: Sequence[Graded]) -> PartialCredit:
    letters = [(set(one.answer or ""), set(one.question.answer or "")) for one in graded]
    shared = sum(len(given & gold) for given, gold in letters)
    return PartialCredit(
        n=len(graded),
        accuracy=100 * sum(one.right for one in graded) / len(graded),
        jaccard=100 * sum(len(given & gold) / len(given | gold) for given, gold in letters) / len(graded),
        precision=100 * shared / max(sum(len(given) for given, _ in letters), 1),
        recall=100 * shared / sum(len(gold) for _, gold in letters),
    )
