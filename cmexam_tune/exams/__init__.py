"""Exams, one file each: the file's name is what `cmexam-tune preprocess` takes.

In: raw exam files. Out: questions one by one, and what happened to rows that were not simply kept. An exam is a map of
column names: a YAML file (`cmmlu.yaml`), or Python where there is more to say (`cmexam.py`, `cmb.py`). Start reading in
`_fields.py`, the map and the one loop over rows; `_tables.py` reads rows of any format, `_cells.py` what is in them,
`_sources.py` finds the files in folders, zips and on the hub. An exam whose questions are neither rows nor flat objects
has a `read()` of its own, see `Exam` below, here or in a module of the user's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from cmexam_tune.core import variants
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams._cells import Cells, Reporter, RowReport, UnreadableRow
from cmexam_tune.exams._fields import Fields, FieldsExam, from_yaml, parse_map
from cmexam_tune.exams._guess import guess
from cmexam_tune.exams._sources import RawFile, find_answers, find_sources, sort_out

__all__ = [
    "Cells",
    "Exam",
    "Fields",
    "FieldsExam",
    "RawFile",
    "Reporter",
    "RowReport",
    "UnreadableRow",
    "find_answers",
    "find_sources",
    "from_yaml",
    "load",
    "sort_out",
    "with_guesses",
]


class Exam(Protocol):
    """What a file in this folder provides."""

    def read(self, files: Sequence[Path], answers: Path | None = None, report: Reporter = ...) -> Iterator[Question]:
        """Yield the questions of raw files one by one; tell `report` about every row dropped or repaired."""


AUTO = "auto"
"""A map, or its first entry: columns are found by the names that they usually have."""


def with_guesses(columns: str, path: Path) -> str:
    """Return a map with `auto` replaced by the columns found in a file; fields that the map names are not guessed.

    Raises:
        DataError: the file's columns cannot be told for certain.
    """
    stated = columns.partition(",")[2]
    guessed = guess(path, [entry.partition("=")[0].strip() for entry in stated.split(",")])
    return ",".join(filter(None, (guessed, stated)))


def load(name: str, columns: str | None = None) -> tuple[Exam, Fields | None]:
    """Return an exam and its map of columns, None where the exam has none.

    Args:
        name: an exam of this folder, a module (`my_lab.exam`) or a YAML file of the user's own.
        columns: changes to the exam's map, such as `stem=题干,facet:科室=科室`; for `table` it is the whole map.

    Raises:
        ConfigError: an unknown exam or field, or a map for an exam that has none to amend.
    """
    exam = variants.load("exams", name)
    known = vars(exam).get("FIELDS", vars(exam).get("fields"))
    fields = known if isinstance(known, Fields) else None
    if columns is None:
        return cast(Exam, exam), fields
    if fields is None and name != "table":
        raise ConfigError(f"--map: {name} reads its files by itself and has no map to amend.")
    amended = FieldsExam(parse_map(columns, fields), vars(exam).get("difficulty"))
    return amended, amended.fields
