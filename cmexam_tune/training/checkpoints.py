"""Checkpoints that are whole or not there: written beside, checksummed, renamed; read only if every byte is right."""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.training import checksums, processes

STAGING = ".saving"
WEIGHTS = "trainable.safetensors"
PREFIX = "checkpoint-"


OLDER = "Delete this folder to go on from the checkpoint before it."


@dataclass(frozen=True)
class Callbacks:
    """What a trainer_state.json holds of the Trainer's callbacks."""

    TrainerControl: Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """What a trainer_state.json holds, as far as the Trainer or we read it."""

    global_step: int
    max_steps: int
    log_history: tuple[Mapping[str, Any], ...]
    stateful_callbacks: Callbacks
    epoch: float | None = None
    total_flos: float = 0.0
    num_input_tokens_seen: int = 0
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None


def step_of(folder: Path) -> int:
    """Return the step of `checkpoint-<step>`, or -1 for anything else."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and number.isdigit() else -1


def found(out: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, whole or not."""
    return sorted((p for p in out.glob(f"{PREFIX}*") if p.is_dir() and step_of(p) >= 0), key=step_of, reverse=True)


def newest(out: Path) -> Path | None:
    """Return the newest checkpoint whose checksums hold; called by all processes, each reads what it wrote itself.

    Every damaged one that is passed over is named.
    """
    rank, world = processes.place()
    for folder in processes.gather(found(out))[0]:
        problems = [problem for problem in processes.gather(checksums.damage(folder, rank, world)) if problem]
        if not problems:
            return Path(folder)
        if rank == 0:
            cli.note(f"note: {folder} is damaged ({problems[0]}); going back to the checkpoint before it")
    return None


def check_resumable(folder: Path, deepspeed: bool, trusted: bool) -> None:
    """Refuse a checkpoint that this command cannot go on from, before anything is loaded.

    Raises:
        UserError: it was written with (or without) DeepSpeed or by another number of DeepSpeed's processes, or
            somebody else has written it and the command does not say that they are `trusted`.
    """
    facts = checksums.read(folder) or {}
    rank, world = processes.place()
    if facts.get("deepspeed") != deepspeed:
        has, wants = ("with", "without") if facts.get("deepspeed") else ("without", "with")
        raise UserError(
            f"{folder}: was saved {has} DeepSpeed and this command runs {wants} it. Set training.deepspeed as before."
        )
    if not deepspeed:
        return
    if facts["processes"] != world:
        raise UserError(
            f"{folder}: was saved by {facts['processes']} processes and this command has {world}; DeepSpeed goes on "
            f"only with the same number. Start {facts['processes']}, or choose another out=... to begin anew."
        )
    # The secret is the first process's, who may be on another machine.
    if not trusted and not processes.gather(rank == 0 and checksums.is_own(folder))[0]:
        raise UserError(
            f"{folder}: this DeepSpeed checkpoint was not written by you on this machine, and reading it can run code "
            "that was put into it. If you trust whoever wrote it, add --trust-checkpoint to the command."
        )


def check_state(folder: Path) -> None:
    """Refuse a checkpoint whose trainer_state.json the Trainer would stumble over.

    Raises:
        UserError: it is damaged, or of another step.
    """
    state = jsonl.read_one(folder / "trainer_state.json", State, "state of a training")
    if state.global_step != step_of(folder):
        raise UserError(f"{folder}: its trainer_state.json is of step {state.global_step}. {OLDER}")


def publish(staged: Path, target: Path, deepspeed: bool) -> None:
    """Checksum everything in `staged`, then rename it to `target`; called by all processes, the first one renames."""
    rank, world = processes.place()
    parts = processes.gather(checksums.sums(staged, rank, world))
    if rank != 0:
        return
    checksums.write(staged, parts, world, deepspeed)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    staged.parent.rmdir()
    checksums.sync(target.parent)


def clear_staging(out: Path) -> None:
    """Remove what a save that was killed has left."""
    shutil.rmtree(out / STAGING, ignore_errors=True)


def rotate(out: Path, limit: int | None, best: Path | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, never the newest or the best."""
    if not limit or limit < 1:
        return
    kept = found(out)
    keep = {*kept[:1], *([best] if best else [])}
    for folder in reversed(kept):
        if len(kept) <= max(limit, len(keep)):
            return
        if folder not in keep:
            shutil.rmtree(folder, ignore_errors=True)
            kept.remove(folder)


def parameters(model: nn.Module, everything: bool, keep: bool, deepspeed: bool) -> dict[str, torch.Tensor]:
    """Return copies on the CPU of the trained parameters, or of all; under DeepSpeed in its float32.

    Args:
        model: without its wrappers.
        everything: frozen parameters too.
        keep: whether this process wants them; DeepSpeed collects from all of them in any case.
        deepspeed: whether DeepSpeed holds the parameters.
    """
    result = {}
    for name, parameter in model.named_parameters():
        if not (everything or parameter.requires_grad):
            continue
        whole = _collected(parameter) if deepspeed else parameter.detach()
        if keep:
            result[name] = whole.cpu().clone()
    return result


def _collected(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter from the parts that DeepSpeed keeps of it, the optimizer's own float32 where it trains it."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
    with GatheredParameters([parameter]):
        value = parameter.detach().clone()
    # With `round_robin_gradients` DeepSpeed 0.19 puts the parts together in the wrong order.
    right = master is not None and torch.equal(torch.as_tensor(master).to(value), value)
    return torch.as_tensor(master).detach() if right else value


def write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write trained parameters to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS)


def read_weights(folder: Path, model: nn.Module) -> None:
    """Copy the trained parameters of a checkpoint into `model`, bit by bit."""
    stored = load_file(folder / WEIGHTS)
    tuned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if different := sorted(set(stored) ^ set(tuned)):
        raise UserError(
            f"{folder / WEIGHTS} and the model differ in {different[0]}: the base model or a library has changed since."
        )
    with torch.no_grad():
        for name, value in stored.items():
            tuned[name].copy_(value)


def is_full_disk(error: BaseException, folder: Path) -> bool:
    """Return whether a failed save means that no space is left; torch and safetensors hide the errno."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error).lower()
    return "no space left" in text or "file too large" in text or shutil.disk_usage(folder).free < 1 << 20


def no_space(folder: Path) -> OSError:
    """Return the error that `cli.run` turns into one message."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
