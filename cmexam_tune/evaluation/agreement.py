"""How far two judges agree: correlations of scores and of ranks, and kappa.

All take two sequences of equal length, and return None where they are undefined: fewer than two pairs, or a judge who
gave everything the same score.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

T = TypeVar("T", bound=str | float)


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the linear correlation, -1 to 1."""
    n = len(first)
    if n < 2:
        return None
    mean_1, mean_2 = math.fsum(first) / n, math.fsum(second) / n
    off_1, off_2 = [value - mean_1 for value in first], [value - mean_2 for value in second]
    spread = math.sqrt(math.fsum(a * a for a in off_1) * math.fsum(b * b for b in off_2))
    return math.fsum(a * b for a, b in zip(off_1, off_2, strict=True)) / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    result = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            result[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return result


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the correlation of ranks, -1 to 1."""
    return pearson(ranks(first), ranks(second))


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return tau-b, -1 to 1: pairs in the same order less pairs in the opposite order, corrected for ties.

    Scores are few, so pairs are counted by the cells of the table of both judges and not one by one.
    """
    cells = Counter(zip(first, second, strict=True))
    same = opposite = 0
    items = list(cells.items())
    for i, ((a, b), n) in enumerate(items):
        for (c, d), m in items[i + 1 :]:
            sign = (a - c) * (b - d)
            same += n * m if sign > 0 else 0
            opposite += n * m if sign < 0 else 0
    pairs = math.comb(len(first), 2)
    untied_1, untied_2 = (pairs - sum(math.comb(n, 2) for n in Counter(side).values()) for side in (first, second))
    return (same - opposite) / math.sqrt(untied_1 * untied_2) if untied_1 and untied_2 else None


def kappa(first: Sequence[T], second: Sequence[T], weights: Literal["quadratic"] | None = None) -> float | None:
    """Return Cohen's kappa, 1 at most; with quadratic weights a miss counts by its squared distance (scores only)."""
    n = len(first)
    if not n:
        return None

    def cost(a: T, b: T) -> float:
        return float(a != b) if weights is None else (float(a) - float(b)) ** 2

    observed = math.fsum(cost(a, b) for a, b in zip(first, second, strict=True)) / n
    left, right = Counter(first), Counter(second)
    expected = math.fsum(cost(a, b) * m * k for a, m in left.items() for b, k in right.items()) / n**2
    return 1 - observed / expected if expected else None


MEASURES: Mapping[str, Callable[[Sequence[float], Sequence[float]], float | None]] = {
    "spearman": spearman,
    "pearson": pearson,
    "kendall": kendall,
    "weighted_kappa": lambda first, second: kappa(first, second, "quadratic"),
}
"""What is reported of every two judges, for each axis."""
