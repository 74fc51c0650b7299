"""CMB: CMB-Exam items (.json array, .jsonl, .parquet; answers in the file or in a second one) and CMB-Clin cases.

Options are read as A to F, the empty ones left out (one-character options stay: the released script drops them).
`question_type` becomes `kind` where it says how many answers there are; a type other than the two usual words is
kept as the facet `question_type`, which CMB's prompts print.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Case, Question, Turn
from cmexam_tune.exams import _tables
from cmexam_tune.exams._cells import Reporter
from cmexam_tune.exams._fields import Fields, read_questions

FACETS = ("exam_type", "exam_class", "exam_subject")
FIELDS = Fields(
    stem=("question",),
    options=("option",),
    answer=("answer",),
    explanation=("explanation",),
    id=("id",),
    kind=("question_type",),
    case=("context",),
    facets={name: (name,) for name in FACETS},
    answers="elsewhere",
    source="https://github.com/FreedomIntelligence/CMB",
    licence="Apache-2.0; questions for research",
)


def read(files: Sequence[Path], answers: Path | None = None, report: Reporter = lambda _: None) -> Iterator[Question]:
    """Yield the questions of CMB-Exam files one by one; ids are the exam's own, else `<file stem>:<row>`.

    Args:
        files: CMB-Exam files (train, val, test).
        answers: a file with id and answer of test items, joined by id.
        report: called with every row that is dropped or repaired.

    Raises:
        UserError: a file is missing or empty.
        DataError: wrong keys, encoding or JSON, duplicate ids, or a file without a single readable question.
    """
    yield from read_questions(FIELDS, files, answers, report)


def is_clin(path: Path) -> bool:
    """Whether the first item of the file is a CMB-Clin case."""
    return "QA_pairs" in next(_tables.read(path), (0, {}))[1]


def read_clin(path: str | Path) -> Iterator[Case]:
    """Yield the cases of a CMB-Clin file; reference texts may be called `answer` or `solution`.

    Raises:
        UserError: the file is missing or empty.
        DataError: a case lacks a key or has no question; names the file and the case.
    """
    path, names = Path(path), set[str]()
    for row, item in _tables.read(path):
        where = f"{path}: case {row}"
        name = _clin_text(item, "id", where) if "id" in item else f"{path.stem}:{row}"
        if name in names:
            raise DataError(f"{where} repeats the id {name!r}.")
        names.add(name)
        pairs = item.get("QA_pairs")
        if not isinstance(pairs, list) or not pairs:
            content = f"{pairs!r:.40}" if "QA_pairs" in item else f"the keys {', '.join(item)}"
            raise DataError(f"{where}: QA_pairs must be a list of questions with their answers, found {content}.")
        turns = tuple(_clin_pair(pair, f"{where}, question {number}") for number, pair in enumerate(pairs, 1))
        yield Case(name, str(item.get("title", "")), _clin_text(item, "description", where), turns)
    if not names:
        raise DataError(f"{path}: holds no cases.")


def _clin_pair(pair: object, where: str) -> Turn:
    if not isinstance(pair, dict):
        raise DataError(f"{where}: an object is needed, found {type(pair).__name__}.")
    key = "answer" if "answer" in pair else "solution"
    return Turn(_clin_text(pair, "question", where), _clin_text(pair, key, where))


def _clin_text(item: Mapping[str, object], key: str, where: str) -> str:
    text = str(item.get(key, "")).strip()
    if not text:
        raise DataError(f"{where}: {key} is missing or empty. Found: {', '.join(item)}.")
    return text
