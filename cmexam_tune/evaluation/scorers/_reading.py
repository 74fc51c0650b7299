"""What several scripts' readers share."""

from collections import Counter
from collections.abc import Iterable

from cmexam_tune.core.schema import Question


def printed_type(question: Question) -> str:
    """Return the type that the exam paper prints, in CMB's words; "" where it prints none."""
    known = {"single": "单项选择题", "multiple": "多项选择题"}
    return question.facets.get("question_type") or known.get(question.kind or "", "")


def most_frequent(answers: Iterable[str]) -> str:
    """Return the most frequent answer that is not empty, the first seen of equals; "" without any."""
    counts = Counter(answer for answer in answers if answer)
    return counts.most_common(1)[0][0] if counts else ""


def after_last(text: str, mark: str) -> str:
    """Return what follows the last `mark`, the whole text where there is none."""
    return text.rpartition(mark)[2]


def between(text: str, start: str, end: str) -> list[str]:
    """Return what stands between each `start` and the next `end`; in one pass, where a lazy expression takes n."""
    parts, at = [], text.find(start)
    while at >= 0 and (stop := text.find(end, at + len(start))) >= 0:
        parts.append(text[at + len(start) : stop])
        at = text.find(start, stop + len(end))
    return parts


def outside(text: str, start: str, end: str) -> str:
    """Return the text without each `start` up to the next `end`."""
    parts, done, at = [], 0, text.find(start)
    while at >= 0 and (stop := text.find(end, at + len(start))) >= 0:
        parts.append(text[done:at])
        done = stop + len(end)
        at = text.find(start, done)
    return "".join([*parts, text[done:]])


def by_position(question: Question) -> dict[str, str]:
    """Return {A, B, C, ...: the option's own letter}: many scripts letter the options anew from A on."""
    return {chr(ord("A") + i): letter for i, letter in enumerate(question.options)}
