"""Checkpoints that are whole or not there: written beside, summed, renamed; read back only if every byte is right."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cmexam_tune.core import cli, files

STAGING = ".saving"
MANIFEST = "checksums.json"
WEIGHTS = "trainable.safetensors"
PREFIX = "checkpoint-"


def step_of(folder: Path) -> int:
    """Return the step of `checkpoint-<step>`, or -1 for anything else."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and number.isdigit() else -1


def found(out: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first, whole or not."""
    return sorted((p for p in out.glob(f"{PREFIX}*") if p.is_dir() and step_of(p) >= 0), key=step_of, reverse=True)


def newest(out: Path) -> Path | None:
    """Return the newest checkpoint whose checksums hold; every damaged one that is passed over is named."""
    for folder in found(out):
        if not (problem := damage(folder)):
            return folder
        cli.note(f"note: {folder} is damaged ({problem}); going back to the checkpoint before it")
    return None


def damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"no {MANIFEST}: it was not finished"
    try:
        sums: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return f"{MANIFEST} cannot be read"
    for name, value in sums.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if files.sha256(folder / name) != value:
            return f"the checksum of {name} is wrong"
    return None


def publish(staged: Path, target: Path) -> None:
    """Sum and sync everything in `staged`, then rename it to `target`, replacing what was there."""
    sums = {}
    for path in sorted(p for p in staged.rglob("*") if p.is_file()):
        sums[path.relative_to(staged).as_posix()] = files.sha256(path)
        _sync(path)
    with files.atomic_write(staged / MANIFEST) as handle:
        json.dump(sums, handle, indent=1)
    _sync(staged)
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    staged.parent.rmdir()
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def trainable(model: nn.Module, gather: bool = False) -> dict[str, torch.Tensor]:
    """Return copies on the CPU of every trained parameter; `gather` collects the parts of ZeRO-3 (on all processes)."""
    result = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if gather:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([parameter]):
                result[name] = parameter.detach().cpu().clone()
        else:
            result[name] = parameter.detach().cpu().clone()
    return result


def write_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write trained parameters to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS)


def read_weights(folder: Path, model: nn.Module) -> None:
    """Copy the trained parameters of a checkpoint into `model`, bit by bit."""
    stored = load_file(folder / WEIGHTS)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if set(stored) != set(parameters):
        odd = sorted(set(stored) ^ set(parameters))[0]
        raise RuntimeError(f"{folder / WEIGHTS} and the model differ in {odd}: the model or its libraries changed.")
    with torch.no_grad():
        for name, value in stored.items():
            parameters[name].copy_(value)


def is_full_disk(error: BaseException, folder: Path) -> bool:
    """Return whether a failed save means that no space is left; torch and safetensors hide the errno."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    text = str(error).lower()
    return "no space left" in text or "file too large" in text or shutil.disk_usage(folder).free < 1 << 20


def no_space(folder: Path) -> OSError:
    """Return the error that `cli.run` turns into one message."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
