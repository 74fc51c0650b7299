"""`huatuo-o1`: HuatuoGPT-o1's evaluation/scorer.py and the clean-up of its eval.py.

`</s>` and one leading space are removed; an output that is empty then never reaches the scorer and leaves the
denominator. Read is what follows the last `## Final Response`: letters behind "answer is", else lone option letters,
else option texts, else the most similar option text. The script scores the last and the first hit apart and reports
the better of the two accuracies. One letter only: a question with several right letters is never right.
"""

import re
from difflib import SequenceMatcher

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.scorers._reading import after_last, by_position

SCRIPT = "HuatuoGPT-o1/evaluation/scorer.py:match_choice"
_ANSWER_IS = re.compile(r"answer is\s*([A-N])")


def clean(text: str) -> str:
    """Return the output as the script stores it."""
    return text.replace("</s>", "").removeprefix(" ")


def readings(text: str, question: Question) -> tuple[str, str, int]:
    """Return the last hit, the first hit, and by which of its three ways the script found them."""
    text = after_last(clean(text), "## Final Response\n\n")
    options = dict(question.options)
    lone = re.compile(
        rf"(?:[\u4e00-\u9fff]|is |\W|^)(?![aA] )([{''.join(by_position(question))}])(?:\W|[\u4e00-\u9fff]|$)"
    )
    if matches := _ANSWER_IS.findall(text) or lone.findall(text):
        return matches[-1], matches[0], 1
    text = text.lower()
    if texts := {letter: option.lower() for letter, option in options.items() if option.lower() in text}:
        return (
            max(texts, key=lambda key: text.rindex(texts[key])),
            # Not `min`: the script calls first the option whose first mention comes last.
            max(texts, key=lambda key: text.index(texts[key])),
            2,
        )
    near = {letter: SequenceMatcher(None, option.lower(), text).ratio() for letter, option in options.items()}
    # `max` takes the first of equals, the script the last.
    nearest = max(reversed(near), key=lambda letter: near[letter])
    return nearest, nearest, 3


SCORER = Scorer(
    name="huatuo-o1",
    summary="better of last and first letter, option texts, nearest option; empty outputs leave the denominator",
    read=lambda text, question: Reading(readings(text, question)[0], None),
    second=lambda text, question: Reading(readings(text, question)[1], None),
    drops=lambda text, reading: not clean(text),
    signature={"answer": SCRIPT, "unread": "nearest option", "empty": "dropped", "score": "better of two readings"},
    prompt="Please answer the following multiple-choice question:\n{question}\n{option_str}",
)
