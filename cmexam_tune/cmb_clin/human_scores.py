"""A person as judge: a sheet of answers without names, in random order, and its scores read back.

Which row is whose answer stands in a file beside the sheet, which the judge does not get.
"""

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cmexam_tune.cmb_clin.judgements import Judged, Judgement
from cmexam_tune.cmb_clin.rubric import HIGH, LOW, Rubric
from cmexam_tune.core import documents, files, jsonl, workbooks
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.prompts import dialogue

TEXTS = ("record", "conversation", "question", "reference", "answer")
WIDTHS = (8, 60, 40, 40, 60, 60)
MAX_CELL = 32_767
"""Characters that a cell can hold."""


@dataclass(frozen=True)
class SheetRow:
    """Whose answer a row of the sheet is."""

    row: int
    model: str
    question_id: str


def key_path(sheet: str | Path) -> Path:
    """Return the file beside a sheet that says whose answers its rows are."""
    return Path(f"{sheet}.key.json")


def export(
    path: str | Path,
    cases: Sequence[Case],
    predictions: Mapping[str, Sequence[Prediction]],
    rubric: Rubric,
    *,
    sample: int | None = None,
    seed: int = 0,
) -> int:
    """Write a sheet for a person to fill in, and the key beside it; return the number of answers.

    Args:
        path: an .xlsx file that does not exist yet.
        cases: what was asked.
        predictions: name -> answers.
        rubric: its axes become columns, their levels the notes of the headings.
        sample: so many answers, drawn evenly among the models (the paper's experts had 320); None: all.
        seed: of drawing and shuffling.

    Raises:
        UserError: something is at `path` or beside it.
    """
    path = files.check_output(path)
    files.check_output(key_path(path))
    chosen = _draw(predictions, set(dialogue.keys(cases)), sample, random.Random(seed))
    places = [SheetRow(row, model, answer.question_id) for row, (model, answer) in enumerate(chosen, 2)]
    turns = {dialogue.key(case, number): (case, number) for case in cases for number, _ in enumerate(case.turns, 1)}
    rows = []
    for place, (_, answer) in zip(places, chosen, strict=True):
        case, number = turns[place.question_id]
        spoken = "\n".join(f"问：{turn.question}\n答：{turn.answer}" for turn in case.turns[: number - 1])
        turn = case.turns[number - 1]
        rows.append([place.row - 1, case.record, spoken, turn.question, turn.answer, answer.text])
    # The key first: a sheet without one could never be read back.
    with files.atomic_write(key_path(path)) as handle:
        json.dump([asdict(place) for place in places], handle, ensure_ascii=False, indent=1)
        handle.write("\n")
    with files.atomic_write(path, binary=True) as handle:
        _book(rows, rubric).save(handle)
    return len(rows)


def _draw(
    predictions: Mapping[str, Sequence[Prediction]], keys: set[str], sample: int | None, dice: random.Random
) -> list[tuple[str, Prediction]]:
    """Return (model, answer) in random order, the same number of each model as long as it has any left."""
    shuffled = {}
    for model, answers in predictions.items():
        shuffled[model] = [answer for answer in answers if answer.question_id in keys and answer.finish != "error"]
        dice.shuffle(shuffled[model])
    rounds = [
        (model, answers[place])
        for place in range(max(map(len, shuffled.values()), default=0))
        for model, answers in shuffled.items()
        if place < len(answers)
    ]
    # Models take turns in `rounds`, so a sample holds as many of each; shuffling then hides whose turn it is.
    chosen = rounds[:sample]
    dice.shuffle(chosen)
    return chosen


def _book(rows: Sequence[Sequence[object]], rubric: Rubric) -> Any:
    from openpyxl import Workbook
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
    from openpyxl.comments import Comment
    from openpyxl.styles import Alignment, Font
    from openpyxl.utils import get_column_letter
    from openpyxl.worksheet.datavalidation import DataValidation

    book = Workbook()
    sheet = book.active
    sheet.title = "judge"
    sheet.append(["no.", *TEXTS, *rubric.axes])
    for column, axis in enumerate(rubric.axes.values(), len(TEXTS) + 2):
        cell = sheet.cell(1, column)
        cell.comment = Comment("\n".join([axis.name, *(f"{n} {text}" for n, text in axis.levels.items())]), "rubric")
    # Excel refuses to open a file with control characters or longer cells; a cut answer can still be judged.
    for row in rows:
        sheet.append([ILLEGAL_CHARACTERS_RE.sub("", v)[:MAX_CELL] if isinstance(v, str) else v for v in row])
    for line in sheet.iter_rows(min_row=2):
        for cell in line:
            cell.alignment = Alignment(wrap_text=True, vertical="top")
            if isinstance(cell.value, str):
                cell.data_type = "s"  # an answer that starts with = is no formula
    for cell in sheet[1]:
        cell.font = Font(bold=True)
    for column, width in enumerate(WIDTHS, 1):
        sheet.column_dimensions[get_column_letter(column)].width = width
    # A slip of the finger is refused while the judge still looks at the answer, not when the sheet is read back.
    rule = DataValidation("whole", formula1=str(LOW), formula2=str(HIGH), showErrorMessage=True)
    first, last = (get_column_letter(len(TEXTS) + 1 + place) for place in (1, len(rubric.axes)))
    rule.add(f"{first}2:{last}{len(rows) + 1}")
    sheet.add_data_validation(rule)
    sheet.freeze_panes = "A2"
    return book


def read(
    path: str | Path, rubric: Rubric, answered: Mapping[str, Collection[str]], judge: str | None = None
) -> list[Judged]:
    """Return what a person filled in, one `Judged` for each model; rows without any score are left out.

    Args:
        path: the sheet; its key is beside it, also for copies `NAME.xlsx` of it given to several people, where
            `NAME` starts with the name of the sheet.
        rubric: the one it was written with.
        answered: name of the predictions -> ids of the turns they answer; the key may name no others.
        judge: name of the judge; default: the sheet's.

    Raises:
        UserError: no sheet, no key, or a sheet that cannot be read.
        DataError: a row that is scored in part, a score that is no integer from 1 to 5, a number that is not in the key
            or stands twice, or a key of other predictions; names file and row.
    """
    path = files.check_input(path, "sheet")
    places = _key_of(path, answered)
    header, *rows = _cells(path)
    columns = {axis: header.index(axis) for axis in rubric.axes if axis in header}
    if missing := [axis for axis in rubric.axes if axis not in columns]:
        raise DataError(f"{path}: no column {', '.join(missing)}. Is this the sheet that `judge --export` wrote?")
    judgements: dict[str, list[Judgement]] = {place.model: [] for place in places.values()}
    row_of: dict[int, int] = {}
    for number, row in enumerate(rows, 2):
        cells = {axis: row[column] if column < len(row) else None for axis, column in columns.items()}
        if all(cell in (None, "") for cell in cells.values()):
            continue
        try:
            place = places[int(str(row[0])) + 1]
        except (KeyError, ValueError):
            raise DataError(
                f"{path}: row {number}: no. {row[0]!r} is not in its key. Leave the column as it was."
            ) from None
        if (first := row_of.setdefault(place.row, number)) != number:
            raise DataError(f"{path}: row {number}: no. {row[0]} is on row {first} already. Delete one of them.")
        # Spreadsheets keep every number as a float.
        scores: dict[str, Any] = {
            axis: int(cell) if isinstance(cell, float) and cell.is_integer() else cell for axis, cell in cells.items()
        }
        if problem := rubric.problem(scores):
            raise DataError(f"{path}: row {number}: {problem}.")
        judgements[place.model].append(Judgement(place.question_id, "", scores))
    name = judge or path.stem
    return [Judged(name, model, tuple(scored)) for model, scored in judgements.items() if scored]


def _key_of(path: Path, answered: Mapping[str, Collection[str]]) -> dict[int, SheetRow]:
    """Return number of a row -> model and turn of its answer."""
    keys = [key for key in sorted(path.parent.glob("*.xlsx.key.json")) if path.name.startswith(key.name[:-14])]
    if not keys:
        raise UserError(f"{path}: no {key_path(path).name} beside it, which says whose answers these are.")
    # Of the keys whose sheet's name this name starts with, that of the longest is meant.
    key = max(keys, key=lambda path: len(path.name))
    try:
        places = [jsonl.from_object(SheetRow, place, str(key)) for place in documents.read_json(key, "key", list)]
    except (UserError, AttributeError):
        raise DataError(f"{key}: is no key of a sheet. Export the sheet again.") from None
    rows: dict[int, SheetRow] = {}
    answers: set[tuple[str, str]] = set()
    for place in places:
        where, answer = f"{key}: row {place.row}", (place.model, place.question_id)
        if place.question_id not in answered.get(place.model, ()):
            raise DataError(
                f"{where}: {place.question_id!r} of {place.model!r} is in no file of --predictions. Give those that "
                "were exported."
            )
        if place.row in rows or answer in answers:
            raise DataError(f"{where}: the row or its answer stands twice. Export the sheet again.")
        rows[place.row] = place
        answers.add(answer)
    return rows


def _cells(path: Path) -> list[list[object]]:
    with workbooks.opened(path) as book:
        if not book.worksheets:
            raise DataError(f"{path}: no sheet has cells. Is this the sheet that `judge --export` wrote?")
        return [list(row) for row in book.worksheets[0].iter_rows(values_only=True)] or [[]]
