"""Writing files so that nothing is ever half-written or overwritten by accident."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from cmexam_tune.core.errors import UserError


def check_input(path: str | Path, what: str = "file") -> Path:
    """Return `path` as a `Path`, or refuse: it must be a file with at least one byte.

    Raises:
        UserError: the file is missing, a folder, or empty.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a {what} is needed.")
    if not path.exists():
        raise UserError(f"{path}: no such {what}. Relative paths start at {Path.cwd()}.")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the {what} is empty.")
    return path


def check_output(path: str | Path, overwrite: bool = False) -> Path:
    """Return `path` as a `Path`, or refuse to overwrite what lies there.

    Raises:
        UserError: something exists at `path` and `overwrite` is false.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise UserError(f"{path}: exists. Add --overwrite to replace it, or choose another output.")
    return path


@contextlib.contextmanager
def atomic_write(path: str | Path, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file beside `path` for writing and rename it to `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") if binary else part.open("w", encoding="utf-8", newline="\n") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_replaceable(path: str | Path) -> Path:
    """Return `path` as a `Path`, or refuse: what is written and renamed there must not replace a link or a device.

    Raises:
        UserError: a folder, a link, a device or a pipe lies at `path`, or its folder is none.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a folder, a file is needed.")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path}: is a link, a device or a pipe; it would be replaced. Name a file.")
        missing = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise UserError(f"{str(path)[:200]}: cannot be an output ({error.strerror}). Choose another.") from None
    if not missing.is_dir():
        raise UserError(f"{path}: cannot be an output, {missing} is a file. Choose another.")
    return path


@contextlib.contextmanager
def lock(path: str | Path) -> Iterator[None]:
    """Keep others from writing `path` while the block runs; a process that dies gives it back.

    Raises:
        UserError: another process holds it.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise UserError(f"{path}: another process is writing it. Wait for it, or choose another output.") from None
    try:
        yield
    finally:
        held.release()


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
