"""`medevalkit`: MedEvalKit's utils/utils.py, judge_multi_choice (alibaba-damo-academy/MedEvalKit).

The output is cut down step by step (answer tags, paragraphs, boxes, nine markers, full stop, colon) and compared with
the right answer, letters or "A.text". What is neither is compared with every option line, and the most similar one is
the answer, the first of equals: an output that cannot be read is a guess. Several right letters are right only where
what is left is exactly those letters. Options are lettered by position. CMB's questions with several right answers
are left out.
"""

import re
from difflib import SequenceMatcher

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import after_last, between, by_position

SCRIPT = "MedEvalKit/utils/utils.py:judge_multi_choice"
_MARKERS = (
    *("**answer**:", "**answer**", "*answer*:", "**answer:**", "answer is", "answer:", "答案:"),
    *("final answer", "final answer is"),
)


def remains(text: str, question: Question) -> str:
    """Return what is left of an output, lower-case, before the last two cuts."""
    text = _answers(text).lower()
    parts = text.split("\n\n")
    offered = {letter.lower() for letter in by_position(question)}
    for part in (parts[0], parts[-1].split(".")[0]):
        if part.strip() in offered:
            text = part.strip()
            break
    # A box that is never closed leaves the word "none", which is then compared with the options like any answer.
    text = _boxed(text) if "boxed" in text else _answers(text)
    for marker in _MARKERS:
        text = after_last(text, marker)
    return text.strip().replace("\n", "")


def cut(text: str) -> str:
    """Return what stands before the first full stop and after the last colon."""
    return after_last(text.split(".")[0], ":")


def _answers(text: str) -> str:
    answers = between(text, "<answer>", "</answer>")
    return " ".join(answers) if answers else text


def _boxed(text: str) -> str:
    """Return the content of the last box whose braces balance, else the word none, as the script does."""
    start = text.rfind("boxed{")
    depth = 0
    for brace in re.finditer("[{}]", text[start:]) if start >= 0 else ():
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start + len("boxed{") : start + brace.start()]
    return "none"


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    text = remains(text, question)
    short = cut(text)
    if question.answer is not None and short == question.answer.lower():
        return Reading(question.answer, None)
    lines = [f"{letter}.{option}".lower() for letter, option in question.options.items()]
    for letter, line in zip(by_position(question), lines, strict=True):
        if short in (letter.lower(), line):
            return Reading(letter, None)
    # The script compares the whole text here, not what the last two cuts leave.
    near = [SequenceMatcher(None, line, text).ratio() for line in lines]
    return Reading(chr(ord("A") + near.index(max(near))), None)


SCORER = Scorer(
    name="medevalkit",
    summary="markers and cuts, else the most similar option; several letters only verbatim; CMB's 单项选择题 only",
    read=read,
    signature={"answer": SCRIPT, "unread": "most similar option"},
    subset=lambda question: question.kind != "multiple",
    subset_name="all but those printed as 多项选择题",
    prompt="\n问题： {question}\n选项： \n...请直接使用给定选项中的选项字母来回答该问题。",
)
