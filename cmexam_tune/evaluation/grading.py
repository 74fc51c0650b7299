"""Which questions are scored, how a scorer reads each output, and what they count: from predictions to scores."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import GROUP, OrderedOutput, Prediction, Question, Scores
from cmexam_tune.evaluation import scorers, significance, text_metrics
from cmexam_tune.evaluation.answer_parsing import still_thinking
from cmexam_tune.evaluation.graded import Graded, OrderedAnswer
from cmexam_tune.evaluation.scorers import Reading, Scorer
from cmexam_tune.evaluation.text_metrics import PairStatistics
from cmexam_tune.prompts import order

_UNREAD = "无答案"
"""Label of an unreadable output for precision, recall and F1, as CMExam's scripts call it."""
_SHOWN = 5
"""Ids that a message names."""


@dataclass(frozen=True)
class QuestionSelection:
    """A part of a questions file; scores of it are not the exam's."""

    n: int
    of: int
    """Questions in the file."""
    how: str

    @property
    def sentence(self) -> str:
        """What a reader has to know before the first number."""
        return f"only {self.n:,} of {self.of:,} questions are scored: {self.how}"


def select(
    questions: Sequence[Question],
    answered: Sequence[Collection[str]],
    *,
    limit: int | None = None,
    answered_only: bool = False,
) -> tuple[list[Question], QuestionSelection | None]:
    """Return the questions that are scored, and the selection, None where it is all of them.

    Args:
        questions: The whole file.
        answered: For each run the ids that it has a prediction for.
        limit: Only the first so many.
        answered_only: Only those that every run has a prediction for.

    Raises:
        UserError: a limit below 1, or no question is left.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: at least 1 is needed.")
    chosen = list(questions[:limit])
    how = [] if limit is None else [f"the first {limit:,} of the file (--limit)"]
    if answered_only:
        chosen = [question for question in chosen if all(question.id in ids for ids in answered)]
        how.append("those with a prediction " + ("in every run " * (len(answered) > 1)) + "(--answered-only)")
    if not chosen:
        raise UserError(f"{', '.join(how) or 'the questions'}: no question is left to score.")
    if len(chosen) == len(questions):
        return chosen, None
    return chosen, QuestionSelection(len(chosen), len(questions), ", ".join(how))


def grade(
    questions: Iterable[Question],
    predictions: Iterable[Prediction],
    scorer: str | Scorer = "standard",
    option_order: str | None = None,
    explanations: bool | None = None,
) -> list[Graded]:
    """Return every question with its prediction, read again by the scorer, in the order of the questions.

    Args:
        questions: All that were predicted.
        predictions: One for each question, in any order.
        scorer: Whose rules, or their name.
        option_order: The order in which the options were shown (`prompt.option_order`). Outputs are read and counted
            with the options in that order; the answers returned have the exam's letters.
        explanations: Whether the model was asked for explanations, which are scored only then. None is unknown, as of
            another tool's outputs: the outputs tell it, see `Scorer.marks_explanation`.

    Raises:
        DataError: the ids of predictions and questions are not the same set.
        ConfigError: an unknown scorer.
    """
    scorer = scorers.get(scorer)
    exam = list(questions)
    matched = _match([order.shown(question, option_order) for question in exam], list(predictions))
    readings = _readings(scorer, matched)
    if explanations is None:
        explanations = _writes_explanations(scorer, matched, readings)
    texts = _text_statistics(scorer, matched, readings) if explanations else {}
    return [
        Graded(
            printed,
            prediction,
            order.restored(reading.answer, printed, option_order),
            reading.explanation,
            texts.get(i),
            right=scorer.right(reading.answer, shown) if shown.answer is not None else 0.0,
            counted=shown.answer is not None
            and (scorer.subset is None or scorer.subset(shown))
            and not scorer.drops(prediction.text, reading),
            orders=tuple(_ordered(scorer, printed, sample) for sample in prediction.orders),
        )
        for i, (printed, (shown, prediction), reading) in enumerate(zip(exam, matched, readings, strict=True))
    ]


def _ordered(scorer: Scorer, printed: Question, sample: OrderedOutput) -> OrderedAnswer:
    shown = order.shown(printed, sample.order)
    answer = scorer.read(sample.text, shown).answer
    right = scorer.right(answer, shown) if shown.answer is not None else 0.0
    return OrderedAnswer(sample.order, order.restored(answer, printed, sample.order), right, sample.probabilities)


def _text_statistics(
    scorer: Scorer, matched: Sequence[tuple[Question, Prediction]], readings: Sequence[Reading]
) -> dict[int, PairStatistics]:
    """Return place of the question -> statistics of its explanation, for those that the scorer scores."""
    pairs = {
        i: (reading.explanation or "", question.explanation or "")
        for i, ((question, _), reading) in enumerate(zip(matched, readings, strict=True))
        if question.explanation or scorer.no_reference == "empty"
    }
    if not scorer.statistics or not pairs:
        return {}
    hypotheses, references = zip(*pairs.values(), strict=True)
    return dict(zip(pairs, scorer.statistics(hypotheses, references), strict=True))


def _writes_explanations(
    scorer: Scorer, matched: Sequence[tuple[Question, Prediction]], readings: Sequence[Reading]
) -> bool:
    """Return whether explanations are scored where nobody knows whether the model was asked for them."""
    if scorer.marks_explanation is None:
        return scorer.no_reference == "empty" or any(reading.explanation for reading in readings)
    # A model that was asked for letters alone writes a marked explanation here and there: a few make no task of it.
    return 2 * sum(scorer.marks_explanation(output.text) for _, output in matched) >= len(matched)


def _readings(scorer: Scorer, matched: Sequence[tuple[Question, Prediction]]) -> list[Reading]:
    """Return what the scorer reads; of two ways to read, the one that is right more often over all questions."""

    def all_by(read: Callable[[str, Question], Reading]) -> list[Reading]:
        return [
            # A scorer is given the whole output, as its script is; what is thinking, it decides itself.
            scorer.vote(output.votes, question) if scorer.vote and output.votes else read(output.text, question)
            for question, output in matched
        ]

    def right(readings: Sequence[Reading]) -> float:
        return sum(
            scorer.right(reading.answer, question) for reading, (question, _) in zip(readings, matched, strict=True)
        )

    readings = all_by(scorer.read)
    return readings if scorer.second is None else max(readings, all_by(scorer.second), key=right)


def _match(questions: Sequence[Question], predictions: Sequence[Prediction]) -> list[tuple[Question, Prediction]]:
    by_id = {prediction.question_id: prediction for prediction in predictions}
    known = {question.id for question in questions}
    mismatches = {
        "questions have no prediction": [question.id for question in questions if question.id not in by_id],
        "predictions belong to no question": [name for name in by_id if name not in known],
    }
    if any(mismatches.values()):
        problems = "; ".join(
            f"{len(ids)} {problem}: {', '.join(ids[:_SHOWN])}{', ...' if len(ids) > _SHOWN else ''}"
            for problem, ids in mismatches.items()
            if ids
        )
        raise DataError(
            f"predictions and questions do not match ({len(by_id)} predictions, {len(known)} questions); "
            f"{problems}. Score the questions file that was predicted; an interrupted predict continues "
            "where it stopped when it is started again; --answered-only scores the questions that have a prediction, "
            "--limit N the first N (after predict --limit N)."
        )
    return [(question, by_id[question.id]) for question in questions]


def score(graded: Sequence[Graded], scorer: str | Scorer = "standard") -> Scores:
    """Return the scores of any subset of what `grade` returned.

    `n` is the number of questions. `scored` of them are in the denominator of accuracy: the answer is published, the
    scorer scores such questions and did not drop the output. `answered` have a readable output.

    Accuracy, its 95% interval (Wilson's, or that of a bootstrap of whole groups where questions share a case), BLEU and
    ROUGE are percentages; precision, recall and weighted_f1 are fractions, as scikit-learn gives them. None stands for
    what cannot be computed.
    """
    scorer = scorers.get(scorer)
    scored = [item for item in graded if item.counted]
    texts = [item.text for item in graded if item.text is not None]
    scores: dict[str, float | int | list[float] | None] = {
        "n": len(graded),
        "scored": len(scored),
        "answered": sum(item.answer is not None for item in graded),
        "accuracy": average(scored, ()),
        "accuracy_ci": _interval(scored),
        **weighted([(item.question.answer or "", item.answer or _UNREAD) for item in scored]),
        "explanations": len(texts),
        **text_metrics.aggregate(texts, scorer.smoothing),
    }
    for name, facets in scorer.averages.items():
        scores[name] = average(scored, facets)
    scores.update({name: metric.of(scored) if scored else None for name, metric in scorer.metrics.items()})
    return scores


def clusters(graded: Sequence[Graded]) -> list[str] | None:
    """Return the group of each question, itself where it has none; None where no two questions share one."""
    groups = [item.question.facets.get(GROUP) or f"question {item.question.id}" for item in graded]
    return groups if len(set(groups)) < len(groups) else None


def _interval(scored: Sequence[Graded]) -> list[float] | None:
    """Return the 95% interval of the accuracy in percent: Wilson's, or that of a bootstrap of whole groups."""
    if not scored:
        return None
    groups = clusters(scored)
    # Wilson's interval takes questions as independent; those of one case are not, and it would be too short.
    if groups is None:
        return [100 * end for end in significance.wilson(sum(item.right for item in scored), len(scored))]
    import numpy as np

    rows = significance.by_cluster(np.array([[item.right, 1.0] for item in scored]), groups)
    ((low, high),) = significance.bootstrap(rows, lambda sums: 100 * sums[:, :1] / sums[:, 1:])
    return [low, high]


def weighted(pairs: Sequence[tuple[str, str]]) -> dict[str, float | None]:
    """Return precision, recall and weighted_f1 of (gold, predicted) labels as fractions; None without pairs.

    scikit-learn's `average="weighted"`: per answer string, weighted by how often it is the gold answer; 0 where a label
    is never predicted. Recall equals accuracy.
    """
    gold, predicted = Counter(label for label, _ in pairs), Counter(label for _, label in pairs)
    hits = Counter(label for label, given in pairs if label == given)
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
        return 100 * sum(item.right for item in scored) / len(scored) if scored else None
    cells: Mapping[str, list[Graded]] = defaultdict(list)
    for item in scored:
        if facets[0] in item.question.facets:
            cells[item.question.facets[facets[0]]].append(item)
    means = [mean for cell in cells.values() if (mean := average(cell, facets[1:])) is not None]
    return fmean(means) if means else None


@dataclass(frozen=True)
class OutputTruncation:
    """How many outputs of a run its limit cut off: they may lack an answer for want of room, not of knowledge."""

    outputs: int
    cut: int
    """Of the outputs, those with `finish: length`."""
    thinking: int
    """Of the cut ones, those in which `<think>` was never closed."""

    @property
    def sentence(self) -> str:
        """What the screen says."""
        thinking = f", {self.thinking} of them while thinking" if self.thinking else ""
        return f"{self.cut} of {self.outputs} outputs reached generation.max_new_tokens and were cut{thinking}"


def truncation(graded: Iterable[Graded]) -> OutputTruncation | None:
    """Return how many outputs of a run were cut off, None where no output says how it ended."""
    outputs = [item.prediction for item in graded]
    if not any(output.finish for output in outputs):
        return None
    cut = [output for output in outputs if output.finish == "length"]
    return OutputTruncation(len(outputs), len(cut), sum(still_thinking(output.text) for output in cut))
