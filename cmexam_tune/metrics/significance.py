"""How far a score can be trusted: intervals, several runs, and the paired comparison of two runs.

Accuracies are fractions from 0 to 1 here; text metrics keep the unit of the statistic that is resampled.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

RESAMPLES = 1000
SEED = 20230605
_BLOCK = 50


def wilson(successes: float, n: int, level: float = 0.95) -> tuple[float, float]:
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
    """Two-sided: how easily chance alone gives a difference at least this large."""


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
    n = only_first + only_second
    term, tail = 1, 0
    for i in range(min(only_first, only_second) + 1):
        tail += term
        term = term * (n - i) // (i + 1)
    # Integers until here: 2**n is far beyond a float when thousands of questions flip.
    return min(1.0, 2 * tail / (1 << n))


def bootstrap(
    rows: "Matrix",
    statistic: "Callable[[Matrix], Matrix]",
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[tuple[float, float]]:
    """Return percentile intervals (low, high) of one or more statistics that are functions of column sums.

    Every corpus metric used here is: a mean is sum/n, corpus BLEU is a function of summed n-gram matches. So a
    resample is one matrix product of counts and rows instead of a new pass over the texts.

    Args:
        rows: [pairs, columns], what each pair adds to the sums.
        statistic: [resamples, columns] sums -> [resamples, statistics].
        level: Share of the resamples between low and high.
        resamples: Number of resamples drawn.
        seed: Of the generator; the same rows and seed give the same interval.
    """
    import numpy as np

    values = np.concatenate([statistic(counts @ rows) for counts in _resamples(len(rows), resamples, seed)])
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def paired_bootstrap(
    first: "Matrix",
    second: "Matrix",
    statistic: "Callable[[Matrix], Matrix]",
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> list[Paired]:
    """Return the difference of each statistic between two runs with its 95% interval and two-sided p-value.

    Both runs are resampled by the same questions (Koehn 2004). The p-value is twice the smaller share of resamples on
    one side of zero, with one added to each count so that it is never exactly 0.

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
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    beyond = np.minimum((drawn <= 0).sum(0), (drawn >= 0).sum(0))
    p_values = np.minimum(1.0, 2 * (beyond + 1) / (resamples + 1))
    return [Paired(*map(float, one)) for one in zip(observed, low, high, p_values, strict=True)]


def _resamples(n: int, resamples: int, seed: int) -> "Iterator[Matrix]":
    """Yield how often each of n rows is drawn in each resample, in blocks of [some resamples, n]."""
    import numpy as np

    generator = np.random.default_rng(seed)
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        drawn = generator.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)
