"""Pairs of questions that are the same, nearly the same, or ask about the same case."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cmexam_tune.core.normalise import (
    SHORTEST_STEM,
    case_of,
    jaccard,
    plain,
    question_text,
    right_texts,
)
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Question

Reason = Literal["exact", "contradiction", "near", "similar", "sibling", "stem", "case"]
NEAR, SIMILAR = 0.7, 0.5
"""Jaccard similarity of a near duplicate, and where the doubtful band below it begins."""


@dataclass(frozen=True)
class Pair:
    """Two questions by their places; `first` is one that was checked, `second` may be one it was held against."""

    first: int
    second: int
    reason: Reason
    jaccard: float


class Index:
    """What is remembered of every question: enough to find pairs, not the question itself."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.files = array("i")
        self.lines = array("l")
        self.against = array("b")
        self.texts: list[str] = []
        """Distinct texts of stem and options."""
        self.text_of = array("l")
        self._numbers: dict[str, int] = {}
        self._stems: dict[int, list[int]] = {}
        self._cases: dict[int, list[int]] = {}
        self._right = array("q")
        self._stem_of = array("q")
        self._case_of = array("q")

    def add(self, question: Question, file: int, line: int, against: bool) -> int:
        """Remember a question and return its place."""
        place = len(self.ids)
        self.ids.append(question.id)
        self.files.append(file)
        self.lines.append(line)
        self.against.append(against)
        text = question_text(question.stem, question.options)
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        self.text_of.append(number)
        stem = plain(question.stem)
        self._stem_of.append(hash(stem))
        right = right_texts(question)
        self._right.append(0 if right is None else hash(right) or 1)
        if len(stem) >= SHORTEST_STEM:
            self._stems.setdefault(hash(stem), []).append(place)
        case = case_of(question.stem)
        self._case_of.append(hash(case) if case else 0)
        if case:
            self._cases.setdefault(hash(case), []).append(place)
        return place

    def pairs(self) -> Iterator[Pair]:
        """Yield every pair once; each checked question is paired with one member of a group, not with all."""
        members: list[list[int]] = [[] for _ in self.texts]
        for place, number in enumerate(self.text_of):
            members[number].append(place)
        for group in members:
            for first, second in self._partners(group):
                right, other = self._right[first], self._right[second]
                yield Pair(first, second, "contradiction" if right and other and right != other else "exact", 1.0)
        similar = list(self._near(members))
        known = {(self.text_of[p.first], self.text_of[p.second]) for p in similar}
        yield from similar
        yield from self._sharing(self._stems, "stem", known)
        yield from self._sharing(self._cases, "case", known)

    def _partners(self, group: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield each checked question of a group with one it repeats: a question held against, else an earlier one."""
        others = [place for place in group if self.against[place]]
        checked = [place for place in group if not self.against[place]]
        for number, place in enumerate(checked):
            if others:
                yield place, others[0]
            elif number:
                yield place, checked[0]

    def _near(self, members: Sequence[Sequence[int]]) -> Iterator[Pair]:
        import numpy as np

        from cmexam_tune.quality import minhash

        wanted = np.array([not all(self.against[place] for place in group) for group in members], dtype=bool)
        found = minhash.candidates(minhash.signatures(self.texts), wanted, SIMILAR).tolist()
        for a, b in Progress("compare", "pairs", len(found), patience=1).each(found):
            score = jaccard(self.texts[a], self.texts[b])
            if score >= SIMILAR:
                for first, second in self._across(members[a], members[b]):
                    yield Pair(first, second, self._kind(first, second, score), score)

    def _kind(self, first: int, second: int, score: float) -> Reason:
        """Tell near duplicates from questions that only share their options, or only their case."""
        options = [self.texts[self.text_of[place]].partition("\n")[2] for place in (first, second)]
        right, other = self._right[first], self._right[second]
        if options[0] == options[1] and right and other and right != other:
            return "sibling"
        case = self._case_of[first]
        if score < NEAR and case and case == self._case_of[second] and self._stem_of[first] != self._stem_of[second]:
            return "case"
        return "near" if score >= NEAR else "similar"

    def _across(self, one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield pairs between two groups: with a question held against where there is one, else later with earlier."""
        for mine, theirs in ((one, other), (other, one)):
            held = next((place for place in theirs if self.against[place]), None)
            if held is not None:
                yield from ((place, held) for place in mine if not self.against[place])
        if not any(self.against[place] for place in (*one, *other)):
            early, late = sorted((one, other), key=min)
            yield from ((place, early[0]) for place in late)

    def _sharing(
        self, groups: dict[int, list[int]], reason: Literal["stem", "case"], known: set[tuple[int, int]]
    ) -> Iterator[Pair]:
        for group in groups.values():
            first_of: dict[tuple[int, int], int] = {}
            for place in sorted(group, key=lambda place: not self.against[place]):
                # One for each text: equal questions are listed as such already.
                first_of.setdefault((self.text_of[place], 0 if reason == "stem" else self._stem_of[place]), place)
            if len(first_of) < 2:
                continue
            heads = list(first_of.values())
            if reason == "case" and len({self._stem_of[place] for place in heads}) < 2:
                continue
            for first, second in self._partners(heads):
                numbers = (self.text_of[first], self.text_of[second])
                same_stem = reason == "case" and self._stem_of[first] == self._stem_of[second]
                if numbers not in known and numbers[::-1] not in known and not same_stem:
                    yield Pair(first, second, reason, jaccard(self.texts[numbers[0]], self.texts[numbers[1]]))
