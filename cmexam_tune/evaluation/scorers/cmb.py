"""`cmb`: the CMB repository's src/utils.py (match_choice, extract_ans for one answer) and score.py.

The first 答案 or 正确选项 followed by 是, 为, a full-width colon, ... decides: every capital from A to G up to the next
full stop, unsorted and with repetitions; without one, every capital of the output. Only the first letter counts unless
the paper says 多项选择题. Compared as strings, so "CA" is wrong for AC; no letter is wrong. score.py reports the mean
over a category's classes, the paper averages the six categories: that is `accuracy_macro`; `accuracy` is over all
questions. One difference: four published gold answers are unsorted, here gold answers always are sorted.
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer

SCRIPT = "CMB/src/utils.py:match_choice"
_CUE = re.compile(r"(?:答案|正确选项)(?:是|：|为|应该是|应该为)(.*?)(?:。|\.|$)", re.S)


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    # Kept as the script has it: a half-width "答案:" is no cue, and a cue without letters behind it means no answer.
    cue = _CUE.search(text)
    letters = "".join(re.findall("[A-G]", cue[1] if cue else text))
    if question.kind != "multiple":
        letters = letters[:1]
    return Reading(letters or None, None)


SCORER = Scorer(
    name="cmb",
    summary="first 答案是/为/： else every capital; unreadable = wrong; no text metrics",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong", "accuracy_macro": "CMB/score.py, mean of the categories"},
    averages={"accuracy_classes": ("exam_class",), "accuracy_macro": ("exam_type", "exam_class")},
    headline="accuracy_macro",
    styles=("cmb_answer", "cmb_cot"),
    prompt="以下是中国{exam_type}中{exam_class}考试的一道{question_type}，...",
)
