"""Several processes (torchrun) answer one file: they draw its questions from one queue, each into a part of its own."""

import contextlib
import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from cmexam_tune.core.errors import UserError

T = TypeVar("T")
SILENCE = 5.0
"""Seconds for the first process to report an error before another does."""
SHARES = 4
"""A draw is what is left, divided among so many times the processes."""
_QUEUES = itertools.count()
PATIENCE = datetime.timedelta(days=30)
"""How long a process that is done waits for the others; by default torch gives up after 30 minutes."""


@contextlib.contextmanager
def speaking_once() -> Iterator[None]:
    """Let the first process report an error that all of them meet: the others speak only if it has not.

    Raises:
        UserError: what the block raised.
    """
    try:
        yield
    except UserError:
        if os.environ.get("RANK", "0") != "0":
            # The launcher ends this process as soon as the first one has ended.
            time.sleep(SILENCE)
        raise


class Processes:
    """The processes of this prediction; one alone needs no torch and exchanges nothing."""

    def __init__(self) -> None:
        """Meet the other processes, if a launcher started several."""
        self.rank, self.count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.count > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo", timeout=PATIENCE)

    @property
    def first(self) -> bool:
        """Whether this process is the one that speaks and writes the common files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()

    def from_first(self, work: Callable[[], T]) -> T:
        """Let the first process do something and return its result on all.

        Raises:
            UserError: what `work` raised; the other processes end without a word of their own.
        """
        if self.count == 1:
            return work()
        import torch.distributed as dist

        result: list[Any] = [None, None]
        if self.first:
            try:
                result[0] = work()
            except UserError as error:
                result[1] = error
        dist.broadcast_object_list(result)
        if result[1] is not None:
            raise result[1] if self.first else SystemExit(2)
        value: T = result[0]
        return value

    def queue(self, items: Sequence[T], size: int, order: Callable[[T], Any]) -> "SharedQueue[T]":
        """Return the queue that all processes draw these items from; each calls it as often as the others.

        Args:
            items: the same on all processes.
            size: items that are answered together.
            order: sorts them by the work that they make, the largest first. A single process gets them as they are.
        """
        if self.count == 1:
            return SharedQueue([list(items)] if items else [])
        import torch.distributed as dist

        ordered = sorted(items, key=order, reverse=True)
        units = [ordered[start:end] for start, end in units_of(len(ordered), size, self.count)]
        library: Any = dist
        store = library.PrefixStore(f"queue{next(_QUEUES)}", library.distributed_c10d._get_default_store())
        return SharedQueue(units, self.rank, self.count, store)


def units_of(total: int, size: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield first and end of what is drawn at a time: whole batches, many at first and one at the end.

    Args:
        total: items.
        size: items of a batch; fewer where there would be no batch for each process.
        count: processes.
    """
    size, start = max(1, min(size, -(-total // count))), 0
    while start < total:
        batches = max(1, (total - start) // (SHARES * count * size))
        yield start, min(start + batches * size, total)
        start += batches * size


class SharedQueue(Generic[T]):
    """Lists of items, handed to whichever process asks first: one with long answers asks less often."""

    def __init__(self, units: Sequence[list[T]], rank: int = 0, count: int = 1, store: Any = None) -> None:
        """Take the lists, who asks, and the store in which processes count; None: there is one process."""
        self._units, self._rank, self._count, self._store, self._answered = units, rank, count, store, 0

    def __iter__(self) -> Iterator[list[T]]:
        """Yield this process's lists, each time it is ready for another; the first is given, so that all begin."""
        turn = self._rank
        while turn < len(self._units):
            yield self._units[turn]
            turn = self._count + self._store.add("drawn", 1) - 1 if self._store is not None else turn + 1

    def count_answer(self) -> int:
        """Count an answer of this process and return how many all of them have given."""
        self._answered += 1
        return self._answered if self._store is None else int(self._store.add("answered", 1))
