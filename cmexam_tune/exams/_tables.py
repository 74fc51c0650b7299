"""Rows of raw exam files, one at a time: .csv, .xlsx, .jsonl and .json (an array of objects)."""

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.files import check_input
from cmexam_tune.core.jsonl import read_objects

Row = Mapping[str, Any]
EXTRA_CELLS = ""
"""Key of a row's cells beyond the last column: the row is broken."""
_LARGEST_FIELD = 1 << 30
_CHUNK = 1 << 16
_ENDS_EARLY = 16
"""A JSON error this close to the end of the buffer may only mean that more must be read."""


def read(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, column -> value); a table's header is not counted.

    Raises:
        DataError: the file is not of its format or not UTF-8; names file and line.
        UserError: the file is missing or empty, or its suffix is none of the known ones.
    """
    check_input(path, "exam file")
    readers = {".csv": _csv, ".xlsx": _xlsx, ".jsonl": _lines, ".json": _json}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: the suffix {path.suffix!r} is unknown. Save the file as {', '.join(readers)}.")
    return enumerate(readers[path.suffix.lower()](path), 1)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LARGEST_FIELD)
    reader = csv.reader(_text_lines(path), strict=True)
    try:
        yield from _table(path, reader)
    except csv.Error as error:
        raise DataError(
            f"{path}:{reader.line_num}: broken CSV, {error}. A quote may be missing; quotes inside a cell are doubled."
        ) from None


def _table(path: Path, rows: Iterable[list[Any]]) -> Iterator[Row]:
    header: list[str] | None = None
    for cells in rows:
        if not cells or all(cell is None for cell in cells):
            continue
        if header is None:
            header = ["" if cell is None else str(cell).strip() for cell in cells]
            if twice := sorted({name for name in header if name and header.count(name) > 1}):
                raise DataError(f"{path}:1: the column {twice[0]!r} is there twice. Rename or delete one of them.")
            continue
        row = dict(zip(header, cells, strict=False))
        row.pop("", None)
        if any(cell not in ("", None) for cell in cells[len(header) :]):
            row[EXTRA_CELLS] = cells[len(header) :]
        yield row
    if header is None:
        raise DataError(f"{path}: holds no rows, only blank lines.")


def _text_lines(path: Path) -> Iterator[str]:
    offset = 0
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                _not_utf8(path, number, offset + error.start, raw[error.start])
            offset += len(raw)


def _not_utf8(path: Path, line: int, offset: int, byte: int) -> NoReturn:
    raise DataError(
        f"{path}:{line}: not UTF-8, byte 0x{byte:02x} at offset {offset}. Files of Chinese Windows are mostly GBK: "
        f"convert with `iconv -f GB18030 -t UTF-8 {path.name} > new{path.suffix}`, or save as 'CSV UTF-8' in Excel."
    )


def _xlsx(path: Path) -> Iterator[Row]:
    import zipfile

    import openpyxl
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except (zipfile.BadZipFile, InvalidFileException, KeyError) as error:
        raise DataError(f"{path}: not an .xlsx workbook ({error}). Save it again without a password.") from None
    try:
        yield from _table(path, ([*cells] for cells in book.worksheets[0].iter_rows(values_only=True)))
    finally:
        book.close()


def _lines(path: Path) -> Iterator[Row]:
    return (value for _, value in read_objects(path))


def _json(path: Path) -> Iterator[Row]:
    stream = _JsonArray(path)
    return stream.objects() if stream.is_array else _lines(path)


class _JsonArray:
    """The objects of a JSON array, decoded from a buffer that holds only the current one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chunks = _chunks(path)
        self.buffer = ""
        self.line = 1
        self.is_array = self._peek() == "["

    def objects(self) -> Iterator[Row]:
        """Yield every object of the array."""
        self._drop(1)
        first = True
        while (sign := self._peek()) != "]":
            if not first:
                if sign != ",":
                    self._broken("Expecting ',' or ']' after an item" if sign else "the array does not end", 0)
                self._drop(1)
                self._peek()
            first = False
            yield self._object()
        self._drop(1)
        if self._peek():
            self._broken("text after the end of the array", 0)

    def _object(self) -> Row:
        decoder, size = json.JSONDecoder(), _CHUNK
        while True:
            try:
                value, end = decoder.raw_decode(self.buffer)
                break
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated") or error.pos > len(self.buffer) - _ENDS_EARLY
                if not (unfinished and self._more(size)):
                    self._broken(error.msg, error.pos)
                size *= 2
        if not isinstance(value, dict):
            self._broken(f"an object is needed for every item, found {type(value).__name__}", 0)
        self._drop(end)
        return value

    def _more(self, size: int = _CHUNK) -> bool:
        """Add at least `size` characters to the buffer if the file has them; whether it had any."""
        parts, got = [self.buffer], 0
        for chunk in self.chunks:
            parts.append(chunk)
            got += len(chunk)
            if got >= size:
                break
        self.buffer = "".join(parts)
        return got > 0

    def _peek(self) -> str:
        """Drop white space and return the next character, "" at the end of the file."""
        while True:
            self._drop(len(self.buffer) - len(self.buffer.lstrip()))
            if self.buffer or not self._more():
                return self.buffer[:1]

    def _drop(self, count: int) -> None:
        self.line += self.buffer.count("\n", 0, count)
        self.buffer = self.buffer[count:]

    def _broken(self, message: str, position: int) -> NoReturn:
        line = self.line + self.buffer.count("\n", 0, position)
        raise DataError(f"{self.path}:{line}: broken JSON, {message}.")


def _chunks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line, offset = 1, 0
    with path.open("rb") as handle:
        while raw := handle.read(_CHUNK):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(raw)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                _not_utf8(path, line, offset - pending + error.start, error.object[error.start])
            line += text.count("\n")
            offset += len(raw)
            yield text
    if decoder.getstate()[0]:
        _not_utf8(path, line, offset - 1, decoder.getstate()[0][0])
