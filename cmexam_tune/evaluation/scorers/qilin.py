"""`qilin`: Qilin-Med's eval/CMExam/evaluators/baichuan.py, few-shot route (github.com/williamliujl/Qilin-Med).

The last 所以答案是...。 if what stands between is one letter A to E, else the first run of capitals, else the only
option A to E whose text up to its first space occurs; a letter past E is in no list that the script looks at. An empty
text occurs in every output. An option text of several lines raises IndexError there where the output has no capital;
here its first line counts. (The zero-shot route compares logits of A to D and reads no text.)
"""

import re

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import between

CHOICES = "ABCDE"
SCRIPT = "Qilin-Med/eval/CMExam/evaluators/baichuan.py:extract_cot_answer"


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    text = text.strip()
    concluded = [letters for line in text.split("\n") for letters in between(line, "所以答案是", "。")]
    if concluded and concluded[-1] in [*CHOICES]:
        return Reading(concluded[-1], None)
    if capitals := re.search("[A-Z]+", text):
        return Reading(capitals[0], None)
    named = [
        letter
        for letter, option in question.options.items()
        if letter in CHOICES and str(option).split("\n")[0].split(" ")[0] in text
    ]
    return Reading(named[0] if len(named) == 1 else None, None)


SCORER = Scorer(
    name="qilin",
    summary="last 所以答案是X。, else first run of capitals, else the only option text; unreadable = wrong",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    prompt="{Question}\n{Options}\n答案：",
)
