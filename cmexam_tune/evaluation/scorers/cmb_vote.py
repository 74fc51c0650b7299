"""`cmb-vote`: the CMB repository's src/utils.py, extract_ans over several outputs: each is read as in `cmb`.

Unreadable outputs do not vote, the most frequent answer wins, the first seen of equals.
"""

import dataclasses
from collections.abc import Sequence

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, cmb
from cmexam_tune.evaluation.scorers._reading import most_frequent


def vote(texts: Sequence[str], question: Question) -> Reading:
    """Read several outputs as the script does."""
    return Reading(most_frequent(cmb.read(text, question).answer or "" for text in texts) or None, None)


SCORER = dataclasses.replace(
    cmb.SCORER,
    name="cmb-vote",
    summary="majority over several outputs, each read as in cmb; ties to the first; unreadable = wrong",
    vote=vote,
)
