"""How far a score can be trusted: intervals, several runs, and the paired comparison of two runs.

Accuracies are fractions from 0 to 1 here; text metrics keep the unit of the statistic that is resampled.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 20230605
_BLOCK = 50


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
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


def bootstrap(
    rows: "NDArray[np.float64]",
    statistic: "Callable[[NDArray[np.float64]], NDArray[np.float64]]",
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


def _resamples(n: int, resamples: int, seed: int) -> "list[NDArray[np.float64]]":
    """How often each of n rows is drawn in each resample: blocks of [some resamples, n]."""
    import numpy as np

    generator = np.random.default_rng(seed)
    blocks = []
    for start in range(0, resamples, _BLOCK):
        size = min(_BLOCK, resamples - start)
        drawn = generator.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        blocks.append(np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64))
    return blocks
