"""CMB: CMB-Exam items (.json array or .jsonl; answers in the file or in a second one) and CMB-Clin cases.

Options are read as A to F, the empty ones left out (one-character options stay: the released script drops them).
`question_type` becomes `kind` where it says how many answers there are; a type other than the two usual words is
kept as the facet `question_type`, which CMB's prompts print.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Case, Question, Turn
from cmexam_tune.exams import RowReport, _tables
from cmexam_tune.exams._cells import NO_ANSWER, Cells, Unreadable, check_answer, tell

FACETS = ("exam_type", "exam_class", "exam_subject")
_USUAL: dict[str, Literal["single", "multiple"]] = {"单项选择题": "single", "多项选择题": "multiple"}
_SINGLE = ("单项", "单选", "A1", "A2", "A3", "A4", "A型", "B1", "B型", "C型", "最佳选择", "配伍")
_MULTIPLE = ("多项", "多选", "X型")


def read(
    files: Sequence[Path], answers: Path | None = None, report: Callable[[RowReport], None] = lambda _: None
) -> Iterator[Question]:
    """Yield the questions of CMB-Exam files one by one; ids are the exam's own, else `<file stem>:<row>`.

    Args:
        files: CMB-Exam files (train, val, test).
        answers: a file with id and answer of test items, joined by id.
        report: told about every row that is dropped or repaired.

    Raises:
        UserError: a file is missing or empty.
        DataError: wrong keys, encoding or JSON, duplicate ids, or a file without a single readable question.
    """
    published = _answers(answers) if answers is not None else None
    for path in files:
        yield from _read_file(Path(path), published, report)


def _read_file(
    path: Path, published: Mapping[str, str] | None, report: Callable[[RowReport], None]
) -> Iterator[Question]:
    reasons, rows, kept = dict[str, int](), dict[str, int](), 0
    for row, item in _tables.read(path):
        if row == 1:
            _check_keys(path, item)
        name = _name(path, row, item, published is not None)
        if name in rows:
            raise DataError(
                f"{path}: items {rows[name]} and {row} have the same id {name!r}. Give each its own, or remove one."
            )
        rows[name] = row
        reader = Cells()
        try:
            question = _question(name, reader, item, published)
        except Unreadable as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            report(RowReport(row, "dropped", str(error), _item(item)))
            continue
        tell(report, row, reader.repairs)
        kept += 1
        yield question
    if not kept:
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        raise DataError(f"{path}: no question can be read{f' ({counts})' if counts else ', it holds no items'}.")


def _check_keys(path: Path, item: _tables.Row) -> None:
    if "QA_pairs" in item:
        raise DataError(f"{path}: CMB-Clin cases, no multiple-choice questions. Read them with `read_clin`.")
    if missing := [name for name in ("question", "option") if name not in item]:
        hint = " This looks like a file of answers: give it as --answers." if "answer" in item and "id" in item else ""
        raise DataError(
            f"{path}: not a CMB-Exam file, {', '.join(missing)} missing in item 1. Found: {', '.join(item)}. "
            f"Needed: question, option, question_type, best with answer, exam_type, exam_class, exam_subject.{hint}"
        )


def _name(path: Path, row: int, item: _tables.Row, joined: bool) -> str:
    name = str(item.get("id", "")).strip() if item.get("id") is not None else ""
    if not name and joined:
        raise DataError(f"{path}: item {row} has no id, --answers are joined by id.")
    return name or f"{path.stem}:{row}"


def _question(name: str, reader: Cells, item: _tables.Row, published: Mapping[str, str] | None) -> Question:
    stem = reader.stem(item.get("question"))
    answer = _answer(name, reader, item, published)
    options = reader.options(item.get("option"))
    if answer is not None:
        check_answer(answer, options)
    facets = {facet: text for facet in FACETS if (text := reader.text(item.get(facet)))}
    printed = reader.text(item.get("question_type")) or ""
    if printed and printed not in _USUAL:
        facets["question_type"] = printed
    return Question(name, stem, options, answer, reader.text(item.get("explanation")), _kind(printed), facets)


def _kind(printed: str) -> Literal["single", "multiple"] | None:
    if any(word in printed for word in _MULTIPLE):
        return "multiple"
    return "single" if any(word in printed for word in _SINGLE) else None


def _answer(name: str, reader: Cells, item: _tables.Row, published: Mapping[str, str] | None) -> str | None:
    """Return the answer, None where it is unpublished: the file has no `answer` and no answers were given."""
    own = reader.answer(item.get("answer"))
    if published is None:
        if own is None and "answer" in item:
            raise Unreadable(NO_ANSWER)
        return own
    joined = reader.answer(published[name]) if name in published else None
    if joined is None and own is None:
        raise Unreadable(NO_ANSWER)
    if joined and own and joined != own:
        raise Unreadable("answer differs from the file of answers")
    return joined or own


def _item(item: _tables.Row) -> dict[str, str]:
    reader = Cells()
    fields = {"stem": "question", "answer": "answer", "explanation": "explanation"}
    return {name: reader.text(item.get(key)) or "" for name, key in fields.items()}


def _answers(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for row, item in _tables.read(path):
        if missing := [name for name in ("id", "answer") if name not in item]:
            raise DataError(f"{path}: item {row} has no {', '.join(missing)}; an answer needs id and answer.")
        name = str(item["id"]).strip()
        if name in found:
            raise DataError(f"{path}: item {row} repeats the id {name!r}. Each question has one answer.")
        found[name] = str(item["answer"] or "")
    if not found:
        raise DataError(f"{path}: holds no answers.")
    return found


def is_clin(path: Path) -> bool:
    """Whether the first item of the file is a CMB-Clin case."""
    return "QA_pairs" in next(_tables.read(path), (0, {}))[1]


def read_clin(path: str | Path) -> Iterator[Case]:
    """Yield the cases of a CMB-Clin file; reference texts may be called `answer` or `solution`.

    Raises:
        UserError: the file is missing or empty.
        DataError: a case lacks a key or has no question; names the file and the case.
    """
    path, seen = Path(path), set[str]()
    for row, item in _tables.read(path):
        where = f"{path}: case {row}"
        name = _clin_text(item, "id", where) if "id" in item else f"{path.stem}:{row}"
        if name in seen:
            raise DataError(f"{where} repeats the id {name!r}.")
        seen.add(name)
        pairs = item.get("QA_pairs")
        if not isinstance(pairs, list) or not pairs:
            raise DataError(f"{where} has no QA_pairs. Found: {', '.join(item)}.")
        turns = tuple(_clin_pair(pair, f"{where}, question {number}") for number, pair in enumerate(pairs, 1))
        yield Case(name, str(item.get("title", "")), _clin_text(item, "description", where), turns)
    if not seen:
        raise DataError(f"{path}: holds no cases.")


def _clin_pair(pair: Any, where: str) -> Turn:
    if not isinstance(pair, dict):
        raise DataError(f"{where}: an object is needed, found {type(pair).__name__}.")
    key = "answer" if "answer" in pair else "solution"
    return Turn(_clin_text(pair, "question", where), _clin_text(pair, key, where))


def _clin_text(item: Mapping[str, Any], key: str, where: str) -> str:
    text = str(item.get(key, "")).strip()
    if not text:
        raise DataError(f"{where}: {key} is missing or empty. Found: {', '.join(item)}.")
    return text
