"""Which answers a question allows."""

import itertools
from typing import Literal

from cmexam_tune.core.schema import Question


def letter_sets(question: Question, answer_sets: Literal["kind", "single", "multiple"]) -> list[str]:
    """Return the legal answers: single letters, or all sorted subsets, smaller ones first.

    Args:
        question: its options, and what the exam paper prints about the number of answers.
        answer_sets: `generation.answer_sets`; `kind` goes by the exam paper, one letter where it says nothing.
    """
    several = answer_sets == "multiple" or (answer_sets == "kind" and question.kind == "multiple")
    most = len(question.options) if several else 1
    chosen = (itertools.combinations(sorted(question.options), size) for size in range(1, most + 1))
    return ["".join(letters) for size in chosen for letters in size]
