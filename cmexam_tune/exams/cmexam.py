"""CMExam: .csv (as released), .xlsx, .jsonl and .json, with English or Chinese column names.

The five annotations become facets under their released names. The authors' own tables have `正确率`, the share of
exam takers who were right, in place of the difficulty level: the level is then one of five equal bins over the range
of the whole file (as the authors compute it with pandas' `cut`), `1` the easiest; it takes one more pass.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import RowReport, _tables
from cmexam_tune.exams._cells import NO_ANSWER, Cells, Unreadable, check_answer, tell

_RATE = "正确率"
_LEVELS = 5
_FIELDS = {
    "stem": ("Question", "标题", "题目", "题干"),
    "options": ("Options", "选项", "Option"),
    "answer": ("Answer", "答案"),
    "explanation": ("Explanation", "答案解析", "解析"),
}
_OPTIONAL = frozenset({"explanation"})
FACETS = {
    "Disease Group": ("Disease Group", "Disease Groups", "ICD-11"),
    "Clinical Department": ("Clinical Department", "Clinical Departments", "Subject"),
    "Medical Discipline": ("Medical Discipline", "Medical Disciplines", "一级标签"),
    "Medical Competency": ("Medical Competency", "Medical Competencies", "Area of Competency", "Ability"),
    "Difficulty level": ("Difficulty level", "Difficulty", "Question Difficulty"),
}
"""Released name -> names of the same column elsewhere; case, spaces, `_` and `-` do not matter."""


def read(
    files: Sequence[Path], answers: Path | None = None, report: Callable[[RowReport], None] = lambda _: None
) -> Iterator[Question]:
    """Yield the questions of CMExam files one by one, with ids `<file stem>:<row>`.

    Args:
        files: raw files.
        answers: refused, CMExam's answers are in its files.
        report: told about every row that is dropped or repaired.

    Raises:
        UserError: a file is missing or empty.
        DataError: wrong columns, encoding or format, or a file without a single readable question.
    """
    if answers is not None:
        raise DataError(f"{answers}: CMExam files hold their answers, --answers is for cmb. Leave it out.")
    for path in files:
        yield from _read_file(Path(path), report)


def _read_file(path: Path, report: Callable[[RowReport], None]) -> Iterator[Question]:
    kept, reasons = 0, dict[str, int]()
    names: dict[str, str] = {}
    levels: tuple[float, float] | None = None
    for row, cells in _tables.read(path):
        if not names:
            names = _columns(path, list(cells))
            levels = _rate_range(path) if _RATE in cells and "Difficulty level" not in names else None
        reader = Cells()
        try:
            question = _question(f"{path.stem}:{row}", reader, cells, names, levels)
        except Unreadable as error:
            reason = str(error)
            reasons[reason] = reasons.get(reason, 0) + 1
            report(RowReport(row, "dropped", reason, _item(cells, names)))
            continue
        tell(report, row, reader.repairs)
        kept += 1
        yield question
    if not kept:
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        raise DataError(f"{path}: no question can be read{f' ({counts})' if counts else ', it holds no rows'}.")


def _question(
    name: str,
    reader: Cells,
    cells: _tables.Row,
    names: Mapping[str, str],
    levels: tuple[float, float] | None,
) -> Question:
    if _tables.EXTRA_CELLS in cells:
        raise Unreadable("more cells than columns")
    stem = reader.stem(cells.get(names["stem"]))
    answer = reader.answer(cells.get(names["answer"]))
    if answer is None:
        raise Unreadable(NO_ANSWER)
    options = reader.options(cells.get(names["options"]))
    check_answer(answer, options)
    facets = {facet: text for facet in FACETS if facet in names and (text := reader.text(cells.get(names[facet])))}
    rate = _rate(cells.get(_RATE)) if levels else None
    if levels and rate is not None:
        facets["Difficulty level"] = str(_level(rate, *levels))
    explanation = reader.text(cells.get(names["explanation"])) if "explanation" in names else None
    return Question(name, stem, options, answer, explanation, None, facets)


def _item(cells: _tables.Row, names: Mapping[str, str]) -> dict[str, str]:
    reader = Cells()
    return {
        field: reader.text(cells.get(names[field])) or "" if field in names else ""
        for field in ("stem", "answer", "explanation")
    }


def _columns(path: Path, found: Sequence[str]) -> dict[str, str]:
    """Return field or facet -> column of this file."""
    plain = {_plain(name): name for name in found}
    known = {**_FIELDS, **FACETS}
    names = {
        field: plain[_plain(name)]
        for field, given in known.items()
        for name in reversed(given)
        if _plain(name) in plain
    }
    missing = [" or ".join(_FIELDS[field][:2]) for field in _FIELDS if field not in names and field not in _OPTIONAL]
    if missing:
        raise DataError(
            f"{path}: not a CMExam file, column {', '.join(missing)} missing. Found: {', '.join(found)}. "
            "Needed: Question, Options, Answer (标题, 选项, 答案), Explanation (答案解析), commas between."
        )
    return names


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _rate_range(path: Path) -> tuple[float, float] | None:
    rates = (_rate(cells.get(_RATE)) for _, cells in _tables.read(path))
    low, high = float("inf"), float("-inf")
    for rate in rates:
        if rate is not None:
            low, high = min(low, rate), max(high, rate)
    return (low, high) if low <= high else None


def _rate(value: object) -> float | None:
    text = "" if value is None else str(value).strip()
    try:
        number = float(text.rstrip("%％"))
    except ValueError:
        return None
    return number if number == number else None


def _level(rate: float, low: float, high: float) -> int:
    """Return 1 (most people were right) to 5; bins are open below and closed above, as in pandas' `cut`."""
    edges = [low + (high - low) * number / _LEVELS for number in range(1, _LEVELS)]
    return _LEVELS - sum(rate > edge for edge in edges)
