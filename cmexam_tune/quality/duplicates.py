"""Questions that are the same, nearly the same, or ask about the same case.

`Repeated` finds the same question only, in one pass; `Index` finds pairs of all kinds, near ones by `minhash.py`.
"""

import functools
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from cmexam_tune.core.normalise import (
    SHORTEST_STEM,
    case_of,
    plain,
    question_text,
    right_texts,
    share_in_common,
    shingles,
)
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Question

Reason = Literal["exact", "contradiction", "near", "similar", "sibling", "stem", "case"]
NEAR, SIMILAR = 0.7, 0.5
"""Jaccard similarity of a near duplicate, and where the doubtful band below it begins."""
HEADS = 16
"""Heads of a group of similar texts that a text is compared with before it counts as repeating none of them."""
Scored = tuple[int, int, float]
"""Numbers of two texts, the smaller first, and their Jaccard similarity."""


class Repeated:
    """Hashes of the questions seen so far; of a question that is met again all places are kept."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, str, tuple[str, ...] | None]] = {}
        self._again: dict[int, list[tuple[str, str, tuple[str, ...] | None]]] = {}

    def add(self, file: str, question: Question) -> None:
        """Remember one question of `file`."""
        question_hash = hash(question_text(question.stem, question.options))
        # The texts as they are: only the few that are met again need plain ones, which take most of the time.
        place = (file, question.id, question.right_options)
        first = self._first.setdefault(question_hash, place)
        if first is not place:
            self._again.setdefault(question_hash, [first]).append(place)

    def groups(self) -> list[dict[str, Any]]:
        """Return every group of two or more as the report lists it, in the order of their first ids."""
        groups = []
        for members in self._again.values():
            files, ids, answers = zip(*members, strict=True)
            conflict = len({right_texts(right) for right in answers if right is not None}) > 1
            groups.append({"ids": list(ids), "files": sorted(set(files)), "conflicting_answers": conflict})
        return sorted(groups, key=lambda group: group["ids"])


@dataclass(frozen=True)
class QuestionPair:
    """Two questions by their places; `first` is one that was checked, `second` may be one it was held against."""

    first: int
    second: int
    reason: Reason
    jaccard: float


class Index:
    """What is remembered of every question: enough to find pairs, not the question itself."""

    def __init__(self) -> None:
        # Arrays of numbers and hashes of texts, not an object for each question: CMB-train alone has 269,359.
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
        # Made again when needed: held for all texts, sets of 5-grams take far more memory than the texts.
        self._shingles = functools.lru_cache(maxsize=1024)(lambda text: shingles(self.texts[text]))

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
        right = question.right_options
        # 0 stands for an unpublished answer.
        self._right.append(0 if right is None else hash(right_texts(right)) or 1)
        if len(stem) >= SHORTEST_STEM:
            self._stems.setdefault(hash(stem), []).append(place)
        case = case_of(question.stem)
        self._case_of.append(hash(case) if case else 0)
        if case:
            self._cases.setdefault(hash(case), []).append(place)
        return place

    def pairs(self) -> Iterator[QuestionPair]:
        """Yield every pair once.

        Of large groups not all pairs are listed: there are quadratically many. Of equal questions each checked one is
        paired with one other. A text with `minhash.NEIGHBOURS` similar ones or more is paired with the most
        similar one and with one that it repeats.
        """
        members: list[list[int]] = [[] for _ in self.texts]
        for place, number in enumerate(self.text_of):
            members[number].append(place)
        for group in members:
            for first, second in self._partners(group):
                answers = {self._right[first], self._right[second]} - {0}
                yield QuestionPair(first, second, "contradiction" if len(answers) > 1 else "exact", 1.0)
        similar = list(self._near(members))
        compared = {(self.text_of[pair.first], self.text_of[pair.second]) for pair in similar}
        yield from similar
        yield from self._sharing(self._stems, "stem", compared)
        yield from self._sharing(self._cases, "case", compared)

    def _partners(self, group: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield each checked question of a group with one it repeats: a question held against, else an earlier one."""
        references = [place for place in group if self.against[place]]
        checked = [place for place in group if not self.against[place]]
        for number, place in enumerate(checked):
            if references:
                yield place, references[0]
            elif number:
                yield place, checked[0]

    def _near(self, members: Sequence[Sequence[int]]) -> Iterator[QuestionPair]:
        import numpy as np

        from cmexam_tune.quality import minhash

        wanted = np.array([not all(self.against[place] for place in group) for group in members], dtype=bool)
        candidates = minhash.candidates(minhash.signatures(self.texts), wanted, SIMILAR).tolist()
        scored = []
        for a, b in Progress("compare", "pairs", len(candidates), patience=1).each(candidates):
            score = self._jaccard(a, b)
            if score >= SIMILAR:
                scored.append((a, b, score))
        degree = Counter(text for a, b, _ in scored for text in (a, b))
        crowded = {text for text, count in degree.items() if count >= minhash.NEIGHBOURS}
        listed = [*_not_crowded(scored, crowded), *self._with_heads(scored, crowded, members)]
        for a, b, score in dict.fromkeys(listed):
            for first, second in self._across(members[a], members[b]):
                yield QuestionPair(first, second, self._kind(first, second, score), score)

    def _jaccard(self, a: int, b: int) -> float:
        return share_in_common(self._shingles(a), self._shingles(b))

    def _with_heads(
        self, scored: Sequence[Scored], crowded: Set[int], members: Sequence[Sequence[int]]
    ) -> Iterator[Scored]:
        """Yield each crowded text with one that it repeats: a head of its group, else one of its neighbours.

        Heads are texts that repeat no other head, those held against first, then the earlier ones.
        """
        neighbours: dict[int, list[int]] = {text: [] for text in crowded}
        for a, b, score in scored:
            if a in crowded and b in crowded and score >= NEAR:
                neighbours[a].append(b)
                neighbours[b].append(a)

        rank = {text: (not any(self.against[place] for place in members[text]), members[text][0]) for text in crowded}
        for group in _groups(neighbours):
            heads: list[int] = []
            for text in sorted(group, key=rank.__getitem__):
                earlier = [other for other in neighbours[text] if rank[other] < rank[text]]
                for other in (*heads, *sorted(earlier, key=rank.__getitem__)):
                    score = self._jaccard(text, other)
                    if score >= NEAR and self._kind(members[text][0], members[other][0], score) == "near":
                        yield min(text, other), max(text, other), score
                        break
                else:
                    heads += [text] if len(heads) < HEADS else []

    def _kind(self, first: int, second: int, score: float) -> Reason:
        """Tell near duplicates from questions that only share their options, or only their case."""
        options = [self.texts[self.text_of[place]].partition("\n")[2] for place in (first, second)]
        answers = {self._right[first], self._right[second]} - {0}
        if options[0] == options[1] and len(answers) > 1:
            return "sibling"
        case = self._case_of[first]
        if score < NEAR and case and case == self._case_of[second] and self._stem_of[first] != self._stem_of[second]:
            return "case"
        return "near" if score >= NEAR else "similar"

    def _across(self, group: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield pairs between two groups: with a question held against where there is one, else later with earlier."""
        for mine, theirs in ((group, other), (other, group)):
            held = next((place for place in theirs if self.against[place]), None)
            if held is not None:
                yield from ((place, held) for place in mine if not self.against[place])
        if not any(self.against[place] for place in (*group, *other)):
            early, late = sorted((group, other), key=min)
            yield from ((place, early[0]) for place in late)

    def _sharing(
        self, groups: dict[int, list[int]], reason: Literal["stem", "case"], known: set[tuple[int, int]]
    ) -> Iterator[QuestionPair]:
        for group in groups.values():
            first_of: dict[tuple[int, int], int] = {}
            # Those held against come first, so that they stand for their text.
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
                    score = self._jaccard(*numbers)
                    # Of many that are alike not all pairs are known.
                    yield QuestionPair(
                        first, second, self._kind(first, second, score) if score >= NEAR else reason, score
                    )


def _not_crowded(scored: Sequence[Scored], crowded: Set[int]) -> Iterator[Scored]:
    """Yield all pairs of texts that have few, and of each of the others the most alike."""
    best: dict[int, Scored] = {}
    for pair in scored:
        for text in pair[:2]:
            if text in crowded and (text not in best or pair[2] > best[text][2]):
                best[text] = pair
    for pair in scored:
        if pair[0] not in crowded or pair[1] not in crowded or pair in (best[pair[0]], best[pair[1]]):
            yield pair


def _groups(neighbours: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """Yield the connected components of a graph."""
    seen: set[int] = set()
    for start in neighbours:
        if start in seen:
            continue
        seen.add(start)
        group = [start]
        for node in group:  # grows while it is walked through
            new = [other for other in dict.fromkeys(neighbours[node]) if other not in seen]
            seen.update(new)
            group += new
        yield group
