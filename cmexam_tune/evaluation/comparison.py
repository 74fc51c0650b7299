"""Gradings of the same questions beside each other: a run and a baseline, several runs, our score and a script's.

`compare` sets a run beside its baseline question by question, `pairwise` and `summarise` several runs or seeds.
`decompose` explains the difference between our accuracy and a published script's on the same outputs in four steps,
each a difference of two accuracies, so that they add up: the questions that the script scores, how it reads and
compares, what it leaves out of the denominator, and how it averages.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation import grading, scorers, significance
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.grading import average, clusters
from cmexam_tune.evaluation.scorers import STANDARD, Scorer
from cmexam_tune.evaluation.significance import Paired
from cmexam_tune.evaluation.text_metrics import TEXT, corpus_scores, rows_of

SUMMARY = ("accuracy", "weighted_f1", *TEXT)


@dataclass(frozen=True)
class Comparison:
    """Two runs on the same questions, those whose answer is published."""

    name: str
    """Of the run that is compared with."""
    n: int
    both: int
    """Questions right in both runs."""
    neither: int
    gained: tuple[str, ...]
    """Ids of the questions that became right."""
    lost: tuple[str, ...]
    mcnemar_p: float
    metrics: Mapping[str, Paired]
    """The run minus the other one, in percent. Accuracy has McNemar's exact test and the interval that agrees with it
    (`significance.paired_interval`), or the bootstrap of whole groups where questions share a case; the text metrics
    have the paired bootstrap."""
    smallest_difference: float | None = None
    """In points of accuracy: what these questions would show with 80% power, at the disagreement that was seen. None
    where no difference would be found."""
    clusters: int | None = None
    """Groups of questions that are drawn together, where the file says which (facet `group`); else None."""
    scores: Scores = field(default_factory=dict)
    """Of the run that is compared with; empty where nobody asked for them."""
    other_answers: int = 0
    """Questions, of the `n`, that got another answer."""
    computed: str | None = None
    """`A instead of B` where the runs differ in nothing but what computed them: the engine, or the type of weights."""


@dataclass(frozen=True)
class RunPair:
    """Two runs of several; the difference is the second minus the first, in points of accuracy."""

    first: str
    second: str
    difference: float
    p_value: float
    """McNemar's exact test."""
    adjusted_p: float
    """Corrected by Holm's method for all pairs of these runs."""
    smallest_difference: float | None
    """See `Comparison.smallest_difference`."""


@dataclass(frozen=True)
class Spread:
    """One metric over several runs."""

    mean: float
    std: float | None
    """Sample standard deviation; None of a single run."""
    runs: int


def text_intervals(graded: Sequence[Graded], smoothing: str) -> dict[str, list[float]]:
    """Return the bootstrap 95% interval of each text metric; empty where there are no pairs."""
    explained = [item for item in graded if item.text is not None]
    rows = rows_of(item.text for item in explained if item.text is not None)
    if not len(rows):
        return {}
    intervals = significance.bootstrap(
        significance.by_cluster(rows, clusters(explained)), lambda sums: corpus_scores(sums, smoothing)
    )
    # `corpus_scores` goes on with precision and recall of each ROUGE; the first six are those of `TEXT`.
    return {name: list(interval) for name, interval in zip(TEXT, intervals, strict=False)}


def compare(
    baseline: Sequence[Graded], run: Sequence[Graded], smoothing: str = "exp", name: str = "the baseline"
) -> Comparison:
    """Return the paired comparison of a run with the baseline called `name`.

    The metrics are differences run - baseline with their 95% intervals and p-values; see `Comparison.metrics`.
    """
    pairs = [(before, after) for before, after in zip(baseline, run, strict=True) if before.question.answer]
    gained = tuple(after.question.id for before, after in pairs if after.correct and not before.correct)
    lost = tuple(after.question.id for before, after in pairs if before.correct and not after.correct)
    both_correct = sum(before.correct and after.correct for before, after in pairs)
    p_value = significance.mcnemar(len(lost), len(gained))
    groups = clusters([before for before, _ in pairs])
    metrics = {"accuracy": _paired_accuracy(pairs, groups)} if pairs else {}
    explained = [(before, after) for before, after in zip(baseline, run, strict=True) if before.text and after.text]
    if explained:
        shared = clusters([before for before, _ in explained])
        first = significance.by_cluster(rows_of(before.text for before, _ in explained if before.text), shared)
        second = significance.by_cluster(rows_of(after.text for _, after in explained if after.text), shared)
        differences = significance.paired_bootstrap(first, second, lambda sums: corpus_scores(sums, smoothing))
        metrics |= dict(zip(TEXT, differences, strict=False))
    return Comparison(
        name=name,
        n=len(pairs),
        both=both_correct,
        neither=len(pairs) - both_correct - len(gained) - len(lost),
        gained=gained,
        lost=lost,
        mcnemar_p=p_value,
        metrics=metrics,
        smallest_difference=_smallest(len(pairs), len(gained) + len(lost)),
        clusters=len(set(groups)) if groups else None,
        other_answers=sum(before.answer != after.answer for before, after in pairs),
    )


def _paired_accuracy(pairs: Sequence[tuple[Graded, Graded]], groups: Sequence[str] | None) -> Paired:
    import numpy as np

    right = np.array([[before.right, after.right] for before, after in pairs], dtype=np.float64)
    if groups is None and np.isin(right, (0, 1)).all():
        lost, gained = (int((right[:, side] > right[:, 1 - side]).sum()) for side in (0, 1))
        low, high = significance.paired_interval(lost, gained, len(pairs))
        difference = 100 * (gained - lost) / len(pairs)
        return Paired(difference, 100 * low, 100 * high, significance.mcnemar(lost, gained))
    # Questions of one case fall together, and an answer may be right by a chance: neither is a flip of a coin.
    rows = [np.stack([right[:, side], np.ones(len(pairs))], axis=1) for side in (0, 1)]
    first, second = (significance.by_cluster(side, groups) for side in rows)
    (accuracy,) = significance.paired_bootstrap(first, second, lambda sums: 100 * sums[:, :1] / sums[:, 1:])
    return accuracy


def _smallest(n: int, disagreeing: int) -> float | None:
    difference = significance.smallest_difference(n, disagreeing / n) if n else None
    return None if difference is None else 100 * difference


def pairwise(runs: Mapping[str, Sequence[Graded]]) -> tuple[RunPair, ...]:
    """Return every pair of runs, in the order of the runs, with p-values corrected for multiple comparisons."""
    compared = []
    for first, second in itertools.combinations(runs, 2):
        both = zip(runs[first], runs[second], strict=True)
        pairs = [(before, after) for before, after in both if before.question.answer]
        lost = sum(before.correct and not after.correct for before, after in pairs)
        gained = sum(after.correct and not before.correct for before, after in pairs)
        difference = 100 * sum(after.right - before.right for before, after in pairs) / max(len(pairs), 1)
        p_value = significance.mcnemar(lost, gained)
        compared.append(RunPair(first, second, difference, p_value, p_value, _smallest(len(pairs), lost + gained)))
    # Each pair that is tested is another chance of a low p-value.
    adjusted = significance.holm([pair.p_value for pair in compared])
    return tuple(replace(pair, adjusted_p=p) for pair, p in zip(compared, adjusted, strict=True))


def summarise(runs: Mapping[str, Scores]) -> dict[str, Spread]:
    """Return mean and deviation of each metric over seeds of one experiment; metrics that a run lacks are left out."""
    table = {}
    for name in SUMMARY:
        values = [value for scores in runs.values() if isinstance(value := scores.get(name), int | float)]
        if len(values) == len(runs) and values:
            table[name] = Spread(*significance.mean_std(values), len(values))
    return table


def flips(runs: Mapping[str, Sequence[Graded]]) -> int:
    """Return how many questions do not have the same answer in all runs, for example in all orders of the options."""
    return sum(len({item.answer for item in items}) > 1 for items in zip(*runs.values(), strict=True))


def ranking(runs: Mapping[str, Scores]) -> tuple[str, ...]:
    """Return the names of the runs by accuracy, the best first; those without one last."""

    def accuracy(name: str) -> float:
        value = runs[name].get("accuracy")
        return value if isinstance(value, int | float) else -1.0

    return tuple(sorted(runs, key=accuracy, reverse=True))


def agreement(runs: Mapping[str, Sequence[Graded]]) -> dict[str, float]:
    """Return {"first | second": percentage of questions with the same readable answer} for every pair of runs."""
    shares = {}
    for first, second in itertools.combinations(runs, 2):
        pairs = list(zip(runs[first], runs[second], strict=True))
        # Two unreadable outputs agree on nothing.
        same = sum(item.answer is not None and item.answer == other.answer for item, other in pairs)
        shares[f"{first} | {second}"] = 100 * same / max(len(pairs), 1)
    return shares


@dataclass(frozen=True)
class Differing:
    """A question that the script reads or counts in another way than we do."""

    question_id: str
    standard: str | None
    """The answer as we read it."""
    theirs: str | None
    gold: str
    standard_right: float
    theirs_right: float
    """1 or 0; a chance where the script draws letters."""


@dataclass(frozen=True)
class ScoreDecomposition:
    """The way from our accuracy to a script's score, in points of percent: standard + the four steps = theirs.

    A score or step is None where there is none, because the script scores none of these questions.
    """

    profile: str
    """Name of the scorer that follows the script."""
    n: int
    """Questions with a published answer."""
    standard: float | None
    """Our accuracy on all of them."""
    by_subset: float | None
    """Our accuracy on the questions that the script scores, minus that on all."""
    by_reading: float | None
    """On those: right as the script reads and compares, minus right as we do."""
    by_denominator: float | None
    """Outputs that leave the script's denominator."""
    by_average: float | None
    """The average that the script reports, minus the plain one."""
    theirs: float | None
    scored: int
    """Questions in the script's denominator."""
    subset: str
    """The questions that it scores, in words."""
    headline: str
    """The average that it reports: `accuracy` (over questions) or a key of the scorer's `averages`."""
    differing: tuple[Differing, ...]
    mark: str | None = None
    """A remark where the run was prompted in other words than the script's; see `prompt_mark`."""


def by_scorers(
    graded: Sequence[Graded],
    names: Sequence[str],
    *,
    style: str | None = None,
    option_order: str | None = None,
    explanations: bool | None = None,
) -> tuple[dict[str, Scores], dict[str, ScoreDecomposition]]:
    """Return the scores of the same outputs by each of several scorers, and for each but `standard` why they differ.

    Args:
        graded: All questions and outputs, by any scorer.
        names: Of the scorers.
        style: Prompt style of the run, where it is known; see `prompt_mark`.
        option_order: See `grading.grade`.
        explanations: See `grading.grade`.
    """
    questions, predictions = [item.question for item in graded], [item.prediction for item in graded]
    ours = grading.grade(questions, predictions, STANDARD, option_order, explanations)
    scores, decompositions = {}, {}
    for name in Progress("evaluate", "profiles", len(names), patience=1).each(names):
        scorer = scorers.get(name)
        theirs = ours if name == STANDARD else grading.grade(questions, predictions, scorer, option_order, explanations)
        scores[name] = grading.score(theirs, scorer)
        if name != STANDARD:
            decompositions[name] = decompose(ours, theirs, scorer, style)
    return scores, decompositions


def decompose(
    ours: Sequence[Graded], theirs: Sequence[Graded], scorer: str | Scorer, style: str | None = None
) -> ScoreDecomposition:
    """Return the way from our accuracy to a script's score.

    Args:
        ours: All questions and outputs as `standard` grades them.
        theirs: The same as the script's scorer grades them.
        scorer: That scorer, or its name.
        style: Prompt style of the run, where it is known; see `prompt_mark`.

    Raises:
        ValueError: the two hold different questions.
        ConfigError: an unknown scorer.
    """
    scorer = scorers.get(scorer)
    pairs = [(our, their) for our, their in zip(ours, theirs, strict=True) if our.question.answer is not None]
    if any(our.question.id != their.question.id for our, their in pairs):
        raise ValueError("two gradings of the same questions in the same order are needed")
    in_subset = [(our, their) for our, their in pairs if scorer.subset is None or scorer.subset(their.question)]
    counted = [their for _, their in pairs if their.counted]
    # Each accuracy differs from the one before in one thing, which gives the step between the two its name.
    standard = average([our for our, _ in pairs], ())
    of_subset = average([our for our, _ in in_subset], ())
    as_read = average([their for _, their in in_subset], ())
    of_counted = average(counted, ())
    reported = average(counted, scorer.averages.get(scorer.headline, ()))
    return ScoreDecomposition(
        profile=scorer.name,
        n=len(pairs),
        standard=standard,
        by_subset=_step(standard, of_subset),
        by_reading=_step(of_subset, as_read),
        by_denominator=_step(as_read, of_counted),
        by_average=_step(of_counted, reported),
        theirs=reported,
        scored=len(counted),
        subset=scorer.subset_name,
        headline=scorer.headline,
        differing=tuple(
            Differing(our.question.id, our.answer, their.answer, our.question.answer or "", our.right, their.right)
            for our, their in in_subset
            if our.answer != their.answer or our.right != their.right
        ),
        mark=prompt_mark(scorer, style),
    )


def _step(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def prompt_mark(scorer: Scorer, style: str | None) -> str | None:
    """Return a remark where a run with this prompt style was prompted in other words than the script's.

    None where the words are the script's, where the script has none of its own, or where the style is unknown.
    """
    if style is None or not scorer.prompt or style in scorer.styles:
        return None
    return f"asked in style {style!r}, not in the words of {scorer.name}"
