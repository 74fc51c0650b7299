"""Which column of a file is which field of a map, found once for each set of columns."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import MAX_OPTIONS

FILE = "#file"
"""The name of the file as a column."""
_RANGE = re.compile(r"(.*?)\.\.(.*)")


SIGNS = {
    "cmb": ("exam_type", "exam_class", "exam_subject"),
    "cmexam": ("Disease Group", "Clinical Department", "Medical Discipline", "Area of Competency", "正确率"),
}
"""Columns that only one exam has: nothing of another exam reads them."""
LAYOUTS = {"cmexam": ("question", "options", "answer"), "cmb": ("question", "option"), "clin": ("QA_pairs",)}


class Found:
    """The columns of the rows that have the same columns."""

    def __init__(self, path: Path, names: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> None:
        self._file = path.stem
        self._plain = {_plain(name): name for name in reversed(names)}
        self._names = [name for name in names if name[:1] != "#"]
        self._columns: dict[str, tuple[str, ...]] = {}
        for field, given in wanted.items():
            columns = next(filter(None, map(self._resolve, given)), ())
            if columns:
                self._columns[field] = columns
        self.facets = [(f.removeprefix("facet:"), c[0]) for f, c in self._columns.items() if f.startswith("facet:")]
        self._options = self._columns.get("options", ())
        self.column: dict[str, Any] = {field: self._columns.get(field, (None,))[0] for field in wanted}
        """The first column of each field, None where the file has none: `item.get(None)` is None."""
        self.used = {column for columns in self._columns.values() for column in columns}

    def _resolve(self, name: str) -> tuple[str, ...]:
        if name == FILE:
            return (FILE,)
        if spread := _RANGE.fullmatch(name):
            return self._spread(spread[1].strip(), spread[2].strip())
        if name[:1] == "#" and name[1:].lstrip("-").isdigit():
            number = int(name[1:])
            inside = 0 < abs(number) <= len(self._names)
            return (self._names[number - 1 if number > 0 else number],) if inside else ()
        column = name if name in self._names else self._plain.get(_plain(name))
        return (column,) if column is not None else ()

    def _spread(self, first: str, last: str) -> tuple[str, ...]:
        if first[:1] == last[:1] == "#":
            ends = [self._resolve(first), self._resolve(last)]
            if not all(ends):
                return ()
            low, high = (self._names.index(end[0]) for end in ends)
            return tuple(self._names[low : high + 1])
        letters = [chr(code) for code in range(ord(first[-1:] or "A"), ord(last[-1:] or "A") + 1)]
        columns = [found[0] for letter in letters[:MAX_OPTIONS] if (found := self._resolve(first[:-1] + letter))]
        return tuple(columns) if len(columns) > 1 else ()

    def has(self, field: str) -> bool:
        """Whether there is a column for the field."""
        return self.column[field] is not None

    def value(self, column: str, item: Mapping[str, Any]) -> Any:
        """Return the cell of a column."""
        return self._file if column == FILE else item.get(column)

    def one(self, field: str, item: Mapping[str, Any]) -> Any:
        """Return the cell of a field, None where the file has no such column."""
        return item.get(self.column[field])

    def options(self, item: Mapping[str, Any]) -> Any:
        """Return the cell with all options, or letter -> cell where each has its own column."""
        if len(self._options) < 2:
            return self.one("options", item)
        cells = {}
        for number, column in enumerate(self._options):
            letter, value = chr(ord("A") + number), item.get(column)
            text = "" if value is None or value != value else str(value).strip()
            if text[:1] in (letter, chr(ord("Ａ") + number)) and text[1:2] in tuple(".．、:：)）"):
                text = text[2:].strip()
            if text:
                cells[letter] = text
        return cells


class Columns:
    """The columns of one file, whose rows (JSON) may differ in them."""

    def __init__(self, path: Path, wanted: Mapping[str, Sequence[str]], ignore: Sequence[str]) -> None:
        self.path, self.wanted = path, wanted
        self._ignore = {_plain(name) for name in ignore}
        self._known: dict[tuple[str, ...], Found] = {}
        self._seen: set[str] = set()
        self._unread: list[str] = []

    def of(self, item: Mapping[str, Any]) -> Found:
        """Return which columns of this row are which field."""
        key = tuple(item)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = Found(self.path, key, self.wanted)
            for name in key:
                unread = name not in found.used and name[:1] not in ("", "#") and _plain(name) not in self._ignore
                if unread and name not in self._seen:
                    self._seen.add(name)
                    self._unread.append(name)
        return found

    def unread_now(self) -> list[str]:
        """Return the columns that nothing reads and that were not returned before."""
        names, self._unread = self._unread, []
        return names

    def check(self, item: Mapping[str, Any], needed: Sequence[str]) -> None:
        """Refuse a file that lacks what is needed.

        Raises:
            DataError: it does; the message lists the columns found.
        """
        found = self.of(item)
        for exam, signs in SIGNS.items():
            if strange := [name for name in signs if name in self._unread]:
                maps = ",".join(f"facet:{name}={name}" for name in strange)
                raise DataError(
                    f"{self.path}: has {', '.join(strange)}, which are columns of {exam.upper()}. Read it with "
                    f"`preprocess {exam}`, or add --map {maps} if it is none."
                )
        if missing := [field for field in needed if not found.has(field)]:
            lacking = "; ".join(f"{field} ({' or '.join(self.wanted[field]) or 'not mapped'})" for field in missing)
            answers = {"id", "answer"} <= set(item) and not found.has("stem")
            hint = " This looks like a file of answers: give it as --answers." if answers else _other(item)
            raise DataError(
                f"{self.path}: no column for {lacking}. Found: {', '.join(map(str, item))}. Name it with --map, for "
                f"example --map {missing[0]}=COLUMN.{hint}"
            )


def _other(item: Mapping[str, Any]) -> str:
    """Say which exam's layout the columns of a row are."""
    names = {_plain(name) for name in item}
    for exam, layout in LAYOUTS.items():
        if names >= {_plain(name) for name in layout}:
            known = "CMB-Clin cases: no multiple-choice questions; `preprocess cmb` reads them"
            return f" This looks like {known if exam == 'clin' else f'{exam}: try `preprocess {exam}`'}."
    return ""


def _plain(name: object) -> str:
    return re.sub(r"[\s_-]", "", str(name)).lower()
