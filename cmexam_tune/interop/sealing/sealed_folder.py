"""What a sealed folder holds, and how it is made of questions and predictions.

- `seal.json`: who sealed what with which code, the SHA-256 of every other file, and its own (key `seal`).
- `predictions.jsonl`: the outputs, as `predict` wrote them. `config.json`: what it recorded beside them.
- `questions.jsonl`: of each question its id, key, option letters, facets and the SHA-256 of its whole record. Its texts
  stay out: they are the exam's, not ours to pass on.
- `readings.json`: the readings that a scorer owes to the options' texts, as of an output that repeats the option and
  names no letter. All others follow from output and letters alone, so that they can be recomputed without the texts.
- `scores.json`: the scores by every scorer, ours also by facet, and what the order of the options does.
- the same results as other tools read them, see `shared_records.py`.

Everything but the first three is derived from them: `derive` is what both writing and verifying call.
"""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cmexam_tune.core import __version__, files, jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import OMIT_IF_DEFAULT, Prediction, Question, Scores
from cmexam_tune.evaluation import breakdowns, grading, prediction_metadata, scorers
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.evaluation.scorers import STANDARD
from cmexam_tune.interop import predictions as other_tools
from cmexam_tune.interop.sealing import shared_records
from cmexam_tune.report import identity
from cmexam_tune.report.option_orders import OptionOrders, option_orders

FORMAT = 1
SEAL, CONFIG, QUESTIONS, PREDICTIONS = "seal.json", "config.json", "questions.jsonl", "predictions.jsonl"
READINGS, SCORES = "readings.json", "scores.json"
_NOWHERE = "\ue000"
"""A private character that no output holds: stands for the texts that stay out."""

Readings = Mapping[str, Mapping[str, Any]]
"""Scorer -> id of a question -> [answer, right, counted], and [answer, right] of each order where there are several."""


@dataclass(frozen=True)
class SealedQuestion:
    """What may be passed on of a question."""

    id: str
    sha256: str
    """Of the question's whole record, as `preprocess` writes it."""
    answer: str | None
    letters: str
    """Of its options."""
    length: int
    """Characters of its stem."""
    kind: Literal["single", "multiple"] | None = None
    facets: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, question: Question) -> "SealedQuestion":
        """Leave the texts out."""
        digest = hashlib.sha256(jsonl.dumps(question).encode()).hexdigest()
        letters = "".join(question.options)
        return cls(question.id, digest, question.answer, letters, len(question.stem), question.kind, question.facets)

    def stand_in(self) -> Question:
        """Return a question with the same letters and key, and texts that no output can contain."""
        options = {letter: _NOWHERE + letter for letter in self.letters}
        stem = _NOWHERE * max(self.length, 1)
        return Question(self.id, stem, options, self.answer, None, self.kind, self.facets)


@dataclass(frozen=True)
class SealHeader:
    """What `seal.json` says beside the checksums."""

    name: str
    date: str
    """Day of the sealing, ISO 8601."""
    questions: str
    """Name of the questions file."""
    questions_sha256: str
    """Of ids and checksums of all questions, in order: equal where two folders are of the same questions."""
    predictions_sha256: str
    """Of the predictions file as it was given."""
    of: int | None = field(default=None, metadata=OMIT_IF_DEFAULT)
    """Questions in that file, where only the first of them were sealed."""
    benchmark: str | None = field(default=None, metadata=OMIT_IF_DEFAULT)
    """Dataset of the Hugging Face hub whose leaderboard the score is meant for."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Versions, and the SHA-256 of this package's source."""
    format: int = FORMAT


@dataclass(frozen=True)
class Derived:
    """All that follows from questions, outputs and config."""

    graded: list[Graded]
    """By our own scorer."""
    readings: Readings
    scores: Mapping[str, Scores]
    """By every scorer."""
    by_facet: Mapping[str, Mapping[str, Scores]]
    """By our own scorer."""
    option_orders: OptionOrders | None
    documents: Mapping[str, object]
    """Name of a file of the folder -> what it holds: a JSON object, a list of them for JSON lines, or text."""


def derive(
    head: SealHeader,
    sealed: Sequence[SealedQuestion],
    predictions: Sequence[Prediction],
    metadata: PredictionMetadata,
    *,
    questions: Sequence[Question] | None = None,
    readings: Readings | None = None,
) -> Derived:
    """Return everything that follows from the outputs.

    Args:
        head: Who was scored and when.
        sealed: The questions, without their texts.
        predictions: The outputs.
        metadata: How they were made.
        questions: The same questions with their texts.
        readings: Where there are no texts: what was read with them, as the folder says.

    Raises:
        DataError: predictions and questions do not match.
    """
    # Scored with the texts and without: only where the two differ does the folder have to say what was read, and
    # everything else in it can be recomputed by somebody who has no licence for the exam.
    stand_ins = [question.stand_in() for question in sealed]
    needed: dict[str, dict[str, Any]] = {}
    scores: dict[str, Scores] = {}
    standard: list[Graded] = []
    order, asked = metadata.option_order, metadata.asks_for_explanations
    for name in Progress(head.name, "scorers", len(scorers.names()), patience=1).each(scorers.names()):
        items = grading.grade(stand_ins, predictions, name, order, explanations=False)
        if questions is None:
            needed[name] = dict((readings or {}).get(name, {}))
            items = [_read_with_texts(item, needed[name].get(item.question.id)) for item in items]
        else:
            whole = grading.grade(questions, predictions, name, order, asked)
            needed[name] = {
                item.question.id: _reading(item)
                for item, bare in zip(whole, items, strict=True)
                if _reading(item) != _reading(bare)
            }
            items = whole
        scores[name] = grading.score(items, name)
        standard = items if name == STANDARD else standard
    needed_readings = {name: values for name, values in needed.items() if values}
    orders = option_orders(standard)
    facets = breakdowns.by_facet(standard, lambda items: grading.score(items, STANDARD))
    documents = {
        READINGS: needed_readings,
        SCORES: {"profiles": scores, "by_facet": facets, "option_orders": orders and asdict(orders)},
        **shared_records.records(_about(head, metadata, len(sealed)), standard, scores, [q.sha256 for q in sealed]),
    }
    return Derived(standard, needed_readings, scores, facets, orders, documents)


def _about(head: SealHeader, metadata: PredictionMetadata, n: int) -> shared_records.About:
    who = identity.identify(metadata, head.questions, n, STANDARD, head.date)
    # What other folders do not have in common with this one. Not the scores: they have to come out of it again.
    apart = (head.name, head.date, head.questions_sha256, head.predictions_sha256)
    digest = hashlib.sha256("\n".join(apart).encode()).digest()
    return shared_records.About(head.name, who, metadata, head.questions_sha256, digest, head.code, head.benchmark)


def _reading(item: Graded) -> list[object]:
    orders = [[[answer.answer, answer.right] for answer in item.orders]] if item.orders else []
    return [item.answer, item.right, item.counted, *orders]


def _read_with_texts(item: Graded, reading: Sequence[Any] | None) -> Graded:
    if reading is None:
        return item
    answer, right, counted, *orders = reading
    answers = [
        replace(ordered, answer=own, right=float(points))
        for ordered, (own, points) in zip(item.orders, orders[0] if orders else (), strict=True)
    ]
    return replace(item, answer=answer, right=float(right), counted=counted, orders=tuple(answers))


def seal(
    predictions: str | Path,
    questions: str | Path,
    out: str | Path,
    program: str,
    date: str,
    *,
    name: str = "",
    benchmark: str | None = None,
    limit: int | None = None,
    overwrite: bool = False,
) -> str:
    """Write a sealed folder and return its seal.

    Args:
        predictions: What `predict`, or another tool, wrote.
        questions: The questions that were asked.
        out: The folder; it appears whole or not at all.
        program: Who writes it.
        date: The day, ISO 8601.
        name: What the system is called; default: its run or model, else the file.
        benchmark: Dataset of the hub whose leaderboard the score is meant for.
        limit: Seal only the first so many questions.
        overwrite: Replace a folder that this program wrote.

    Raises:
        UserError: a file is missing or broken, the two do not match, or the output exists.
    """
    target = files.check_folder(out, program, overwrite, keep=[predictions, questions])
    if benchmark is not None and (benchmark.count("/") != 1 or not all(benchmark.split("/"))):
        raise UserError(f"--benchmark {benchmark}: a dataset of the hub is needed, OWNER/NAME.")
    whole = list(jsonl.read(questions, Question))
    exam, selection = grading.select(whole, (), limit=limit)
    left_out = {question.id for question in whole[len(exam) :]}
    outputs = [output for output in other_tools.read(predictions, whole) if output.question_id not in left_out]
    recorded = prediction_metadata.read(predictions) or PredictionMetadata()
    # What is passed on names no folder of this machine; it is also what the scores are computed with.
    metadata = PredictionMetadata(identity.portable(recorded.values))
    sealed = [SealedQuestion.of(question) for question in exam]
    who = identity.identify(metadata, str(questions), len(exam), STANDARD, date)
    head = SealHeader(
        name=name or who.adapter or who.model or Path(predictions).stem,
        date=date,
        questions=who.questions,
        questions_sha256=digest_of(sealed),
        predictions_sha256=files.sha256(predictions),
        of=selection.of if selection else None,
        benchmark=benchmark,
        code=code(),
    )
    derived = derive(head, sealed, outputs, metadata, questions=exam)
    inputs = {CONFIG: dict(metadata.values), QUESTIONS: sealed, PREDICTIONS: outputs}
    with files.new_folder(target, program, overwrite) as folder:
        for file, content in {**inputs, **derived.documents}.items():
            write(folder / file, content)
        return write_seal(folder, head)


def write(path: Path, content: object) -> None:
    """Write a file of the folder: text, JSON lines or JSON, as `Derived.documents` holds them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        with files.atomic_write(path) as handle:
            handle.write(content)
    elif isinstance(content, list):
        jsonl.write(path, content, overwrite=True)
    else:
        files.write_json(path, content)


def write_seal(folder: Path, head: SealHeader) -> str:
    """Write `seal.json` over the files of a folder, and return the seal."""
    checksums = {name: files.sha256(path) for name, path in contents(folder).items()}
    values = {**json.loads(jsonl.dumps(head)), "files": checksums}
    values["seal"] = seal_of(values)
    files.write_json(folder / SEAL, values)
    return str(values["seal"])


def contents(folder: Path) -> dict[str, Path]:
    """Return what the seal covers by name: all but itself and the mark of who wrote the folder."""
    inside = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    # A link to a folder is no folder of ours, and shows as what was not sealed.
    return {
        name: path
        for name, path in inside.items()
        if name not in (SEAL, files.MARKER) and (path.is_symlink() or not path.is_dir())
    }


def seal_of(values: Mapping[str, object]) -> str:
    """Return the SHA-256 of what `seal.json` says, but for the key `seal` itself."""
    content = {key: value for key, value in values.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def digest_of(sealed: Sequence[SealedQuestion]) -> str:
    """Return one checksum of all questions, in their order."""
    return hashlib.sha256("".join(f"{item.id}\t{item.sha256}\n" for item in sealed).encode()).hexdigest()


def code() -> dict[str, str]:
    """Return which code computes the scores: versions, and the SHA-256 of this package's Python files."""
    package = Path(__file__).resolve().parents[2]
    lines = [f"{path.relative_to(package)}\t{files.sha256(path)}\n" for path in sorted(package.rglob("*.py"))]
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"cmexam_tune": __version__, "python": platform.python_version(), "sha256": digest}
