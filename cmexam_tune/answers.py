"""Reading an answer from what a model wrote."""

import re

from cmexam_tune.schema import Question, letters


def parse(text: str, question: Question) -> str | None:
    """Return the letters that an output answers with, sorted and distinct, or None where it cannot be read."""
    found = re.findall(r"答案[:：是为\s]*([A-J]+)(?![A-Za-z])|^\s*([A-J]+)\s*[.。]?\s*$", text)
    for group in reversed(found):
        answer = letters("".join(group))
        if all(letter in question.options for letter in answer):
            return answer
    return None


def split_explanation(text: str) -> str | None:
    """Return the explanation in an output, or None where it holds none."""
    marker = re.search(r"(?:解释|解析)\s*[:：]", text)
    return (text[marker.end() :] if marker else text).strip() or None
