"""The records that pass between the stages: Question (or Case) -> Example -> Prediction -> Report.

On disk each is one JSON object a line, UTF-8, with its keys in the order of the fields here.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cmexam_tune.core.errors import DataError

# Ten: A to J are the letters that the readers of exam files and of outputs know.
MIN_OPTIONS, MAX_OPTIONS = 2, 10
LETTERS = frozenset(string.ascii_uppercase)
GROUP = "group"
"""The facet that questions of one case share; reports are not broken down by it."""
OMIT_IF_DEFAULT = {"omit_if_default": True}
"""Metadata of a field that `jsonl` leaves out of the file where it has its default."""

IN_CARDS = "in_cards"
"""Key of a field's metadata: what the report calls it, in English and Chinese, in the card of a question."""


def letters(text: str) -> str:
    """Return the letters of an answer sorted and distinct: `letters("ca")` is `"AC"`."""
    return "".join(sorted(set(text.upper())))


@dataclass(frozen=True)
class Question:
    """One exam item, whatever file it came from.

    Raises:
        DataError: an option or answer that cannot be; the message names the question and the value.
    """

    id: str
    """Stable: the exam's own id, or `<file stem>:<row>`."""
    stem: str
    options: Mapping[str, str]
    """Letter -> text, in the order of the exam paper; 2 to 10 of them."""
    answer: str | None
    """Sorted distinct letters, `"C"` or `"ACD"`; None only where the answers are unpublished."""
    explanation: str | None = None
    kind: Literal["single", "multiple"] | None = None
    """What the exam paper itself prints; never derived from the answer."""
    facets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be an exam question."""
        where = f"question {self.id!r}"
        if not isinstance(self.id, str) or not isinstance(self.stem, str):
            raise DataError(f"{where}: id and stem must be texts.")
        if not self.id or not self.stem.strip():
            raise DataError(f"{where}: id and stem must not be empty.")
        if not MIN_OPTIONS <= len(self.options) <= MAX_OPTIONS:
            raise DataError(f"{where}: {len(self.options)} options, {MIN_OPTIONS} to {MAX_OPTIONS} are possible.")
        if not LETTERS.issuperset(self.options):
            wrong = next(letter for letter in self.options if letter not in LETTERS)
            raise DataError(f"{where}: option letter {wrong!r} is not one of A to Z.")
        if self.kind not in ("single", "multiple", None):
            raise DataError(f"{where}: kind {self.kind!r} is not 'single', 'multiple' or null.")
        # One letter that is an option's is sorted and on offer: nine answers in ten need no more than this look.
        if self.answer is None or self.answer in self.options:
            return
        if not self.answer or self.answer != letters(self.answer):
            raise DataError(f"{where}: answer {self.answer!r} is not made of sorted distinct letters.")
        if missing := [letter for letter in self.answer if letter not in self.options]:
            raise DataError(
                f"{where}: answer {self.answer!r} names {', '.join(missing)}, options are {''.join(self.options)}."
            )

    @property
    def option_lines(self) -> str:
        """The options one a line: `A text`."""
        return "\n".join(f"{letter} {text}" for letter, text in self.options.items())

    @property
    def right_options(self) -> tuple[str, ...] | None:
        """The texts of the right options; None where the answer is not published."""
        return None if self.answer is None else tuple(map(self.options.__getitem__, self.answer))


@dataclass(frozen=True)
class Turn:
    """One question and the text that answers it: of a case (CMB-Clin), a worked example, a round of a conversation."""

    question: str
    answer: str


@dataclass(frozen=True)
class Case:
    """A patient's record and the questions that are asked about it in turn (CMB-Clin).

    What a model says to a turn is a `Prediction` with the id `<case id>:<turn from 1>`.

    Raises:
        DataError: no id, no record or no turn; the message names the case.
    """

    id: str
    title: str
    record: str
    """The case description that every turn is about."""
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be asked about."""
        if not self.id or not self.record.strip() or not self.turns:
            raise DataError(f"case {self.id!r}: id, record and turns must not be empty.")


@dataclass(frozen=True)
class Example:
    """What a model reads (`prompt`) and should write (`completion`), rendered by `prompts.render`."""

    question_id: str
    prompt: str
    completion: str
    style: str


@dataclass(frozen=True)
class OrderedOutput:
    """One of several outputs for a question, asked with its options in an order of its own."""

    text: str
    """The raw model output; its letters are those that the model saw."""
    order: str | None
    """Of the options, as `prompts.order.shown` knows it; None is the exam's."""
    probabilities: Mapping[str, float] | None = None
    """See `Prediction.probabilities`."""


@dataclass(frozen=True)
class Prediction:
    """What a model wrote for one question, and how it was read."""

    question_id: str
    text: str
    """The raw model output; `evaluate` reads it again with its profile's parser."""
    answer: str | None = None
    """Sorted letters, or None = unreadable: a result, which stays in every denominator."""
    explanation: str | None = None
    votes: tuple[str, ...] = field(default=(), metadata=OMIT_IF_DEFAULT)
    """The raw outputs that a majority was taken of."""
    finish: Literal["stop", "length", "error"] | None = field(
        default=None, metadata={**OMIT_IF_DEFAULT, IN_CARDS: ("ended by", "结束于")}
    )
    """How the output ended: by itself, cut off by a limit, or never written (a request that failed for good)."""
    reason: str | None = field(default=None, metadata={**OMIT_IF_DEFAULT, IN_CARDS: ("error", "错误")})
    """Why a request failed."""
    votes_cut: tuple[int, ...] = field(default=(), metadata=OMIT_IF_DEFAULT)
    """Which of the votes a limit has cut off, counted from 0."""
    probabilities: Mapping[str, float] | None = field(
        default=None, metadata={**OMIT_IF_DEFAULT, IN_CARDS: ("probabilities", "概率")}
    )
    """Probability of each allowed answer, in the exam's letters, together 1: where the model chose by likelihood."""
    context: tuple[str, ...] = field(default=(), metadata={**OMIT_IF_DEFAULT, IN_CARDS: ("passages", "参考段落")})
    """Ids of the passages that stood in front of the question."""
    orders: tuple[OrderedOutput, ...] = field(default=(), metadata=OMIT_IF_DEFAULT)
    """The outputs with the options in several orders; the first of them is `text`."""


Scores = Mapping[str, float | int | list[float] | None]


@dataclass(frozen=True)
class Report:
    """Scores of one predictions file: overall, by facet, how they were computed and from what."""

    overall: Scores
    by_facet: Mapping[str, Mapping[str, Scores]]
    signature: Mapping[str, Any]
    provenance: Mapping[str, Any]
