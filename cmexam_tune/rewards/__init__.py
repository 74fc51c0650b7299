"""What a verdict is worth in training: the reward that a model's output to a question earns. Needs no torch.

In: a question, a text and the section `reward` of a config. Out: one number for each term, and their weighted sum.
Start reading in `strict_answer.py`, which letters a text states beyond doubt; `terms.py` has one function for each
term, `total.py` adds them up.
"""

from cmexam_tune.rewards.strict_answer import AnswerPlace, Statement, answer_place, read_strictly, statement
from cmexam_tune.rewards.terms import TERMS, Output, Term
from cmexam_tune.rewards.total import Reward

__all__ = [
    "TERMS",
    "AnswerPlace",
    "Output",
    "Reward",
    "Statement",
    "Term",
    "answer_place",
    "read_strictly",
    "statement",
]
