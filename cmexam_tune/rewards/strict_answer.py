"""The strict reader: letters that a text states once, in the form and at the place that training is to teach.

`evaluation.answer_parsing` understands what people would understand, because a model must not lose points for its
words. A reward needs the opposite: whatever a lenient reader forgives, reinforcement learns to exploit ("答案：A或B",
letters all over the text, a second answer further down).
"""

import re
from typing import Literal, NamedTuple

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import final_part
from cmexam_tune.prompts.styles import TEXT_SEPARATOR, Style

AnswerPlace = Literal["start", "end"]
"""Whether a style writes the letters in its first line or in its last one."""

_CUE = r"答案[ ]*(?:[是为]?[ ]*[:：]|[是为])[ ]*"
_SEPARATOR = r"(?:[ ]*[、,，][ ]*)?"
_LETTERS = rf"[A-Z](?:{_SEPARATOR}[A-Z])*"
# 所以正确答案是C。 and 最终答案：A、C: what leads up to the letters belongs to the statement, the rest explains.
_LEAD = r"(?:(?:所以|因此|故|综上(?:所述)?)[，,]?[ ]*)?(?:本题的?)?(?:正确|最终)?"
_STATEMENT = re.compile(rf"(?P<lead>{_LEAD}){_CUE}(?P<letters>{_LETTERS})(?![A-Za-z0-9])")
# Looser than `_STATEMENT`: a second announcement in any other form ("Answer: B") makes the first one a guess, too.
_ANY_STATEMENT = re.compile(r"答\s*案\s*(?:应)?(?:是|为|选|[:：])|(?i:\banswer\s*(?:is|:))")
_STOP = re.compile(r"[ ]*[。.]?[ ]*")
_EXPLANATION_CUE = re.compile(r"\s*(?:答案)?(?:解释|解析)\s*[:：]\s*")


class Statement(NamedTuple):
    """The one statement of an answer in a text."""

    letters: str
    """Sorted and distinct, all of them on offer."""
    explanation: str
    """The text without the statement; may be empty."""


def answer_place(style: Style) -> AnswerPlace:
    """Return where a style has the answer written: before its explanation, or at the end."""
    before, field, _ = style.write.partition("{explanation}")
    return "start" if field and "{letters}" in before else "end"


def statement(text: str, question: Question, place: AnswerPlace = "end") -> Statement | None:
    """Return what a text states, or None where it does not state exactly one answer in the form that counts.

    That form is `答案：`, `答案是` or `答案为` and letters, with nothing behind them but the texts of these options and
    a full stop, in the last line that is not blank (`place` "start": in the first). Letters are on offer, distinct and
    in order; no other words of the text announce an answer. A reasoning model's thoughts do not count, and a text that
    never stopped thinking states nothing.
    """
    text = final_part(text).strip()
    if len(_ANY_STATEMENT.findall(text)) != 1 or not (match := _STATEMENT.search(text)):
        return None
    letters = re.sub(r"[ 、,，]", "", match["letters"])
    if not set(letters) <= set(question.options) or letters != "".join(sorted(set(letters))):
        return None
    end = _end_of_line(text, match.end(), TEXT_SEPARATOR.join(question.options[letter] for letter in letters))
    if end is None:
        return None
    before, after = text[: match.start()].strip(), text[end:].strip()
    if before if place == "start" else after:
        return None
    return Statement(letters, _EXPLANATION_CUE.sub("", before or after, count=1).strip())


def _end_of_line(text: str, start: int, option_texts: str) -> int | None:
    """Return where the line of a statement ends; None if it says more than the letters and their options' texts."""
    line_end = text.find("\n", start)
    line_end = len(text) if line_end < 0 else line_end
    after = text[start:line_end].strip(" ")
    allowed = _STOP.fullmatch(after) or _STOP.fullmatch(after.removeprefix(option_texts))
    return line_end if allowed else None


def read_strictly(text: str, question: Question, place: AnswerPlace = "end") -> str | None:
    """Return the letters of `statement`, None without one."""
    stated = statement(text, question, place)
    return None if stated is None else stated.letters
