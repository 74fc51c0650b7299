"""Reading an answer out of an output.

In: what a model wrote, and its question. Out: letters and explanation, or None where nothing can be read.
Start reading in `reading.py`, the rules in the order in which they are tried; `cleaning.py` is what comes before them.
"""

from cmexam_tune.answers.cleaning import THINK, THOUGHT, final_part, still_thinking
from cmexam_tune.answers.reading import parse, split_explanation
from cmexam_tune.answers.sets import letter_sets

__all__ = ["THINK", "THOUGHT", "final_part", "letter_sets", "parse", "split_explanation", "still_thinking"]
