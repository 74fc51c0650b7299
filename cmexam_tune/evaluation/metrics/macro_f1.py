"""Macro F1: the plain mean of F1 over answers, so that rare answers (ABD, BCE, ...) count as much as A or B.

The classes are the answers that are right or given somewhere, as scikit-learn's `average="macro"` counts them; an
output without an answer is one of them.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from cmexam_tune.evaluation.metrics import Metric

if TYPE_CHECKING:
    from cmexam_tune.evaluation.graded import Graded


def macro_f1(graded: "Sequence[Graded]") -> float:
    """Return the mean F1 over answers in percent."""
    pairs = [(item.question.answer or "", item.answer or "") for item in graded]
    gold, given = Counter(right for right, _ in pairs), Counter(answer for _, answer in pairs)
    hits = Counter(right for right, answer in pairs if right == answer)
    return 100 * fmean(2 * hits[answer] / (gold[answer] + given[answer]) for answer in {*gold, *given})


METRIC = Metric(macro_f1, "Macro F1 %", "宏平均 F1 %")
