"""What this project reports: nothing leaves a denominator, metrics as the libraries define them."""

from functools import partial

from cmexam_tune import answers
from cmexam_tune.core.schema import Question
from cmexam_tune.scoring.profiles import Profile, Reading
from cmexam_tune.scoring.text_metrics import pair_statistics, signature


def read(text: str, question: Question) -> Reading:
    """Read an output with `answers.parse` and `answers.split_explanation`."""
    return Reading(answers.parse(text, question), answers.split_explanation(text))


def profile(name: str, unit: str, words: str) -> Profile:
    """Return the rules with text metrics on another unit: char, jieba or zh (`text_metrics.pair_statistics`)."""
    return Profile(
        name=name,
        summary=f"answers.parse; unreadable = wrong; {words}, clipped counts, missing explanation = empty",
        read=read,
        statistics=partial(pair_statistics, unit=unit),
        signature={"answer": "cmexam_tune.answers.parse", "unread": "wrong", **signature(unit)},
    )


PROFILE = profile("standard", "char", "BLEU and ROUGE on characters")
