"""`standard`, the scorer of this project: nothing leaves a denominator, metrics as the libraries define them.

`standard-jieba` and `standard-zh` differ in the units of BLEU and ROUGE only.
"""

from functools import partial

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.text_metrics import pair_statistics, signature


def read(text: str, question: Question) -> Reading:
    """Read an output with `answer_parsing.parse` and `answer_parsing.split_explanation`."""
    return Reading(answer_parsing.parse(text, question), answer_parsing.split_explanation(text))


def with_units(name: str, unit: str, words: str) -> Scorer:
    """Return the standard scorer with BLEU and ROUGE on these units."""
    return Scorer(
        name=name,
        summary=f"answer_parsing.parse; unreadable = wrong; {words}, clipped counts, missing explanation = empty",
        read=read,
        statistics=partial(pair_statistics, unit=unit),
        marks_explanation=answer_parsing.marks_explanation,
        signature={"answer": "cmexam_tune.evaluation.answer_parsing.parse", "unread": "wrong", **signature(unit)},
    )


SCORER = with_units("standard", "char", "BLEU and ROUGE on characters")
