"""Stems of other questions inside an explanation: pages that were cut in the wrong place."""

from cmexam_tune.core.normalise import plain
from cmexam_tune.core.schema import Question

WINDOW = 14
SHORTEST = 18
"""Characters of a plain stem; shorter ones occur in explanations by themselves."""


class Embedded:
    """The stems seen so far by their first characters."""

    def __init__(self) -> None:
        self._place_of: dict[str, int] = {}
        self._lengths: dict[str, set[int]] = {}
        """First characters -> lengths of the stems that start with them: thousands can, of a few lengths."""

    def add_stem(self, place: int, question: Question) -> None:
        """Remember the stem of the question at `place`."""
        stem = plain(question.stem)
        if len(stem) >= SHORTEST:
            self._place_of.setdefault(stem, place)
            self._lengths.setdefault(stem[:WINDOW], set()).add(len(stem))

    def inside(self, question: Question) -> int | None:
        """Return the place of a question whose whole stem stands in this one's explanation, and not in its stem."""
        if not question.explanation:
            return None
        text, own = plain(question.explanation), plain(question.stem)
        for start in range(len(text) - SHORTEST + 1):
            lengths = self._lengths.get(text[start : start + WINDOW], ())
            stems = {text[start : start + length] for length in lengths} & self._place_of.keys()
            if places := [self._place_of[stem] for stem in stems if stem not in own and own not in stem]:
                return min(places)
        return None
