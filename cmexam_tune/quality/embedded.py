"""Stems of other questions inside an explanation: pages that were cut in the wrong place."""

from cmexam_tune.core.normalise import plain
from cmexam_tune.core.schema import Question

WINDOW = 14
SHORTEST = 18
"""Characters of a plain stem; shorter ones occur in explanations by themselves."""


class Embedded:
    """The stems seen so far by their first characters."""

    def __init__(self) -> None:
        self._by_start: dict[str, list[tuple[int, str]]] = {}

    def add_stem(self, place: int, question: Question) -> None:
        """Remember the stem of the question at `place`."""
        stem = plain(question.stem)
        if len(stem) >= SHORTEST:
            self._by_start.setdefault(stem[:WINDOW], []).append((place, stem))

    def inside(self, question: Question) -> int | None:
        """Return the place of a question whose whole stem stands in this one's explanation, and not in its stem."""
        if not question.explanation:
            return None
        text, own = plain(question.explanation), plain(question.stem)
        for start in range(len(text) - SHORTEST + 1):
            for place, stem in self._by_start.get(text[start : start + WINDOW], ()):
                if text.startswith(stem, start) and stem not in own and own not in stem:
                    return place
        return None
