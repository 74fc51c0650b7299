"""`huatuo2`: HuatuoGPT-II's evaluation/scorer.py, score_mix2.

The first 答案是 or 答案为 decides: letters A to E up to the next 。 as long as they ascend. Else the options whose
text occurs, ordered by where, if their letters ascend. Else the first run of capitals A to E that is sorted and not
part of a Latin word, else those options unsorted, else B. Where the right answer has one letter, only the first
letter counts: the script looks at the right answer, and F can never be read.
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer

SCRIPT = "HuatuoGPT-II/evaluation/scorer.py"
DEFAULT = "B"
_CUE = re.compile("答案[是为]")
_RUN = re.compile("(?<![A-Za-z])[A-E]+(?![A-Za-z])")


def stated(text: str) -> str:
    """Return the ascending letters A to E between the first 答案是 or 答案为 and the next 。."""
    cue = _CUE.search(text)
    ascending = ""
    for char in text[cue.end() :].partition("。")[0] if cue else "":
        if "A" <= char <= "E" and char > ascending[-1:]:
            ascending += char
    return ascending


def find_letters(text: str, question: Question) -> str:
    """Return the letters that the script finds, "" where it finds none."""
    if answer := stated(text):
        return answer
    places = [(text.find(option), letter) for letter, option in question.options.items() if option]
    named = "".join(letter for at, letter in sorted(places, key=lambda place: place[0]) if at >= 0)
    if named and named == "".join(sorted(named)):
        return named
    runs = (run for run in _RUN.findall(text) if run == "".join(sorted(set(run))))
    return next(runs, named)


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    answer = find_letters(text, question) or DEFAULT
    return Reading(answer[:1] if question.answer is not None and len(question.answer) == 1 else answer, None)


SCORER = Scorer(
    name="huatuo2",
    summary="first 答案是/为, option texts, first sorted run, else B; cut to one letter where the gold has one",
    read=read,
    signature={"answer": f"{SCRIPT}:match_choice3", "unread": "B", "score": "score_mix2"},
    styles=("huatuogpt2",),
    prompt="请回答下面选择题。\n[{question_type}]{question}\n{option_str}",
)
