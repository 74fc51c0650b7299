"""Which questions make up each optimizer step, and how they are laid out on every process.

A step holds `global_batch_size` questions whatever the number of processes, the packing and the token budget; only
their layout changes. Every process derives the whole plan from seed and epoch, so nothing has to be communicated.
"""

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils.data import BatchSampler

BUCKET_STEPS = 64
"""Steps that are sorted by length together: enough to leave little padding, few enough to stay random."""

MicroBatch = tuple[tuple[int, ...], ...]
"""Groups of sample indices; each group becomes one row of tokens."""


class StepPlan(NamedTuple):
    """One process's part of one step, as indices into the encoded rows."""

    micro: tuple[MicroBatch, ...]
    step_targets: int
    tokens: int = 0


@dataclass(frozen=True)
class StepLayout:
    """How questions are grouped.

    Attributes:
        global_batch: questions for each optimizer step, over all processes.
        micro_batch: most questions in one forward pass of one process.
        max_tokens: most token slots in one forward pass, or None; one question alone may exceed it.
        pack_length: rows are filled with several questions up to this many tokens; None: one question a row.
        seed: of the order.
    """

    global_batch: int
    micro_batch: int
    max_tokens: int | None = None
    pack_length: int | None = None
    seed: int = 0


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
        """Return the questions of an epoch (from 0), file by file, each as often as it is shown."""
        indices: list[int] = []
        for number, count in enumerate(self.counts()):
            members = [i for i, source in enumerate(self.sources) if source == number]
            first, end = epoch * count, (epoch + 1) * count
            for copy in range(first // len(members), -(-end // len(members))) if members else ():
                mixed = random.Random(f"{self.seed}/{number}/{copy}").sample(members, len(members))
                start = copy * len(members)
                indices += mixed[max(first - start, 0) : end - start]
        return indices


def order(lengths: Sequence[int], layout: StepLayout, epoch: int, mixture: Mixture | None = None) -> list[list[int]]:
    """Return the steps of an epoch as lists of sample indices: shuffled, each of similar lengths.

    The first epoch starts with its longest question: without a mixture memory runs out in the first step or never.
    """
    # A string is hashed into the state, alike in every process; with a sum, seed 0 and epoch 1 would be seed 1 and
    # epoch 0.
    rng = random.Random(f"{layout.seed}:{epoch}")
    indices = list(range(len(lengths))) if mixture is None else mixture.shown(epoch)
    rng.shuffle(indices)
    size = layout.global_batch
    steps: list[list[int]] = []
    for start in range(0, len(indices), BUCKET_STEPS * size):
        bucket = sorted(indices[start : start + BUCKET_STEPS * size], key=lambda i: -lengths[i])
        steps.extend(bucket[i : i + size] for i in range(0, len(bucket), size))
    rng.shuffle(steps)
    if epoch == 0 and steps:
        longest = max(range(len(steps)), key=lambda i: lengths[steps[i][0]])
        steps.insert(0, steps.pop(longest))
    return steps


def spread(step: Sequence[int], lengths: Sequence[int], layout: StepLayout, world: int) -> list[tuple[MicroBatch, ...]]:
    """Return for every process its micro-batches of a step: as many, and of the same lengths, on each.

    A process that is left without a question gets an empty micro-batch (only where a step has fewer questions than
    there are processes).
    """
    ordered = sorted(step, key=lambda i: -lengths[i])

    def planned(rounds: int) -> list[MicroBatch]:
        parts = itertools.pairwise(_bounds(len(ordered), world * rounds))
        return [_rows(ordered[start:end], lengths, layout) for start, end in parts]

    def fits(rounds: int) -> bool:
        limit = layout.max_tokens
        if limit is None or len(ordered) <= world * rounds:
            return True
        if layout.pack_length is not None:
            return all(slots(micro, lengths) <= limit for micro in planned(rounds))
        # The first of a chunk is its longest: no rows have to be made to know what they fill.
        parts = itertools.pairwise(_bounds(len(ordered), world * rounds))
        return all((end - start) * lengths[ordered[start]] <= limit for start, end in parts)

    rounds = max(1, -(-len(ordered) // (world * layout.micro_batch)))
    if not fits(rounds):
        # A pass over a whole validation file may need thousands of rounds: double until enough, then halve the gap.
        low = rounds
        while not fits(rounds := 2 * rounds):
            low = rounds
        rounds = bisect.bisect_left(range(rounds), True, lo=low, key=fits)
    micros = planned(rounds)
    # Neighbours in length run at the same time, so that no process waits long for another.
    return [tuple(micros[turn * world + rank] for turn in range(rounds)) for rank in range(world)]


def _bounds(count: int, parts: int) -> list[int]:
    """Return the start of each of `parts` equal parts, and the end of the last one."""
    small, extra = divmod(count, parts)
    return [part * small + min(part, extra) for part in range(parts + 1)]


def _rows(chunk: Sequence[int], lengths: Sequence[int], layout: StepLayout) -> MicroBatch:
    """Group a chunk into rows: one question each, or packed into as few equally long rows as possible."""
    if layout.pack_length is None or not chunk:
        return tuple((i,) for i in chunk)
    capacity = max(layout.pack_length, lengths[chunk[0]])
    count = -(-sum(lengths[i] for i in chunk) // capacity)
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for i in chunk:
            # The longest question left into the shortest row (Graham's LPT rule, 1969) keeps rows even.
            shortest = filled.index(min(filled))
            rows[shortest].append(i)
            filled[shortest] += lengths[i]
        if max(filled) <= capacity:
            return tuple(tuple(row) for row in rows)
        count += 1


def slots(micro: MicroBatch, lengths: Sequence[int]) -> int:
    """Return rows times the longest row: the token slots that a micro-batch fills with tokens or padding."""
    return len(micro) * max((sum(lengths[i] for i in group) for group in micro), default=0)


class StepSampler(BatchSampler):
    """Yields one `StepPlan` for each optimizer step; `set_epoch` reshuffles."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_targets: Sequence[int],
        layout: StepLayout,
        *,
        rank: int,
        world: int,
        mixture: Mixture | None = None,
    ) -> None:
        self.lengths, self.num_targets, self.layout, self.rank, self.world = lengths, num_targets, layout, rank, world
        self.mixture = mixture
        self.questions = len(lengths) if mixture is None else sum(mixture.counts())
        """Of an epoch, over all processes."""
        self.epoch = 0
        self.drop_last = False

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.questions // self.layout.global_batch)

    def __iter__(self) -> Iterator[list[StepPlan]]:  # type: ignore[override]
        for step in self._steps():
            micro = spread(step, self.lengths, self.layout, self.world)[self.rank]
            yield [StepPlan(micro, sum(self.num_targets[i] for i in step), sum(self.lengths[i] for i in step))]

    def _steps(self) -> list[list[int]]:
        return order(self.lengths, self.layout, self.epoch, self.mixture)

    def tokens(self) -> int:
        """Return the tokens of this epoch without padding, over all processes."""
        return sum(self.lengths[i] for step in self._steps() for i in step)

    def padding(self) -> float:
        """Return the share of token slots that the plan of this epoch fills with padding, over all processes."""
        used = total = 0
        for step in self._steps():
            for micros in spread(step, self.lengths, self.layout, self.world):
                total += sum(slots(micro, self.lengths) for micro in micros)
            used += sum(self.lengths[i] for i in step)
        return 1 - used / total
