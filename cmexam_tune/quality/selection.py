"""Sampled answers that the key has judged, as training data: what is right, right beside wrong, what is worth asking.

`select` reads the outputs that `predict` sampled (`generation.votes`), judges each one strictly, and keeps a funnel of
what became of every question and every output. Questions whose key is doubtful or that are held out are refused first.
"""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rapidfuzz.distance import Levenshtein

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import GROUP, Prediction, Question
from cmexam_tune.evaluation import prediction_metadata
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.prompts import STYLES, order
from cmexam_tune.prompts.styles import Style
from cmexam_tune.quality.contamination import SAME
from cmexam_tune.quality.findings import WRONG_KEYS, check_files, names_of
from cmexam_tune.rewards import Statement, answer_place
from cmexam_tune.rewards.terms import JudgedOutput, argues

Make = Literal["sft", "pairs", "pool"]
Preference = Literal["shortest", "diverse"]
KEPT = "kept"
OUTCOMES = {
    KEPT: "kept",
    "held-out": "also in a file of --against",
    "no-key": "its answer is not published",
    **{name: f"its key is doubtful: {name} (see `check`)" for name in WRONG_KEYS},
    "failed": "the request failed, nothing was written",
    "unfinished": "cut off by a limit",
    "unreadable": "does not state exactly one answer in the style's form",
    "wrong": "states other letters than the key",
    "argues-otherwise": "right, and its explanation concludes with other letters",
    "no-explanation": "right, without the explanation that the style has written",
    "repeated": "right, and the same as another output",
    "enough": "right, more than are kept of a question",
    "no-partner": "right or wrong, without an output of the other kind and a similar length",
    "none-right": "no output is right",
    "none-wrong": "no output is wrong",
    "too-easy": "its share of right outputs is above --pass-rate",
    "too-hard": "its share of right outputs is below --pass-rate",
    "counted": "counted in its question's share of right outputs",
}
"""What can become of a question or an output, and what it means."""


@dataclass(frozen=True)
class SelectionRules:
    """What is made of the outputs, and which of them are kept."""

    make: Make
    per_question: int = 1
    """Right outputs (pairs) that are kept of one question."""
    prefer: Preference = "shortest"
    length_ratio: float = 1.5
    """How many times as long as the shorter one the longer output of a pair may be."""
    pass_rate: tuple[float, float] = (0.125, 0.875)
    """Lowest and highest share of right outputs in the pool."""
    easy_first: bool = False
    """Sort the pool by that share, the highest first."""


class Sample(NamedTuple):
    """One output of a question."""

    number: int
    text: str
    finish: str | None


@dataclass(frozen=True)
class Verdict:
    """A sample, what it states, and what became of it."""

    sample: Sample
    stated: Statement | None
    outcome: str
    """`KEPT` for a right output, until something else is decided."""

    @property
    def right(self) -> bool:
        """Whether the output is finished, right, and argues for what it answers."""
        return self.outcome in (KEPT, "repeated")


@dataclass
class Funnel:
    """How many questions and outputs there were, and what became of them."""

    made: Make
    rows: int = 0
    """Lines written."""
    questions: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)
    right: int = 0
    by_facet: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Facet -> value -> `questions`, `outputs`, `right` outputs, `kept` questions."""

    def count(self, question: Question, outcome: str, verdicts: Sequence[Verdict]) -> None:
        """Count a question and its outputs."""
        right = sum(verdict.right for verdict in verdicts)
        self.right += right
        self.questions[outcome] += 1
        numbers = {"questions": 1, "outputs": len(verdicts), "right": right, "kept": int(outcome == KEPT)}
        for facet, value in question.facets.items():
            if facet != GROUP:
                cell = self.by_facet.setdefault(facet, {}).setdefault(value, dict.fromkeys(numbers, 0))
                for name, number in numbers.items():
                    cell[name] += number

    def to_dict(self) -> dict[str, Any]:
        """Return funnel.json."""
        return {
            "made": self.made,
            "rows": self.rows,
            "questions": dict(self.questions),
            "outputs": dict(self.outputs),
            "outputs_right": self.right,
            "by_facet": self.by_facet,
        }


@dataclass
class Selection:
    """What was selected, and examples of what was not."""

    funnel: Funnel
    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, list[tuple[Question, Verdict]]] = field(default_factory=dict)
    """Outcome -> the first few outputs that it happened to."""


EXAMPLES = 5
"""Dropped outputs of each kind that are kept to be looked at."""


def select(votes: Path, questions: Path, against: Sequence[Path], rules: SelectionRules) -> Selection:
    """Judge sampled outputs by the key and make training rows of them.

    Args:
        votes: a predictions file with several outputs for each question, or its unfinished `.votes` file.
        questions: the file that was asked.
        against: files of questions that must not be trained on.
        rules: what is to be made.

    Raises:
        UserError: a file that is missing or empty, or has no output for any of the questions.
        DataError: an output of a question that is not there.
    """
    by_id = {question.id: question for question in jsonl.read(questions, Question)}
    samples = read_samples(votes, by_id)
    refused = refusals(questions, against)
    metadata = prediction_metadata.read(votes) or PredictionMetadata()
    style = style_of(metadata)
    result = Selection(Funnel(rules.make))
    rates: list[float] = []
    for name, group in Progress("select", "questions", len(samples), patience=1).each(samples.items()):
        # Texts speak of the letters as they were shown.
        question = order.shown(by_id[name], metadata.option_order)
        reason = "no-key" if question.answer is None else refused.get(name)
        verdicts = [judge(question, sample, style, reason) for sample in group]
        made = _rows_of(question, verdicts, rules, reason)
        for row in made.rows:
            row.values["source"] = {**_provenance(metadata, votes), "samples": row.samples}
        rates += [sum(verdict.right for verdict in made.verdicts) / len(made.verdicts)] * len(made.rows)
        result.funnel.count(question, made.outcome, made.verdicts)
        result.rows += [row.values for row in made.rows]
        _count_outputs(result, question, made)
    if rules.make == "pool" and rules.easy_first:
        by_rate = sorted(range(len(rates)), key=lambda i: -rates[i])
        result.rows = [result.rows[i] for i in by_rate]
    result.funnel.rows = len(result.rows)
    return result


class TrainingRow(NamedTuple):
    """One line of the training data."""

    values: dict[str, Any]
    samples: list[int]
    """Numbers of the outputs that it is made of."""


class QuestionRows(NamedTuple):
    """What became of a question: why it has rows or none, its rows, and what became of its outputs."""

    outcome: str
    rows: list[TrainingRow]
    verdicts: Sequence[Verdict]


def _count_outputs(result: Selection, question: Question, made: QuestionRows) -> None:
    used = {number for row in made.rows for number in row.samples}
    for verdict in made.verdicts:
        outcome = KEPT if verdict.sample.number in used else verdict.outcome
        if outcome == KEPT and verdict.sample.number not in used:
            outcome = {"sft": "enough", "pairs": "no-partner", "pool": "counted"}[result.funnel.made]
        result.funnel.outputs[outcome] += 1
        examples = result.dropped.setdefault(outcome, [])
        if outcome != KEPT and len(examples) < EXAMPLES:
            examples.append((question, verdict))


def style_of(metadata: PredictionMetadata) -> Style:
    """Return the style in which the outputs were asked for; without a note the letters are expected at the end."""
    name, write = metadata.prompt.get("style"), metadata.prompt.get("write")
    style = STYLES.get(str(name), STYLES["cmb_answer"])
    return dataclasses.replace(style, write=write) if isinstance(write, str) else style


def read_samples(path: Path, questions: Mapping[str, Question]) -> dict[str, list[Sample]]:
    """Return id of a question -> its outputs, of the questions that have any, in the order of the questions.

    A line holds all outputs of its question in `votes`, or is a single one, whose key is the question's id, or this
    and the number of the output (`q17#3`), as in a `.votes` file.

    Raises:
        UserError: the file is missing or empty, or no question has an output.
        DataError: an output of a question that is not there.
    """
    samples: dict[str, list[Sample]] = {}
    for line in jsonl.read(path, Prediction):
        name, _, number = line.question_id.rpartition("#")
        if line.question_id in questions:
            name, number = line.question_id, "0"
        if name not in questions or not number.isdecimal():
            raise DataError(
                f"{path}: {line.question_id!r} is no question of the file given as --questions. Give the file that "
                "was asked."
            )
        cut = set(line.votes_cut)
        outputs = [Sample(i, text, "length" if i in cut else "stop") for i, text in enumerate(line.votes)]
        samples.setdefault(name, []).extend(outputs or [Sample(int(number), line.text, line.finish)])
    if not samples:
        raise UserError(f"{path}: holds no output for any of the questions.")
    return {name: samples[name] for name in questions if name in samples}


def refusals(questions: Path, against: Sequence[Path]) -> dict[str, str]:
    """Return id -> why a question must not be trained on: it is held out, or its key is doubtful."""
    checked = check_files([questions], against, drop=())
    (name,) = names_of([questions])
    doubtful = {finding.id: finding.finding for finding in checked.findings if finding.finding in WRONG_KEYS}
    held_out = {pair.id: "held-out" for pair in checked.overlaps if pair.against and pair.reason in SAME}
    assert all(pair.file == name for pair in checked.overlaps if pair.against)
    return doubtful | held_out


def judge(question: Question, sample: Sample, style: Style, refused: str | None = None) -> Verdict:
    """Return what a sample states and whether it is right; a refused question's are all refused."""
    judged = JudgedOutput.of(question, sample.text, answer_place(style))
    return Verdict(sample, judged.stated, refused or _outcome(judged, sample, style))


def _outcome(judged: JudgedOutput, sample: Sample, style: Style) -> str:
    if sample.finish == "error":
        return "failed"
    if sample.finish == "length":
        return "unfinished"
    if judged.stated is None:
        return "unreadable"
    if judged.stated.letters != judged.question.answer:
        return "wrong"
    if argues(judged) < 0:
        return "argues-otherwise"
    if "{explanation}" in style.write and not judged.stated.explanation and style.write_unexplained is None:
        return "no-explanation"
    return KEPT


def _rows_of(
    question: Question, verdicts: Sequence[Verdict], rules: SelectionRules, refused: str | None
) -> QuestionRows:
    """Return the training rows of a question and what became of its outputs; `refused` says why it has none."""
    if refused is not None:
        return QuestionRows(refused, [], verdicts)
    if rules.make == "pool":
        return _pool_row(question, verdicts, rules)
    verdicts = _without_repetitions(verdicts)
    right = [verdict for verdict in verdicts if verdict.outcome == KEPT]
    if not right:
        return QuestionRows("none-right", [], verdicts)
    if rules.make == "sft":
        chosen = _diverse(right, rules.per_question) if rules.prefer == "diverse" else _shortest(right)
        chosen = chosen[: rules.per_question]
        rows = [_sft_row(question, place, verdict) for place, verdict in enumerate(chosen)]
        return QuestionRows(KEPT, rows, verdicts)
    # Unreadable and unfinished outputs are no partners: pairs are to teach what is right, not its form.
    wrong = [verdict for verdict in verdicts if verdict.outcome == "wrong"]
    if not wrong:
        return QuestionRows("none-wrong", [], verdicts)
    rows = [_pair_row(question, place, *pair) for place, pair in enumerate(_pairs(right, wrong, rules))]
    return QuestionRows(KEPT if rows else "no-partner", rows, verdicts)


def _pool_row(question: Question, verdicts: Sequence[Verdict], rules: SelectionRules) -> QuestionRows:
    rate = sum(verdict.right for verdict in verdicts) / len(verdicts)
    low, high = rules.pass_rate
    if not low <= rate <= high:
        return QuestionRows("too-hard" if rate < low else "too-easy", [], verdicts)
    # Made of no single output: new ones are sampled when the question is trained on.
    row = TrainingRow({**dataclasses.asdict(question), "pass_rate": rate}, [])
    return QuestionRows(KEPT, [row], verdicts)


def _sft_row(question: Question, place: int, verdict: Verdict) -> TrainingRow:
    explanation = verdict.stated.explanation or None if verdict.stated else None
    values = {**dataclasses.asdict(question), "id": _key(question, place), "explanation": explanation}
    return TrainingRow(values, [verdict.sample.number])


def _pair_row(question: Question, place: int, chosen: Verdict, rejected: Verdict) -> TrainingRow:
    texts = {"chosen": chosen.sample.text, "rejected": rejected.sample.text}
    values = {**dataclasses.asdict(question), "id": _key(question, place), **texts}
    return TrainingRow(values, [chosen.sample.number, rejected.sample.number])


def _key(question: Question, number: int) -> str:
    """Return the id of a row: the question's own for the first one, so that it is found again."""
    return question.id if number == 0 else f"{question.id}#{number + 1}"


def _without_repetitions(verdicts: Sequence[Verdict]) -> list[Verdict]:
    seen: set[str] = set()
    result = []
    for verdict in verdicts:
        text = verdict.sample.text.strip()
        repeated = verdict.outcome == KEPT and text in seen
        seen.add(text)
        result.append(dataclasses.replace(verdict, outcome="repeated") if repeated else verdict)
    return result


def _shortest(verdicts: Sequence[Verdict]) -> list[Verdict]:
    return sorted(verdicts, key=lambda verdict: len(verdict.sample.text))


def _diverse(verdicts: Sequence[Verdict], count: int) -> list[Verdict]:
    """Return the shortest output, then again and again the one that is least like any that was taken."""
    first, *candidates = _shortest(verdicts)
    taken = [first]
    while candidates and len(taken) < count:

        def distance(verdict: Verdict) -> float:
            texts = (chosen.sample.text for chosen in taken)
            return min(Levenshtein.normalized_distance(verdict.sample.text, text) for text in texts)

        best = max(candidates, key=distance)
        taken.append(best)
        candidates.remove(best)
    return taken


def _pairs(
    right: Sequence[Verdict], wrong: Sequence[Verdict], rules: SelectionRules
) -> Iterator[tuple[Verdict, Verdict]]:
    """Yield pairs of right and wrong outputs of most similar length, each output at most once.

    Where right outputs tend to be longer or shorter than wrong ones, a preference learns the length first.
    """

    def ratio(pair: tuple[Verdict, Verdict]) -> float:
        short, long = sorted(max(len(verdict.sample.text), 1) for verdict in pair)
        return long / short

    used: set[int] = set()
    candidates = sorted(itertools.product(right, wrong), key=ratio)
    for pair in candidates:
        if len(used) // 2 == rules.per_question or ratio(pair) > rules.length_ratio:
            return
        numbers = {verdict.sample.number for verdict in pair}
        if not numbers & used:
            used |= numbers
            yield pair


def _provenance(metadata: PredictionMetadata, votes: Path) -> dict[str, object]:
    """Return where outputs come from, as far as the note beside them says."""
    config = prediction_metadata.section(metadata.values, "config")
    model, generation = (prediction_metadata.section(config, name) for name in ("model", "generation"))
    prompt = json.dumps(dict(metadata.prompt), sort_keys=True, ensure_ascii=False)
    return {
        "votes": votes.name,
        "model": model.get("model_name_or_path"),
        "revision": model.get("revision"),
        "run": metadata.values.get("run"),
        "model_sha256": metadata.values.get("model_sha256"),
        "adapter_sha256": metadata.values.get("adapter_sha256"),
        "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest() if metadata.prompt else None,
        "seed": generation.get("seed"),
        "temperature": generation.get("temperature"),
    }
