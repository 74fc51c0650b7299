"""`zsy-answer-line`: scripts/answer_utils.py of github.com/ZSYZSY-111/chinese-medical-exam-llm, its strict reader.

The output is nothing but distinct letters that the question offers, or exactly one of its lines is 答案 or 最终答案, a
colon and such letters. In its mode `cot` only the line counts; this scorer is the mode `direct`, which takes both.
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer

SCRIPT = "chinese-medical-exam-llm/scripts/answer_utils.py:parse_completion"
_LETTERS = r"[A-Za-z](?:[\s,，、/]*[A-Za-z])*"
_LINE = re.compile(rf"(?m)^[ \t]*(?:最终答案|答案)[ \t]*[:：][ \t]*({_LETTERS})[ \t]*$")


def letters_alone(text: str, question: Question) -> str | None:
    """Return the letters of a text that holds nothing else, each once and all of them on offer."""
    answer = re.sub(r"[\s,，、/]", "", text).upper()
    valid = answer and len(set(answer)) == len(answer) and set(answer) <= set(question.options)
    return "".join(sorted(answer)) if valid else None


def answer_line(text: str, question: Question) -> str | None:
    """Return the letters of the one line that states the answer."""
    lines = _LINE.findall(text.replace("\r\n", "\n").strip())
    return letters_alone(lines[0], question) if len(lines) == 1 else None


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    return Reading(letters_alone(text, question) or answer_line(text, question), None)


SCORER = Scorer(
    name="zsy-answer-line",
    summary="letters alone, or the one line 答案：X; everything else is unreadable = wrong",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    prompt="(as `zsy`)",
)
