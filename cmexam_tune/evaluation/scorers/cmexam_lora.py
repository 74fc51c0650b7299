"""`cmexam-lora`: the CMExam repository's src/evaluation/evaluate_lora_result.py, read from the CSV that infer.py wrote.

Every option counts whose letter or first word occurs anywhere in what is searched: the first line where the output has
an explanation, else all of it. Without a hit the answer is the label 无答案, which is wrong. An output that the CSV
turns into NaN (empty, "NA", ...) is read as answer and explanation 无答案, and the latter is scored as a text.
"""

from functools import partial

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer, _cmexam
from cmexam_tune.evaluation.text_metrics import tokenizer

SCRIPT = "CMExam/evaluate_lora_result.py"
_NO_ANSWER = "无答案"


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    if text in _cmexam.NAN_STRINGS:
        return Reading(None, _NO_ANSWER)
    searched = text.split("\n")[0].strip() if "解释" in text else text
    hits = [
        letter
        for letter, words in ((letter, option.split()) for letter, option in question.options.items())
        if letter in searched or (words and words[0] in searched)
    ]
    # Full-width colons are not found: the whole output is then the explanation.
    explanation = text.split("解释:")[1].strip() if "解释:" in text else text
    return Reading("".join(hits) or None, explanation)


SCORER = Scorer(
    name="cmexam-lora",
    summary="any option letter or first word found; unreadable = wrong; character BLEU, set-based ROUGE",
    read=read,
    statistics=partial(_cmexam.statistics, words=tokenizer("char")),
    signature=_cmexam.signature(SCRIPT, "char", f"{SCRIPT}:parse_options", "wrong"),
    smoothing="none",
)
