"""`opencompass-cmb`: OpenCompass' CMB (open-compass/opencompass, multiple_select_postprocess and AccEvaluator).

Every upper-case character of any script, sorted: the T of "The answer is B", full-width Ａ and the Greek Ω count, so
that such outputs are wrong. The published config asks the 280 validation questions and cuts outputs after 10 tokens.
"""

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer

SCRIPT = "opencompass/utils/text_postprocessors.py:multiple_select_postprocess"


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    return Reading("".join(sorted({char for char in text if char.isupper()})) or None, None)


SCORER = Scorer(
    name="opencompass-cmb",
    summary="every upper-case character of any script; unreadable = wrong; published on CMB-val",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    styles=("cmb_answer",),
    prompt="以下是中国{exam_type}中{exam_class}考试的一道{question_type}，不需要做任何分析和解释，...... 答案: ",
)
