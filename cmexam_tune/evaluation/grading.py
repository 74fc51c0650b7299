"""From questions and predictions to scores, by the rules of one profile."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Prediction, Question, Scores
from cmexam_tune.evaluation import scorers, significance, text_metrics
from cmexam_tune.evaluation.scorers import Profile, Reading
from cmexam_tune.evaluation.text_metrics import PairStatistics
from cmexam_tune.prompts import order

_UNREAD = "无答案"
_SHOWN = 5
GROUP = "group"
"""Facet of questions that share a stem or a case."""


@dataclass(frozen=True)
class Graded:
    """One question, what was predicted, and how the profile read it."""

    question: Question
    prediction: Prediction
    answer: str | None
    """As the profile's parser read `prediction.text`; None is unreadable."""
    explanation: str | None
    text: PairStatistics | None
    """Statistics of explanation against reference; None where there is no pair to score."""
    right: float = 0.0
    """1 or 0 as the profile counts; a chance where its script draws letters. 0 where the answer is unpublished."""
    counted: bool = True
    """Whether the question stays in the denominator of accuracy."""

    @property
    def correct(self) -> bool:
        """Whether the profile counts the answer as right."""
        return self.right == 1


def grade(
    questions: Iterable[Question],
    predictions: Iterable[Prediction],
    profile: str | Profile = "standard",
    option_order: str | None = None,
    explanations: bool | None = None,
) -> list[Graded]:
    """Return every question with its prediction, read again by the profile's parser, in the order of the questions.

    Explanations are scored where the model was asked for them. Where that is unknown (`explanations` is None), as of
    another tool's outputs, the outputs tell it: see `Profile.marks_explanation`.

    Where the options were shown in another order (`prompt.option_order`), the outputs are read and counted with the
    options in that order, and the answers are given back in the exam's letters.

    Raises:
        DataError: the ids of predictions and questions are not the same set.
        ConfigError: an unknown profile.
    """
    rules = scorers.get(profile) if isinstance(profile, str) else profile
    exam = list(questions)
    matched = _match([order.shown(question, option_order) for question in exam], list(predictions))
    readings = _readings(rules, matched)
    pairs: dict[int, tuple[str, str]] = {}
    if explanations is None:
        explanations = _explained(rules, matched, readings)
    if rules.statistics and explanations:
        pairs = {
            i: (readings[i].explanation or "", question.explanation or "")
            for i, (question, _) in enumerate(matched)
            if question.explanation or rules.no_reference == "empty"
        }
    texts: dict[int, PairStatistics] = {}
    if rules.statistics and pairs:
        hypotheses, references = zip(*pairs.values(), strict=True)
        texts = dict(zip(pairs, rules.statistics(hypotheses, references), strict=True))
    return [
        Graded(
            printed,
            prediction,
            order.restored(reading.answer, printed, option_order),
            reading.explanation,
            texts.get(i),
            right=rules.right(reading.answer, question) if question.answer is not None else 0.0,
            counted=question.answer is not None
            and (rules.subset is None or rules.subset(question))
            and not rules.drops(prediction.text, reading),
        )
        for i, (printed, (question, prediction), reading) in enumerate(zip(exam, matched, readings, strict=True))
    ]


def _explained(rules: Profile, matched: Sequence[tuple[Question, Prediction]], readings: Sequence[Reading]) -> bool:
    """Return whether explanations are scored where nobody knows whether the model was asked for them."""
    if rules.marks_explanation is None:
        return rules.no_reference == "empty" or any(reading.explanation for reading in readings)
    # A model that was asked for letters alone writes a marked explanation here and there: a few make no task of it.
    return 2 * sum(rules.marks_explanation(output.text) for _, output in matched) >= len(matched)


def _readings(rules: Profile, matched: Sequence[tuple[Question, Prediction]]) -> list[Reading]:
    """Return what the profile reads; of two ways to read, the one that is right more often over all questions."""
    ways = [rules.read] if rules.second is None else [rules.read, rules.second]
    read = [
        [
            # A profile reads the whole output, as its script does; what is thinking, it decides itself.
            rules.vote(output.votes, question) if rules.vote and output.votes else way(output.text, question)
            for question, output in matched
        ]
        for way in ways
    ]

    def right(readings: Sequence[Reading]) -> float:
        return sum(rules.right(one.answer, question) for one, (question, _) in zip(readings, matched, strict=True))

    return max(read, key=right)


def _match(questions: Sequence[Question], predictions: Sequence[Prediction]) -> list[tuple[Question, Prediction]]:
    by_id = {prediction.question_id: prediction for prediction in predictions}
    known = {question.id for question in questions}
    problems = [
        f"{len(ids)} {what}: {', '.join(ids[:_SHOWN])}{', ...' if len(ids) > _SHOWN else ''}"
        for what, ids in (
            ("questions have no prediction", [q.id for q in questions if q.id not in by_id]),
            ("predictions belong to no question", [name for name in by_id if name not in known]),
        )
        if ids
    ]
    if problems:
        raise DataError(
            f"predictions and questions do not match ({len(by_id)} predictions, {len(known)} questions); "
            f"{'; '.join(problems)}. Score the questions file that was predicted; an interrupted predict continues "
            "where it stopped when it is started again; --answered-only scores the questions that have a prediction, "
            "--limit N the first N (after predict --limit N)."
        )
    return [(question, by_id[question.id]) for question in questions]


def score(graded: Sequence[Graded], profile: str | Profile = "standard") -> Scores:
    """Return the scores of any subset of what `grade` returned.

    `n` questions, `scored` of them in the denominator of accuracy (gold answers are published, the profile scores
    such questions and did not drop the output), `answered` readable. accuracy, its 95% interval (Wilson's, or that of a
    bootstrap of whole groups where questions share a case), BLEU and ROUGE are percentages; precision, recall and
    weighted_f1 are fractions as scikit-learn gives them. None stands for what cannot be computed.
    """
    rules = scorers.get(profile) if isinstance(profile, str) else profile
    scored = [g for g in graded if g.counted]
    texts = [g.text for g in graded if g.text is not None]
    scores: dict[str, float | int | list[float] | None] = {
        "n": len(graded),
        "scored": len(scored),
        "answered": sum(g.answer is not None for g in graded),
        "accuracy": average(scored, ()),
        "accuracy_ci": _interval(scored),
        **weighted([(g.question.answer or "", g.answer or _UNREAD) for g in scored]),
        "explanations": len(texts),
        **text_metrics.aggregate(texts, rules.smoothing),
    }
    for name, facets in rules.averages.items():
        scores[name] = average(scored, facets)
    return scores


def clusters(graded: Sequence[Graded]) -> list[str] | None:
    """Return the group of each question, itself where it has none; None where no two questions share one."""
    groups = [one.question.facets.get(GROUP) or f"question {one.question.id}" for one in graded]
    return groups if len(set(groups)) < len(groups) else None


def _interval(scored: Sequence[Graded]) -> list[float] | None:
    """Return the 95% interval of the accuracy in percent: Wilson's, or that of a bootstrap of whole groups."""
    if not scored:
        return None
    groups = clusters(scored)
    if groups is None:
        return [100 * end for end in significance.wilson(sum(g.right for g in scored), len(scored))]
    import numpy as np

    rows = significance.by_cluster(np.array([[g.right, 1.0] for g in scored]), groups)
    ((low, high),) = significance.bootstrap(rows, lambda sums: 100 * sums[:, :1] / sums[:, 1:])
    return [low, high]


def weighted(pairs: Sequence[tuple[str, str]]) -> dict[str, float | None]:
    """Return precision, recall and weighted_f1 of (gold, predicted) labels as fractions; None without pairs.

    scikit-learn's `average="weighted"`: per answer string, weighted by how often it is the gold answer; 0 where a label
    is never predicted. Recall equals accuracy.
    """
    gold, predicted = Counter(g for g, _ in pairs), Counter(p for _, p in pairs)
    hits = Counter(g for g, p in pairs if g == p)
    sums = dict.fromkeys(("precision", "recall", "weighted_f1"), 0.0)
    for label, support in gold.items():
        sums["precision"] += support * hits[label] / max(predicted[label], 1)
        sums["recall"] += hits[label]
        sums["weighted_f1"] += support * 2 * hits[label] / (support + predicted[label])
    return {name: total / len(pairs) if pairs else None for name, total in sums.items()}


def average(scored: Sequence[Graded], facets: Sequence[str]) -> float | None:
    """Return the accuracy in percent, averaged over the values of the first facet, within each over the next, ...

    Without facets it is the plain share of right answers. Questions that lack a facet do not count; None without any.
    """
    if not facets:
        return 100 * sum(g.right for g in scored) / len(scored) if scored else None
    cells: Mapping[str, list[Graded]] = defaultdict(list)
    for g in scored:
        if facets[0] in g.question.facets:
            cells[g.question.facets[facets[0]]].append(g)
    means = [mean for cell in cells.values() if (mean := average(cell, facets[1:])) is not None]
    return fmean(means) if means else None
