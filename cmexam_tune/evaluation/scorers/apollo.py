"""`apollo`: Apollo's src/evaluate/generate_score.py (github.com/FreedomIntelligence/Apollo).

Of an output with several lines the first that is not empty is read: the most frequent letter A to F in round
brackets, else the most frequent capital A to F anywhere, the first seen of equals; "Yes." is A and "No." is B. The
right answer is cut to its first letter, so that a question with several is right when that one is given. Given lists
of outputs, as its own generation writes them, the script raises TypeError; here one output is read.
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import most_frequent

SCRIPT = "Apollo/src/evaluate/generate_score.py"
_BRACKETED = re.compile(r"[（(]([A-Fa-f])[）)]")


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    line = next((line for line in text.split("\n") if line.strip()), text)
    answer = most_frequent(_BRACKETED.findall(line)).upper() or most_frequent(re.findall("[A-F]", line))
    return Reading(answer or {"Yes.": "A", "No.": "B"}.get(line), None)


def right(answer: str | None, question: Question) -> float:
    """Return whether the answer is the first letter of the right one."""
    return float(answer is not None and answer == (question.answer or "")[:1])


SCORER = Scorer(
    name="apollo",
    summary="first line: most frequent letter, in brackets first; gold cut to its first letter; unreadable = wrong",
    read=read,
    right=right,
    signature={"answer": SCRIPT, "unread": "wrong", "gold": "first letter"},
    prompt="User:You are a medical doctor answering real-world medical exam questions. ... (3 examples)",
)
