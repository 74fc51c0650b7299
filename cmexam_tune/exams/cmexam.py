"""CMExam: .csv (as released), .xlsx, .jsonl and .json, with English or Chinese column names.

The five annotations become facets under their released names. The authors' own tables have `正确率`, the share of
exam takers who were right, in place of the difficulty level: the level is then one of five equal bins over the range
of the whole file (as the authors compute it with pandas' `cut`), `1` the easiest; it takes one more pass.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import _tables
from cmexam_tune.exams._cells import Reporter
from cmexam_tune.exams._fields import Fields, FurtherFacets, read_questions
from cmexam_tune.exams._tables import Row

_RATE = "正确率"
_LEVEL = "Difficulty level"
_LEVELS = 5
FACETS = {
    "Disease Group": ("Disease Group", "Disease Groups", "ICD-11"),
    "Clinical Department": ("Clinical Department", "Clinical Departments", "Subject"),
    "Medical Discipline": ("Medical Discipline", "Medical Disciplines", "一级标签"),
    "Medical Competency": ("Medical Competency", "Medical Competencies", "Area of Competency", "Ability"),
    _LEVEL: (_LEVEL, "Difficulty", "Question Difficulty"),
}
"""Released name -> names of the same column elsewhere."""
FIELDS = Fields(
    stem=("Question", "标题", "题目", "题干"),
    options=("Options", "选项", "Option"),
    answer=("Answer", "答案"),
    explanation=("Explanation", "答案解析", "解析"),
    facets=FACETS,
    ignore=(_RATE,),
    source="https://github.com/williamliujl/CMExam",
    licence="Apache-2.0; academic research only",
)


def read(files: Sequence[Path], answers: Path | None = None, report: Reporter = lambda _: None) -> Iterator[Question]:
    """Yield the questions of CMExam files one by one, with ids `<file stem>:<row>`.

    Args:
        files: raw files.
        answers: refused, CMExam's answers are in its files.
        report: called with every row that is dropped or repaired.

    Raises:
        UserError: a file is missing or empty.
        DataError: wrong columns, encoding or format, or a file without a single readable question.
    """
    if answers is not None:
        raise DataError(f"{answers}: CMExam files hold their answers, --answers is for cmb. Leave it out.")
    yield from read_questions(FIELDS, files, None, report, difficulty)


def difficulty(path: Path, first: Row) -> FurtherFacets:
    """Return what gives a row its difficulty level from the share of exam takers who were right, where there is one."""
    if _RATE not in first or _LEVEL in first:
        return lambda _: {}
    span = _rate_range(path)

    def level(item: Mapping[str, object]) -> dict[str, str]:
        rate = _rate(item.get(_RATE))
        return {} if rate is None or span is None else {_LEVEL: str(_level(rate, *span))}

    return level


def _rate_range(path: Path) -> tuple[float, float] | None:
    """Return the lowest and the highest rate of a file, None where no row has one."""
    low, high = math.inf, -math.inf
    for _, item in _tables.read(path):
        if (rate := _rate(item.get(_RATE))) is not None:
            low, high = min(low, rate), max(high, rate)
    return (low, high) if low <= high else None


def _rate(value: object) -> float | None:
    text = "" if value is None else str(value).strip()
    try:
        number = float(text.rstrip("%％"))
    except ValueError:
        return None
    return None if math.isnan(number) else number


def _level(rate: float, low: float, high: float) -> int:
    """Return 1 (most people were right) to 5; bins are open below and closed above, as in pandas' `cut`."""
    edges = [low + (high - low) * number / _LEVELS for number in range(1, _LEVELS)]
    return _LEVELS - sum(rate > edge for edge in edges)
