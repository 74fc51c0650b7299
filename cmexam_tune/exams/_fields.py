"""A map of column names is an exam: which columns hold stem, options, answer, and how they are written."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from cmexam_tune.core import documents
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import GROUP, Question
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.exams import _tables
from cmexam_tune.exams._cells import (
    BEYOND,
    NO_ANSWER,
    ZERO,
    Cells,
    Reporter,
    RowReport,
    UnreadableRow,
    check_answer,
    tell,
)
from cmexam_tune.exams._columns import Columns, ResolvedColumns
from cmexam_tune.exams._tables import Row

Kind = Literal["single", "multiple"]
Names = tuple[str, ...]
FurtherFacets = Callable[[Row], dict[str, str]]
"""Makes facets of a row that no single column holds."""
Derive = Callable[[Path, Row], FurtherFacets]
"""Gets a file and its first row, and returns what makes further facets of all its rows."""
# What a column says beyond these two is kept as the facet `question_type`; CMB's prompts print it.
_USUAL = ("单项选择题", "多项选择题")
# The types of Chinese medical papers: A (one best of five) and B (matching) have one answer, X any number.
_SINGLE = ("单项", "单选", "A1", "A2", "A3", "A4", "A型", "B1", "B型", "C型", "最佳选择", "配伍")
_MULTIPLE = ("多项", "多选", "X型")


@dataclass(frozen=True)
class Fields:
    """Which columns an exam's questions are in. Each field lists names that the column has in different copies.

    Case, full-width letters, spaces, `_` and `-` in names do not matter. `#2` is the second column, `#-1` the last;
    `A..E` stands for the columns A, B, C, D, E, one for each option, which keeps the letter of its column; E may be
    missing, one before another may not. `#2..#-2` are columns by their places, the first is option A.
    """

    stem: Names
    options: Names
    answer: Names
    answer_as: Literal["letters", "number", "index", "text"] = "letters"
    """`number` counts options from 1, `index` from 0, `text` repeats the option's text. What looks like a number is
    never taken for a text, or the reverse."""
    explanation: Names = ()
    id: Names = ()
    """The exam's own ids; without them a question is `<file stem>:<row>`."""
    kind: Names = ()
    """What the paper prints about the number of answers; other texts than the two usual become `question_type`."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """What texts of that column mean, beside 单项, 多项, A1, X型 and the like."""
    case: Names = ()
    """Text that several questions share: it is put before the stem and makes them one `group`."""
    group: Names = ()
    """Questions with the same text here belong together."""
    facets: Mapping[str, Names] = field(default_factory=dict)
    """Facet -> columns; `#file` is the name of the file, `#section` that of the sheet or of the array."""
    ignore: Names = ()
    """Columns that say nothing about the question; those named nowhere are reported."""
    answers: Literal["required", "elsewhere", "unpublished"] = "required"
    """`elsewhere`: files without the column are tests, joined with a file of answers; `unpublished`: an empty cell
    means that too."""
    source: str = ""
    licence: str = ""
    named: Names = ()
    """Fields that `--map` names: a table without their columns is refused, whatever else may be missing."""

    def columns(self) -> dict[str, Names]:
        """Return every field and facet with its names."""
        single = ("stem", "options", "answer", "explanation", "id", "kind", "case", "group")
        return {name: getattr(self, name) for name in single} | {f"facet:{k}": v for k, v in self.facets.items()}


@dataclass(frozen=True)
class FieldsExam:
    """An exam that its map of columns describes completely."""

    fields: Fields
    derive: Derive | None = None

    def read(
        self, files: Sequence[Path], answers: Path | None = None, report: Reporter = lambda _: None
    ) -> Iterator[Question]:
        """Yield the questions of raw files one by one; see `read_questions`."""
        yield from read_questions(self.fields, files, answers, report, self.derive)


def from_yaml(path: Path) -> FieldsExam:
    """Return the exam that a YAML file of `Fields` describes.

    Raises:
        ConfigError: the file is not YAML, or names unknown fields.
    """
    try:
        return FieldsExam(_build(documents.read_yaml(path, "description of an exam"), str(path)))
    except UserError as error:
        raise ConfigError(str(error)) from None


def parse_map(text: str, start: Fields | None = None) -> Fields:
    """Return the map that `stem=题干,options=A..E,answer=答案,facet:科室=科室` says, over the one that it amends.

    Other names of a column follow after `|`.

    Raises:
        ConfigError: an entry is no `field=column`, a field is unknown or there twice, or stem, options or answer are
            missing.
    """
    values: dict[str, object] = {}
    facets, mapped = dict(start.facets) if start else {}, []
    for entry in filter(None, map(str.strip, text.split(","))):
        name, equals, columns = (part.strip() for part in entry.partition("="))
        if not (name and equals and columns):
            raise ConfigError(f"--map: {entry!r} is no field=column, for example stem=题干 or facet:科室=科室.")
        if name in mapped:
            raise ConfigError(f"--map: {name} is there twice. Other names of one column follow after |.")
        names = tuple(column.strip() for column in columns.split("|"))
        mapped.append(name)
        if name.startswith("facet:"):
            facets[name.removeprefix("facet:")] = names
        else:
            values[name] = names[0] if name in ("answer_as", "answers") else names
    base = {name: getattr(start, name) for name in start.__dataclass_fields__} if start else {}
    fields = _build({**base, **values, "facets": facets}, "--map")
    return replace(fields, named=tuple(name for name in mapped if name in fields.columns()))


def _build(values: object, where: str) -> Fields:
    problems = Problems()
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: fields with column names are needed, found {type(values).__name__}.")
    # A column with one name is written without a list.
    columns = {field.name for field in dataclasses.fields(Fields) if field.type == Names}
    values = {name: [value] if name in columns and isinstance(value, str) else value for name, value in values.items()}
    if isinstance(facets := values.get("facets"), Mapping):
        values["facets"] = {
            str(name): [names] if isinstance(names, str) else [*map(str, names or ())] for name, names in facets.items()
        }
    fields = build(Fields, values, "", problems)
    if fields is None:
        raise ConfigError(f"{where}: {'; '.join(problems)}.")
    return fields


def read_questions(
    fields: Fields,
    files: Sequence[Path],
    answers: Path | None,
    report: Reporter,
    derive: Derive | None = None,
) -> Iterator[Question]:
    """Yield the questions of files one by one; ids are the exam's own, else `<file stem>:<row>`.

    Args:
        fields: the map.
        files: raw files.
        answers: a file with id and answer, joined by id.
        report: called with every row that is dropped or repaired, and with columns that nothing reads.
        derive: gets a file and its first row, returns what makes further facets of a row.

    Raises:
        UserError: a file is missing or empty.
        DataError: wrong columns, encoding or format, duplicate ids, or a file without a single readable question.
    """
    published = read_answers(answers) if answers is not None else None
    for path in map(Path, files):
        yield from _File(path, fields, published).questions(report, derive)


class _File:
    """One raw file: its columns, and the one loop over its rows."""

    def __init__(self, path: Path, fields: Fields, published: Mapping[str, str] | None) -> None:
        self.path, self.stem, self.fields, self.published = path, path.stem, fields, published
        # Objects may have a key that others lack: what is missing there is an empty cell.
        self.header = path.suffix.lower() not in (".json", ".jsonl")
        self.columns = Columns(path, fields.columns(), fields.ignore, header=self.header)

    def questions(self, report: Reporter, derive: Derive | None) -> Iterator[Question]:
        """Yield the questions that can be read, and report every other row.

        Raises:
            DataError: wrong columns, a repeated id, answers that count from elsewhere, or nothing that can be read.
        """
        reasons, rows_by_id = Counter[str](), dict[str, int]()
        kept, counted_first = 0, False
        further_facets: FurtherFacets | None = None
        for row, item in _tables.read(self.path):
            columns = self.columns.of(item)
            if columns.problem:
                raise DataError(
                    f"{self.path}: {columns.problem}. Found: {', '.join(filter(None, item))}. Rename the columns, or "
                    "name them with --map as they are written."
                )
            if row == 1:
                needed = ["stem", "options", *["answer"] * (self.fields.answers == "required")]
                needed += self.fields.named if self.header else ()
                self.columns.check(item, list(dict.fromkeys(needed)))
                further_facets = derive(self.path, item) if derive else None
            for name in self.columns.unread_now():
                report(RowReport(row, "unread", name))
            name = self._id(row, item, columns, rows_by_id)
            cells = Cells()
            try:
                question = self._question(name, cells, item, columns, further_facets)
            except UnreadableRow as error:
                reasons[str(error)] += 1
                report(RowReport(row, "dropped", str(error), _texts(item, columns)))
                continue
            if cells.repairs:
                tell(report, row, cells.repairs)
            kept += 1
            counted_first = counted_first or "A" in (question.answer or "")
            yield question
        self._check_counting(reasons, counted_first)
        if not kept:
            why = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "it has no rows"
            raise DataError(f"{self.path}: no question can be read ({why}).")

    def _check_counting(self, reasons: Mapping[str, int], counted_first: bool) -> None:
        """Refuse a file whose answers evidently do not count from where the map says: each would be off by one."""
        if rows := reasons.get(ZERO, 0):
            raise DataError(
                f"{self.path}: {rows} answers are 0, but answer_as=number counts from 1. If 0 is the first option, "
                "say answer_as=index; if it means that there is no answer, empty the cell."
            )
        if self.fields.answer_as == "index" and not counted_first and (rows := reasons.get(BEYOND, 0)):
            raise DataError(
                f"{self.path}: no answer is 0 and {rows} are beyond the options, but answer_as=index counts from 0. "
                "If 1 is the first option, say answer_as=number."
            )

    def _id(self, row: int, item: Row, columns: ResolvedColumns, rows_by_id: dict[str, int]) -> str:
        """Return the exam's own id of a row, `<file stem>:<row>` where it has none; 0 is an id like any other."""
        if not (value := columns.cell("id", item)) and value != 0:
            if self.published is not None:
                why = "--answers are joined by id. Files that hold their own answers need a command without --answers."
                raise DataError(f"{self.path}: item {row} has no id, {why}")
            return f"{self.stem}:{row}"
        name = str(value).strip()
        if name in rows_by_id:
            raise DataError(
                f"{self.path}: items {rows_by_id[name]} and {row} have the same id {name!r}. Each needs its own."
            )
        rows_by_id[name] = row
        return name

    def _question(
        self, name: str, cells: Cells, item: Row, columns: ResolvedColumns, further_facets: FurtherFacets | None
    ) -> Question:
        """Return the question in a row.

        Raises:
            UnreadableRow: it cannot be read; the message is the reason.
        """
        if _tables.BROKEN in item:
            raise UnreadableRow(str(item[_tables.BROKEN]))
        # Not by `columns.cell`: a dozen calls for each row of CMB-train would be three million.
        column, get = columns.column, item.get
        if isinstance(get(column["stem"]), _tables.Merged):
            raise UnreadableRow("a question over several rows (merged cells)")
        stem, answer_cell = cells.stem(get(column["stem"])), get(column["answer"])
        as_letters = self.fields.answer_as == "letters"
        # Letters can be read before the options, other answers only after them. The order of the two decides which
        # reason is counted where a row lacks both.
        answer = self._answer(name, cells, answer_cell, columns) if as_letters else None
        if len(columns.letters) > 1:
            options = cells.by_column({letter: get(option) for letter, option in columns.letters.items()})
        else:
            options = cells.options(get(column["options"]))
        if not as_letters:
            chosen = cells.chosen(answer_cell, options, self.fields.answer_as)
            answer = self._answer(name, cells, chosen, columns)
        if answer is not None:
            check_answer(answer, options)
        facets = {facet: text for facet, place in columns.facets if (text := cells.text(columns.value(place, item)))}
        kind = self._kind(cells.text(get(column["kind"])), facets)
        if case := cells.text(get(column["case"])):
            # Some copies already have the case in front of each stem.
            stem = stem if stem.startswith(case) else f"{case}\n{stem}"
        if group := cells.text(get(column["group"])) or case:
            facets[GROUP] = group_label(group)
        if further_facets is not None:
            facets.update(further_facets(item))
        return Question(name, stem, options, answer, cells.text(get(column["explanation"])), kind, facets)

    def _kind(self, printed: str | None, facets: dict[str, str]) -> Kind | None:
        if not printed:
            return None
        if printed not in _USUAL:
            facets["question_type"] = printed
        return self.fields.kinds.get(printed) or printed_kind(printed)

    def _answer(self, name: str, cells: Cells, cell: object, columns: ResolvedColumns) -> str | None:
        """Return the answer, None where it is unpublished."""
        answer = cells.answer(cell)
        if self.published is not None:
            joined = cells.answer(self.published.get(name))
            if joined and answer and joined != answer:
                raise UnreadableRow("answer differs from the file of answers")
            answer = joined or answer
        if answer is None:
            unpublished = self.fields.answers == "unpublished" or not columns.has("answer")
            if self.published is not None or not unpublished:
                raise UnreadableRow(NO_ANSWER)
        return answer


@cache
def printed_kind(printed: str) -> Kind | None:
    """Return what an exam's question type says about the number of answers, None where it says nothing."""
    if any(word in printed for word in _MULTIPLE):
        return "multiple"
    return "single" if any(word in printed for word in _SINGLE) else None


def group_label(text: str) -> str:
    """Return a short name for what questions share: equal for equal text, up to white space."""
    from hashlib import blake2b

    return blake2b("".join(text.split()).encode(), digest_size=6).hexdigest()


def _texts(item: Row, columns: ResolvedColumns) -> dict[str, str]:
    """Return what a dropped row says, as far as it can be read: the papers' statistics count it."""
    return {name: Cells().text(columns.cell(name, item)) or "" for name in ("stem", "answer", "explanation")}


def read_answers(path: Path) -> dict[str, str]:
    """Return id -> answer of a file of answers.

    Raises:
        DataError: an item has no id or no answer, an id is there twice, or there is none.
    """
    answers: dict[str, str] = {}
    for row, item in _tables.read(path):
        if missing := [name for name in ("id", "answer") if name not in item]:
            raise DataError(f"{path}: item {row} has no {', '.join(missing)}; an answer needs id and answer.")
        name = str(item["id"]).strip()
        if name in answers:
            raise DataError(f"{path}: item {row} repeats the id {name!r}. Each question has one answer.")
        answers[name] = str(item["answer"] or "")
    if not answers:
        raise DataError(f"{path}: holds no answers.")
    return answers
