"""Scores of parts of a run: by facet as the papers print them, by length, by number of letters, with and without some.

Names and limits of the papers' tables are in `breakdowns.yaml`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, TypedDict

from cmexam_tune.core import documents
from cmexam_tune.core.normalise import plain
from cmexam_tune.core.schema import GROUP, Scores
from cmexam_tune.evaluation.answer_parsing import conclusion
from cmexam_tune.evaluation.comparison import Comparison
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.significance import wilson

Score = Callable[[Sequence[Graded]], Scores]
"""What `grading.score` is for one scorer."""

MINIMUM = 30
"""Below this many questions a cell is marked where no paper sets its own limit (an interval wider than 35 points)."""
# Upper ends, inclusive: a stem of exactly 10 characters is in the first bin.
LENGTH_EDGES = (10, 20, 30, 40, 60, 80, 100, 150, 200, 300)
_LETTER_RUN = re.compile(r"(?<![A-Za-z0-9])[A-J]+(?![A-Za-z0-9])")
"""Letters that stand alone, as in `A、B错`; `ACEI` is a word where E or I is no option."""
_NAMING_SHARE = 0.7
"""An option counts as named from this share of its bigrams on: its words recur in a text, its wording rarely."""
SEVERAL, UNREADABLE = "several", "unreadable"


@dataclass(frozen=True)
class FacetValue:
    """A value of a facet: the paper's abbreviation, the Chinese and the English name."""

    name: str
    zh: str
    en: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class FacetDefinition:
    """How the scores are broken down by one facet."""

    facet: str
    zh: str
    source: str | None
    minimum: int = MINIMUM
    columns: tuple[str, ...] = ()
    """Other names of the column."""
    values: tuple[FacetValue, ...] = ()
    """What the paper counts; `annotate` offers these and no others."""
    further: tuple[FacetValue, ...] = ()
    """Names of values that data files have beside the paper's, for both languages of a report."""
    ordered: bool = False
    """Keep the order of `values`; otherwise the largest cell comes first."""
    macro: bool = False
    """The paper averages over the cells, not over the questions."""

    def recognise(self, value: str) -> FacetValue:
        """Return the name that `value` means; a value that no paper names stands for itself.

        A truncated name (such as the ICD-11 chapters in some exports) is recognised if only one name begins with it.
        """
        folded = _fold(value)
        for name in (*self.values, *self.further):
            if folded in map(_fold, (name.name, name.zh, name.en, *name.also)):
                return name
        # Three characters or fewer begin too many names, and cut nothing off.
        candidates = [name for name in self.values if _fold(name.zh).startswith(folded.rstrip(".…"))]
        return candidates[0] if len(folded) > 3 and len(candidates) == 1 else FacetValue(value, value, value)


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
    """Whether there are fewer questions than the table's minimum: its interval says more than its accuracy."""


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
def definitions() -> tuple[FacetDefinition, ...]:
    """Return the breakdowns of the papers in their order."""
    return tuple(map(_definition, documents.read_yaml(Path(__file__).with_name("breakdowns.yaml"))))


def _definition(item: Mapping[str, Any]) -> FacetDefinition:
    # YAML has lists where the frozen classes, which are keys of mappings, need tuples.
    names = {
        key: tuple(FacetValue(**{**value, "also": tuple(value.get("also", ()))}) for value in item.get(key, ()))
        for key in ("values", "further")
    }
    return FacetDefinition(**{**item, "columns": tuple(item["columns"]), **names})


def define(facet: str) -> FacetDefinition:
    """Return the definition for a column of this name; a column that no paper breaks down gets a plain one."""
    for definition in definitions():
        if _fold(facet) in map(_fold, (definition.facet, *definition.columns)):
            return definition
    return FacetDefinition(facet, facet, None)


def by_facet(graded: Iterable[Graded], score: Score) -> dict[str, dict[str, Scores]]:
    """Return {facet: {value: scores}} with facets and values spelled as in the data, the papers' facets first."""
    groups: dict[str, dict[str, list[Graded]]] = defaultdict(lambda: defaultdict(list))
    for item in graded:
        for facet, value in item.question.facets.items():
            if value.strip() and facet != GROUP:
                groups[facet][value].append(item)
    paper_facets = [definition.facet for definition in definitions()]
    rank = {
        facet: paper_facets.index(define(facet).facet) if define(facet).source else len(paper_facets)
        for facet in groups
    }
    return {
        facet: {value: score(members) for value, members in sorted(groups[facet].items())}
        for facet in sorted(groups, key=lambda facet: (rank[facet], facet))
    }


def tables(graded: Sequence[Graded], scores: Mapping[str, Mapping[str, Scores]], score: Score) -> tuple[Breakdown, ...]:
    """Return one table for each facet of `scores` (what `by_facet` returned for the same questions)."""
    return tuple(_table(facet, graded, scores[facet], score) for facet in scores)


def _table(facet: str, graded: Sequence[Graded], scores: Mapping[str, Scores], score: Score) -> Breakdown:
    definition = define(facet)
    spellings: dict[FacetValue, list[str]] = defaultdict(list)
    for value in scores:
        spellings[definition.recognise(value)].append(value)
    cells = []
    for name, values in spellings.items():
        group_scores = scores[values[0]]
        # Scores of two spellings do not add up (intervals, F1): their questions are scored together.
        if len(values) > 1:
            group_scores = score([item for item in graded if item.question.facets.get(facet) in values])
        small = _count(group_scores) < definition.minimum
        cells.append(Cell(name.name, name.zh, name.en, tuple(values), group_scores, small))
    order = {name.name: i for i, name in enumerate(definition.values)} if definition.ordered else {}
    cells.sort(key=lambda cell: (order.get(cell.name, len(order)), -_count(cell.scores), cell.name))
    # A cell without published answers, or without one readable output where the scorer drops those, has no accuracy.
    accuracies = [accuracy for cell in cells if isinstance(accuracy := cell.scores["accuracy"], int | float)]
    macro = fmean(accuracies) if definition.macro and accuracies else None
    return Breakdown(facet, definition.zh, definition.source, definition.minimum, tuple(cells), macro)


def _count(scores: Scores) -> int:
    n = scores["n"]
    assert isinstance(n, int)
    return n


LengthBin = TypedDict(
    "LengthBin",
    {
        "from": int,
        "to": int | None,
        "n": int,
        "accuracy": float | None,
        "accuracy_ci": list[float] | None,
        "small": bool,
    },
)
"""The questions whose stem has `from` to `to` characters; the last bin is open, its `to` is None."""


def by_length(graded: Iterable[Graded], score: Score) -> list[LengthBin]:
    """Return accuracy by the number of characters of the question (CMExam's Figure 3), shortest first."""
    bins: dict[int, list[Graded]] = defaultdict(list)
    for item in graded:
        bins[sum(len(item.question.stem) > edge for edge in LENGTH_EDGES)].append(item)
    return [_length_bin(place, score(items)) for place, items in sorted(bins.items())]


def _length_bin(place: int, scores: Scores) -> LengthBin:
    n, accuracy, interval = _count(scores), scores["accuracy"], scores["accuracy_ci"]
    return {
        "from": LENGTH_EDGES[place - 1] + 1 if place else 1,
        "to": LENGTH_EDGES[place] if place < len(LENGTH_EDGES) else None,
        "n": n,
        "accuracy": accuracy if isinstance(accuracy, int | float) else None,
        "accuracy_ci": interval if isinstance(interval, list) else None,
        "small": n < MINIMUM,
    }


def confusion(graded: Iterable[Graded]) -> dict[str, object]:
    """Return how often each answer was given for each right answer, answers of several letters taken together.

    The result is {"gold": [letters..., "several"], "predicted": [letters..., "several", "unreadable"],
    "counts": [gold][predicted]}; questions without a published answer do not count.
    """
    pairs = Counter((_label(item.question.answer), _label(item.answer)) for item in graded if item.question.answer)
    used = sorted({label for pair in pairs for label in pair if len(label) == 1})
    # A row for every key that occurs; a column for every output that a model can write, as zeros say something there.
    rows = [*used, *([SEVERAL] if any(gold == SEVERAL for gold, _ in pairs) else [])]
    columns = [*used, SEVERAL, UNREADABLE]
    counts = [[pairs[gold, predicted] for predicted in columns] for gold in rows]
    return {"gold": rows, "predicted": columns, "counts": counts}


def _label(answer: str | None) -> str:
    if not answer:
        return UNREADABLE
    return answer if len(answer) == 1 else SEVERAL


@dataclass(frozen=True)
class PartialCredit:
    """Scores of questions with one, with several, or with any number of right letters, in percent."""

    n: int
    accuracy: float
    """Exactly the right letters, as the scorer counts them."""
    jaccard: float
    """Mean over questions of letters both given and right, divided by letters given or right."""
    precision: float
    """Share of the letters given that are right, over all questions; 0 where none was given."""
    recall: float
    """Share of the right letters that were given, over all questions."""


def partial_credit(graded: Sequence[Graded]) -> dict[str, PartialCredit]:
    """Return the scores of `all` questions in the denominator, of `single` (one right letter) and `multiple`.

    The published answer decides which part a question belongs to, not what the paper prints about it: CMExam prints
    nothing. A part without questions is left out.
    """
    counted = [item for item in graded if item.counted]
    parts = {
        "all": counted,
        "single": [item for item in counted if len(item.question.answer or "") == 1],
        "multiple": [item for item in counted if len(item.question.answer or "") > 1],
    }
    return {name: _credit(part) for name, part in parts.items() if part}


def _credit(graded: Sequence[Graded]) -> PartialCredit:
    letters = [(set(item.answer or ""), set(item.question.answer or "")) for item in graded]
    shared = sum(len(answer & gold) for answer, gold in letters)
    return PartialCredit(
        n=len(graded),
        accuracy=100 * sum(item.right for item in graded) / len(graded),
        jaccard=100 * sum(len(answer & gold) / len(answer | gold) for answer, gold in letters) / len(graded),
        precision=100 * shared / max(sum(len(answer) for answer, _ in letters), 1),
        recall=100 * shared / sum(len(gold) for _, gold in letters),
    )


@dataclass(frozen=True)
class Share:
    """How many of some questions were right; accuracy and its Wilson 95% interval in percent, None without any."""

    n: int
    right: float
    accuracy: float | None
    accuracy_ci: tuple[float, float] | None


@dataclass(frozen=True)
class Subset:
    """Some questions of a run, and the run without them."""

    name: str
    everything: Share
    only: Share
    without: Share
    gain: float | None = None
    """Points of accuracy by which the run is above the baseline."""
    gain_only: float | None = None
    """How many of these points come from the subset."""

    @property
    def sentence(self) -> str:
        """What the numbers say."""
        if not self.only.n:
            return f"None of the {self.everything.n:,} questions is {self.name}."
        if self.without.accuracy is None or self.everything.accuracy is None:
            return f"All {self.everything.n:,} questions are {self.name}."
        change = self.everything.accuracy - self.without.accuracy
        text = (
            f"{self.only.n:,} of {self.everything.n:,} questions are {self.name}: accuracy "
            f"{self.everything.accuracy:.2f} with them, {self.without.accuracy:.2f} without, so they change it by "
            f"{_signed(change)} points"
        )
        if self.gain is not None and self.gain_only is not None:
            text += (
                f"; of the {_signed(self.gain)} points against the baseline {_signed(self.gain_only)} come from these "
                f"{self.only.n:,} questions"
            )
        return f"{text}."


def _signed(points: float) -> str:
    # Adding 0.0 turns -0.0 into 0.0, which is printed as +0.00.
    return f"{round(points, 2) + 0.0:+.2f}"


def subset(name: str, graded: Sequence[Graded], ids: Collection[str], comparison: Comparison | None = None) -> Subset:
    """Return the scores of the questions with these ids, and of the others.

    Args:
        name: What the questions are, to follow `questions are`.
        graded: All questions of a run.
        ids: The questions that are meant; others than the run's are ignored.
        comparison: With the baseline, where there is one: which questions are newly right or wrong.
    """
    counted = [item for item in graded if item.counted]
    gain = gain_only = None
    if comparison is not None and counted:
        gain = 100 * (len(comparison.gained) - len(comparison.lost)) / len(counted)
        # Of the same denominator as `gain`, so that subset and remainder add up to it.
        of_these = sum(i in ids for i in comparison.gained) - sum(i in ids for i in comparison.lost)
        gain_only = 100 * of_these / len(counted)
    return Subset(
        name,
        everything=_share(counted),
        only=_share([item for item in counted if item.question.id in ids]),
        without=_share([item for item in counted if item.question.id not in ids]),
        gain=gain,
        gain_only=gain_only,
    )


def _share(graded: Sequence[Graded]) -> Share:
    if not graded:
        return Share(0, 0, None, None)
    right = sum(item.right for item in graded)
    low, high = wilson(right, len(graded))
    return Share(len(graded), right, 100 * right / len(graded), (100 * low, 100 * high))


@dataclass(frozen=True)
class Consistency:
    """How often explanations conclude with a letter, and how often with another one than was answered."""

    explained: int
    """Explanations that were read."""
    concluding: int
    """Of these, how many end in a letter and belong to a readable answer."""
    conflicting: int
    conflicting_right: int
    """Right answers among the conflicting ones."""
    agreeing_right: int
    """Right answers among the others."""
    treated: float
    """Mean share in percent of a question's options that an explanation names, by letter or by most of their words."""
    treat_all: int
    """Explanations that name every option."""
    reference_treated: float | None
    """As `treated`, of the exam's own explanations of the same questions; None without any."""


def conflicts(item: Graded) -> bool:
    """Return whether the explanation argues for another answer than the one above it."""
    concluded = conclusion(item.explanation, item.question.options)
    return concluded is not None and item.answer is not None and concluded != item.answer


def consistency(graded: Sequence[Graded]) -> Consistency | None:
    """Return how explanations and answers agree; None where nothing was explained.

    The exam's own explanations are measured by the same rule, since no rule finds every mention: only the two numbers
    beside each other say whether a model treats as many options as the authors do.
    """
    explained = [item for item in graded if item.explanation]
    if not explained:
        return None
    shares = [treated(item.explanation or "", item.question.options) for item in explained]
    references = [treated(text, item.question.options) for item in explained if (text := item.question.explanation)]
    concluding = [item for item in explained if item.answer and conclusion(item.explanation, item.question.options)]
    conflicting = [item for item in concluding if conflicts(item)]
    right = sum(item.correct for item in conflicting)
    return Consistency(
        explained=len(explained),
        concluding=len(concluding),
        conflicting=len(conflicting),
        conflicting_right=right,
        agreeing_right=sum(item.correct for item in concluding) - right,
        treated=100 * fmean(shares),
        treat_all=sum(share == 1 for share in shares),
        reference_treated=100 * fmean(references) if references else None,
    )


def treated(explanation: str, options: Mapping[str, str]) -> float:
    """Return the share of the options that an explanation names: by letter, or by at least 70% of their bigrams."""
    text = plain(explanation)
    # From the text as it is written: `plain` is in lower case and joins what stood apart.
    runs = [run for run in _LETTER_RUN.findall(explanation) if set(run) <= set(options)]
    letters_named = {letter for run in runs for letter in run}
    named = 0
    for letter, option in options.items():
        words = plain(option)
        pairs = {words[i : i + 2] for i in range(max(len(words) - 1, 1))}
        named += letter in letters_named or sum(pair in text for pair in pairs) >= _NAMING_SHARE * len(pairs)
    return named / len(options)
