"""Cohen's kappa of given and right answers: accuracy beyond what the same share of letters would hit by chance.

Cohen, A coefficient of agreement for nominal scales, 1960. A model that always says C has 0, whatever its accuracy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.metrics import Metric

if TYPE_CHECKING:
    from cmexam_tune.evaluation.graded import Graded


def kappa(graded: "Sequence[Graded]") -> float:
    """Return kappa times 100; 0 where chance alone agrees everywhere."""
    key = [item.question.answer or "" for item in graded]
    # An unreadable output is a label of its own: it agrees with no key, as it does not in accuracy.
    answers = [item.answer or "" for item in graded]
    return 100 * (significance.kappa(key, answers) or 0.0)


METRIC = Metric(kappa, "Cohen's kappa, x 100", "Cohen κ（×100）")
