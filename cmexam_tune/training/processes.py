"""Agreement between the processes of a run; with one process nothing is exchanged."""

import secrets
import time
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from cmexam_tune.core.errors import UserError
from cmexam_tune.models.device import summing_dtype

T = TypeVar("T")


def is_distributed() -> bool:
    """Return whether this run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_world() -> tuple[int, int]:
    """Return the number of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def any_true(flags: tuple[bool, ...], device: torch.device) -> tuple[bool, ...]:
    """Return for each flag whether it is set on at least one process."""
    if not is_distributed():
        return flags
    values = torch.tensor([int(flag) for flag in flags], device=device, dtype=torch.int32)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(bool(value) for value in values.tolist())


def total(values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
    """Return the sums over all processes, added in float64 where the device has it."""
    if not is_distributed():
        return values
    # Some have no float64; float32 holds the losses of an evaluation well enough to compare them.
    sums = torch.tensor(values, device=device, dtype=summing_dtype(device))
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def gather(value: T) -> list[T]:
    """Return the objects of all processes, by rank."""
    if not is_distributed():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all processes."""
    if is_distributed():
        dist.barrier()


def check_shared(path: Path) -> None:
    """Check that `path` is one folder for all processes, which may run on several machines.

    Raises:
        UserError: a process does not see what the first one writes there.
    """
    rank, world = rank_and_world()
    if world == 1:
        return
    above = list(path.absolute().parents)
    # How far up the first folder is that exists, and a file in it that nobody else can have made.
    level = next(i for i, folder in enumerate(above) if folder.is_dir())
    level, name = gather((level, f".cmexam_tune.{secrets.token_hex(8)}"))[0]
    marker = above[min(level, len(above) - 1)] / name
    if rank == 0:
        marker.touch()
    try:
        barrier()
        blind = [number for number, seen in enumerate(gather(_appears(marker))) if not seen]
    finally:
        if rank == 0:
            marker.unlink(missing_ok=True)
    if blind:
        raise UserError(
            f"out={path}: process {blind[0]} does not see what process 0 writes there. Several machines need one "
            "shared file system (NFS, Lustre, ...) for the run folder; equal paths on their own disks are not enough."
        )


def _appears(path: Path) -> bool:
    """Return whether a file is there, which network file systems may show a moment late."""
    for _ in range(10):
        if path.exists():
            return True
        time.sleep(0.2)
    return False
