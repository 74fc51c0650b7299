"""Rows of raw exam files, one at a time: .csv, .tsv, .xlsx, .jsonl, .json (an array, or named arrays) and .parquet."""

import codecs
import csv
import json
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from cmexam_tune.core import workbooks
from cmexam_tune.core.documents import Broken, parse_json, unique
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.files import check_input
from cmexam_tune.core.jsonl import read_objects

Row = Mapping[str, object]
"""Column -> cell; what a cell may be depends on the format: a text, a number, a date, a list, an object, None."""
BROKEN = ""
"""Key of what is wrong with a row whose cells cannot be told apart: it has more or fewer of them than columns."""
SECTION = "#section"
"""Key of the sheet of a workbook with several, or of the name of the array that an item stands in."""
_MERGED_CELL = re.compile(rb'mergeCell [^>]*?ref="([A-Z]{1,3}[0-9]{1,7}:[A-Z]{1,3}[0-9]{1,7})"')
_LARGEST_FIELD = 1 << 30


class Merged(str):
    """Text that stands once for several rows of a sheet."""

    __slots__ = ()


def read(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, column -> value); a table's header is not counted.

    Raises:
        DataError: the file is not of its format or not UTF-8; names file and line.
        UserError: the file is missing or empty, or its suffix is none of the known ones.
    """
    check_input(path, "exam file")
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path}: the suffix {path.suffix!r} is unknown. Save the file as {', '.join(READERS)}.")
    return enumerate(READERS[path.suffix.lower()](path), 1)


def _csv(path: Path) -> Iterator[Row]:
    # Python's default refuses cells of more than 131,072 characters; the limit is one for the whole process.
    csv.field_size_limit(_LARGEST_FIELD)
    # Not utf-8-sig, whose decoder is written in Python: a tenth of the time of a large file.
    with path.open(encoding="utf-8", newline="") as handle:
        reader = csv.reader(handle, strict=True, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            if handle.read(1) != codecs.BOM_UTF8.decode():
                handle.seek(0)
            yield from _table(path, reader, exact=True)
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num}: broken CSV, {error}. A quote may be missing; quotes inside a cell are "
                "doubled."
            ) from None
        except UnicodeDecodeError:
            _find_not_utf8(path)


def _table(path: Path, rows: Iterable[Sequence[object]], *, exact: bool = False) -> Iterator[Row]:
    """Yield the rows below the header.

    Args:
        path: named in errors.
        rows: cells, the header first.
        exact: nothing but its place says which column a cell is of: a row with one more or less is `BROKEN`, even if
            the last one is empty, since the others may have moved.
    """
    header: list[str] | None = None
    width = 0
    for cells in rows:
        if not cells or (cells[0] is None and all(cell is None for cell in cells)):
            continue
        if header is None:
            header, width = _header(path, cells), len(cells)
            continue
        # A short row lacks its last columns; what a long one has too much is looked at below.
        row = dict(zip(header, cells, strict=False))
        count = len(cells)
        if count > len(header) and any(cell not in ("", None) for cell in cells[len(header) :]):
            row[BROKEN] = "more cells than columns"
        elif count != width and exact:
            row[BROKEN] = "more cells than columns" if count > width else "fewer cells than columns"
        yield row
    if header is None:
        raise DataError(f"{path}: holds no rows, only blank lines.")


def _header(path: Path, cells: Iterable[object]) -> list[str]:
    """Return the names of the columns up to the last that has one; a column without a name is called by its place."""
    names = ["" if cell is None else str(cell).strip() for cell in cells]
    while names and not names[-1]:
        names.pop()
    names = [name or f"#{place}" for place, name in enumerate(names, 1)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}:1: the column {twice[0]!r} is there twice. Rename or delete one of them.")
    return names


def _find_not_utf8(path: Path) -> NoReturn:
    offset = 0
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                _not_utf8(path, number, offset + error.start, raw[error.start])
            offset += len(raw)
    raise AssertionError(f"{path} is UTF-8 line by line, but not as a whole")


def _not_utf8(path: Path, line: int, offset: int, byte: int) -> NoReturn:
    raise DataError(
        f"{path}:{line}: not UTF-8, byte 0x{byte:02x} at offset {offset}. Files of Chinese Windows are mostly GBK: "
        f"convert with `iconv -f GB18030 -t UTF-8 {path.name} > new{path.suffix}`, or save as 'CSV UTF-8' in Excel."
    )


def _xlsx(path: Path) -> Iterator[Row]:
    with workbooks.opened(path) as book:
        empty = True
        for sheet in book.worksheets:
            cells = _cells(path, sheet)
            header = next((row for row in cells if any(cell is not None for cell in row)), None)
            if header is None:
                continue
            empty = False
            for row in _table(path, chain([header], cells)):
                yield {**row, SECTION: sheet.title} if len(book.worksheets) > 1 else row
        if empty:
            raise DataError(f"{path}: no sheet holds a row. Save the table as the first sheet, or as CSV UTF-8.")


def _cells(path: Path, sheet: Any) -> Iterator[list[Any]]:
    """Yield the rows of a sheet; a cell merged over several rows stands in each of them, as on the screen."""
    starting = defaultdict[int, list[tuple[int, int]]](list)
    for left, top, _, bottom in _merged(path, sheet):
        if top < bottom:
            starting[top].append((left - 1, bottom))
    standing: dict[int, tuple[int, Any]] = {}
    for number, values in enumerate(sheet.iter_rows(values_only=True), 1):
        row = [*values]
        for column, bottom in starting.get(number, ()):
            value = row[column] if column < len(row) else None
            standing[column] = bottom, Merged(value) if isinstance(value, str) else value
        for column, (bottom, value) in standing.items():
            if number <= bottom and value is not None:
                row += [None] * (column + 1 - len(row))
                row[column] = value
        yield row


def _merged(path: Path, sheet: Any) -> set[tuple[int, ...]]:
    """Return left, top, right and bottom, from 1, of a sheet's merged cells."""
    from openpyxl.utils.cell import range_boundaries
    from openpyxl.worksheet._read_only import ReadOnlyWorksheet

    if not isinstance(sheet, ReadOnlyWorksheet):
        return {merged.bounds for merged in sheet.merged_cells.ranges}
    # openpyxl does not read merged cells in read-only mode, so they are taken from the sheet's XML.
    ranges, before = set[bytes](), b""
    with zipfile.ZipFile(path) as packed, packed.open(sheet._worksheet_path) as part:
        while chunk := part.read(1 << 20):
            ranges.update(_MERGED_CELL.findall(before + chunk))
            # An element may be cut by the end of a chunk; one found twice is once in the set.
            before = chunk[-100:]
    return {range_boundaries(cells.decode()) for cells in ranges}


def _lines(path: Path) -> Iterator[Row]:
    return (value for _, value in read_objects(path))


def _json(path: Path) -> Iterator[Row]:
    """Yield the objects of an array, or of the arrays in an object (`{"train": [...]}`), or of JSON lines.

    The text is held, the objects are decoded one by one: CMB-train's 269,359 dictionaries at once take over 1 GB.
    """
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _not_utf8(path, raw.count(b"\n", 0, error.start) + 1, error.start, raw[error.start])
    del raw
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "[":
        return _array(path, text, start)
    sections = _sections(path, text) if text[start : start + 1] == "{" else None
    return _lines(path) if sections is None else iter(sections)


def _sections(path: Path, text: str) -> list[Row] | None:
    """Return the items of `{name: [item, ...], ...}`, each with its name; None where the text is something else."""
    try:
        value = parse_json(text, str(path), finite=False)
    except Broken:  # JSON lines, perhaps
        return None
    lists = value.values() if isinstance(value, dict) else []
    if not value or not all(isinstance(part, list) and all(isinstance(item, dict) for item in part) for part in lists):
        return None
    return [{**item, SECTION: name} for name, items in value.items() for item in items]


def _array(path: Path, text: str, start: int) -> Iterator[Row]:
    decoder = json.JSONDecoder(object_pairs_hook=unique)
    # `raw_decode` does not skip white space itself.
    space = json.decoder.WHITESPACE.match  # type: ignore[attr-defined]
    # Only an escape can make half of a surrogate pair: most files need no second encoding.
    halves = "\\ud" in text or "\\uD" in text
    position, sign = space(text, start + 1).end(), ","
    first = True
    while text[position : position + 1] != "]":
        if not first:
            sign = text[position : position + 1]
            if sign != ",":
                _broken(
                    path, text, position, "expecting ',' or ']' after an item" if sign else "the array does not end"
                )
            position = space(text, position + 1).end()
        first = False
        try:
            value, end = decoder.raw_decode(text, position)
            if halves:
                json.dumps(value, ensure_ascii=False).encode()
        except json.JSONDecodeError as error:
            _broken(path, text, error.pos, error.msg)
        except UnicodeEncodeError:
            _broken(path, text, position, r"half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        except (ValueError, RecursionError) as error:
            _broken(path, text, position, "nested too deep" if isinstance(error, RecursionError) else str(error))
        if not isinstance(value, dict):
            _broken(path, text, position, f"an object is needed for every item, found {type(value).__name__}")
        yield value
        position = space(text, end).end()
    if text[position + 1 :].strip():
        _broken(path, text, position + 1, "text after the end of the array")


def _broken(path: Path, text: str, position: int, message: str) -> NoReturn:
    line, column = text.count(chr(10), 0, position) + 1, position - text.rfind("\n", 0, position)
    message = message.removesuffix(" starting at")
    raise DataError(f"{path}:{line}: broken JSON, {message} at column {column}.")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if twice := [name for name, count in Counter(file.schema_arrow.names).items() if count > 1]:
                raise DataError(f"{path}: the column {twice[0]!r} is there twice. Rename or delete one of them.")
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:  # bad text, year 10,000
        what = str(error).splitlines()[0][:200]
        raise DataError(f"{path}: not a parquet file that can be read ({what}). Download it again.") from None


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".xlsx": _xlsx,
    ".jsonl": _lines,
    ".json": _json,
    ".parquet": _parquet,
}
"""Suffix -> reader."""
