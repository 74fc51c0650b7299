"""Folders that a program writes as a whole: marked, so that only its own are replaced, and exchanged in one step."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import PART, check_parent, lock, parents_of, part_of, status

MARKER = ".cmexam_tune"
"""File in a folder that a program wrote and may therefore replace; it holds the program's name."""


def check_folder(path: str | Path, program: str, overwrite: bool = False, keep: Iterable[str | Path] = ()) -> Path:
    """Return `path` of a folder that a program writes as a whole as a `Path`, or refuse.

    Args:
        path: the folder, see `new_folder`.
        program: who writes it.
        overwrite: whether a folder that the same program wrote earlier (see `MARKER`) may be replaced.
        keep: inputs, which must stay: neither they nor what holds them can be replaced.

    Raises:
        UserError: there is something at `path` that may not be replaced, or nothing can be written there.
    """
    path = Path(path)
    if status(path) is not None and (path.is_symlink() or not path.is_dir()):
        raise UserError(f"{path}: is a file or a link, a folder is needed. Choose another output.")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise UserError(f"{path}: exists. Add --overwrite to replace it, or choose another output.")
        if inside := next(
            (other for other in (*keep, Path.cwd()) if Path(other).resolve().is_relative_to(path.resolve())), None
        ):
            raise UserError(f"{path}: holds {inside}, so it stays. Choose another output.")
        if written_by(path) != program:
            raise UserError(
                f"{path}: was not written by cmexam-tune {program}, so --overwrite leaves it alone. Choose another "
                "output, or delete it yourself."
            )
    check_parent(path.absolute())
    return path


def written_by(folder: Path) -> str | None:
    """Return which program wrote a folder as a whole, None if none of this package did."""
    try:
        return (folder / MARKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def new_folder(path: str | Path, program: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder beside `path` and put it in its place when the block ends without an error, marked as `program`'s.

    What lay there (`check_folder` has been asked) is exchanged for it in one step and deleted afterwards.

    Raises:
        UserError: another process writes there, or has written there since `check_folder` was asked.
    """
    path = Path(path).absolute()
    with parents_of(path), lock(path), part_of(path, folder=True) as part:
        check_folder(path, program, overwrite)
        try:
            yield part
        except Exception as error:  # safetensors has an error of its own for a full disk
            if "o space left" not in str(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        (part / MARKER).write_text(f"{program}\n", encoding="utf-8")
        _readable(part)
        if path.exists():
            _exchange(part, path)
        else:
            part.rename(path)


def _readable(folder: Path) -> None:
    """Give files the rights that new files have: some libraries write theirs for their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~mask)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places, in one step where the system can (Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is None or rename(here, os.fsencode(one), here, os.fsencode(other), exchange) != 0:
        aside = one.with_name(one.name.replace(PART, f"-old{PART}"))
        other.rename(aside)
        one.rename(other)
        aside.rename(one)
