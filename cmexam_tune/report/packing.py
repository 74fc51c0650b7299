"""Questions and outputs for the page: an index that filters are answered from, and texts in blocks opened on demand.

Both are gzip in base64, which every current browser unpacks by itself; a few questions stay as they are.
"""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from cmexam_tune.evaluation.bridge import Bridge
from cmexam_tune.evaluation.grading import Graded
from cmexam_tune.report.explanations import conflicts

BLOCK = 200
"""Questions in a block."""
PLAIN = 500
"""So many questions need no packing."""
BUDGET = 24 << 20
"""Bytes that all blocks may take; a page of 30 MB still opens in two seconds."""
_SMALLER = 0.45
"""Base64 of gzip over UTF-8, for Chinese (CMExam: 0.38), with a margin."""
LIMITS = ((4000, 4000), (4000, 600), (1500, 300), (600, 150), (200, 80), (80, 40))
"""Characters shown of a text of a wrong and of a right answer: the first that keeps the budget."""
Runs = Mapping[str, Sequence[Graded]]


def index(runs: Runs, facets: Sequence[str], bridges: Sequence[Bridge]) -> Any:
    """Return ids, right and given answers, facet values and explanation scores of all questions, packed.

    Args:
        runs: Name -> graded questions; all of the same questions, the first is what the report is about.
        facets: Names of the facets.
        bridges: What other profiles read in the first run.
    """
    first = next(iter(runs.values()))
    values = [sorted({one.question.facets.get(facet, "") for one in first}) for facet in facets]
    rank = {one.question.id: i for i, one in enumerate(first)}
    places = [{value: i for i, value in enumerate(names)} for names in values]
    return _pack(
        {
            "ids": [one.question.id for one in first],
            "gold": [one.question.answer for one in first],
            "answers": [[one.answer for one in graded] for graded in runs.values()],
            "values": values,
            "of": [
                [place[one.question.facets.get(facet, "")] for one in first]
                for facet, place in zip(facets, places, strict=True)
            ],
            "right": ["".join(str(int(one.correct)) for one in graded) for graded in runs.values()],
            "rougeL": [None if one.text is None else round(100 * one.text.rougeL.f, 1) for one in first],
            "conflicts": [i for i, one in enumerate(first) if conflicts(one)],
            "readings": {
                bridge.profile: {rank[one.question_id]: one.theirs for one in bridge.differing} for bridge in bridges
            },
        },
        len(first),
    )


def blocks(runs: Runs) -> list[Any]:
    """Return stem, options, reference explanation and the output of each run, packed by `BLOCK` questions."""
    items = list(zip(*runs.values(), strict=True))
    wrong, right = _limits(items)
    shown = [_item(group, wrong, right) for group in items]
    return [_pack(shown[at : at + BLOCK], len(items)) for at in range(0, len(items), BLOCK)]


def _limits(items: Sequence[Sequence[Graded]]) -> tuple[int, int]:
    """Return how many characters of a wrong and of a right answer's texts are shown."""
    lengths = [(group[0].correct, [len(text) for text in _texts(group)], _fixed(group)) for group in items]
    for wrong, right in LIMITS:
        size = sum(
            fixed + 3 * sum(min(length, right if correct else wrong) for length in texts)
            for correct, texts, fixed in lengths
        )
        if size * _SMALLER <= BUDGET:
            break
    return wrong, right


def _fixed(group: Sequence[Graded]) -> int:
    question = group[0].question
    return 3 * (len(question.stem) + sum(map(len, question.options.values()))) + 40


def _texts(group: Sequence[Graded]) -> list[str]:
    return [group[0].question.explanation or "", *(one.prediction.text for one in group)]


def _item(group: Sequence[Graded], wrong: int, right: int) -> list[Any]:
    question, limit = group[0].question, right if group[0].correct else wrong
    reference, *outputs = (_cut(text, limit) for text in _texts(group))
    return [question.stem, list(question.options.items()), reference, outputs]


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters in all)"


def _pack(value: Any, count: int) -> Any:
    if count <= PLAIN:
        return value
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate of a broken output is shown as a question mark.
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")
