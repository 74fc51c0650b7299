"""What happened to the rows of a raw file: the row's number, what was done, and why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RowReport:
    """What happened to one row that was not simply kept."""

    row: int
    """Number of the item in its file, from 1, header not counted."""
    action: Literal["dropped", "repaired", "unread"]
    """`unread`: the file has a column that nothing reads; it is reported once, with its first row."""
    reason: str
    """A short fixed phrase, counted in the preprocess report: `no answer`, `options in one line`, ...; for `unread`
    the column's name."""
    item: Mapping[str, str] | None = None
    """stem, answer and explanation of a dropped row as far as they could be read; the paper's statistics count it."""


Reporter = Callable[[RowReport], None]
