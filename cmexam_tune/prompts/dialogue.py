"""The turns of a case as CMB asks them (arXiv 2308.08833, section 5.1; workers/base.py of its repository)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Case, Question, Turn
from cmexam_tune.prompts import PromptRequest, chat_template, rounds

NO_OPTIONS = {"A": "-", "B": "-"}
"""Of a turn that is asked like a question: a `Question` has two options at least, and nobody reads these."""


def is_cases(path: str | Path) -> bool:
    """Return whether a file holds cases instead of questions.

    Raises:
        UserError: the file is missing or empty.
    """
    _, first = next(jsonl.read_objects(path), (0, {}))
    return "turns" in first and "record" in first


def key(case: Case, number: int) -> str:
    """Return the id of the answer to a turn, counted from 1."""
    return f"{case.id}:{number}"


def keys(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the ids of all turns in order."""
    for case in cases:
        for number, _ in enumerate(case.turns, 1):
            yield key(case, number)


def request(
    case: Case,
    number: int,
    answers: Sequence[str] | None = None,
    form: chat_template.CaseWords = chat_template.CASE,
) -> PromptRequest:
    """Return turn `number` of a case as it is put to a model.

    Mostly the first turn is the record, directly followed by its question, and a later one is its question alone, after
    all earlier turns. In a prompt that is too long the last words lose their middle.

    Args:
        case: the case.
        number: counted from 1.
        answers: the model's own answers to the earlier turns; None: the reference answers, as CMB does.
        form: words of the first and of later turns, `case` of the model's template.
    """
    first, later = form
    words = [
        (later if place else first).format(record=case.record, question=turn.question)
        for place, turn in enumerate(case.turns)
    ]
    replies = [turn.answer for turn in case.turns] if answers is None else answers
    history = rounds(Turn(words[i], replies[i]) for i in range(number - 1))
    question = Question(key(case, number), words[number - 1], NO_OPTIONS, None)
    return PromptRequest(question, lambda shown: shown.stem, history)
