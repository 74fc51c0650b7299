"""Runs beside each other: seeds of one experiment as mean and deviation, any two runs question by question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.grading import Graded, clusters
from cmexam_tune.evaluation.significance import Paired
from cmexam_tune.evaluation.text_metrics import TEXT, corpus_scores, rows_of

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
    """The run minus the other one, in percent. Accuracy has one test, McNemar's exact one (or the bootstrap of whole
    groups, where questions share a case); the text metrics have the paired bootstrap's."""
    smallest_difference: float | None = None
    """In points of accuracy: what these questions would show with 80% power, at the disagreement that was seen. None
    where no difference would be found."""
    clusters: int | None = None
    """Groups of questions that are drawn together, where the file says which (facet `group`); else None."""


@dataclass(frozen=True)
class Pair:
    """Two of several runs; the difference is the second minus the first, in points of accuracy."""

    first: str
    second: str
    difference: float
    p_value: float
    """McNemar's exact test."""
    adjusted_p: float
    """Corrected by Holm's method for all pairs of these runs."""
    smallest_difference: float | None
    """See `Comparison.smallest_difference`."""


@dataclass(frozen=True)
class Spread:
    """One metric over several runs."""

    mean: float
    std: float | None
    """Sample standard deviation; None of a single run."""
    runs: int


def text_intervals(graded: Sequence[Graded], smoothing: str) -> dict[str, list[float]]:
    """Return the bootstrap 95% interval of each text metric; empty where there are no pairs."""
    written = [one for one in graded if one.text is not None]
    rows = rows_of(one.text for one in written if one.text is not None)
    if not len(rows):
        return {}
    if groups := clusters(written):
        rows = significance.by_cluster(rows, groups)
    found = significance.bootstrap(rows, lambda sums: corpus_scores(sums, smoothing))
    return {name: list(interval) for name, interval in zip(TEXT, found, strict=False)}


def compare(
    first: Sequence[Graded], second: Sequence[Graded], smoothing: str = "exp", name: str = "the baseline"
) -> Comparison:
    """Return the paired comparison of `first`, the baseline called `name`, and `second`, the run.

    The metrics are differences second - first with their paired-bootstrap 95% intervals and p-values.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.question.answer]
    gained = tuple(b.question.id for a, b in pairs if b.correct and not a.correct)
    lost = tuple(b.question.id for a, b in pairs if a.correct and not b.correct)
    both = sum(a.correct and b.correct for a, b in pairs)
    p_value = significance.mcnemar(len(lost), len(gained))
    groups = clusters([a for a, _ in pairs])
    metrics: dict[str, Paired] = {}
    if pairs:
        accuracy = _paired_accuracy(pairs, groups)
        metrics["accuracy"] = accuracy if groups else replace(accuracy, p_value=p_value, resolution=0.0)
    written = [(a, b) for a, b in zip(first, second, strict=True) if a.text and b.text]
    if written:
        rows = [rows_of(text for pair in written if (text := pair[i].text)) for i in (0, 1)]
        if shared := clusters([a for a, _ in written]):
            rows = [significance.by_cluster(one, shared) for one in rows]
        found = significance.paired_bootstrap(rows[0], rows[1], lambda sums: corpus_scores(sums, smoothing))
        metrics |= dict(zip(TEXT, found, strict=False))
    return Comparison(
        name=name,
        n=len(pairs),
        both=both,
        neither=len(pairs) - both - len(gained) - len(lost),
        gained=gained,
        lost=lost,
        mcnemar_p=p_value,
        metrics=metrics,
        smallest_difference=_smallest(len(pairs), len(gained) + len(lost)),
        clusters=len(set(groups)) if groups else None,
    )


def _paired_accuracy(pairs: Sequence[tuple[Graded, Graded]], groups: Sequence[str] | None) -> Paired:
    import numpy as np

    right = np.array([[a.right, b.right] for a, b in pairs], dtype=np.float64)
    rows = [np.stack([right[:, i], np.ones(len(pairs))], axis=1) for i in (0, 1)]
    if groups:
        rows = [significance.by_cluster(one, groups) for one in rows]
    (found,) = significance.paired_bootstrap(rows[0], rows[1], lambda sums: 100 * sums[:, :1] / sums[:, 1:])
    return found


def _smallest(n: int, disagreeing: int) -> float | None:
    found = significance.smallest_difference(n, disagreeing / n) if n else None
    return None if found is None else 100 * found


def pairwise(runs: Mapping[str, Sequence[Graded]]) -> tuple[Pair, ...]:
    """Return each two of several runs, in the order of the runs, with p-values corrected for being several."""
    found = []
    for (first, a), (second, b) in combinations(runs.items(), 2):
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.question.answer]
        lost, gained = (sum(p[i].correct and not p[1 - i].correct for p in pairs) for i in (0, 1))
        difference = 100 * sum(y.right - x.right for x, y in pairs) / max(len(pairs), 1)
        p_value = significance.mcnemar(lost, gained)
        found.append(Pair(first, second, difference, p_value, p_value, _smallest(len(pairs), lost + gained)))
    adjusted = significance.holm([one.p_value for one in found])
    return tuple(replace(one, adjusted_p=p) for one, p in zip(found, adjusted, strict=True))


def summarise(runs: Mapping[str, Scores]) -> dict[str, Spread]:
    """Return mean and deviation of each metric over seeds of one experiment; metrics that a run lacks are left out."""
    table = {}
    for name in SUMMARY:
        values = [value for scores in runs.values() if isinstance(value := scores.get(name), int | float)]
        if len(values) == len(runs) and values:
            table[name] = Spread(*significance.mean_std(values), len(values))
    return table


def flips(runs: Mapping[str, Sequence[Graded]]) -> int:
    """Return how many questions do not have the same answer in all runs, for example in all orders of the options."""
    return sum(len({one.answer for one in each}) > 1 for each in zip(*runs.values(), strict=True))


def ranking(runs: Mapping[str, Scores]) -> tuple[str, ...]:
    """Return the names of the runs by accuracy, the best first; those without one last."""

    def accuracy(name: str) -> float:
        value = runs[name].get("accuracy")
        return value if isinstance(value, int | float) else -1.0

    return tuple(sorted(runs, key=accuracy, reverse=True))


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
