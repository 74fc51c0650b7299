"""`standard`, the profile of this project: nothing leaves a denominator, metrics as the libraries define them.

`standard-jieba` and `standard-zh` differ in the units of BLEU and ROUGE only.
"""

from functools import partial

from cmexam_tune import answers
from cmexam_tune.core.schema import Question
from cmexam_tune.metrics.text_metrics import pair_statistics, signature
from cmexam_tune.profiles import Profile, Reading


def read(text: str, question: Question) -> Reading:
    """Read an output with `answers.parse` and `answers.split_explanation`."""
    return Reading(answers.parse(text, question), answers.split_explanation(text))


def with_units(name: str, unit: str, words: str) -> Profile:
    """Return the standard profile with BLEU and ROUGE on these units."""
    return Profile(
        name=name,
        summary=f"answers.parse; unreadable = wrong; {words}, clipped counts, missing explanation = empty",
        read=read,
        statistics=partial(pair_statistics, unit=unit),
        signature={"answer": "cmexam_tune.answers.parse", "unread": "wrong", **signature(unit)},
    )


PROFILE = with_units("standard", "char", "BLEU and ROUGE on characters")
