"""How far a score can be trusted: intervals, paired comparisons of two runs, and how far two judges agree.

Accuracies are fractions from 0 to 1 here; text metrics keep the unit of the statistic that is resampled. What scipy has
is taken from there, within the functions that need it: importing it takes longer than most programs run.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

Label = TypeVar("Label", bound=str | float)
RESAMPLES = 1000
# Any number would do; a fixed one gives the same files the same interval.
SEED = 20230605
LEVEL = 0.95
"""Of every interval; a p-value is compared with what is left of 1."""
_BLOCK = 50
"""Resamples drawn at a time: [50, n] counts take 2.7 MB for CMExam's 6,811 test questions."""


def wilson(successes: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion as (low, high), both from 0 to 1.

    Wilson (1927), without continuity correction: it stays inside [0, 1] and holds its level for the small cells of a
    breakdown, where the normal interval collapses. With `n == 0` nothing is known: (0.0, 1.0).

    Raises:
        ValueError: `successes` outside 0..n, or `level` outside the open interval (0, 1).
    """
    if not 0 <= successes <= n or not 0 < level < 1:
        raise ValueError(f"no interval for {successes} of {n} at level {level}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, z2 = successes / n, z * z
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the formula gives exactly 0 and 1, which rounding misses.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation (n-1) of several runs; None as deviation of a single run.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("no runs to average")
    return fmean(values), stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Paired:
    """The difference of two runs on the same questions, the second minus the first."""

    difference: float
    low: float
    high: float
    p_value: float
    """Two-sided: the probability of a difference at least this large by chance alone."""
    resolution: float = 0.0
    """The smallest p-value that the resamples can show: a `p_value` equal to it means "below it". 0: an exact test."""

    @property
    def p_text(self) -> str:
        """Return the p-value as it is printed: `0.0312`, and `< 0.002` where the draws can show no less."""
        floor = max(self.resolution, 0.0001)
        return f"< {floor:.1g}" if self.p_value <= floor else f"{self.p_value:.4f}"


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Args:
        only_first: Questions that only the first run answered right.
        only_second: Questions that only the second run answered right; under the null hypothesis the two are equally
            likely, so the smaller count is binomial(n, 1/2).

    Raises:
        ValueError: a negative count.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"counts must not be negative: {only_first}, {only_second}")
    # scipy's binomtest, without the seconds that every `evaluate` of two runs would wait for scipy. Integers until the
    # division: 2**n is far beyond a float when thousands of questions flip.
    n = only_first + only_second
    term, tail = 1, 0
    for i in range(min(only_first, only_second) + 1):
        tail += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * tail / (1 << n))


def paired_interval(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """Return the interval of the difference of two accuracies on the same questions, second minus first, as shares.

    Tango's score interval (1998), which inverts McNemar's asymptotic test, is too sure with few flips: 4 newly right
    and none newly wrong exclude 0 at an exact p of 0.125. So it is widened to the conditional interval of Newcombe
    (1998, method 3), Clopper and Pearson's limits for the share of the flips that went to the second, which inverts
    the exact test. Alone that one is too short away from 0, as it takes the number of flips as given. The wider limit
    on each side covers as Tango's does and leaves out 0 exactly when `mcnemar` is below `1 - LEVEL`.

    Args:
        only_first: Questions that only the first run answered right.
        only_second: Questions that only the second run answered right.
        n: All questions.

    Raises:
        ValueError: counts that do not fit, or no question.
    """
    if min(only_first, only_second) < 0 or n < max(1, only_first + only_second):
        raise ValueError(f"no interval for {only_first} and {only_second} of {n}")
    tango = _tango(only_first, only_second, n)
    exact = _conditional(only_first, only_second, n)
    return min(tango[0], exact[0]), max(tango[1], exact[1])


def _tango(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """Return Tango's score interval: the differences that his test of the two counts does not reject."""
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)

    def score(difference: float) -> float:
        # The likeliest share of questions that only the first answers right, were this the true difference.
        linear = (2 * n + only_first - only_second) * difference - only_first - only_second
        constant = -only_first * difference * (1 - difference)
        only = (math.sqrt(max(linear * linear - 8 * n * constant, 0.0)) - linear) / (4 * n)
        variance = n * (2 * only + difference * (1 - difference))
        distance = only_second - only_first - n * difference
        return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance)

    def limit(inside: float, outside: float) -> float:
        # Halved 60 times, an interval of at most 2 is below the precision of a float.
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if abs(score(middle)) < z else (inside, middle)
        return (inside + outside) / 2

    observed = (only_second - only_first) / n
    return limit(observed, -1.0), limit(observed, 1.0)


def _conditional(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """Return Newcombe's method 3: Clopper and Pearson's limits of the share of flips, scaled to all questions."""
    from scipy.special import betaincinv

    flips, tail = only_first + only_second, (1 - LEVEL) / 2
    low = float(betaincinv(only_second, only_first + 1, tail)) if only_second else 0.0
    high = float(betaincinv(only_second + 1, only_first, 1 - tail)) if only_first else 1.0
    return flips / n * (2 * low - 1), flips / n * (2 * high - 1)


def bootstrap(
    rows: "Matrix",
    statistic: "Callable[[Matrix], Matrix]",
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[tuple[float, float]]:
    """Return percentile intervals (low, high) of one or more statistics that are functions of column sums.

    Every corpus metric used here is: a mean is sum/n, corpus BLEU is a function of summed n-gram matches. So a
    resample is one matrix product of counts and rows instead of a new pass over the texts.

    Args:
        rows: [pairs, columns], what each pair adds to the sums.
        statistic: [resamples, columns] sums -> [resamples, statistics].
        resamples: Number of resamples drawn.
        seed: Of the generator; the same rows and seed give the same interval.
    """
    import numpy as np

    values = np.concatenate([statistic(counts @ rows) for counts in _resamples(len(rows), resamples, seed)])
    low, high = np.quantile(values, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], axis=0)
    return [(float(start), float(end)) for start, end in zip(low, high, strict=True)]


def paired_bootstrap(
    first: "Matrix",
    second: "Matrix",
    statistic: "Callable[[Matrix], Matrix]",
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[Paired]:
    """Return the difference of each statistic between two runs with its 95% interval and two-sided p-value.

    Both runs are resampled by the same questions (Koehn 2004). The p-value is twice the smaller share of resamples on
    one side of zero, with one added to each count: never less than 2 / (resamples + 1), its `resolution`.

    Args:
        first: [pairs, columns], see `bootstrap`.
        second: [pairs, columns] of the other run, the same pairs in the same order.
        statistic: [resamples, columns] sums -> [resamples, statistics].
        resamples: Number of resamples drawn.
        seed: Of the generator.

    Raises:
        ValueError: the two runs differ in shape.
    """
    import numpy as np

    if first.shape != second.shape:
        raise ValueError(f"not the same questions: {first.shape} and {second.shape}")
    observed = (statistic(second.sum(0)[None]) - statistic(first.sum(0)[None]))[0]
    drawn = np.concatenate(
        [statistic(counts @ second) - statistic(counts @ first) for counts in _resamples(len(first), resamples, seed)]
    )
    # Whole resamples, not values between two: an interval leaves out 0 exactly when its p-value is below 0.05.
    low = np.quantile(drawn, 0.025, axis=0, method="lower")
    high = np.quantile(drawn, 0.975, axis=0, method="higher")
    beyond = np.minimum((drawn <= 0).sum(0), (drawn >= 0).sum(0))
    p_values = np.minimum(1.0, 2 * (beyond + 1) / (resamples + 1))
    resolution = 2 / (resamples + 1)
    return [
        Paired(float(difference), float(start), float(end), float(p_value), resolution)
        for difference, start, end, p_value in zip(observed, low, high, p_values, strict=True)
    ]


def by_cluster(rows: "Matrix", clusters: Sequence[str] | None) -> "Matrix":
    """Return [clusters, columns], the sums of the rows of each cluster; without clusters the rows as they are.

    A bootstrap of these rows draws whole clusters: questions that share a case tend to be right or wrong together, so
    they carry less information than as many independent ones.

    Raises:
        ValueError: not one cluster for each row.
    """
    import numpy as np

    if clusters is None:
        return rows
    if len(clusters) != len(rows):
        raise ValueError(f"{len(clusters)} clusters for {len(rows)} rows")
    number = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    sums = np.zeros((len(number), rows.shape[1]))
    np.add.at(sums, [number[name] for name in clusters], rows)
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm 1979); each is then compared with the usual level."""
    # From the smallest on, and never below the one before: a larger p-value must not become the smaller one.
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def smallest_difference(n: int, disagreement: float, power: float = 0.8) -> float | None:
    """Return the smallest difference of two accuracies that McNemar's test would find with this power.

    The normal approximation of Connor (1987): the test finds a difference d where
    `d * sqrt(n) = alpha * sqrt(p) + beta * sqrt(p - d**2)` with p the disagreement, alpha and beta the normal quantiles
    of `LEVEL` and power. This is that equation solved for d. All shares are from 0 to 1.

    Args:
        n: Questions that both runs answer.
        disagreement: Share of the questions that only one of the two runs answers right.
        power: Chance of finding the difference.

    Returns:
        The difference, or None where not even the largest possible one, `disagreement`, would be found.

    Raises:
        ValueError: a share outside 0 to 1, or no questions.
    """
    if n < 1 or not 0 <= disagreement <= 1 or not 0 < power < 1:
        raise ValueError(f"no power for n={n}, disagreement={disagreement}, power={power}")
    alpha, beta = NormalDist().inv_cdf(0.5 + LEVEL / 2), NormalDist().inv_cdf(power)
    spare = n + beta**2 - alpha**2
    if not disagreement or spare < 0:
        return None
    difference = math.sqrt(disagreement) * (alpha * math.sqrt(n) + beta * math.sqrt(spare)) / (n + beta**2)
    return max(difference, 0.0) if difference <= disagreement else None


def _resamples(n: int, resamples: int, seed: int) -> "Iterator[Matrix]":
    """Yield how often each of n rows is drawn in each resample: float64 blocks [at most `_BLOCK`, n]."""
    import numpy as np

    generator = np.random.default_rng(seed)
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        # One bincount for the whole block: draws of resample i are counted in bins i * n to (i + 1) * n - 1.
        drawn = generator.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)


def correlations(first: Sequence[float], second: Sequence[float]) -> dict[str, float | None]:
    """Return `spearman` (of ranks), `pearson` (linear) and `kendall` (tau-b, corrected for ties), each from -1 to 1.

    None where they are undefined: fewer than two pairs, or a judge who gave everything the same score.
    """
    if len(set(first)) < 2 or len(set(second)) < 2:
        return dict.fromkeys(("spearman", "pearson", "kendall"))
    from scipy import stats

    measures = {"spearman": stats.spearmanr, "pearson": stats.pearsonr, "kendall": stats.kendalltau}
    return {name: float(measure(first, second).statistic) for name, measure in measures.items()}


def kappa(first: Sequence[Label], second: Sequence[Label], weights: Literal["quadratic"] | None = None) -> float | None:
    """Return Cohen's kappa, 1 at most; None where it is undefined: no pairs, or nothing but one label.

    With quadratic weights a miss counts by its squared distance (Cohen 1968; scores only).
    """
    n = len(first)
    if not n:
        return None

    def cost(label: Label, other: Label) -> float:
        return float(label != other) if weights is None else (float(label) - float(other)) ** 2

    observed = math.fsum(cost(label, other) for label, other in zip(first, second, strict=True)) / n
    # What two judges would miss each other by, did each give its labels as often as it does, but at random.
    expected = math.fsum(
        cost(label, other) * count * other_count
        for label, count in Counter(first).items()
        for other, other_count in Counter(second).items()
    )
    return 1 - observed / (expected / n**2) if expected else None


def judge_agreement(first: Sequence[float], second: Sequence[float]) -> dict[str, float | None]:
    """Return what is reported of every two judges for each axis: the correlations and `weighted_kappa`."""
    return {**correlations(first, second), "weighted_kappa": kappa(first, second, "quadratic")}
