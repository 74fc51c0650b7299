"""Cohen's kappa of given and right answers: accuracy beyond what the same share of letters would hit by chance.

Cohen, A coefficient of agreement for nominal scales, 1960. A model that always says C has 0, whatever its accuracy.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cmexam_tune.evaluation.metrics import Metric

if TYPE_CHECKING:
    from cmexam_tune.evaluation.graded import Graded


def kappa(graded: "Sequence[Graded]") -> float:
    """Return kappa times 100; 0 where chance alone agrees everywhere."""
    pairs = [(item.question.answer or "", item.answer or "") for item in graded]
    n = len(pairs)
    gold, given = Counter(right for right, _ in pairs), Counter(answer for _, answer in pairs)
    observed = sum(right == answer for right, answer in pairs) / n
    chance = sum(gold[answer] * given[answer] for answer in gold) / n**2
    return 100 * (observed - chance) / (1 - chance) if chance < 1 else 0.0


METRIC = Metric(kappa, "Cohen's kappa, x 100", "Cohen κ（×100）")
