"""Which questions an epoch shows where training files have weights."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Files of which an epoch shows a part, or more than the whole.

    A file of n questions with weight w gives round(w * n) to each epoch, at least one. They come from an endless
    row of shuffled copies of the file, each epoch going on where the one before has ended: after any epoch no question
    of a file has been shown more than once more often than another. All of it follows from seed and epoch alone.

    Attributes:
        sources: for each encoded question the number of its file, from 0.
        weights: for each file how often an epoch shows it.
        seed: of the order of the copies.
    """

    sources: Sequence[int]
    weights: Sequence[float]
    seed: int = 0

    def counts(self) -> list[int]:
        """Return how many questions of each file an epoch shows."""
        sizes = [0] * len(self.weights)
        for source in self.sources:
            sizes[source] += 1
        return [max(1, round(w * size)) if size else 0 for w, size in zip(self.weights, sizes, strict=True)]

    def shown(self, epoch: int) -> list[int]:
        """Return the questions of an epoch from 0, file by file; one stands there as often as it is shown."""
        found: list[int] = []
        for number, count in enumerate(self.counts()):
            members = [i for i, source in enumerate(self.sources) if source == number]
            first, end = epoch * count, (epoch + 1) * count
            for copy in range(first // len(members), -(-end // len(members))) if members else ():
                mixed = random.Random(f"{self.seed}/{number}/{copy}").sample(members, len(members))
                start = copy * len(members)
                found += mixed[max(first - start, 0) : end - start]
        return found
