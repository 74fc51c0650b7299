"""Workbooks of others (.xlsx): opened, or one `DataError`, whatever is wrong with them."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import DataError

# An .xlsx is a zip: a few kilobytes can unpack to more than any memory holds.
_LARGEST = 1 << 31
"""Bytes that a workbook may unpack to."""
_MOST_CELLS = 50_000_000
"""Of a sheet that is held in memory, from its first to its last, empty ones included."""
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, SyntaxError, ArithmeticError, AttributeError, EOFError, LookupError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)
"""What openpyxl lets through from damaged workbooks; broken XML is a SyntaxError, entity expansion a ValueError."""


@contextlib.contextmanager
def opened(path: Path, *, editable: bool = False) -> Iterator[Any]:
    """Yield an openpyxl workbook; what turns out to be broken while the block reads it is a `DataError` too.

    Args:
        path: the file.
        editable: whether the workbook can be changed and saved. Else its rows are read one by one, with the values of
            formulas in place of the formulas.

    Raises:
        DataError: no workbook, a damaged one, one that unpacks to more than 2 GiB, or (`editable`) one with a cell far
            away from the others; names the file.
    """
    import openpyxl

    try:
        with zipfile.ZipFile(path) as packed:
            if sum(part.file_size for part in packed.infolist()) > _LARGEST:
                raise DataError(f"{path}: unpacks to more than {_LARGEST >> 30} GiB. Save the sheet as CSV UTF-8.")
        try:
            book = openpyxl.load_workbook(path, read_only=not editable, data_only=not editable)
        except AttributeError:  # openpyxl cannot open sheets that are charts row by row
            book = openpyxl.load_workbook(path, data_only=not editable)
        _forget_sizes(path, book)
        try:
            yield book
        finally:
            book.close()
    except _BROKEN as error:
        what = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"{path}: not an .xlsx workbook that can be read ({what}). Save it again, or as CSV.") from None


def _forget_sizes(path: Path, book: Any) -> None:
    """Keep a stray cell from making a sheet of 1,048,576 rows and 16,384 columns, which takes hours and all memory."""
    from openpyxl.worksheet._read_only import ReadOnlyWorksheet

    for sheet in book.worksheets:
        if isinstance(sheet, ReadOnlyWorksheet):
            # What it claims may also be too small, which would hide rows. Without it rows end with their last cell.
            sheet.reset_dimensions()
        elif sheet.max_row * sheet.max_column > _MOST_CELLS:
            raise DataError(
                f"{path}: sheet {sheet.title!r} has a cell in row {sheet.max_row:,}, column {sheet.max_column:,}. "
                "Delete what is far from the table, or copy the table to a new sheet."
            )
