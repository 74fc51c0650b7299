"""Reading: what a model wrote goes in, its answer's letters and its explanation come out.

Start reading in `reading.py`: the rules in the order in which they are tried; `cleaning.py` is what is done to an
output before them.
"""

from cmexam_tune.answers.reading import parse, split_explanation

__all__ = ["parse", "split_explanation"]
