"""Workbooks in which people review what programs propose.

They belong to the people: columns may be moved and added, and a later run adds its rows and removes none.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmexam_tune.core import files, workbooks
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question

CHANGED = "changed"
"""The last column: what a row held when it was reviewed."""


@dataclass(frozen=True)
class SheetColumns:
    """The columns of a workbook."""

    program: str
    """Who writes it, for messages."""
    keys: tuple[str, ...]
    """Columns that tell rows apart."""
    before: tuple[str, ...]
    """Columns that the program fills, the keys among them, in front of those that depend on the run."""
    after: tuple[str, ...]
    """Columns that the program fills behind those."""
    review: tuple[str, ...]
    """Columns that people fill."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that every run has."""
        return (*self.before, *self.after, *self.review, CHANGED)

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns by which the sheet is found among others in the workbook."""
        return (*self.keys, *self.after[:1], self.review[0])


QUESTION = ("question_id", "stem", "options")
"""Columns by which people recognise a question."""


def question_cells(question: Question) -> dict[str, str]:
    """Return column -> text of `QUESTION`."""
    return dict(zip(QUESTION, (question.id, question.stem, question.option_lines), strict=True))


_MAX_CELL = 32_767
"""Characters that a cell can hold."""
_YELLOW = "FFFFEB9C"


class ReviewSheet:
    """Rows of proposals, found by their keys, and columns by their headings, wherever people have moved them."""

    def __init__(self, layout: SheetColumns, path: str | Path | None = None) -> None:
        """Read the workbook at `path`; None: start a new one.

        Raises:
            DataError: no such workbook, a column or a row that stands twice; names file and row.
        """
        import openpyxl

        self.layout, self.changed = layout, 0
        """How many rows hold something else than before this run."""
        self.touched = path is None
        """Whether anything in the workbook is new."""
        if path is None:
            self.book = openpyxl.Workbook()
            self.sheet = self.book.active
            self.sheet.title = "review"
            self.sheet.freeze_panes = "A2"
            self.columns: dict[str, int] = {}
        else:
            with workbooks.opened(Path(path), editable=True) as self.book:
                self.sheet, self.columns = _find(self.book, layout, path)
        self.rows = self._rows(path)

    def _rows(self, path: str | Path | None) -> dict[tuple[str, ...], int]:
        """Return keys -> row number."""
        rows: dict[tuple[str, ...], int] = {}
        for row in range(2, self.sheet.max_row + 1):
            key = tuple(self.text(row, name) for name in self.layout.keys)
            if any(key) and (first := rows.setdefault(key, row)) != row:
                raise DataError(f"{path}: row {row}: {', '.join(key)} is on row {first} already. Delete one of them.")
        return rows

    def text(self, row: int, name: str) -> str:
        """Return what a cell says."""
        return _text(self.sheet.cell(row, self.columns[name]).value) if name in self.columns else ""

    def _write(self, row: int, name: str, text: str) -> None:
        cell = self.sheet.cell(row, self.columns[name])
        cell.value = text or None
        if text:
            cell.data_type = "s"  # a text that starts with = is no formula
        self.touched = True

    def update(self, proposals: Sequence[Mapping[str, str]], models: Sequence[str] = ()) -> None:
        """Put the proposals in; a row that held something else is flagged in `changed`, with what that was.

        Args:
            proposals: Column -> text of each row.
            models: Columns that only this run has.
        """
        wanted = (*self.layout.before, *models, *self.layout.after, *self.layout.review, CHANGED)
        added = [name for name in wanted if name not in self.columns]
        for column, name in enumerate(added, max(self.columns.values(), default=0) + 1):
            self.columns[name] = column
            self._write(1, name, name)
        unasked = dict(self.rows)
        last = self.sheet.max_row  # below notes without a question, too
        for proposal in proposals:
            cells = {name: _clean(text) for name, text in proposal.items()}
            row = unasked.pop(tuple(cells[name] for name in self.layout.keys), None)
            if row is None:
                last += 1
                for name, text in cells.items():
                    self._write(last, name, text)
            else:
                self._replace(row, {name: text for name, text in cells.items() if name not in added})
                for name in (name for name in added if name in cells):
                    self._write(row, name, cells[name])
        for row in unasked.values():
            self._flag(row, ["the questions do not hold this one any more"])

    def _replace(self, row: int, cells: dict[str, str]) -> None:
        reviewed, changes = any(self.text(row, name) for name in self.layout.review), []
        for name, text in cells.items():
            # Spreadsheet programs change line ends and spaces at the ends of texts.
            if (before := self.text(row, name)).split() != text.split():
                self._write(row, name, text)
                if before or reviewed:
                    changes.append(f"{name} was {before or 'empty'}")
        if changes:
            self._flag(row, changes)

    def _flag(self, row: int, changes: Sequence[str]) -> None:
        from openpyxl.styles import PatternFill

        before = self.text(row, CHANGED)
        if new := [change for change in changes if change not in before]:
            self._write(row, CHANGED, _clean("\n".join(filter(None, [before, *new]))))
            self.sheet.cell(row, self.columns[CHANGED]).fill = PatternFill("solid", fgColor=_YELLOW)
            self.changed += 1

    def write(self, path: str | Path) -> None:
        """Write the workbook, unless nothing in it is new."""
        if not self.touched:
            return
        buffer = io.BytesIO()
        self.book.save(buffer)
        with files.atomic_write(path, binary=True) as handle:
            handle.write(buffer.getvalue())


def _find(book: Any, layout: SheetColumns, path: str | Path) -> tuple[Any, dict[str, int]]:
    """Return the sheet with the reviews, and heading -> column number."""
    for sheet in book.worksheets:
        headings = [_text(cell.value) for cell in sheet[1]]
        if {*layout.needed} <= {*headings}:
            if double := [name for name in headings if name and headings.count(name) > 1]:
                raise DataError(f"{path}: the column {double[0]!r} is there twice. Rename or delete one of them.")
            return sheet, {name: column for column, name in enumerate(headings, 1) if name}
    *names, last = layout.needed
    raise DataError(
        f"{path}: exists and was not written by {layout.program}: no sheet has the columns {', '.join(names)} and "
        f"{last}."
    )


def _text(value: object) -> str:
    """Return what a cell says; spreadsheet programs keep every number as a float."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def _clean(text: str) -> str:
    """Return a text as a cell can hold it."""
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    return str(ILLEGAL_CHARACTERS_RE.sub("", text))[:_MAX_CELL]
