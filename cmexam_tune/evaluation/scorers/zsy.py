"""`zsy`: scripts/eval_cmb.py and score_cmb.py of github.com/ZSYZSY-111/chinese-medical-exam-llm.

Everything is made upper-case first, so that "The answer is B" is E (of THE): the 12 tokens of its runs hide this.
Then the letters behind the first 答案, 选项 or 选择, else an output of letters alone, else every letter of the output
that the question offers. Only the first counts unless the paper prints 多项. Sets of letters are compared.
"""

import re

from cmexam_tune.core.schema import Question, letters
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import printed_type

SCRIPT = "chinese-medical-exam-llm/scripts/eval_cmb.py:extract_choice"
_WIDE = {ord(wide): narrow for wide, narrow in zip("ａｂｃｄｅｆｇＡＢＣＤＥＦＧ", "abcdefgABCDEFG", strict=True)}
_LIST = r"([A-Z](?:[\s,，、/;；和与及]*[A-Z])*)"
_CUED = re.compile(rf"(?:答案|选项|选择)\s*(?:[是为：:]\s*)?{_LIST}")
_ALONE = re.compile(rf"\s*{_LIST}\s*[。.!！]?\s*")


def read(text: str, question: Question) -> Reading:
    """Read an output as the script does."""
    # Upper case makes letters of prose answers: "The answer is B" is read as E, as by the script.
    text = text.translate(_WIDE).upper()
    chosen: list[str] = []
    for match in (_CUED.search(text), _ALONE.fullmatch(text)):
        chosen = chosen or [char for char in (match[1] if match else "") if char in question.options]
    chosen = chosen or [char for char in text if char in question.options]
    if not chosen or "多项" not in printed_type(question):
        return Reading(chosen[0] if chosen else None, None)
    return Reading(letters("".join(chosen)), None)


SCORER = Scorer(
    name="zsy",
    summary="upper-cased: letters behind 答案/选项/选择, else letters alone, else all; unreadable = wrong",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    prompt="以下是中国{exam_type}中{exam_class}考试的一道{question_type}，...只能输出选项字母。单选题例如：A；多选题例如：ABC。",
)
