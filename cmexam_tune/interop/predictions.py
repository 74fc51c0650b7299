"""Predictions files of other tools, told apart by their keys.

- this project's: `question_id` and `text`;
- lm-eval's samples (`--log_samples`): `doc_id`, `doc` and `resps`; the first of several filters is read, and where
  letters were scored (`multiple_choice`) the most likely one is the output;
- EvalScope's predictions: `index`, `metadata` and `model_output` (`choices` in older versions);
- OpenCompass' predictions: one JSON object `{"0": {"prediction": ...}, ...}`, in the order of the questions;
- inspect_ai's logs in JSON (`--log-format json`, or `inspect log convert --to json`); the outputs of several epochs are
  votes;
- any JSONL with an `id` and an `output`, `response` or `prediction`.

Which question an output answers is told by the id in its row: `question_id`, `id`, or the id of the question that
lm-eval repeats in `doc`, EvalScope in `metadata` and inspect_ai in its samples. Only where there is none, `doc_id`,
`index`, OpenCompass' keys and the order of inspect_ai's samples tell it. These are places in the file that the tool was
given and never ids, although ids may be integers too.

An output that is null is unreadable, not missing: it stays in every denominator.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli, documents, files, jsonl
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Prediction, Question

IDS, PLACES = ("question_id", "id"), ("doc_id", "index")
TEXTS = ("text", "output", "response", "prediction", "model_output", "choices", "resps")
_DOCUMENTS = ("doc", "metadata", "raw_input")
"""Where tools repeat the record that they asked, with its id."""
_PROMPTS = ("doc", "raw_input", "origin_prompt", "messages", "input")
"""Where tools repeat the words that they asked."""
_SHOWN, _PROBED = 8, 5
_PLACE = re.compile("[0-9]{1,9}")
_REMEDY = "Give --questions the file that the tool was given, or its first lines where the tool was limited to those."


@dataclass(frozen=True)
class _Row:
    where: str
    content: Mapping[str, object]

    @property
    def id(self) -> str | None:
        """The id that the row itself is given."""
        return next((name for key in IDS if (name := _name(self.content.get(key))) is not None), None)

    @property
    def document_id(self) -> str | None:
        """The id of the record that the tool repeats: ours, or that of another data set."""
        records = [record for key in _DOCUMENTS if isinstance(record := self.content.get(key), dict)]
        return next((name for record in records if (name := _name(record.get("id"))) is not None), None)

    @property
    def place(self) -> int | None:
        places = [self.content[key] for key in PLACES if key in self.content]
        return next((place for place in places if isinstance(place, int) and not isinstance(place, bool)), None)

    def repeats(self, question: Question) -> bool:
        """Return whether stem and options occur in the prompt that the tool recorded, ignoring white space."""
        return all(_squeezed(words) in self.prompt for words in (question.stem, *question.options.values()))

    @cached_property
    def prompt(self) -> str:
        return _squeezed("\n".join(text for key in _PROMPTS for text in _texts(self.content.get(key))))


def read(path: str | Path, questions: Sequence[Question]) -> list[Prediction]:
    """Return the predictions of a file of any of the forms above.

    Args:
        path: The file.
        questions: What was asked; where outputs have places only, in the order of the file that the tool was given.

    Raises:
        UserError: the file is missing or empty.
        DataError: a line that holds no output or no id, an id twice, or outputs by place that answer other questions
            than those or cannot be told to answer them; names file and line.
    """
    path = Path(path)
    contents = _whole_file(path) if path.suffix in (".json", ".eval") else jsonl.read_objects(path)
    rows = [_Row(f"{path}:{number}", content) for number, content in contents]
    if not rows:
        raise DataError(f"{path}: holds no records, only blank lines.")
    by_id = {question.id: question for question in questions}
    predictions: dict[str, Prediction] = {}
    first: dict[str, _Row] = {}
    empty = 0
    for row, name in zip(rows, _question_ids(path, rows, questions), strict=True):
        if name in first:
            if row.content.get("filter") != first[name].content.get("filter"):
                continue  # lm-eval writes every output once for each of its filters
            line = first[name].where.rpartition(":")[2]
            raise DataError(f"{row.where}: duplicate question_id {name!r}, first on line {line}.")
        first[name] = row
        is_ours = "question_id" in row.content and isinstance(row.content.get("text"), str)
        predictions[name] = (
            jsonl.from_object(Prediction, row.content, row.where) if is_ours else _foreign(row, name, by_id.get(name))
        )
        empty += predictions[name].text == "" and not is_ours
    if empty:
        cli.note(f"{path}: {empty} output(s) are null or empty; they count as unreadable.")
    return list(predictions.values())


def _question_ids(path: Path, rows: Sequence[_Row], questions: Sequence[Question]) -> list[str]:
    """Return the id of the question that each row answers; what `read` raises about them."""
    ids = {question.id for question in questions}
    # The records of another data set have ids of their own: a record's id counts where the file holds ours.
    ours = any(row.document_id in ids for row in rows)
    names: list[str] = []
    by_place: set[int] = set()
    for row in rows:
        name, place = row.id, row.place
        if name is None and (ours or place is None):
            name = row.document_id
        if name is None and place is not None:
            if not 0 <= place < len(questions):
                raise DataError(f"{row.where}: place {place} of {len(questions)} questions, counted from 0. {_REMEDY}")
            name = questions[place].id
            by_place.add(place)
        if name is None:
            raise DataError(f"{row.where}: no id, one of {', '.join(IDS)} is needed, or a number as doc_id or index.")
        names.append(name)
    repeats_words = _check_words(rows, names, questions)
    if by_place and len(by_place) < len(questions) and not repeats_words:
        raise DataError(
            f"{path}: {len(by_place)} outputs for {len(questions)} questions, numbered by place and without the words "
            f"that were asked: which questions they answer cannot be told. {_REMEDY}"
        )
    return names


def _check_words(rows: Sequence[_Row], names: Sequence[str], questions: Sequence[Question]) -> bool:
    """Return whether every row repeats the words of the question that it is taken for.

    Tools change words (blanks, letters of options), so other words alone are no error; those of another question are.

    Raises:
        DataError: names the first row that was asked another question.
    """
    by_id = {question.id: question for question in questions}
    unlike = [
        (row, name)
        for row, name in zip(rows, names, strict=True)
        if row.id is None and name in by_id and not row.repeats(by_id[name])
    ]
    # Each look goes through the whole exam, and a file of other questions shows itself in its first rows.
    for row, name in unlike[:_PROBED]:
        other = next((question for question in questions if row.repeats(question)), None)
        if other is not None:
            raise DataError(
                f"{row.where}: would be taken for question {name!r}, but question {other.id!r} was asked. {_REMEDY}"
            )
    return not unlike


def _name(value: object) -> str | None:
    """Return an id, which may be an integer, as text; None for what is no id."""
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _squeezed(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


def _foreign(row: _Row, name: str, question: Question | None) -> Prediction:
    key = next((key for key in TEXTS if key in row.content), None)
    if key is None:
        keys = ", ".join(list(row.content)[:_SHOWN])
        raise DataError(f"{row.where}: no output, one of {', '.join(TEXTS)} is needed (found the keys {keys}).")
    outputs = _outputs(row.content[key], question if key == "resps" else None)
    if outputs is None:
        raise DataError(f"{row.where}: {key!r} holds no text: {str(row.content[key])[:60]!r}.")
    return Prediction(name, outputs[0], votes=tuple(outputs) if len(outputs) > 1 else ())


def _outputs(value: object, question: Question | None) -> list[str] | None:
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
    scores = [_log_likelihood(item) for item in value]
    # Where lm-eval compared likelihoods there is one number for each option, and no text at all.
    if question is not None and len(scores) == len(question.options) and None not in scores:
        return [max(zip(scores, question.options, strict=True), key=lambda pair: pair[0] or 0.0)[1]]
    # inspect_ai's content comes in parts; what was thought on the way is no part of the answer.
    if all(isinstance(item, dict) and item.get("type") in ("text", "reasoning") for item in value):
        return ["".join(str(item.get("text") or "") for item in value if item["type"] == "text")]
    nested = [_outputs(item, question) for item in value]
    return None if None in nested else [text for texts in nested if texts for text in texts]


def _log_likelihood(value: Any) -> float | None:
    """Return the log-likelihood in one of lm-eval's `[[value, is_greedy]]`, None where it is something else."""
    while isinstance(value, list) and value:
        value = value[0]
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _whole_file(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (number from 1, row) for each output in a file that is one JSON object."""
    if path.suffix == ".eval":
        raise DataError(
            f"{path}: a packed log of inspect_ai. Unpack it: inspect log convert --to json --output-dir DIR {path}"
        )
    value = documents.read_json(files.check_input(path), "predictions")
    entries = list(value.items())
    if isinstance(samples := value.get("samples"), list) and "eval" in value:
        yield from _inspect(path, samples)
    elif entries and all(_PLACE.fullmatch(key) and isinstance(entry, dict) for key, entry in entries):
        for key, entry in entries:
            row = {"index": int(key), **{name: entry.get(name) for name in ("prediction", "origin_prompt")}}
            yield int(key) + 1, row
    else:
        raise DataError(
            f"{path}: no predictions that are read here (found the keys {', '.join(list(value)[:_SHOWN])}). Read are "
            "JSON lines (.jsonl) of this project, of lm-eval (samples_*.jsonl of --log_samples), of EvalScope or with "
            "an id and an output in each line, and of .json files those of OpenCompass, "
            '{"0": {"prediction": ...}, ...}, and logs of inspect_ai (--log-format json).'
        )


def _inspect(path: Path, samples: Sequence[object]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, row) for each sample of a log; what several epochs wrote for it is one list of outputs."""
    rows: dict[str | int, dict[str, Any]] = {}
    for number, sample in enumerate(samples, 1):
        if not isinstance(sample, dict) or _name(name := sample.get("id")) is None:
            raise DataError(f"{path}: sample {number} has no id.")
        assert isinstance(name, str | int)
        output = sample.get("output")
        # A sample that failed has an output without choices.
        texts = _outputs(output.get("choices") if isinstance(output, dict) else None, None)
        if texts is None:
            raise DataError(f"{path}: sample {number}: its output holds no text.")
        row = rows.setdefault(
            name, {"index": len(rows), "metadata": {"id": name}, "input": sample.get("input"), "choices": []}
        )
        row["choices"] += texts
    yield from enumerate(rows.values(), 1)
