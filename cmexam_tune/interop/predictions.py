"""Predictions files of other tools, told apart by their keys.

- this project's: `question_id` and `text`;
- lm-eval's samples (`--log_samples`): `doc_id`, `doc` and `resps`; the first of several filters is read, and where
  letters were scored (`multiple_choice`) the most likely one is the output;
- EvalScope's predictions: `index` and `model_output` (`choices` in older versions);
- OpenCompass' predictions: one JSON object `{"0": {"prediction": ...}, ...}`, in the order of the questions;
- any JSONL with an `id` and an `output`, `response` or `prediction`.

Ids may be integers. An output that is null is unreadable, not missing: it stays in every denominator.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli, documents, files, jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Prediction, Question

IDS = ("question_id", "id", "doc_id", "index")
TEXTS = ("text", "output", "response", "prediction", "model_output", "choices", "resps")
_SHOWN = 8


def read(path: str | Path, questions: Sequence[Question]) -> list[Prediction]:
    """Return the predictions of a file of any of the forms above.

    Args:
        path: The file.
        questions: What was asked, in the order of the file that the tool was given: where a tool numbers its outputs,
            the number is a place in it.

    Raises:
        UserError: the file is missing or empty.
        DataError: a line that holds no output or no id, or an id twice; names file and line.
    """
    path = Path(path)
    rows = _opencompass(path) if path.suffix == ".json" else jsonl.read_objects(path)
    known = {question.id: question for question in questions}
    found: dict[str, Prediction] = {}
    lines: dict[str, int] = {}
    filters: dict[str, object] = {}
    empty = 0
    for number, row in rows:
        where = f"{path}:{number}"
        one = _own(row, where) or _foreign(row, where, questions, known)
        if one.question_id in found:
            if row.get("filter") != filters[one.question_id]:
                continue  # lm-eval writes every output once for each of its filters
            raise DataError(
                f"{where}: duplicate question_id {one.question_id!r}, first on line {lines[one.question_id]}."
            )
        found[one.question_id], lines[one.question_id] = one, number
        filters[one.question_id] = row.get("filter")
        empty += one.text == "" and not _own(row, where)
    if not found:
        raise DataError(f"{path}: holds no records, only blank lines.")
    if empty:
        cli.note(f"{path}: {empty} output(s) are null or empty; they count as unreadable.")
    return list(found.values())


def _own(row: Mapping[str, Any], where: str) -> Prediction | None:
    if "question_id" in row and isinstance(row.get("text"), str):
        return jsonl.from_object(Prediction, row, where)
    return None


def _foreign(
    row: Mapping[str, Any], where: str, questions: Sequence[Question], known: Mapping[str, Question]
) -> Prediction:
    key = next((key for key in TEXTS if key in row), None)
    if key is None:
        raise DataError(
            f"{where}: no output, one of {', '.join(TEXTS)} is needed (found the keys {', '.join(list(row)[:_SHOWN])})."
        )
    name = _id(row, where, questions, known)
    outputs = _outputs(row[key], known.get(name) if key == "resps" else None)
    if outputs is None:
        raise DataError(f"{where}: {key!r} holds no text: {str(row[key])[:60]!r}.")
    return Prediction(name, outputs[0], votes=tuple(outputs) if len(outputs) > 1 else ())


def _id(row: Mapping[str, Any], where: str, questions: Sequence[Question], known: Mapping[str, Question]) -> str:
    """Return the question's id: the row's own, the one in the document that lm-eval repeats, or by its place."""
    document = row.get("doc")
    given = [document.get("id")] if isinstance(document, dict) else []
    given += [row[key] for key in IDS if key in row]
    names = [str(one) for one in given if isinstance(one, str | int) and not isinstance(one, bool) and one != ""]
    if not names:
        raise DataError(f"{where}: no id, one of {', '.join(IDS)} is needed.")
    for name in names:
        if name in known:
            return name
    place = row.get("doc_id", row.get("index"))
    if isinstance(place, int) and "id" not in row and 0 <= place < len(questions):
        return questions[place].id
    return names[0]


def _outputs(value: Any, question: Question | None) -> list[str] | None:
    """Return the text, or the texts, in what a tool stores as its output; None where there is none."""
    if value is None:
        return [""]
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        inner = value.get("choices", value.get("message", value.get("content", value)))
        return None if inner is value else _outputs(inner, question)
    if not isinstance(value, list) or not value:
        return None if not isinstance(value, list) else [""]
    scores = [_log_likelihood(one) for one in value]
    if question is not None and len(scores) == len(question.options) and None not in scores:
        return [max(zip(scores, question.options, strict=True), key=lambda pair: pair[0] or 0.0)[1]]
    if all(isinstance(one, dict) and one.get("type") in ("text", "reasoning") for one in value):
        return ["".join(str(one.get("text") or "") for one in value if one["type"] == "text")]
    found = [_outputs(one, question) for one in value]
    return None if None in found else [text for one in found if one for text in one]


def _log_likelihood(value: Any) -> float | None:
    """Return the log-likelihood in one of lm-eval's `[[value, is_greedy]]`, None where it is something else."""
    while isinstance(value, list) and value:
        value = value[0]
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _opencompass(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    value = documents.read_json(files.check_input(path), "predictions of OpenCompass")
    entries = list(value.items()) if isinstance(value, dict) else []
    if not entries or not all(key.isdecimal() and isinstance(entry, dict) for key, entry in entries):
        raise DataError(f'{path}: not predictions of OpenCompass, which are {{"0": {{"prediction": ...}}, ...}}.')
    for key, entry in entries:
        yield int(key) + 1, {"index": int(key), "prediction": entry.get("prediction")}
