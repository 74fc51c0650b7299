"""`cmexam-chatglm`: the CMExam repository's src/evaluation/evaluate_chatglm_result.py (the GPT script is the same).

The answer is what stands between 答案： and the last full-width comma of the line, compared as it is; both 答案：...，
and 解释：... must be found or both are empty. Outputs without an answer leave the denominator; their explanation, as a
missing reference, is scored as an empty text. BLEU on jieba words, ROUGE on characters with its arguments swapped.
"""

from collections.abc import Sequence

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer, _cmexam
from cmexam_tune.evaluation.text_metrics import PairStatistics, jieba_words

SCRIPT = "CMExam/evaluate_chatglm_result.py"


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does; nothing found on "答案: X", which ChatGLM writes without chat()'s repairs."""
    lines = text.split("\n")
    # Behind the first 答案： of a line; a pattern that is tried at each of them takes time by the square.
    answers = (line.partition("答案：")[2].rpartition("，") for line in lines if "答案：" in line)
    answer = next((before for before, comma, _ in answers if comma), None)
    explanation = next((line.partition("解释：")[2] for line in lines if "解释：" in line), None)
    if answer is None or explanation is None:
        return Reading(None, None)
    fields = (None if field in _cmexam.NAN_STRINGS else field for field in (answer, explanation))
    return Reading(*fields)


def statistics(hypotheses: Sequence[str], references: Sequence[str]) -> list[PairStatistics]:
    """Return the script's statistics of each pair."""
    return _cmexam.statistics(hypotheses, references, words=jieba_words(), swapped=True)


SCORER = Scorer(
    name="cmexam-chatglm",
    summary="text between 答案： and the last ，; unreadable leaves the denominator; jieba BLEU, set-based ROUGE",
    read=read,
    statistics=statistics,
    signature=_cmexam.signature(SCRIPT, "jieba", f"{SCRIPT}:prediction", "dropped"),
    smoothing="none",
    drops=lambda text, reading: reading.answer is None,
    no_reference="empty",
)
