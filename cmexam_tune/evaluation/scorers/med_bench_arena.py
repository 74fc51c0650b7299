"""`med-bench-arena`: medeval/datasets/hf_mcq.py of github.com/pariskang/Med-Bench-Arena, mode `multi`.

Its catalogue sets CMB and CMExam to several answers. Without thinking: the capitals behind the last Answer: or 答案:
of the output, to the line's end, that are on offer and not part of a Latin word; else those of the whole output, so
that an explanation of every option gives all letters; else a reader for one letter. Options are numbered by position.
"""

import re

from cmexam_tune.core.schema import Question, letters
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import outside

SCRIPT = "Med-Bench-Arena/medeval/datasets/hf_mcq.py"
_MARKED = re.compile(r"(?i)(?:answer|答案)\s*[:：]\s*([^\n]*)")
_KEYWORD = re.compile(
    r"(?i)(?:answer|correct option|正确答案|答案|选项)\s*(?:(?:is|[:：为是])\s*)?\(?([A-Z])\)?(?![A-Za-z])"
)
_LONE = re.compile(r"(?:^|[^A-Za-z])\(?([A-Z])\)?(?:[.):、]|\b)")


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    options = {letter: option for letter, option in sorted(question.options.items()) if option and option.strip()}
    letter_of = {chr(ord("A") + i): letter for i, letter in enumerate(options)}
    without = outside(text, "<think>", "</think>")
    # An output that is nothing but thinking is read all the same, as by the script.
    text = without if without.strip() else text
    marked = _MARKED.findall(text)
    run = re.compile(f"(?<![A-Za-z])[{''.join(letter_of)}]+(?![A-Za-z])")
    for part in (marked[-1] if marked else "", text):
        if marks := "".join(run.findall(part)):
            return Reading(letters("".join(letter_of[mark] for mark in marks)), None)
    mark = _single(text.strip(), list(options.values()), set(letter_of))
    return Reading(letter_of.get(mark), None)


def _single(text: str, options: list[str], offered: set[str]) -> str:
    keyword = _KEYWORD.search(text)
    if keyword and keyword[1].upper() in offered:
        return keyword[1].upper()
    if lone := [char for char in _LONE.findall(text) if char in offered]:
        return str(lone[-1])
    folded = _folded(text)
    texts = (i for i, option in enumerate(options) if _folded(option) in folded)
    return chr(ord("A") + first) if (first := next(texts, -1)) >= 0 else ""


def _folded(text: str) -> str:
    return " ".join(text.split()).lower()


SCORER = Scorer(
    name="med-bench-arena",
    summary="capitals behind the last 答案:, else all lone capitals; sets of letters; unreadable = wrong",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    prompt="... Think step by step, then write ALL correct letters together on a new line as:\nAnswer: BC",
)
