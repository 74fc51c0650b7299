"""Whether an explanation argues for the answer that stands above it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cmexam_tune.core.schema import letters
from cmexam_tune.evaluation.grading import Graded

# 故选C, 故本题选 A、C, 因此答案为 B, 所以正确答案是 D项; what stands between the cue and the letters is short.
_CONCLUSION = re.compile(
    r"(?:故|因此|所以|综上)[^。；;\n]{0,8}?(?:选择?|答案(?:是|为|应为|选)?)[:：\s]{0,2}([A-J](?:[、,，和及\s]{0,2}[A-J]){0,9})(?![A-Za-z])"
)


@dataclass(frozen=True)
class Consistency:
    """How often explanations conclude with a letter, and how often with another one than was answered."""

    explained: int
    """Explanations that were read."""
    concluding: int
    """Of these, how many end in a letter and belong to a readable answer."""
    conflicting: int
    conflicting_right: int
    """Right answers among the conflicting ones."""
    agreeing_right: int
    """Right answers among the others."""


def conclusion(text: str | None, options: Iterable[str] = "ABCDE") -> str | None:
    """Return the letters that an explanation concludes with (故选C: the last of them counts), None without any.

    Letters that are no options belong to another word, such as ACEI.
    """
    found = _CONCLUSION.findall(text or "")
    concluded = letters("".join(re.findall("[A-J]", found[-1]))) if found else ""
    return concluded if concluded and set(concluded) <= set(options) else None


def conflicts(one: Graded) -> bool:
    """Return whether an explanation argues for another answer than the one given."""
    argued = conclusion(one.explanation, one.question.options)
    return argued is not None and one.answer is not None and argued != one.answer


def consistency(graded: Sequence[Graded]) -> Consistency | None:
    """Return how explanations and answers agree; None where nothing was explained."""
    explained = [one for one in graded if one.explanation]
    if not explained:
        return None
    concluding = [one for one in explained if one.answer and conclusion(one.explanation, one.question.options)]
    against = [one for one in concluding if conflicts(one)]
    right = sum(one.correct for one in against)
    return Consistency(
        explained=len(explained),
        concluding=len(concluding),
        conflicting=len(against),
        conflicting_right=right,
        agreeing_right=sum(one.correct for one in concluding) - right,
    )
