"""Several files of one folder that appear together or not at all, also when the program is killed."""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import check_output, status

_JOURNAL = "all-written"


@contextlib.contextmanager
def write_together(
    out: Path, program: str, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Callable[[str], Path]]:
    """Yield a function that claims a file name of `out` and returns where to write it for now.

    The files are written in a hidden folder and renamed when the block ends without an error. A run that was killed
    while renaming is finished by the next one, which may then replace what that run wrote; what a run left that was
    killed before is deleted.

    Raises:
        UserError: `out` is a file, or a claimed name exists and `overwrite` is false, or it is one of `inputs`.
    """
    if status(out) is not None and not out.is_dir():
        raise UserError(f"{out}: cannot be written, {out} is a file. --out needs a folder.")
    kept = list(inputs)
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    finished = _recover(out, program)
    folder = out / f".{program}.{secrets.token_hex(4)}.part"
    folder.mkdir(parents=True)
    claimed: list[str] = []

    def claim(name: str) -> Path:
        check_output(out / name, overwrite or name in finished, kept)
        claimed.append(name)
        return folder / name

    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield claim
        (folder / _JOURNAL).write_text(json.dumps(claimed), encoding="utf-8")
        _move(folder, out, claimed)
        missing = []
    finally:
        shutil.rmtree(folder)
        os.close(held)
        with contextlib.suppress(OSError):
            for made in missing:
                made.rmdir()


def _move(folder: Path, out: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).replace(out / name)


def _recover(out: Path, program: str) -> set[str]:
    """Finish or delete what killed runs left in `out`; return the names of what was finished."""
    finished: set[str] = set()
    for folder in out.glob(f".{program}.*.part"):
        if len(folder.name) != len(f".{program}..part") + 8 or not folder.is_dir() or folder.is_symlink():
            continue
        held = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError, ValueError):
                names = json.loads((folder / _JOURNAL).read_text(encoding="utf-8"))
                _move(folder, out, names)
                finished.update(names)
            shutil.rmtree(folder)
        except BlockingIOError:
            continue  # another run is writing there
        finally:
            os.close(held)
    return finished
