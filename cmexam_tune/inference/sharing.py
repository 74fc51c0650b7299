"""Several processes (torchrun) answer one file: each its share of the questions, into a part of its own."""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from cmexam_tune.core.errors import UserError

T = TypeVar("T")
SILENCE = 5.0
"""Seconds for the first process to report an error before another does."""
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

    def share(self, items: Sequence[T], size: int, order: Callable[[T], Any]) -> list[T]:
        """Return the items of this process: whole batches of items that are next to each other in `order`.

        Batches are dealt in the order 0..n-1, n-1..0, ..., which evens out their number and their length. A single
        process gets all items as they are.
        """
        if self.count == 1:
            return list(items)
        ordered = sorted(items, key=order, reverse=True)
        # The last round of small questions is cut finer where there are fewer batches than processes.
        size = max(1, min(size, -(-len(ordered) // self.count)))
        batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        there_and_back = [*range(self.count), *reversed(range(self.count))]
        mine = (batch for turn, batch in enumerate(batches) if there_and_back[turn % (2 * self.count)] == self.rank)
        return [item for batch in mine for item in batch]
