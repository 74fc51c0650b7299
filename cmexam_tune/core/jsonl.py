"""Reading and writing records as JSON lines, with errors that name file and line."""

import dataclasses
import functools
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cmexam_tune.core.documents import parse_json, read_json
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.files import atomic_write, check_input, check_output
from cmexam_tune.core.strict import Problems, build

T = TypeVar("T")
# One encoder for all lines; `vars` makes an object of a dataclass without `asdict`, which copies whatever is inside.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=vars).encode


def check(path: str | Path, what: str = "file") -> Path:
    """Return `path` as a `Path`, or refuse what can be no file of JSON lines.

    Raises:
        UserError: as `check_input`.
        DataError: it is a raw exam file; the message says how questions are made of it.
    """
    path = check_input(path, what)
    if path.suffix.lower() in (".csv", ".xlsx"):
        raise DataError(
            f"{path}: is a raw exam file. Make questions of it: cmexam-tune preprocess cmexam --input {path} --out DIR"
        )
    return path


def read_objects(path: str | Path, *, unfinished: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, JSON object) for every line that is not blank.

    With `unfinished` a last line without its newline, which a killed program leaves, is left out.

    Raises:
        UserError: the file is missing or empty.
        DataError: a line is not UTF-8 or not a JSON object; names file and line.
    """
    path = check(path)
    number = 0
    # In bytes: a line that is not UTF-8 can then be named by its number.
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if unfinished and not raw.endswith(b"\n"):
                return
            try:
                # A byte-order mark can only stand at the start of a file; later U+FEFF is text.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
                ) from None
            if not text.strip():
                continue
            value = parse_json(text, f"{path}:{number}")
            if not isinstance(value, dict):
                raise DataError(
                    f"{path}:{number}: a JSON object is needed on every line, found {type(value).__name__}."
                )
            yield number, value


def from_object(cls: type[T], value: Mapping[str, object], where: str) -> T:
    """Build the record `cls` from a JSON object, which may hold more; `where` (file:line) starts the error message."""
    problems = Problems(more_keys=True)
    try:
        record: T | None = build(cls, value, "", problems)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if record is not None:
        return record
    hint = " Question files come from `cmexam-tune preprocess`." if cls.__name__ == "Question" else ""
    keys = reprlib.repr(list(value))
    raise DataError(f"{where}: not a {cls.__name__}: {'; '.join(problems)} (found the keys {keys}).{hint}")


def read_one(path: str | Path, cls: type[T], what: str) -> T:
    """Return the record `cls` that a JSON file holds, which may hold more; errors as `read_json` and `from_object`."""
    return from_object(cls, read_json(path, what), str(path))


def read(path: str | Path, cls: type[T]) -> Iterator[T]:
    """Yield the records of a JSON-lines file one by one; ids must be distinct.

    Raises:
        UserError: the file is missing or empty.
        DataError: a line that is no such record, a duplicate id, or no record at all; names file and line.
    """
    key = "id" if "id" in {f.name for f in dataclasses.fields(cls)} else "question_id"  # type: ignore[arg-type]
    seen: dict[str, int] = {}
    for number, value in read_objects(path):
        record = from_object(cls, value, f"{path}:{number}")
        name = value[key]
        if name in seen:
            raise DataError(f"{path}:{number}: duplicate {key} {name!r}, first on line {seen[name]}.")
        seen[name] = number
        yield record
    if not seen:
        raise DataError(f"{path}: holds no records, only blank lines.")


def dumps(record: object) -> str:
    """Return a record (a dataclass or a mapping) as one line of JSON without its newline.

    Fields whose metadata is `schema.OMIT_IF_DEFAULT` are left out where they have their default.
    """
    cls: type = type(record)
    defaults = _omitted_defaults(cls).items()
    # Most records have no such field: they are encoded as they are, without a copy.
    if not defaults:
        return _encode(record)
    return _encode({name: value for name, value in vars(record).items() if (name, value) not in defaults})


@functools.cache
def _omitted_defaults(cls: type) -> dict[str, object]:
    """Return field -> default of those that are left out where they have it; looked up once for each class."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields if field.metadata.get("omit_if_default")}


def write(path: str | Path, records: Iterable[object], overwrite: bool = False) -> int:
    """Write records as JSON lines beside `path`, rename, and return how many there were.

    Raises:
        UserError: `path` exists and `overwrite` is false.
    """
    check_output(path, overwrite)
    count = 0
    with atomic_write(path) as handle:
        for record in records:
            handle.write(dumps(record) + "\n")
            count += 1
    return count
