"""Whether a model's probabilities mean what they say: of the answers held 70% probable, are 70% right?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.grading import clusters
from cmexam_tune.evaluation.significance import wilson

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BINS = 10
COVERAGE = 0.8
DRAWN = 50
"""Exams drawn at a time."""


@dataclass(frozen=True)
class ConfidenceBin:
    """The questions whose answer the model held about equally probable; all but `n` in percent."""

    n: int
    low: float
    high: float
    confidence: float
    """Mean probability of the answers given."""
    accuracy: float
    accuracy_ci: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """Probabilities against results over the questions with a published answer; all but `n` in percent."""

    n: int
    confidence: float
    """Mean probability of the answers given: above `accuracy`, the model is too sure of itself."""
    accuracy: float
    ece: float
    """Expected calibration error: distance of accuracy and confidence, mean over bins of equal width by their size."""
    ece_ci: tuple[float, float]
    """95%, of a bootstrap, reflected at the estimate (basic bootstrap): the estimate and its resamples are too large by
    about the same, because distances of noise do not cancel. It begins at 0 where `ece` is below `ece_by_chance`."""
    ece_by_chance: float
    """What a perfectly calibrated model with these probabilities stays below in 95% of exams."""
    bins: tuple[ConfidenceBin, ...]
    """Those that hold questions."""
    coverage: float
    """Share of the questions, the surest, that are answered in `covered_accuracy`."""
    covered_accuracy: float
    covered_ci: tuple[float, float]
    threshold: float
    """The least probability of an answer among them."""


def calibration(graded: Sequence[Graded]) -> Calibration | None:
    """Return how probabilities and results agree; None where no answer has a probability."""
    # An unreadable output has no probability, nor has an answer that was not among those that the model scored.
    known = [
        (item, probability)
        for item in graded
        if item.counted
        and item.answer is not None
        and (probability := (item.prediction.probabilities or {}).get(item.answer)) is not None
    ]
    if not known:
        return None
    import numpy as np

    confidence = np.array([probability for _, probability in known])
    right = np.array([item.right for item, _ in known])
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    # One column for each bin and sum, so that every resample is a product of counts and rows.
    rows = np.zeros((len(known), 3, BINS))
    rows[np.arange(len(known)), :, place] = np.stack([np.ones(len(known)), confidence, right], axis=1)
    flat = rows.reshape(len(known), 3 * BINS)
    error = float(_errors(flat.sum(0)[None])[0, 0])
    groups = clusters([item for item, _ in known])
    ((low, high),) = significance.bootstrap(significance.by_cluster(flat, groups), _errors)
    chance = _by_chance(confidence, rows)
    surest = np.argsort(-confidence, kind="stable")[: max(1, round(COVERAGE * len(known)))]
    hits = float(right[surest].sum())
    return Calibration(
        n=len(known),
        confidence=100 * float(confidence.mean()),
        accuracy=100 * float(right.mean()),
        ece=error,
        ece_ci=(0.0 if error <= chance else max(0.0, 2 * error - high), max(0.0, 2 * error - low)),
        ece_by_chance=chance,
        bins=tuple(_bin(i, *rows.sum(0)[:, i]) for i in range(BINS) if rows[:, 0, i].any()),
        coverage=100 * len(surest) / len(known),
        covered_accuracy=100 * hits / len(surest),
        covered_ci=_percent(wilson(hits, len(surest))),
        threshold=100 * float(confidence[surest[-1]]),
    )


def _by_chance(confidence: "NDArray[np.float64]", rows: "NDArray[np.float64]") -> float:
    """Return the 95% quantile of the error where every answer is right with its own probability.

    Args:
        confidence: [questions] probabilities.
        rows: [questions, 3, bins], 1 in the first of the three at the question's bin.
    """
    import numpy as np

    # The model's own probabilities as the truth: how large is the error of a perfectly calibrated one?
    dice, errors = np.random.default_rng(significance.SEED), []
    sums = rows.sum(0)[:2].reshape(-1)
    for _ in range(significance.RESAMPLES // DRAWN):
        hits = (dice.random((DRAWN, len(confidence))) < confidence) @ rows[:, 0]
        errors.append(_errors(np.concatenate([np.broadcast_to(sums, (DRAWN, len(sums))), hits], axis=1)))
    return float(np.quantile(np.concatenate(errors), 0.95))


def _errors(sums: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return [resamples, 1] expected calibration errors in percent of [resamples, 3 * bins] sums."""
    import numpy as np

    count, confidence, right = np.split(sums, 3, axis=1)
    errors: NDArray[np.float64] = np.abs(confidence - right).sum(1, keepdims=True) / count.sum(1, keepdims=True)
    return 100 * errors


def _bin(place: int, count: float, confidence: float, right: float) -> ConfidenceBin:
    n = int(count)
    return ConfidenceBin(
        n,
        low=100 * place / BINS,
        high=100 * (place + 1) / BINS,
        confidence=100 * confidence / n,
        accuracy=100 * right / n,
        accuracy_ci=_percent(wilson(right, n)),
    )


def _percent(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]
