"""`--map auto`: the map of a table whose columns have names that people use, as text that `--map` takes."""

import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import MAX_OPTIONS
from cmexam_tune.exams import _tables
from cmexam_tune.exams._columns import plain

SAMPLE = 500
"""Rows that are looked at."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "stem": ("题干", "题目", "题目内容", "题面", "试题", "试题内容", "试题题干", "问题", "问题描述", "question", "stem",
             "questionstem", "questiontext", "query", "prompt"),
    "options": ("选项", "备选项", "备选答案", "候选项", "options", "option", "choices", "candidates"),
    "answer": ("答案", "正确答案", "标准答案", "参考答案", "正确选项", "answer", "correctanswer", "correctoption",
               "rightanswer", "key", "answerkey", "gold", "label", "target", "answeridx", "cop"),
    "explanation": ("解析", "答案解析", "试题解析", "题目解析", "解释", "详解", "explanation", "analysis", "rationale",
                    "exp", "solution"),
    "id": ("id", "questionid", "题目id", "试题id"),
    "kind": ("题型", "题目类型", "试题类型", "questiontype"),
    "case": ("共用题干", "病例", "案例", "病例摘要", "材料", "case", "vignette"),
}  # fmt: skip
"""Field -> names of its column, as `plain` writes them; the first that is there is taken."""
FACETS = (
    "科室", "科目", "学科", "专业", "章节", "章", "知识点", "考点", "难度", "难度系数", "年份", "考试", "考试类型",
    "考试科目", "疾病", "系统", "来源", "subject", "topic", "category", "department", "difficulty", "discipline",
    "chapter", "year", "exam",
)  # fmt: skip
PREFIXES = ("", "选项", "option", "opt", "op", "choice", "备选项", "备选答案", "答案")
"""What stands before the letter of an option's column, the likeliest first."""
_SPECIAL = re.compile(r"[,=|]|\.\.|^#")
_LETTERS = "abcdefghij"


def guess(path: Path, named: Sequence[str] = ()) -> str:
    """Return `stem=题干,options=A..E,answer=答案,...` for a file.

    Args:
        path: a table in any format that is read.
        named: fields that the user names; they are left out.

    Raises:
        DataError: no column has a name of the stem, the options or the answer, or answers that can be read in two ways.
    """
    rows = [item for _, item in itertools.islice(_tables.read(path), SAMPLE)]
    columns = [name for name in rows[0] if name[:1] not in ("", "#")] if rows else []
    places = {name: place for place, name in enumerate(rows[0] if rows else (), 1)}
    column_of = {
        field: next((column for name in names for column in columns if plain(column) == name), None)
        for field, names in NAMES.items()
    }
    spread = _spread(columns, places)
    entries = {field: _written(name, places) for field, name in column_of.items() if name is not None}
    if spread:
        entries["options"] = _range(spread, places)
    for field in ("stem", "options", "answer"):
        if field not in entries and field not in named:
            raise DataError(
                f"{path}: --map auto finds no column for the {field}. Found: {', '.join(columns)}. Name it: "
                f"--map auto,{field}=COLUMN."
            )
    if "answer" in entries and not {"answer", "answer_as"} & set(named):
        answers = [row.get(str(column_of["answer"])) for row in rows]
        entries["answer_as"] = _answer_as(path, answers, rows, spread)
    facets = [name for name in columns if plain(name) in FACETS and name not in column_of.values()]
    entries |= {f"facet:{name}": _written(name, places) for name in facets if not _SPECIAL.search(name)}
    return ",".join(f"{field}={name}" for field, name in entries.items() if field not in named)


def _written(name: str, places: Mapping[str, int]) -> str:
    """Return a column as `--map` takes it: by its place where its name holds signs that mean something there."""
    return f"#{places[name]}" if _SPECIAL.search(name) else name


def _spread(columns: Sequence[str], places: Mapping[str, int]) -> list[str]:
    """Return the columns of options A, B, ... (or 1, 2, ...), which share what stands around the letter; [] if none."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name in columns:
        for before, sign, after in _parts(plain(name)):
            groups.setdefault((before, after), {})[sign] = name
    spreads = []
    for (before, after), named in groups.items():
        for signs in (_LETTERS, "123456789"):
            run = [named[sign] for sign in itertools.takewhile(named.__contains__, signs)]
            if len(run) > 1 and before in PREFIXES:
                spreads.append((PREFIXES.index(before), bool(after), -len(run), run[:MAX_OPTIONS]))
    # The likeliest prefix first, a letter at the end before one at the start, the longest run before shorter ones.
    return min(spreads)[-1] if spreads else []


def _parts(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield what stands before and after a letter or digit at the end or at the start of a name."""
    if name[-1:].isascii() and name[-1:].isalnum():
        yield name[:-1], name[-1], ""
    if len(name) > 1 and name[0].isascii() and name[0].isalnum() and not name.isascii():
        yield "", name[0], name[1:]


def _range(spread: Sequence[str], places: Mapping[str, int]) -> str:
    first, last = spread[0], spread[-1]
    by_name = all(unicodedata.normalize("NFKC", name)[-1:].isalnum() and not _SPECIAL.search(name) for name in spread)
    if by_name and plain(first)[:-1] == plain(last)[:-1] and plain(first)[-1] in "a1":
        return f"{first}..{last}"
    return f"#{places[first]}..#{places[last]}"


def _answer_as(
    path: Path, answers: Sequence[object], rows: Sequence[Mapping[str, object]], spread: Sequence[str]
) -> str:
    """Return how answers are written; what could be read in two ways is an error, never a guess.

    Raises:
        DataError: numbers that may count from 0 or from 1, or answers of several kinds.
    """
    texts = [plain(answer) for answer in answers if answer not in (None, "")]
    if all(re.fullmatch(r"[a-j][a-j,，、;；/.]*", text) for text in texts):
        return "letters"
    numbers = [set(re.findall(r"\d+", text)) for text in texts if re.fullmatch(r"[\d,，、;；/.]+", text)]
    if not numbers:
        options = [{plain(row.get(name)) for name in spread} for row in rows]
        filled = [(answer, texts_of) for answer, texts_of in zip(answers, options, strict=True) if answer]
        repeats = sum(plain(answer) in texts_of for answer, texts_of in filled)
        return "text" if spread and repeats > len(filled) / 2 else "letters"
    if len(numbers) < len(texts):
        raise DataError(
            f"{path}: some answers are numbers and some are not. Say --map auto,answer_as=letters (or text)."
        )
    named = set().union(*numbers)
    if "0" in named:
        return "index"
    if spread and str(len(spread)) in named:
        return "number"
    raise DataError(
        f"{path}: the answers are numbers ({', '.join(sorted(named))}), which may count from 0 or from 1. Say --map "
        "auto,answer_as=number if 1 is the first option, answer_as=index if 0 is."
    )
