"""Agreement between the processes of a run; with one process nothing is exchanged."""

from typing import Any

import torch
import torch.distributed as dist


def many() -> bool:
    """Return whether this run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def place() -> tuple[int, int]:
    """Return the number of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if many() else (0, 1)


def any_true(flags: tuple[bool, ...], device: torch.device) -> tuple[bool, ...]:
    """Return for each flag whether it is set on at least one process."""
    if not many():
        return flags
    values = torch.tensor([int(flag) for flag in flags], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(bool(value) for value in values.tolist())


def total(values: tuple[float, ...], device: torch.device) -> tuple[float, ...]:
    """Return the sums over all processes."""
    if not many():
        return values
    # float64 has no kernel on some devices; losses of an evaluation fit float32 well enough to be compared.
    sums = torch.tensor(values, device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def gather(value: Any) -> list[Any]:
    """Return the objects of all processes, by rank."""
    if not many():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all processes."""
    if many():
        dist.barrier()
