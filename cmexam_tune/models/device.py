"""The accelerator of this process; the only file that knows what kinds there are.

Whatever torch's own `torch.accelerator` has, or a device's module offers under the common names, works: CUDA and ROCm
(`cuda`), Ascend (`npu`, by torch_npu, which torch imports by itself), Intel (`xpu`). Without one, and on Apple's, which
has no float64 and no memory of its own, programs compute on the CPU.
"""

import os
from typing import Any

import torch
from torch import distributed

from cmexam_tune.core.errors import ConfigError

CUDA, CPU = "cuda", "cpu"
UNUSED = ("mps",)
WITH_4BIT = (CPU, CUDA, "xpu")
"""Where bitsandbytes has kernels for its 4 bits."""
WITH_FLOAT64 = (CPU, CUDA, "xpu")
FIRST_WITH_GROUPS = (8, 0)
"""Compute capability from which FlashAttention runs, the one fused kernel that shares key and value heads."""


def kind() -> str:
    """Return torch's name for the kind of accelerator that is used, `cpu` for none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return CPU if accelerator is None or accelerator.type in UNUSED else accelerator.type


def is_accelerated() -> bool:
    """Return whether there is an accelerator."""
    return kind() != CPU


def _module() -> Any:
    return torch.get_device_module(kind())


def count() -> int:
    """Return how many accelerators this process sees."""
    return int(torch.accelerator.device_count()) if is_accelerated() else 0


def place() -> torch.device:
    """Return the device of this process's model: its own card if there are any.

    That becomes the current one: what a library puts on "the" card, such as adapters and contexts, would else lie on
    the first card for every process.
    """
    if not is_accelerated():
        return torch.device(CPU)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(kind(), index)


def name() -> str:
    """Return the name of the card, or `CPU` without one."""
    return str(_module().get_device_name()) if is_accelerated() else "CPU"


def has_bf16() -> bool:
    """Return whether bfloat16 is computed, and not only imitated at a fraction of the speed as on V100."""
    if kind() == CUDA:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return not is_accelerated() or bool(getattr(_module(), "is_bf16_supported", bool)())


def half_precision() -> torch.dtype | None:
    """Return the half precision that suits the card; None on a CPU, where float32 is faster."""
    if not is_accelerated():
        return None
    return torch.bfloat16 if has_bf16() else torch.float16


def shares_heads() -> bool:
    """Return whether the fused kernels of attention serve fewer key and value heads than query heads.

    On older cards (V100) only the kernel that saves memory is there, which wants a key for each query head; torch then
    takes the slow path with the whole matrix of scores.
    """
    return kind() != CUDA or torch.cuda.get_device_capability() >= FIRST_WITH_GROUPS


def takes_numbers_as_mask() -> bool:
    """Return whether attention is as fast with a mask of numbers as of booleans, which Ascend's is not."""
    return kind() in (CPU, CUDA)


def total_memory() -> int | None:
    """Return the bytes of this process's card, None without one."""
    return int(_module().mem_get_info()[1]) if is_accelerated() else None


def free_memory() -> int | None:
    """Return the bytes that are free on this process's card, what torch keeps for later included; None without one."""
    if not is_accelerated():
        return None
    module = _module()
    return int(module.mem_get_info()[0]) + int(module.memory_reserved()) - int(module.memory_allocated())


def peak_memory() -> int | None:
    """Return the most bytes that torch has held on this process's card, None without one."""
    return int(_module().max_memory_reserved()) if is_accelerated() else None


def empty_cache() -> None:
    """Give back what torch keeps of the card's memory for later."""
    if is_accelerated():
        _module().empty_cache()


def rng_states() -> Any:
    """Return the random states of all cards, for `set_rng_states`."""
    return _module().get_rng_state_all() if is_accelerated() else []


def set_rng_states(states: object) -> None:
    """Put random states back."""
    if states:
        _module().set_rng_state_all(states)


def backend() -> str:
    """Return what processes talk through: nccl on CUDA, hccl on Ascend, gloo on CPUs."""
    return distributed.get_default_backend_for_device(kind())


def summing_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which processes add numbers on a device."""
    return torch.float64 if device.type in WITH_FLOAT64 else torch.float32


def computes_4bit() -> bool:
    """Return whether bitsandbytes has kernels for the accelerator that is here."""
    return kind() in WITH_4BIT


def no_4bit(card: str) -> ConfigError:
    """Return the error for weights of 4 bits on a card that cannot compute with them."""
    return ConfigError(
        f"model.load_in_4bit: bitsandbytes has no kernels for this accelerator ({card}). Leave it out; with several "
        "cards training.deepspeed=zero3 shares out the weights."
    )
