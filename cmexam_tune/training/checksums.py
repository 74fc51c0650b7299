"""checksums.json of a checkpoint: which bytes belong to it, how many processes wrote it, and whose it is.

DeepSpeed reads its own checkpoints with pickle, which runs code. So the checksums carry a signature made with a secret
that only this user has (`secret`): a DeepSpeed checkpoint without it is somebody else's and is not opened.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmexam_tune.core import documents, files, jsonl
from cmexam_tune.core.errors import UserError

MANIFEST = "checksums.json"
OWNER = re.compile(r"(?:rank_|rng_state_)(\d+)")
"""How DeepSpeed and the Trainer name the files that one process writes."""


@dataclass(frozen=True)
class Checksums:
    """What checksums.json holds, besides a signature."""

    files: Mapping[str, str]
    processes: int
    deepspeed: bool


def owner(name: str, world: int) -> int:
    """Return the process that wrote a file of a checkpoint and has it at hand."""
    found = OWNER.search(name)
    return int(found[1]) % world if found else 0


def sums(folder: Path, rank: int, world: int) -> dict[str, str]:
    """Return name -> checksum of the files that process `rank` of `world` wrote, once they are on the disk."""
    result = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if owner(name, world) == rank:
            result[name] = files.sha256(path)
            sync(path)
    return result


def write(folder: Path, parts: Iterable[dict[str, str]], processes: int, deepspeed: bool) -> None:
    """Write checksums.json from the sums of all processes."""
    facts: dict[str, Any] = {
        "files": dict(sorted((name, value) for part in parts for name, value in part.items())),
        "processes": processes,
        "deepspeed": deepspeed,
    }
    if deepspeed:
        facts["signature"] = signature(facts)
    with files.atomic_write(folder / MANIFEST) as handle:
        json.dump(facts, handle, indent=1)
    sync(folder)


def read(folder: Path) -> dict[str, Any] | None:
    """Return what `write` wrote, or None for a file that is not there, damaged or of another kind."""
    try:
        facts: dict[str, Any] = documents.read_json(folder / MANIFEST, "file of checksums")
        jsonl.from_object(Checksums, facts, str(folder / MANIFEST))
        return facts
    except (UserError, OSError):
        return None


def damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Return what is wrong with the files of one process in a checkpoint, or None."""
    if not (folder / MANIFEST).is_file():
        return f"no {MANIFEST}: it was not finished"
    facts = read(folder)
    if facts is None:
        return f"{MANIFEST} cannot be read"
    for name, value in facts["files"].items():
        if owner(name, world) != rank:
            continue
        if not (folder / name).is_file():
            return f"{name} is missing"
        if files.sha256(folder / name) != value:
            return f"the checksum of {name} is wrong"
    return None


def is_own(folder: Path) -> bool:
    """Return whether this user wrote a DeepSpeed checkpoint, and nobody has put another file into it since."""
    facts = read(folder)
    if facts is None or not hmac.compare_digest(str(facts.get("signature")), signature(facts)):
        return False
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return there <= {*facts["files"], MANIFEST}


def signature(facts: dict[str, Any]) -> str:
    """Return the signature of everything else in checksums.json."""
    signed = json.dumps({k: v for k, v in facts.items() if k != "signature"}, sort_keys=True).encode()
    return hmac.new(secret(), signed, hashlib.sha256).hexdigest()


def secret() -> bytes:
    """Return this user's secret, made at its first use in the user's state folder and readable by the user alone."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "cmexam_tune" / "secret"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = path.with_name(f".secret.{secrets.token_hex(8)}")
        with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
            handle.write(secrets.token_bytes(32))
        try:
            os.link(made, path)  # fails where another process was first, whose secret then counts
        except FileExistsError:
            pass
        finally:
            made.unlink()
    return path.read_bytes()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
