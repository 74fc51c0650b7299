"""Which column of a file is which field of a map, found once for each set of columns."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import MAX_OPTIONS
from cmexam_tune.exams._tables import BROKEN, SECTION

FILE = "#file"
"""The name of the file as a column."""
_RANGE = re.compile(r"(.*?)\.\.(.*)")
# Beside what hands type differently: marks without width, which Excel and web pages leave in headers.
_IGNORED = re.compile(r"[\s_\u200b-\u200d\ufeff-]")

SIGNS = {
    "cmb": ("exam_type", "exam_class", "exam_subject"),
    "cmexam": ("Disease Group", "Clinical Department", "Medical Discipline", "Area of Competency", "正确率"),
}
"""Columns that only one exam has: nothing of another exam reads them."""
LAYOUTS = {"cmexam": ("question", "options", "answer"), "cmb": ("question", "option"), "clin": ("QA_pairs",)}


class ResolvedColumns:
    """Which field of the map each column holds, for all rows that have the same columns."""

    def __init__(
        self, path: Path, names: Sequence[str], wanted: Mapping[str, Sequence[str]], *, header: bool = True
    ) -> None:
        """Resolve each wanted field.

        Args:
            path: names the file in messages, and is the value of `#file`.
            names: the columns, in their order.
            wanted: field -> names that its column may have, the first that is there wins.
            header: whether the rows stand under a common header. No column of a range of options may then be missing
                in its middle, while JSON objects leave out keys that are empty.
        """
        self._file, self._header = path.stem, header
        self._all, self._alike = names, dict[str, list[str]]()
        for name in names:
            self._alike.setdefault(plain(name), []).append(name)
        self._places = [name for name in names if name not in (SECTION, BROKEN)]
        self.problem = ""
        """Why no row with these columns can be read for certain, empty where all is well."""
        self._columns: dict[str, tuple[str | None, ...]] = {}
        for field, aliases in wanted.items():
            # Resolved one after the other: an alias that comes later may be ambiguous and need not be looked at.
            columns = next(filter(None, map(self._resolve, aliases)), ())
            if columns:
                self._columns[field] = columns
        self.column: dict[str, Any] = {
            field: next(filter(None, self._columns.get(field, ())), None) for field in wanted
        }
        """The first column of each field, None where the file has none: `item.get(None)` is None."""
        self.facets = [(f.removeprefix("facet:"), self.column[f]) for f in self._columns if f.startswith("facet:")]
        spread = enumerate(self._columns.get("options", ()), ord("A"))
        self.letters = {chr(code): column for code, column in spread if column is not None}
        """Letter -> column of that option; a single column holds all options."""
        self.used = {column for columns in self._columns.values() for column in columns}
        self._check_shared()

    def _doubt(self, problem: str) -> None:
        """Record why the columns cannot be told for certain, unless an earlier reason is known."""
        self.problem = self.problem or problem

    def _check_shared(self) -> None:
        """Doubt a column that two of stem, answer and options name: one of the two is a slip of the map."""
        fields = dict[str | None, str]()
        for field in ("stem", "answer", "options"):
            for column in filter(None, self._columns.get(field, ())):
                if fields.setdefault(column, field) != field:
                    self._doubt(f"the column {column!r} would be read as {fields[column]} and as {field}")

    def _resolve(self, name: str) -> tuple[str | None, ...]:
        if name == FILE:
            return (FILE,)
        if spread := _RANGE.fullmatch(name):
            return self._spread(spread[1].strip(), spread[2].strip())
        if name[:1] == "#" and name[1:].lstrip("-").isdigit():
            number = int(name[1:])
            inside = 0 < abs(number) <= len(self._places)
            return (self._places[number - 1 if number > 0 else number],) if inside else ()
        if name in self._all:
            return (name,)
        alike = self._alike.get(plain(name), [])
        if len(alike) > 1:
            self._doubt(f"{name!r} may be any of the columns {', '.join(map(repr, alike))}")
        return tuple(alike[:1])

    def _spread(self, first: str, last: str) -> tuple[str | None, ...]:
        """Return the columns of a range, that of option A first; None before the first letter that is named."""
        if first[:1] == last[:1] == "#":
            ends = [self._resolve(first), self._resolve(last)]
            if not all(ends):
                return ()
            low, high = (self._places.index(str(end[0])) for end in ends)
            return tuple(self._places[low : high + 1])
        prefix, start, end = first[:-1], *(unicodedata.normalize("NFKC", sign[-1:]) for sign in (first, last))
        if len(start + end) != 2 or (last[:-1] and plain(last[:-1]) != plain(prefix)):
            return ()
        if start.islower() != end.islower():
            start, end = start.upper(), end.upper()
        names = [f"{prefix}{chr(code)}" for code in range(ord(start), ord(end) + 1)][:MAX_OPTIONS]
        columns = [next(iter(self._resolve(name)), None) for name in names]
        # Questions have four options or five: the last columns of a range may be missing, those before may not.
        while columns and columns[-1] is None:
            columns.pop()
        if sum(column is not None for column in columns) < 2:
            return ()
        absent = [name for name, column in zip(names, columns, strict=False) if column is None]
        if len({_bare(column)[-1:].islower() for column in columns if column is not None}) > 1:
            self._doubt(f"the columns {', '.join(filter(None, columns))} of {first}..{last} differ in case")
        if absent and self._header:
            self._doubt(f"no column for {', '.join(absent)} of {first}..{last}, while later options have one")
        before = ord(start.upper()) - ord("A") if start.isalpha() else 0
        return (*[None] * before, *(column or name for name, column in zip(names, columns, strict=False)))

    def has(self, field: str) -> bool:
        """Whether there is a column for the field."""
        return self.column[field] is not None

    def value(self, column: str, item: Mapping[str, object]) -> object:
        """Return the cell of a column."""
        return self._file if column == FILE else item.get(column)

    def cell(self, field: str, item: Mapping[str, object]) -> object:
        """Return the cell of a field, None where the file has no such column."""
        return item.get(self.column[field])


class Columns:
    """The columns of one file, whose rows (JSON) may differ in them."""

    def __init__(
        self, path: Path, wanted: Mapping[str, Sequence[str]], ignore: Sequence[str], *, header: bool = True
    ) -> None:
        self.path, self.wanted, self.header = path, wanted, header
        self._ignore = {plain(name) for name in ignore}
        self._known: dict[tuple[str, ...], ResolvedColumns] = {}
        self._seen: set[str] = set()
        self._unread: list[str] = []

    def of(self, item: Mapping[str, object]) -> ResolvedColumns:
        """Return which columns of this row are which field."""
        # Resolved once for each set of columns: a table has one, JSON objects that leave out empty keys a few.
        key = tuple(item)
        if (resolved := self._known.get(key)) is None:
            resolved = self._known[key] = ResolvedColumns(self.path, key, self.wanted, header=self.header)
            for name in key:
                unread = name not in resolved.used and name[:1] not in ("", "#") and plain(name) not in self._ignore
                if unread and name not in self._seen:
                    self._seen.add(name)
                    self._unread.append(name)
        return resolved

    def unread_now(self) -> list[str]:
        """Return the columns that nothing reads and that were not returned before."""
        names, self._unread = self._unread, []
        return names

    def check(self, item: Mapping[str, object], needed: Sequence[str]) -> None:
        """Refuse a file that lacks a needed column, or has columns of another exam.

        Raises:
            DataError: one of the two; the message lists the columns found and what to do.
        """
        resolved = self.of(item)
        for exam, signs in SIGNS.items():
            if strange := [name for name in signs if name in self._unread]:
                maps = ",".join(f"facet:{name}={name}" for name in strange)
                raise DataError(
                    f"{self.path}: has {', '.join(strange)}, which are columns of {exam.upper()}. Read it with "
                    f"`preprocess {exam}`, or add --map {maps} if it is none."
                )
        if missing := [field for field in needed if not resolved.has(field)]:
            lacking = "; ".join(f"{field} ({' or '.join(self.wanted[field]) or 'not mapped'})" for field in missing)
            answers = {"id", "answer"} <= set(item) and not resolved.has("stem")
            hint = " This looks like a file of answers: give it as --answers." if answers else _hint_of_layout(item)
            raise DataError(
                f"{self.path}: no column for {lacking}. Found: {', '.join(map(str, item))}. Name it with --map, for "
                f"example --map {missing[0]}=COLUMN.{hint}"
            )


def _hint_of_layout(item: Mapping[str, object]) -> str:
    """Return a hint for the end of a message where a row has the layout of a known exam, else ""."""
    names = {plain(name) for name in item}
    for exam, layout in LAYOUTS.items():
        if names >= {plain(name) for name in layout}:
            known = "CMB-Clin cases: no multiple-choice questions; `preprocess cmb` reads them"
            return f" This looks like {known if exam == 'clin' else f'{exam}: try `preprocess {exam}`'}."
    return ""


def _bare(name: object) -> str:
    return _IGNORED.sub("", unicodedata.normalize("NFKC", str(name)))


def plain(name: object) -> str:
    """Return what names are compared by: full-width letters, case, spaces, `_` and `-` make no difference."""
    return _bare(name).lower()
