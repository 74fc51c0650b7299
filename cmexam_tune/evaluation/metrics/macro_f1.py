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
    gold, predicted = Counter(key for key, _ in pairs), Counter(answer for _, answer in pairs)
    hits = Counter(key for key, answer in pairs if key == answer)
    # F1 from counts: 2 TP / (support + predicted), which is never 0 / 0 for a label that occurs at all.
    return 100 * fmean(2 * hits[label] / (gold[label] + predicted[label]) for label in {*gold, *predicted})


METRIC = Metric(macro_f1, "Macro F1 %", "宏平均 F1 %")
