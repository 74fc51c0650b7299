"""`huatuo2-vote`: HuatuoGPT-II's evaluation/scorer.py, score_result: a vote over several outputs to one question.

Each output is read by its first 答案是 or 答案为 alone; the most frequent answer wins, the first seen of equals, and A
where nothing can be read. Only the pharmacists' four question types are scored; another type is a KeyError there and is
not counted here.
"""

from collections.abc import Sequence

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import most_frequent, printed_type
from cmexam_tune.evaluation.scorers.huatuo2 import SCRIPT, stated

TYPES = ("最佳选择题", "配伍选择题", "综合分析选择题", "多项选择题")
DEFAULT = "A"


def vote(texts: Sequence[str], question: Question) -> Reading:
    """Read several outputs as the script does."""
    letters = None if printed_type(question) == "多项选择题" else 1
    return Reading(most_frequent(stated(text)[:letters] for text in texts) or DEFAULT, None)


SCORER = Scorer(
    name="huatuo2-vote",
    summary="first 答案是/为 of each output, majority, ties to the first, else A; the pharmacists' four types only",
    read=lambda text, question: vote([text], question),
    vote=vote,
    signature={"answer": f"{SCRIPT}:match_choice2", "unread": "A", "score": "score_result"},
    subset=lambda question: printed_type(question) in TYPES,
    subset_name="、".join(TYPES),
    averages={"accuracy_types": ("question_type",)},
    styles=("huatuogpt2",),
    prompt="请回答下面选择题。\n[{question_type}]{question}\n{option_str}",
)
