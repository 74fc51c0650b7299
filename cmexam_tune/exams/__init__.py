"""Exams, one file each: the file's name is what `cmexam-tune preprocess` takes.

In: raw exam files. Out: questions one by one, and what happened to rows that were not simply kept. An exam is a map of
column names: a YAML file (`cmmlu.yaml`), or Python where there is more to say (`cmexam.py`, `cmb.py`). Start reading in
`_fields.py`, the map and the one loop over rows; `_tables.py` reads rows of any format, `_cells.py` what is in them,
`_sources.py` finds the files in folders, zips and on the hub.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from cmexam_tune.core.schema import Question
from cmexam_tune.exams._fields import FieldsExam, from_yaml
from cmexam_tune.exams._rows import Reporter, RowReport

__all__ = ["Exam", "FieldsExam", "Reporter", "RowReport", "from_yaml"]


class Exam(Protocol):
    """What a file in this folder provides."""

    def read(self, files: Sequence[Path], answers: Path | None = None, report: Reporter = ...) -> Iterator[Question]:
        """Yield the questions of raw files one by one; tell `report` about every row dropped or repaired."""
