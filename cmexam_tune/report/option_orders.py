"""Answers to the same questions with their options in several orders: does the model choose a text, or a letter?

PriDe (Zheng et al. 2024, arXiv 2309.03882) takes the log-probability of a letter for a preference of the letter plus
one of its text. Over rotations every text stands once under every letter, so that the mean of the log-probabilities is
the preference of the letters, up to a constant; its mean over the questions is subtracted from what was observed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.graded import Graded, OrderedAnswer
from cmexam_tune.evaluation.grading import clusters
from cmexam_tune.evaluation.significance import wilson
from cmexam_tune.prompts import order

_LEAST = 1e-10
"""Stands for a probability of 0, whose logarithm would make a mean of minus infinity."""


@dataclass(frozen=True)
class LetterBias:
    """One letter, as the model saw it, over all questions with one right letter and all their orders; in percent."""

    letter: str
    right: float
    """Askings in which the right text stood under it."""
    given: float
    """Readable answers that were it: more than `right`, the model prefers it."""
    recall: float | None
    """Of the askings in which it was right, how many were answered with it."""
    prior: float | None = None
    """PriDe's probability of the letter whatever stands under it; None without probabilities."""


@dataclass(frozen=True)
class OptionOrders:
    """Results over several orders; shares in percent of the questions that were asked in several."""

    n: int
    orders: int
    """Most orders of a question."""
    one_order: int
    """Questions left out, because their options speak of each other and have one order only."""
    first: float
    """Accuracy in the first order, the exam's unless `prompt.option_order` says another."""
    mean: float
    mean_ci: tuple[float, float]
    all_right: float
    """Right in every order (CircularEval)."""
    all_right_ci: tuple[float, float]
    changed: float
    """The answer is not the same text in every order."""
    changed_ci: tuple[float, float]
    letters: tuple[LetterBias, ...]
    recall_deviation: float | None
    """Deviation of the letters' recalls in points: 0 for a model that prefers no letter."""
    debiased: float | None = None
    """Accuracy of the first order after PriDe; None where answers have no probabilities."""
    averaged: float | None = None
    """Accuracy of the text that is most probable in the mean over the orders."""
    probable_first: float | None = None
    """Accuracy in the first order over the questions of these two: those with one letter for an answer."""


def option_orders(graded: Sequence[Graded]) -> OptionOrders | None:
    """Return what the order of the options does; None where no question was asked in several."""
    asked = [item for item in graded if item.counted and len(item.orders) > 1]
    if not asked:
        return None
    import numpy as np

    rights = [[answer.right for answer in item.orders] for item in asked]
    rows = np.array([[fmean(right), 1.0] for right in rights])
    ((low, high),) = significance.bootstrap(
        significance.by_cluster(rows, clusters(asked)), lambda sums: 100 * sums[:, :1] / sums[:, 1:]
    )
    always = sum(min(right) == 1 for right in rights)
    changed = sum(len({answer.answer for answer in item.orders}) > 1 for item in asked)
    priors = _priors(asked)
    letters = _letters(asked, priors)
    recalls = [letter.recall for letter in letters if letter.recall is not None]
    return OptionOrders(
        n=len(asked),
        orders=max(map(len, rights)),
        one_order=sum(item.counted and len(item.orders) == 1 for item in graded),
        first=100 * fmean(right[0] for right in rights),
        mean=100 * float(rows[:, 0].mean()),
        mean_ci=(low, high),
        all_right=100 * always / len(asked),
        all_right_ci=_interval(always, len(asked)),
        changed=100 * changed / len(asked),
        changed_ci=_interval(changed, len(asked)),
        letters=letters,
        recall_deviation=pstdev(recalls) if recalls else None,
        **_corrected(asked, priors),
    )


def _interval(count: int, n: int) -> tuple[float, float]:
    low, high = wilson(count, n)
    return 100 * low, 100 * high


def _seen(item: Graded, answer: OrderedAnswer) -> dict[str, str]:
    """Return the exam's letter -> the letter that the model saw."""
    return order.moved(item.question, answer.order or "rotate:0")


def _logs(item: Graded, answer: OrderedAnswer) -> dict[str, float] | None:
    """Return letter as seen -> log-probability; None where answers of several letters competed, or there are none."""
    scores = answer.probabilities
    if not scores or any(len(letters) != 1 for letters in scores):
        return None
    seen = _seen(item, answer)
    return {seen[letter]: math.log(max(scores.get(letter, 0.0), _LEAST)) for letter in item.question.options}


def _priors(asked: Sequence[Graded]) -> dict[tuple[str, ...], dict[str, float]]:
    """Return the letters of a question -> letter -> PriDe's prior, its mean over the questions with these letters."""
    estimates = defaultdict(list)
    for item in asked:
        by_order = [logs for answer in item.orders if (logs := _logs(item, answer)) is not None]
        if len(by_order) == len(item.orders):
            # The softmax of the mean log-probabilities: what the texts contribute is the same for every letter.
            weights = {letter: math.exp(fmean(logs[letter] for logs in by_order)) for letter in item.question.options}
            total = sum(weights.values())
            estimates[tuple(weights)].append({letter: weight / total for letter, weight in weights.items()})
    return {
        letters: {letter: fmean(prior[letter] for prior in priors) for letter in letters}
        for letters, priors in estimates.items()
    }


def _letters(asked: Sequence[Graded], priors: Mapping[tuple[str, ...], Mapping[str, float]]) -> tuple[LetterBias, ...]:
    right: dict[str, int] = defaultdict(int)
    given: dict[str, int] = defaultdict(int)
    hits: dict[str, int] = defaultdict(int)
    for item in asked:
        gold = item.question.answer or ""
        for answer in item.orders if len(gold) == 1 else ():
            seen = _seen(item, answer)
            right[seen[gold]] += 1
            for letter in answer.answer or "":
                if letter in seen:
                    given[seen[letter]] += 1
            hits[seen[gold]] += answer.answer == gold
    # Priors are of a set of letters; where questions have several numbers of options, that of the most is shown.
    prior = priors[max(priors, key=len)] if priors else {}
    askings, answers = max(sum(right.values()), 1), max(sum(given.values()), 1)
    return tuple(
        LetterBias(
            letter,
            100 * right[letter] / askings,
            100 * given[letter] / answers,
            100 * hits[letter] / right[letter] if right[letter] else None,
            100 * prior[letter] if letter in prior else None,
        )
        for letter in sorted({*right, *given})
    )


def _corrected(
    asked: Sequence[Graded], priors: Mapping[tuple[str, ...], Mapping[str, float]]
) -> dict[str, float | None]:
    """Return the accuracies that probabilities of several orders allow for."""
    plain, debiased, averaged = [], [], []
    for item in asked:
        letters = tuple(item.question.options)
        by_order = [_logs(item, answer) for answer in item.orders]
        if letters not in priors or any(logs is None for logs in by_order):
            continue
        first, prior = item.orders[0], priors[letters]
        seen, logs_first = _seen(item, first), by_order[0] or {}
        # The exam's letter of the text that stands under the best of the corrected letters.
        corrected = {
            letter: logs_first[seen[letter]] - math.log(max(prior[seen[letter]], _LEAST)) for letter in letters
        }
        # The exam's letters stay with their texts: summed over the orders, a preference for a letter cancels.
        summed = {
            letter: sum((answer.probabilities or {}).get(letter, 0.0) for answer in item.orders) for letter in letters
        }
        plain.append(first.right)
        debiased.append(float(max(letters, key=corrected.__getitem__) == item.question.answer))
        averaged.append(float(max(letters, key=summed.__getitem__) == item.question.answer))
    if not plain:
        return {}
    return {
        "debiased": 100 * fmean(debiased),
        "averaged": 100 * fmean(averaged),
        "probable_first": 100 * fmean(plain),
    }
