"""Runs beside each other: several seeds as mean and deviation, two runs question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cmexam_tune.core.schema import Scores
from cmexam_tune.metrics import significance
from cmexam_tune.metrics.significance import Paired
from cmexam_tune.metrics.text_metrics import TEXT, corpus_scores, rows_of
from cmexam_tune.scoring.grading import Graded

SUMMARY = ("accuracy", "weighted_f1", *TEXT)


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same questions, those whose answer is published."""

    name: str
    """Of the run that is compared with."""
    n: int
    both: int
    """Questions right in both runs."""
    neither: int
    gained: tuple[str, ...]
    """Ids of the questions that became right."""
    lost: tuple[str, ...]
    mcnemar_p: float
    metrics: Mapping[str, Paired]
    """The run minus the other one, in percent."""


@dataclass(frozen=True)
class Spread:
    """One metric over several runs."""

    mean: float
    std: float | None
    """Sample standard deviation; None of a single run."""
    runs: int


def text_intervals(graded: Sequence[Graded], smoothing: str) -> dict[str, list[float]]:
    """Return the bootstrap 95% interval of each text metric; empty where there are no pairs."""
    rows = rows_of(one.text for one in graded if one.text is not None)
    if not len(rows):
        return {}
    found = significance.bootstrap(rows, lambda sums: corpus_scores(sums, smoothing))
    return {name: list(interval) for name, interval in zip(TEXT, found, strict=False)}


def compare(
    first: Sequence[Graded], second: Sequence[Graded], smoothing: str = "exp", name: str = "the baseline"
) -> Comparison:
    """Return the paired comparison of `first`, the baseline called `name`, and `second`, the run.

    The metrics are differences second - first with their paired-bootstrap 95% intervals and p-values.
    """
    import numpy as np

    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.question.answer]
    gained = tuple(b.question.id for a, b in pairs if b.correct and not a.correct)
    lost = tuple(b.question.id for a, b in pairs if a.correct and not b.correct)
    both = sum(a.correct and b.correct for a, b in pairs)
    metrics: dict[str, Paired] = {}
    if pairs:
        right = np.array([[a.correct, b.correct] for a, b in pairs], dtype=np.float64)
        ones = np.ones(len(pairs))
        rows = [np.stack([right[:, i], ones], axis=1) for i in (0, 1)]
        (metrics["accuracy"],) = significance.paired_bootstrap(
            rows[0], rows[1], lambda sums: 100 * sums[:, :1] / sums[:, 1:]
        )
    written = [(a, b) for a, b in zip(first, second, strict=True) if a.text and b.text]
    if written:
        rows = [rows_of(text for pair in written if (text := pair[i].text)) for i in (0, 1)]
        found = significance.paired_bootstrap(rows[0], rows[1], lambda sums: corpus_scores(sums, smoothing))
        metrics |= dict(zip(TEXT, found, strict=False))
    return Comparison(
        name=name,
        n=len(pairs),
        both=both,
        neither=len(pairs) - both - len(gained) - len(lost),
        gained=gained,
        lost=lost,
        mcnemar_p=significance.mcnemar(len(lost), len(gained)),
        metrics=metrics,
    )


def summarise(runs: Mapping[str, Scores]) -> dict[str, Spread]:
    """Return mean and deviation of each metric over several runs or seeds; metrics that a run lacks are left out."""
    table = {}
    for name in SUMMARY:
        values = [value for scores in runs.values() if isinstance(value := scores.get(name), int | float)]
        if len(values) == len(runs) and values:
            table[name] = Spread(*significance.mean_std(values), len(values))
    return table


def flips(runs: Mapping[str, Sequence[Graded]]) -> int:
    """Return how many questions do not have the same answer in all runs, for example in all orders of the options."""
    return sum(len({one.answer for one in each}) > 1 for each in zip(*runs.values(), strict=True))


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
