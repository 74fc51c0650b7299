"""Exam files where people have them: single files, a folder or zip as it was downloaded, a data set on a hub."""

import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from cmexam_tune.core import files
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import check_input
from cmexam_tune.exams import _tables
from cmexam_tune.exams._columns import Columns
from cmexam_tune.exams._fields import Fields

_HUB = re.compile(r"(hf|ms)://([^/@\s]+/[^/@\s]+)(?:@([^/\s]+))?(?:/(.+))?")
_LARGEST_ZIP = 1 << 33
_BROKEN_ZIP = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError),
    *(NotImplementedError, RuntimeError, ValueError, EOFError, OSError),
)
"""What zipfile lets through from damaged zips; a bad bzip2 stream is an OSError."""
# What macOS adds to zips, and hidden files.
_NOT_DATA = ("__MACOSX", ".")


@dataclass(frozen=True)
class RawFile:
    """One raw file."""

    path: Path
    name: str
    """What its output files are called."""
    origin: str
    """Where it is from, for the report: the path, a path inside a zip, or an address with its revision."""
    picked: bool = False
    """Whether it was found in a folder, a zip or on the hub, and not named by the user."""


def find_sources(inputs: Sequence[str | Path], unpacked: Path) -> list[RawFile]:
    """Return the files of all inputs; zips are unpacked into the folder `unpacked`.

    Raises:
        UserError: an input is missing or empty, holds no file that could be an exam, or cannot be fetched.
    """
    sources = []
    for location in inputs:
        if match := _HUB.fullmatch(str(location)):
            sources += _from_hub(*match.groups())
        elif str(location).startswith(("hf://", "ms://")):
            raise UserError(
                f"{location}: a data set on a hub is written {str(location)[:5]}OWNER/NAME[@REVISION][/FOLDER]."
            )
        elif Path(location).is_dir():
            sources += _in_folder(Path(location), str(location))
        elif Path(location).suffix.lower() == ".zip":
            sources += _in_zip(check_input(location, "exam file"), unpacked / str(len(sources)))
        else:
            path = check_input(location, "exam file")
            sources.append(RawFile(path, path.stem, str(path)))
    return _named(sources)


def _named(sources: Sequence[RawFile]) -> list[RawFile]:
    """Return the sources with distinct names; those found in folders take their folder's name where needed."""
    count = Counter(source.name for source in sources)
    named = [
        replace(source, name=f"{source.path.parent.name}-{source.name}")
        if count[source.name] > 1 and source.picked
        else source
        for source in sources
    ]
    for name, times in Counter(source.name for source in named).items():
        if times > 1:
            raise UserError(f"--input: {times} files are called {name!r}; what is written is named by it. Rename one.")
    return named


def _in_folder(folder: Path, label: str) -> list[RawFile]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _tables.READERS
        and path.is_file()
        and path.stat().st_size
        and not any(part.startswith(_NOT_DATA) for part in path.relative_to(folder).parts)
    )
    if not paths:
        raise UserError(f"{label}: holds no {', '.join(_tables.READERS)} file.")
    for path in paths:
        files.status(path)  # refuses names that are not UTF-8, which no report could hold
    return [RawFile(path, path.stem, f"{label}/{path.relative_to(folder).as_posix()}", True) for path in paths]


def _in_zip(path: Path, folder: Path) -> list[RawFile]:
    try:
        with zipfile.ZipFile(path) as packed:
            members = [member for member in packed.infolist() if _wanted(member.filename) and member.file_size]
            if sum(member.file_size for member in members) > _LARGEST_ZIP:
                raise UserError(f"{path}: unpacks to more than {_LARGEST_ZIP >> 30} GiB. Unpack it yourself.")
            # `extract` takes `..` and absolute paths out of names: nothing is written outside of the folder.
            for member in members:
                packed.extract(member, folder)
    except _BROKEN_ZIP as error:
        raise UserError(f"{path}: not a zip that can be read ({error}). Unpack it yourself.") from None
    if not members:
        raise UserError(f"{path}: holds no {', '.join(_tables.READERS)} file.")
    return _in_folder(folder, str(path))


def _wanted(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.suffix.lower() in _tables.READERS and not any(part.startswith(_NOT_DATA) for part in path.parts)


def _from_hub(hub: str, repository: str, revision: str | None, inside: str | None) -> list[RawFile]:
    """Fetch the tables of a data set at one revision."""
    label = f"{hub}://{repository}"
    patterns = [f"*{suffix}" for suffix in _tables.READERS]
    if inside:
        patterns = [inside, *(f"{inside.rstrip('/')}/{pattern}" for pattern in patterns)]
    mirror = "behind a firewall set HF_ENDPOINT to a mirror, or " if hub == "hf" else "or "
    try:
        folder, pinned = (_hugging_face if hub == "hf" else _modelscope)(repository, revision, patterns)
    except (OSError, ValueError) as error:
        what = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{label}: cannot be fetched ({what}). Check name and revision; {mirror}download the files and give "
            "their folder."
        ) from None
    return _in_folder(folder, f"{label}@{pinned}")


def _hugging_face(repository: str, revision: str | None, patterns: list[str]) -> tuple[Path, str | None]:
    """Return the folder of a snapshot and its commit; a mirror is set by the variable HF_ENDPOINT."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        # The commit that a branch is at now: the report names what was read, and not what is there later.
        pinned = HfApi().dataset_info(repository, revision=revision).sha
        folder = snapshot_download(repository, repo_type="dataset", revision=pinned, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError) as error:
        raise OSError(str(error)) from None
    return Path(folder), pinned


def _modelscope(repository: str, revision: str | None, patterns: list[str]) -> tuple[Path, str]:
    """Return the folder of a snapshot and its revision: as given, else the branch, since ModelScope tells no commit.

    Raises:
        UserError: modelscope is not installed.
    """
    try:
        from modelscope import dataset_snapshot_download
        from modelscope_hub.errors import HubError
    except ImportError:
        raise UserError(
            f"ms://{repository}: modelscope is not installed: pip install 'cmexam_tune[modelscope]'."
        ) from None

    pinned = revision or "master"
    try:
        folder = dataset_snapshot_download(repository, revision=pinned, allow_patterns=patterns)
    except HubError as error:
        raise OSError(str(error)) from None
    return Path(folder), pinned


def sort_out(sources: Sequence[RawFile], fields: Fields | None) -> tuple[list[RawFile], list[RawFile], list[RawFile]]:
    """Return (what to read, files of answers, files left out) of the sources.

    Files that the user named are all read. Of those found in folders only what has the exam's columns, or CMB-Clin's.

    Raises:
        UserError: nothing is left to read.
    """
    kinds: dict[str, list[RawFile]] = {"questions": [], "answers": [], "other": []}
    for source in sources:
        kinds[look(source.path, fields) if source.picked else "questions"].append(source)
    read, answers, left_out = kinds.values()
    if not read:
        raise UserError(f"--input: none of {', '.join(source.origin for source in sources)} has this exam's columns.")
    return read, answers, left_out


def look(path: Path, fields: Fields | None) -> str:
    """Return `questions` (CMB-Clin's cases too), `answers` or `other` by the first row of a file."""
    try:
        _, row = next(_tables.read(path), (0, {}))
    except UserError:
        return "other"
    if not row:
        return "other"
    if fields is None:
        return "questions"
    if "QA_pairs" in row:  # CMB-Clin, which is beside the tests whose answers are elsewhere
        return "questions" if fields.answers == "elsewhere" else "other"
    columns = Columns(path, fields.columns(), fields.ignore).of(row)
    if columns.has("stem") and columns.has("options"):
        return "questions"
    return "answers" if {"id", "answer"} <= set(row) else "other"


def find_answers(source: RawFile, fields: Fields | None, known: Sequence[RawFile]) -> Path | None:
    """Return the file of answers beside a file of questions without any, None where there is not just one."""
    if fields is None or fields.answers != "elsewhere":
        return None
    _, row = next(_tables.read(source.path), (0, {}))
    columns = Columns(source.path, fields.columns(), fields.ignore).of(row)
    if columns.has("answer") or not columns.has("stem") or not columns.has("id"):
        return None
    beside = [path for path in source.path.parent.glob("*answer*") if path.suffix.lower() in _tables.READERS]
    paths = {answers.path.resolve() for answers in known} or {path.resolve() for path in beside}
    answers = [path for path in sorted(paths) if look(path, fields) == "answers"]
    return answers[0] if len(answers) == 1 else None
