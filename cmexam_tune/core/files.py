"""Paths and writing: any path of a user is usable or a `UserError`, and nothing is half-written or lost.

What is written lies beside its place, hidden and locked, until it is whole: a file (`atomic_write`), a folder
(`new_folder`), or several files of a folder that belong together (`write_together`). What a killed program left is
finished if it was whole, else deleted, by the next one that writes there.
"""

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from cmexam_tune.core.errors import UserError

PART = ".cmexam-part"
"""End of the names of files and folders that are being written: `.<name>.<8 hexadecimal digits>.cmexam-part`."""
MARKER = ".cmexam_tune"
"""File in a folder that a program wrote and may therefore replace; it holds the program's name."""
_JOURNAL = ".all-written"
"""File in a hidden folder all of whose files are whole; it holds their names."""
_LONGEST_NAME = 40
"""Characters of a file's name that the name of its part repeats: in UTF-8, with prefix and suffix, below 255 bytes."""


def status(path: Path) -> os.stat_result | None:
    """Return the status of what is at a path (of a link: of its target), None if nothing is there.

    Raises:
        UserError: the path cannot be used: too long, a circle of links, a link to nothing, not UTF-8, unreadable.
    """
    shown = ascii(str(path))[1:-1] if not str(path).isprintable() else str(path)
    shown = shown if len(shown) <= 200 else f"{shown[:80]}...{shown[-80:]}"
    # Python reads bytes of a file name that are not UTF-8 as lone surrogates (`surrogateescape`).
    if any("\ud800" <= character <= "\udfff" for character in str(path)):
        raise UserError(f"{shown}: the path is not UTF-8. Rename it.")
    try:
        return path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{shown}: a link that leads nowhere. Delete it or name another path.") from None
        return None
    except NotADirectoryError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise UserError(f"{shown}: {getattr(error, 'strerror', None) or error}. Name another path.") from None


def article(noun: str) -> str:
    """Return `a file`, `an exam file`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def check_input(path: str | Path, what: str = "file") -> Path:
    """Return `path` as a `Path`, or refuse: it must be a readable file with at least one byte.

    Raises:
        UserError: the file is missing, a folder, a device or pipe, empty, or cannot be read.
    """
    path = Path(path)
    info = status(path)
    if info is None:
        raise UserError(f"{path}: no such {what}. Relative paths start at {Path.cwd()}.")
    if stat.S_ISDIR(info.st_mode):
        raise UserError(f"{path}: is a folder, {article(what)} is needed.")
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"{path}: is a device or a pipe, {article(what)} is needed. Save it as a file first.")
    if info.st_size == 0:
        raise UserError(f"{path}: the {what} is empty.")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: you may not read this {what} (chmod u+r, or ask its owner).")
    return path


def check_output(path: str | Path, overwrite: bool = False, inputs: Iterable[str | Path] = ()) -> Path:
    """Return `path` of a file as a `Path`, or refuse to write there.

    Args:
        path: the file that will be written beside its place and renamed.
        overwrite: whether a file that is there may be replaced.
        inputs: files that are never replaced, not even with `overwrite`.

    Raises:
        UserError: something exists at `path` and `overwrite` is false; a folder, a link, a device, a pipe or one of the
            inputs is there; its folder cannot be written to.
    """
    path = Path(path)
    info = status(path)
    if info is not None:
        if stat.S_ISDIR(info.st_mode):
            raise UserError(f"{path}: is a folder, a file is needed.")
        # Renaming onto a link replaces the link and leaves the file that it names as it was: nobody expects that.
        if path.is_symlink() or not stat.S_ISREG(info.st_mode):
            raise UserError(f"{path}: is a link, a device or a pipe; it would be replaced. Name a file.")
        if clash := next((source for source in inputs if Path(source).exists() and path.samefile(source)), None):
            raise UserError(f"{path}: would replace its own input {clash}. Choose another output.")
        if not overwrite:
            raise UserError(f"{path}: exists. Add --overwrite to replace it, or choose another output.")
    check_parent(path)
    return path


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
        if protected := next(
            (source for source in (*keep, Path.cwd()) if Path(source).resolve().is_relative_to(path.resolve())), None
        ):
            raise UserError(f"{path}: holds {protected}, so it stays. Choose another output.")
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


def check_parent(path: Path) -> None:
    """Refuse a path in whose folder nothing can be written."""
    if len(os.fsencode(path.name)) > os.pathconf("/", "PC_NAME_MAX"):
        raise UserError(f"{str(path)[:200]}...: the name is too long. Choose a shorter one.")
    folder = next(folder for folder in path.absolute().parents if status(folder) is not None)
    if not folder.is_dir():
        raise UserError(f"{path}: cannot be written, {folder} is a file. Choose another output.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{path}: you may not write in {folder}. Choose another output.")


@contextlib.contextmanager
def atomic_write(path: str | Path, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file beside `path` for writing and rename it to `path` when the block ends without an error."""
    path = Path(path)
    with parents_of(path), part_of(path, folder=False) as part:
        # The same bytes whatever the system's own line ends and encoding are: checksums of outputs are compared.
        with part.open("wb") if binary else part.open("w", encoding="utf-8", newline="\n") as handle:
            yield handle
            handle.flush()
            # Without it a power cut after the rename can leave an empty file under the final name.
            os.fsync(handle.fileno())
        part.replace(path)


def write_json(path: str | Path, value: object) -> None:
    """Write a value as JSON that people can read, whole or not at all."""
    with atomic_write(path) as handle:
        json.dump(value, handle, ensure_ascii=False, indent=2)
        handle.write("\n")


@contextlib.contextmanager
def new_folder(path: str | Path, program: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder beside `path` and put it in its place when the block ends without an error, marked as `program`'s.

    What lay there (`check_folder` has been asked) is moved away just before and deleted just after.

    Raises:
        UserError: another process writes there, or has written there since `check_folder` was asked.
    """
    path = Path(path).absolute()
    with parents_of(path), lock(path), part_of(path, folder=True) as part:
        check_folder(path, program, overwrite)
        try:
            yield part
        except Exception as error:
            # Libraries in Rust, such as safetensors, have errors of their own for a full disk.
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None or isinstance(error, OSError):
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        marker = part / MARKER
        marker.write_text(f"{program}\n", encoding="utf-8")
        for file in part.rglob("*"):
            if file.is_file() and not file.is_symlink():
                file.chmod(marker.stat().st_mode)  # safetensors writes for the owner only
        # A folder cannot be renamed onto one with files in it, so for a moment neither is there: `sweep` restores it.
        old = _old(part)
        if path.exists():
            path.rename(old)
        part.rename(path)
        if old.exists():
            shutil.rmtree(old)


@contextlib.contextmanager
def write_together(
    out: Path, program: str, overwrite: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Callable[[str], Path]]:
    """Yield a function that claims the name of a file in `out` and returns where to write it for now.

    The files appear in `out` when the block ends without an error, and then all of them: if the program is killed while
    they are moved, the next one that writes there moves the others (and may replace them without `overwrite`).

    Raises:
        UserError: `out` is a file, or a claimed name exists and `overwrite` is false, or it is one of `inputs`.
    """
    if status(out) is not None and not out.is_dir():
        raise UserError(f"{out}: cannot be written, {out} is a file. --out needs a folder.")
    protected, claimed, finished = list(inputs), list[str](), sweep(out / program)
    with parents_of(out / program), part_of(out / program, folder=True) as part:

        def claim(name: str) -> Path:
            check_output(out / name, overwrite or name in finished, protected)
            claimed.append(name)
            return part / name

        yield claim
        # Once the journal is whole, `sweep` finishes what a kill interrupts; before, it deletes.
        (part / _JOURNAL).write_text(json.dumps(claimed), encoding="utf-8")
        _publish(part)


def _publish(part: Path) -> list[str]:
    """Move the files of a hidden folder out of it if all of them are whole; return their names."""
    try:
        names: list[str] = json.loads((part / _JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is half-written
        return []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # moved before the program was killed
            (part / name).replace(part.parent / name)
    return names


@contextlib.contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that were missing are removed again if the block ends with an error."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    # Also after Ctrl-C.
    except BaseException:
        with contextlib.suppress(OSError):  # somebody else has put something there
            for folder in missing:
                folder.rmdir()
        raise


@contextlib.contextmanager
def part_of(path: Path, folder: bool) -> Iterator[Path]:
    """Yield a new file or folder beside `path`, locked while the block runs and deleted after it if still there."""
    sweep(path)
    while True:
        part = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{PART}")
        part.mkdir() if folder else part.touch(exist_ok=False)
        descriptor = os.open(part, os.O_RDONLY)
        # The kernel lets go of a lock when its process ends, whatever ended it; a file with a process id would stay.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if part.exists():  # else another process has swept it before it was locked
            break
        os.close(descriptor)
    try:
        yield part
    finally:
        _delete(part)
        os.close(descriptor)


def sweep(path: Path) -> set[str]:
    """Finish or delete what programs that were killed left beside `path`; return the names of files that it finished.

    What is being written, and what is a user's own, stays.
    """
    finished: set[str] = set()
    for part in path.parent.glob(f"{glob.escape(_prefix(path))}*{PART}"):
        if not re.fullmatch(r"[0-9a-f]{8}(-old)?", part.name[len(_prefix(path)) : -len(PART)]):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDONLY)
            try:
                # The lock of a living writer raises an OSError here, which leaves its part alone.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finished.update(_publish(part))
                if part.name.endswith(f"-old{PART}") and not path.exists():
                    part.rename(path)  # the program was killed just before it put the new folder here
                else:
                    _delete(part)
            finally:
                os.close(descriptor)
    return finished


def _old(part: Path) -> Path:
    """Return where the folder is put that `part` replaces."""
    return part.with_name(part.name.replace(PART, f"-old{PART}"))


def _prefix(path: Path) -> str:
    return f".{path.name[:_LONGEST_NAME]}."


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: str | Path) -> Iterator[None]:
    """Keep others from writing `path` while the block runs; a process that dies gives it back.

    Raises:
        UserError: another process holds it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two long names may begin with the same characters, which is all of them that a hidden name repeats.
    lock_path = path.with_name(f"{_prefix(path)}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}.lock")
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"{path}: another process is writing it. Wait for it, or choose another output.") from None
        # The last holder may have deleted the file between our open and our lock; such a lock excludes nobody.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock_path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        # Deleted while it is locked: once it is closed, it may be another process's.
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def explain(error: OSError) -> str | None:
    """Return one message for an error of the system that the caller can mend, None for any other."""
    full, elsewhere = "Free some space or choose another folder", "Choose another path, or ask its owner"
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), full)
    denied, no_path = (errno.EACCES, errno.EPERM, errno.EROFS), (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
    remedies |= dict.fromkeys((*denied, *no_path, errno.EISDIR, errno.ENOENT, errno.EEXIST), elsewhere)
    if error.errno not in remedies:
        return None
    return f"{str(error.filename or 'output')[:300]}: {error.strerror}. {remedies[error.errno]}."
