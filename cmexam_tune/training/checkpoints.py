"""Checkpoints that are whole or not there: written beside, checksummed, renamed; read only if every byte is right.

`checksums.json` in a checkpoint says which bytes belong to it, how many processes wrote it, and whose it is. DeepSpeed
reads its own checkpoints with pickle, which runs code. So the checksums carry a signature made with a secret that only
this user has (`secret`): a DeepSpeed checkpoint without it is somebody else's and is not opened.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cmexam_tune.core import cli, files, jsonl
from cmexam_tune.core.errors import TrainingStopped, UserError
from cmexam_tune.training import processes

STAGING = ".saving"
WEIGHTS = "trainable.safetensors"
MANIFEST = "checksums.json"
PREFIX = "checkpoint-"
OWNER = re.compile(r"(?:rank_|rng_state_)(\d+)")
"""How DeepSpeed and the Trainer name the files that one process writes."""
GO_BACK = "Delete this folder to go on from the checkpoint before it."


@dataclass(frozen=True)
class Manifest:
    """What checksums.json holds."""

    files: Mapping[str, str]
    """Path in the checkpoint -> SHA-256."""
    processes: int
    deepspeed: bool
    signature: str | None = None
    """With DeepSpeed: an HMAC of everything else."""

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Return the manifest of a checkpoint, or None for a file that is not there, damaged or of another kind."""
        try:
            return jsonl.read_one(folder / MANIFEST, cls, "file of checksums")
        except (UserError, OSError):
            return None

    def signed(self) -> str:
        """Return the signature that this user gives to everything else in the manifest."""
        content = {name: value for name, value in asdict(self).items() if name != "signature"}
        return hmac.new(secret(), json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


# Which checkpoint to go on from


def step_of(folder: Path) -> int:
    """Return the step of `checkpoint-<step>`, or -1 for anything else."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and re.fullmatch("[0-9]+", number) else -1


def newest_first(run_folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, whole or not."""
    folders = [path for path in run_folder.glob(f"{PREFIX}*") if path.is_dir() and step_of(path) >= 0]
    return sorted(folders, key=step_of, reverse=True)


def find_resumable(run_folder: Path, *, deepspeed: bool, trusted: bool) -> Path | None:
    """Return the newest checkpoint whose checksums hold; called by all processes, each reads what it wrote itself.

    Every damaged one that is passed over is named.

    Raises:
        UserError: training cannot go on from it (`refusal`).
    """
    rank, world = processes.rank_and_world()
    for folder in processes.gather(newest_first(run_folder))[0]:
        problem = damage(folder, rank, world)
        # The secret by which a user knows their own is the first process's, which may be on another machine.
        refused = refusal(folder, world, deepspeed=deepspeed, trusted=trusted) if rank == 0 else None
        checked = processes.gather((problem, refused))
        problems = [problem for problem, _ in checked if problem]
        if not problems:
            if message := checked[0][1]:
                raise UserError(message)
            return Path(folder)
        if rank == 0:
            cli.note(f"note: {folder} is damaged ({problems[0]}); going back to the checkpoint before it")
    return None


def refusal(folder: Path, world: int = 1, *, deepspeed: bool, trusted: bool) -> str | None:
    """Return why this command, with `world` processes, cannot go on from a whole checkpoint, or None.

    It was written with (or without) DeepSpeed or by another number of DeepSpeed's processes, or somebody else has
    written it and the command does not say that they are `trusted`.
    """
    manifest = Manifest.read(folder)
    if manifest is None or manifest.deepspeed != deepspeed:
        has, wants = ("without", "with") if deepspeed else ("with", "without")
        return (
            f"{folder}: was saved {has} DeepSpeed and this command runs {wants} it. Set training.deepspeed as before."
        )
    if deepspeed and manifest.processes != world:
        return (
            f"{folder}: was saved by {manifest.processes} processes and this command has {world}; DeepSpeed goes on "
            f"only with the same number. Start {manifest.processes}, or choose another out=... to begin anew."
        )
    if deepspeed and not trusted and not is_own(folder, manifest):
        return (
            f"{folder}: this DeepSpeed checkpoint was not written by you on this machine, and reading it can run code "
            "that was put into it. If you trust whoever wrote it, add --trust-checkpoint to the command."
        )
    return None


def damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Return what is wrong with the files of one process in a checkpoint, or None."""
    if not (folder / MANIFEST).is_file():
        return f"no {MANIFEST}: it was not finished"
    manifest = Manifest.read(folder)
    if manifest is None:
        return f"{MANIFEST} cannot be read"
    for name, checksum in manifest.files.items():
        if owner(name, world) != rank:
            continue
        if not (folder / name).is_file():
            return f"{name} is missing"
        if files.sha256(folder / name) != checksum:
            return f"the checksum of {name} is wrong"
    return None


def is_own(folder: Path, manifest: Manifest) -> bool:
    """Return whether this user wrote a DeepSpeed checkpoint, and nobody has put another file into it since."""
    if not hmac.compare_digest(str(manifest.signature), manifest.signed()):
        return False
    # Signed are the files that are named: one more would be read by DeepSpeed all the same.
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return present <= {*manifest.files, MANIFEST}


def secret() -> bytes:
    """Return this user's secret, made at its first use in the user's state folder and readable by the user alone."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "cmexam_tune" / "secret"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f".secret.{secrets.token_hex(8)}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secrets.token_bytes(32))
        try:
            os.link(new, path)  # fails where another process was first, whose secret then counts
        except FileExistsError:
            pass
        finally:
            new.unlink()
    return path.read_bytes()


# Publishing what was staged


def publish(staged: Path, target: Path, deepspeed: bool) -> None:
    """Checksum everything in `staged`, then rename it to `target`; called by all processes, the first one renames."""
    rank, world = processes.rank_and_world()
    checksums = processes.gather(own_checksums(staged, rank, world))
    if rank != 0:
        return
    merged = {name: checksum for part in checksums for name, checksum in part.items()}
    write_manifest(staged, merged, processes=world, deepspeed=deepspeed)
    # One of this step is there if it was damaged and training went back behind it.
    if target.exists():
        shutil.rmtree(target)
    staged.rename(target)
    staged.parent.rmdir()
    # A rename lives in its parent folder.
    sync(target.parent)


def owner(name: str, world: int) -> int:
    """Return the process that wrote a file of a checkpoint and sees it on its own machine."""
    match = OWNER.search(name)
    # Modulo: where fewer processes resume than have written, every file still has one that checks it.
    return int(match[1]) % world if match else 0


def own_checksums(folder: Path, rank: int, world: int) -> dict[str, str]:
    """Return name -> checksum of the files that process `rank` of `world` wrote, once they are on the disk."""
    checksums = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if owner(name, world) == rank:
            checksums[name] = files.sha256(path)
            # Synced before the rename: after a power cut a folder must not have its final name and lack its bytes.
            sync(path)
    return checksums


def write_manifest(folder: Path, checksums: Mapping[str, str], *, processes: int, deepspeed: bool) -> None:
    """Write checksums.json, signed where DeepSpeed will unpickle what it names."""
    manifest = Manifest(dict(sorted(checksums.items())), processes, deepspeed)
    content = asdict(replace(manifest, signature=manifest.signed()) if deepspeed else manifest)
    files.write_json(folder / MANIFEST, content)
    sync(folder)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_staging(run_folder: Path) -> None:
    """Remove what a save that was killed has left."""
    shutil.rmtree(run_folder / STAGING, ignore_errors=True)


def rotate(run_folder: Path, limit: int | None, best: Path | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, never the newest or the best."""
    if not limit or limit < 1:
        return
    folders = newest_first(run_folder)
    protected = {*folders[:1], *([best] if best else [])}
    for folder in reversed(folders):
        if len(folders) <= max(limit, len(protected)):
            return
        if folder not in protected:
            shutil.rmtree(folder, ignore_errors=True)
            folders.remove(folder)


# Trained parameters


def trained_parameters(model: nn.Module, *, keep: bool, deepspeed: bool) -> dict[str, torch.Tensor]:
    """Return copies on the CPU of the trained parameters; under DeepSpeed in its float32.

    Args:
        model: without its wrappers.
        keep: whether this process wants them; DeepSpeed collects from all of them in any case.
        deepspeed: whether DeepSpeed holds the parameters.
    """
    state_dict = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = _gathered(parameter) if deepspeed else parameter.detach()
            if keep:
                state_dict[name] = whole.cpu().clone()
    return state_dict


def _gathered(parameter: torch.Tensor) -> torch.Tensor:
    """Return a trained parameter from the parts that DeepSpeed keeps of it: the optimizer's own float32.

    Collective under ZeRO: every process must ask for the same parameters in the same order.
    """
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter)
    with GatheredParameters([parameter]):
        value = parameter.detach().clone()
    # With `round_robin_gradients` DeepSpeed 0.19 puts the parts together in the wrong order; rounded to the type of
    # computation they must be what the model computes with.
    right = master is not None and torch.equal(torch.as_tensor(master).to(value), value)
    return torch.as_tensor(master).detach() if right else value


def write_weights(folder: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write trained parameters to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in state_dict.items()}, folder / WEIGHTS)


def read_weights(folder: Path, model: nn.Module) -> None:
    """Copy the trained parameters of a checkpoint into `model`, bit by bit."""
    stored = load_file(folder / WEIGHTS)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if different := sorted(set(stored) ^ set(trained)):
        raise UserError(
            f"{folder / WEIGHTS} and the model differ in {different[0]}: the base model or a library has changed since."
        )
    with torch.no_grad():
        for name, value in stored.items():
            trained[name].copy_(value)


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Raise an OSError that says so where saving fails for want of space; torch and safetensors hide the errno."""
    try:
        yield
    except TrainingStopped:
        raise
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        else:
            text = str(error).lower()
            full = "no space left" in text or "file too large" in text or shutil.disk_usage(folder).free < 1 << 20
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise
