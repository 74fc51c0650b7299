"""Runs beside each other: several seeds as mean and deviation, two runs question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cmexam_tune.core.schema import Scores
from cmexam_tune.metrics import significance
from cmexam_tune.metrics.text_metrics import TEXT, corpus_scores, rows_of
from cmexam_tune.scoring.grading import Graded

if TYPE_CHECKING:
    pass

SUMMARY = ("accuracy", "weighted_f1", *TEXT)


def text_intervals(graded: Sequence[Graded], smoothing: str) -> dict[str, list[float]]:
    """Return the bootstrap 95% interval of each text metric; empty where there are no pairs."""
    rows = rows_of(one.text for one in graded if one.text is not None)
    if not len(rows):
        return {}
    found = significance.bootstrap(rows, lambda sums: corpus_scores(sums, smoothing))
    return {name: list(interval) for name, interval in zip(TEXT, found, strict=False)}


def compare(first: Sequence[Graded], second: Sequence[Graded], smoothing: str = "exp") -> dict[str, Any]:
    """Return the paired comparison of `first` (the baseline) and `second` (the run) on the same questions.

    The result holds counts of questions right in both, one or none of the runs, the exact McNemar p-value, for each
    metric the difference second - first with its paired-bootstrap 95% interval and p-value, and the ids that flipped.
    """
    import numpy as np

    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.question.answer]
    gained = [b.question.id for a, b in pairs if b.correct and not a.correct]
    lost = [b.question.id for a, b in pairs if a.correct and not b.correct]
    both = sum(a.correct and b.correct for a, b in pairs)
    result: dict[str, Any] = {
        "n": len(pairs),
        "both": both,
        "neither": len(pairs) - both - len(gained) - len(lost),
        "gained": gained,
        "lost": lost,
        "mcnemar_p": significance.mcnemar(len(lost), len(gained)),
        "metrics": {},
    }
    if pairs:
        right = np.array([[a.correct, b.correct] for a, b in pairs], dtype=np.float64)
        ones = np.ones(len(pairs))
        rows = [np.stack([right[:, i], ones], axis=1) for i in (0, 1)]
        (accuracy,) = significance.paired_bootstrap(rows[0], rows[1], lambda sums: 100 * sums[:, :1] / sums[:, 1:])
        result["metrics"]["accuracy"] = asdict(accuracy)
    written = [(a, b) for a, b in zip(first, second, strict=True) if a.text and b.text]
    if written:
        rows = [rows_of(text for pair in written if (text := pair[i].text)) for i in (0, 1)]
        found = significance.paired_bootstrap(rows[0], rows[1], lambda sums: corpus_scores(sums, smoothing))
        result["metrics"] |= {name: asdict(one) for name, one in zip(TEXT, found, strict=False)}
    return result


def summarise(runs: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """Return {metric: {"mean":, "std":, "runs":}} of several runs or seeds; metrics that a run lacks are left out."""
    table = {}
    for name in SUMMARY:
        values = [value for scores in runs.values() if isinstance(value := scores.get(name), int | float)]
        if len(values) == len(runs) and values:
            mean, std = significance.mean_std(values)
            table[name] = {"mean": mean, "std": std, "runs": len(values)}
    return table


def agreement(runs: Mapping[str, Sequence[Graded]]) -> dict[str, float]:
    """Return {"first | second": share in percent of questions with the same readable answer} for each two runs."""
    names = list(runs)
    return {
        f"{a} | {b}": 100
        * sum(x.answer is not None and x.answer == y.answer for x, y in zip(runs[a], runs[b], strict=True))
        / max(len(runs[a]), 1)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    }
