"""Questions that occur more than once, in one file or in several: equal stem and options, found by a fingerprint."""

from typing import Any

from cmexam_tune.core.normalise import folded
from cmexam_tune.core.schema import Question


class Duplicates:
    """Fingerprints of the questions seen so far; of a question that is met again all places are kept."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, str, str | None]] = {}
        self._again: dict[int, list[tuple[str, str, str | None]]] = {}

    def add(self, file: str, question: Question) -> None:
        """Remember one question of `file`."""
        mark = fingerprint(question)
        place = (file, question.id, question.answer)
        first = self._first.setdefault(mark, place)
        if first is not place:
            self._again.setdefault(mark, [first]).append(place)

    def groups(self) -> list[dict[str, Any]]:
        """Return every group of two or more as the report lists it, in the order of their first ids."""
        found = []
        for members in self._again.values():
            files, ids, answers = zip(*members, strict=True)
            conflict = len({answer for answer in answers if answer is not None}) > 1
            found.append({"ids": list(ids), "files": sorted(set(files)), "conflicting_answers": conflict})
        return sorted(found, key=lambda group: group["ids"])


def fingerprint(question: Question) -> int:
    """Return a hash that is equal for equal stem and options, up to white space, width and case."""
    text = "\0".join([question.stem, *question.options.values()])
    return hash("".join(folded(text).split()))
