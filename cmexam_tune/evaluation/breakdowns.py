"""Scores by facet, as the papers print them: names and limits of the tables are in `breakdowns.yaml`."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from cmexam_tune.core.schema import GROUP, Scores

if TYPE_CHECKING:
    from cmexam_tune.evaluation.grading import Graded

Scorer = Callable[[Sequence["Graded"]], Scores]

MINIMUM = 30
"""Below this many questions a cell is marked where no paper sets its own limit (an interval wider than 35 points)."""
LENGTH_EDGES = (10, 20, 30, 40, 60, 80, 100, 150, 200, 300)
SEVERAL, UNREADABLE = "several", "unreadable"


@dataclass(frozen=True)
class Name:
    """A value of a facet: the paper's abbreviation, the Chinese and the English name."""

    name: str
    zh: str
    en: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Definition:
    """How one facet is broken down."""

    facet: str
    zh: str
    source: str | None
    minimum: int = MINIMUM
    columns: tuple[str, ...] = ()
    """Other names of the column."""
    values: tuple[Name, ...] = ()
    ordered: bool = False
    """Keep the order of `values`; otherwise the largest cell comes first."""
    macro: bool = False
    """The paper averages over the cells, not over the questions."""

    def recognise(self, value: str) -> Name:
        """Return the name that `value` means; a value that nobody has named stands for itself.

        A name that was cut off (as the ICD-11 chapters in some exports) is recognised when only one begins so.
        """
        folded = _fold(value)
        for one in self.values:
            if folded in map(_fold, (one.name, one.zh, one.en, *one.also)):
                return one
        begun = [one for one in self.values if len(folded) > 3 and _fold(one.zh).startswith(folded.rstrip(".…"))]
        return begun[0] if len(begun) == 1 else Name(value, value, value)


@dataclass(frozen=True)
class Cell:
    """The questions of one facet value."""

    name: str
    zh: str
    en: str
    values: tuple[str, ...]
    """The value as the data spells it; several spellings of one thing are one cell."""
    scores: Scores
    small: bool
    """Fewer questions than the table's minimum: read its interval, not its accuracy."""


@dataclass(frozen=True)
class Breakdown:
    """One breakdown."""

    facet: str
    zh: str
    source: str | None
    minimum: int
    cells: tuple[Cell, ...]
    macro_accuracy: float | None
    """Mean of the cells' accuracies (CMB's average), None where no paper uses it."""


def _fold(text: str) -> str:
    return text.strip().casefold().replace(" ", "").replace("_", "")


@cache
def definitions() -> tuple[Definition, ...]:
    """Return the breakdowns of the papers in their order."""
    text = Path(__file__).with_name("breakdowns.yaml").read_text(encoding="utf-8")
    return tuple(_definition(item) for item in yaml.safe_load(text))


def _definition(item: Mapping[str, Any]) -> Definition:
    values = tuple(Name(**{**value, "also": tuple(value.get("also", ()))}) for value in item["values"])
    return Definition(**{**item, "columns": tuple(item["columns"]), "values": values})


def define(facet: str) -> Definition:
    """Return the breakdown that a column of this name belongs to; unknown columns get a plain one."""
    for one in definitions():
        if _fold(facet) in map(_fold, (one.facet, *one.columns)):
            return one
    return Definition(facet, facet, None)


def by_facet(graded: Iterable["Graded"], score: Scorer) -> dict[str, dict[str, Scores]]:
    """Return {facet: {value: scores}} with facets and values spelled as in the data, the papers' facets first."""
    groups: dict[str, dict[str, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    for one in graded:
        for facet, value in one.question.facets.items():
            if value.strip() and facet != GROUP:
                groups[facet][value].append(one)
    known = [one.facet for one in definitions()]
    rank = {facet: known.index(define(facet).facet) if define(facet).source else len(known) for facet in groups}
    return {
        facet: {value: score(members) for value, members in sorted(groups[facet].items())}
        for facet in sorted(groups, key=lambda facet: (rank[facet], facet))
    }


def tables(
    graded: Sequence["Graded"], scores: Mapping[str, Mapping[str, Scores]], score: Scorer
) -> tuple[Breakdown, ...]:
    """Return one table for each facet of `scores` (what `by_facet` returned for the same questions)."""
    return tuple(_table(facet, graded, scores[facet], score) for facet in scores)


def _table(facet: str, graded: Sequence["Graded"], scores: Mapping[str, Scores], score: Scorer) -> Breakdown:
    definition = define(facet)
    spellings: dict[Name, list[str]] = defaultdict(list)
    for value in scores:
        spellings[definition.recognise(value)].append(value)
    cells = []
    for name, values in spellings.items():
        own = scores[values[0]]
        if len(values) > 1:
            own = score([one for one in graded if one.question.facets.get(facet) in values])
        cells.append(Cell(name.name, name.zh, name.en, tuple(values), own, _count(own) < definition.minimum))
    order = {name.name: i for i, name in enumerate(definition.values)} if definition.ordered else {}
    cells.sort(key=lambda cell: (order.get(cell.name, len(order)), -_count(cell.scores), cell.name))
    # A cell without published answers, or without one readable output where the profile drops those, has no accuracy.
    known = [accuracy for cell in cells if isinstance(accuracy := cell.scores["accuracy"], int | float)]
    macro = fmean(known) if definition.macro and known else None
    return Breakdown(facet, definition.zh, definition.source, definition.minimum, tuple(cells), macro)


def _count(scores: Scores) -> int:
    n = scores["n"]
    assert isinstance(n, int)
    return n


def by_length(graded: Iterable["Graded"], score: Scorer) -> list[dict[str, Any]]:
    """Return accuracy by the number of characters of the question (the paper's Figure 3), shortest first.

    Each item is {"from":, "to":, "n":, "accuracy":, "accuracy_ci":, "small":}; the last bin is open, `to` is null.
    """
    bins: dict[int, list[Graded]] = defaultdict(list)
    for one in graded:
        bins[sum(len(one.question.stem) > edge for edge in LENGTH_EDGES)].append(one)
    rows = []
    for i in sorted(bins):
        scores = score(bins[i])
        rows.append(
            {
                "from": LENGTH_EDGES[i - 1] + 1 if i else 1,
                "to": LENGTH_EDGES[i] if i < len(LENGTH_EDGES) else None,
                **{key: scores[key] for key in ("n", "accuracy", "accuracy_ci")},
                "small": len(bins[i]) < MINIMUM,
            }
        )
    return rows


def confusion(graded: Iterable["Graded"]) -> dict[str, Any]:
    """Return how often each answer was given for each right answer, answers of several letters taken together.

    The result is {"gold": [letters..., "several"], "predicted": [letters..., "several", "unreadable"],
    "counts": [gold][predicted]}; questions without a published answer do not count.
    """
    pairs = Counter((_one(one.question.answer), _one(one.answer)) for one in graded if one.question.answer)
    used = sorted({name for pair in pairs for name in pair if len(name) == 1})
    gold = [*used, *([SEVERAL] if any(g == SEVERAL for g, _ in pairs) else [])]
    predicted = [*used, SEVERAL, UNREADABLE]
    return {"gold": gold, "predicted": predicted, "counts": [[pairs[g, p] for p in predicted] for g in gold]}


def _one(answer: str | None) -> str:
    return UNREADABLE if not answer else answer if len(answer) == 1 else SEVERAL
