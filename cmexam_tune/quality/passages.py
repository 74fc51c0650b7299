"""Passages that hold questions of an exam, or their explanations: retrieved, they would tell the answer."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cmexam_tune.core import jsonl
from cmexam_tune.core.normalise import SHORTEST_STEM, plain
from cmexam_tune.core.schema import Question
from cmexam_tune.prompts.retrieval import Passage

GRAM = 8
"""Characters of an n-gram: long enough that a term of medicine is not one."""
FEWEST = 12
"""n-grams of an explanation that is looked for; shorter ones are in textbooks, too."""
SHARE = 0.5
"""Share of an explanation's n-grams in a passage from which on it counts as its source."""


@dataclass(frozen=True)
class Leak:
    """A passage that holds a part of the exam."""

    passage_id: str
    question_id: str
    what: str
    """`stem` or `explanation`."""


def read(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a file."""
    return jsonl.read(path, Passage)


def leaks(passages: Iterable[Passage], questions: Sequence[Question]) -> Iterator[Leak]:
    """Yield for each passage the first question whose whole stem, or at least half of whose explanation, it holds."""
    # By their first characters, so that a passage is walked through once and not once for each question.
    stems: dict[str, dict[str, str]] = defaultdict(dict)
    places_of: dict[str, list[int]] = defaultdict(list)
    sizes = []
    for place, question in enumerate(questions):
        stem = plain(question.stem)
        if len(stem) >= SHORTEST_STEM:
            stems[stem[:SHORTEST_STEM]].setdefault(stem, question.id)
        grams = _grams(plain(question.explanation or ""))
        sizes.append(len(grams))
        if len(grams) >= FEWEST:
            for gram in grams:
                places_of[gram].append(place)
    for passage in passages:
        text = plain(passage.text)
        starts = (text[i : i + SHORTEST_STEM] for i in range(len(text) - SHORTEST_STEM + 1))
        question_id = next(
            (name for start in starts for stem, name in stems.get(start, {}).items() if stem in text), None
        )
        if question_id is not None:
            yield Leak(passage.id, question_id, "stem")
            continue
        hits = Counter(place for gram in _grams(text) for place in places_of.get(gram, ()))
        held = [place for place, count in hits.items() if count >= SHARE * sizes[place]]
        if held:
            yield Leak(passage.id, questions[max(held, key=lambda place: hits[place])].id, "explanation")


def _grams(text: str) -> set[str]:
    return {text[i : i + GRAM] for i in range(len(text) - GRAM + 1)}
