"""Exams, one file each: the file's name is what `cmexam-tune preprocess` takes.

In: raw exam files. Out: questions one by one, and what happened to rows that were not simply kept. Start reading in
`cmexam.py`; `_tables.py` reads rows of any format, `_cells.py` what is in them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cmexam_tune.core.schema import Question


@dataclass(frozen=True)
class RowReport:
    """What happened to one row that was not simply kept."""

    row: int
    """Number of the item in its file, from 1, header not counted."""
    action: Literal["dropped", "repaired"]
    reason: str
    """A short fixed phrase, counted in the preprocess report: `no answer`, `options in one line`, ..."""
    item: Mapping[str, str] | None = None
    """stem, answer and explanation of a dropped row as far as they could be read; the paper's statistics count it."""


class Exam(Protocol):
    """What a file in this folder provides."""

    def read(
        self, files: Sequence[Path], answers: Path | None = None, report: Callable[[RowReport], None] = ...
    ) -> Iterator[Question]:
        """Yield the questions of raw files one by one; tell `report` about every row dropped or repaired."""
