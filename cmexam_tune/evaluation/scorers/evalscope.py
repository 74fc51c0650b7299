"""`evalscope`: EvalScope's general_mcq in Chinese (modelscope/evalscope, evalscope/utils/multi_choices.py).

The last 答案 with a colon that a label follows: bracketed single letters with commas, or letters with commas; of it
the leading part counts that is made of the question's own letters. Without one the last upper-case character of the
output is the answer, if the question offers it. A data set runs in one mode: `single` takes one letter only, `multi`
a set. Here a question that is printed as 单选 is read in the first, every other in the second. Options count
from A up to the first letter that is missing, and a file with an option that is null is refused there.
"""

import re

from cmexam_tune.core.schema import Question, letters
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import by_position

SCRIPT = "evalscope/utils/multi_choices.py:parse_answers_zh"
_MARKER = re.compile(r"答案\s*[:：]\s*\**\s*")
# Commas are the only separators that the script knows: "答案：A、C" is read as A.
_LABELS = (
    re.compile(r"[(\[（【]\s*([A-Za-z\d](?:\s*[,，]\s*[A-Za-z\d])*)\s*[)\]）】]"),
    re.compile("([A-Za-z0-9][A-Za-z0-9,，]*)"),
)
_TOKEN = re.compile(r"[A-Za-z\d]+")


def labelled(text: str, offered: set[str]) -> str | None:
    """Return the label behind the last marker that has one, without what is not made of the letters on offer."""
    for marker in reversed(list(_MARKER.finditer(text))):
        for label in _LABELS:
            if match := label.match(text, marker.end()):
                end = 0
                for token in _TOKEN.finditer(match[1]):
                    if not set(token[0]) <= offered:
                        break
                    end = token.end()
                if end:
                    return match[1][:end]
    return None


def read_mode(text: str, question: Question, several: bool) -> Reading:
    """Read an output in the mode `multi` (several) or `single`."""
    offered = {letter for letter, own in by_position(question).items() if letter == own}
    label = labelled(text, offered)
    if label is None:
        last = next((char for char in reversed(text) if char.isupper()), "")
        return Reading(last if last in offered else None, None)
    listed = re.split("[,，]", label.replace(" ", ""))
    parts = {label} if not several else set(listed) if len(listed) > 1 else set(label)
    return Reading(letters("".join(parts)) if parts <= offered else None, None)


def read(text: str, question: Question) -> Reading:
    """Read an output in the mode that the question belongs to."""
    return read_mode(text, question, several=question.kind != "single")


SCORER = Scorer(
    name="evalscope",
    summary="last labelled 答案：, else last capital; sets of letters; unreadable = wrong",
    read=read,
    signature={"answer": SCRIPT, "unread": "wrong"},
    prompt="回答下面的单项（多项）选择题，请选出其中的（所有）正确答案。你的回答的全部内容应该是这样的格式：...",
)
