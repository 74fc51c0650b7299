"""`cmmlu`: CMMLU's src/mp_utils.py, extract_choice (github.com/haonan-li/CMMLU).

The first character if it is A to D, else the first of a dozen phrases that matches, else "A ... 正确", else the only
capital A to D of the output, else a RANDOM letter. No letter is drawn here: such an output has no answer, and counts as
right with probability 1/4. An empty output raises IndexError in the function, but reaches it as "nan" on the script's
route through a CSV file. E is never read; scored are questions with four options and one right letter.
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer

SCRIPT = "CMMLU/src/mp_utils.py:extract_choice"
CHOICES = "ABCD"
_L = f"([{CHOICES}])"
_PHRASES = tuple(
    re.compile(phrase)
    for phrase in (
        f"答案(?:选项)?[是为]：? ?{_L}",
        f"答案[是为]选项 ?{_L}",
        f"故?选择?：? ?{_L}",
        f"{_L} ?选?项[是为]?正确",
        f"正确的?选项[是为] ?{_L}",
        f"答案(?:应该)?[是为]{_L}",
        f"选项 ?{_L} ?[是为]?正确",
        f"选择答案 ?{_L}",
        f"答案?：?{_L}",
        f"{_L}(?:选?项)?是?符合题意",
        f"答案选项：? ?{_L}",
    )
)
_LATER = re.compile("答案(?:选项)?为")
_LETTER = re.compile(_L)
_WEAK = re.compile(f"[^不]是：? ?{_L}")


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does; None where it draws a letter."""
    # The empty text is part of every string, so an empty output ends here, without an answer.
    if text[:1] in CHOICES:
        return Reading(text[:1] or None, None)
    for phrase in _PHRASES:
        if match := phrase.search(text):
            return Reading(match[1], None)
    lines = text.split("\n")
    for answer in (_later(lines), _called(lines, "当选"), _called(lines, "正确")):
        if answer:
            return Reading(answer, None)
    if match := _WEAK.search(text):
        return Reading(match[1], None)
    capitals = _LETTER.findall(text)
    return Reading(capitals[0] if len(capitals) == 1 else None, None)


def _later(lines: list[str]) -> str | None:
    """Return the first letter behind 答案为 in the first line that has one."""
    for line in lines:
        if (cue := _LATER.search(line)) and (letter := _LETTER.search(line, cue.end())):
            return letter[0]
    return None


def _called(lines: list[str], word: str) -> str | None:
    """Return the letter nearest before `word`, in the first line where one stands before it."""
    for line in lines:
        first = _LETTER.search(line)
        end = line.find(word, first.end()) if first else -1
        if first and end >= 0:
            return str(_LETTER.findall(line, first.start(), end)[-1])
    return None


def right(answer: str | None, question: Question) -> float:
    """Return 1 or 0, and the chance of the right letter where the script draws one."""
    if answer is None:
        return 1 / len(CHOICES) if question.answer in tuple(CHOICES) else 0.0
    return float(answer == question.answer)


SCORER = Scorer(
    name="cmmlu",
    summary="first character, phrases, only capital A-D; unreadable = a random letter, counted as 1/4",
    read=read,
    right=right,
    signature={"answer": SCRIPT, "unread": "1/4"},
    subset=lambda question: len(question.options) == len(CHOICES) and len(question.answer or "A") == 1,
    subset_name="four options, one right letter",
    prompt="以下是关于{subject}的单项选择题，请直接给出正确答案的选项。\n\n题目：...\n答案是：",
)
