"""Questions whose key may be wrong, told by what several models answered; a person decides, in a sheet.

Three signs, none of which is proof: able runs agree on another answer, able runs miss the question and weak ones do not
(item-rest correlation), the exam's own explanation argues for another letter. Models that learnt from the same texts
share their errors, and an exam that was trained on hides its wrong keys: what is listed is for a person to judge, and
nothing is left out of a score by these signs alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.review_sheet import QUESTION, ReviewSheet, SheetColumns, question_cells
from cmexam_tune.core.schema import Question, letters
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.prompts.question_checks import contradicted
from cmexam_tune.quality.errata import Erratum

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FEWEST = 3
"""Runs from which on their agreement says something."""
CORRELATED = 5
"""Runs from which on a correlation over runs says something."""
PRIOR = 0.02
"""Share of wrong keys that is expected before anything was answered."""
_Z = -2.33
"""The 1% quantile of a standard normal variable: one question in a hundred is below it by chance."""
VERDICTS = ("key wrong", "broken", "key right")
SHEET = SheetColumns(
    "check --predictions",
    keys=("question_id",),
    before=(*QUESTION, "key", "explanation"),
    after=("other answer", "runs", "signs"),
    review=("verdict", "answer", "reviewer", "reason"),
)
"""The workbook for doctors; `verdict` is one of `VERDICTS`, `answer` the right letters of a wrong key."""


@dataclass(frozen=True)
class Suspect:
    """A question whose key may be wrong."""

    question_id: str
    other: str | None
    """The answer that the runs agree on against the key, where they do."""
    votes: Mapping[str, int]
    """Answer -> runs that gave it."""
    odds: float
    """Logarithm (base 10) of the odds that the key is wrong, as if runs erred independently of each other."""
    correlation: float | None
    """Item-rest correlation over the runs; None of fewer than `CORRELATED`, or where all answered alike."""
    signs: tuple[str, ...]


def suspects(runs: Mapping[str, Sequence[Graded]]) -> list[Suspect]:
    """Return the questions with at least one sign, the most suspicious first.

    Args:
        runs: Name -> graded questions, all of the same in the same order.

    Raises:
        UserError: too few runs.
    """
    if len(runs) < FEWEST:
        raise UserError(
            f"--predictions: {len(runs)} files; at least {FEWEST} are needed, or their agreement says nothing."
        )
    asked = [items for items in zip(*runs.values(), strict=True) if items[0].question.answer]
    if not asked:
        return []
    import numpy as np

    right = np.array([[float(item.correct) for item in items] for items in asked])
    # Never certain: a run that was right everywhere could not be outvoted.
    accuracies = np.clip(right.mean(0), 0.05, 0.95).tolist()
    judged = [_suspect(items, accuracies, value) for items, value in zip(asked, item_rest(right), strict=True)]
    suspicious = [suspect for suspect in judged if suspect.signs]
    return sorted(suspicious, key=lambda suspect: (-suspect.odds, -len(suspect.signs), suspect.question_id))


def item_rest(right: "NDArray[np.float64]") -> list[float | None]:
    """Return for each question the correlation over the runs of being right on it with being right on the others.

    Args:
        right: [questions, runs], 1 where the run was right. None where all were alike, or of fewer than `CORRELATED`.
    """
    import numpy as np

    if right.shape[1] < CORRELATED:
        return [None] * len(right)
    # Without the question itself, which would correlate with its own part of the sum.
    rest_scores = right.sum(0) - right
    item, rest = (scores - scores.mean(1, keepdims=True) for scores in (right, rest_scores))
    scale = np.sqrt((item**2).sum(1) * (rest**2).sum(1))
    products = (item * rest).sum(1)
    return [float(product / size) if size > 0 else None for product, size in zip(products, scale, strict=True)]


def _suspect(items: Sequence[Graded], accuracies: Sequence[float], correlation: float | None) -> Suspect:
    question, answers = items[0].question, [item.answer for item in items]
    votes = Counter(answer for answer in answers if answer)
    other, odds = _other(question, answers, accuracies)
    able = [answer for answer, accuracy in zip(answers, accuracies, strict=True) if accuracy >= fmean(accuracies)]
    signs = []
    if other is not None and odds > 0 and able.count(other) >= max(2, len(able) / 2):
        signs.append(f"{able.count(other)} of the {len(able)} abler runs agree on {other}")
    if correlation is not None and _below(correlation, len(items)):
        signs.append(f"abler runs miss it more often (item-rest correlation {correlation:.2f})")
    if argued := contradicted(question):
        signs.append(f"its explanation {argued}")
    return Suspect(question.id, other, dict(votes.most_common()), odds, correlation, tuple(signs))


def _other(question: Question, answers: Sequence[str | None], accuracies: Sequence[float]) -> tuple[str | None, float]:
    """Return the likeliest other answer that a run gave, and the logarithm of the odds that the key is wrong.

    A run gives the right answer as often as it agrees with the key elsewhere, and each wrong letter equally often; so
    every run votes with the logarithm of its odds.
    """
    weights: dict[str, float] = defaultdict(float)
    wrong = max(len(question.options) - 1, 1)
    for answer, accuracy in zip(answers, accuracies, strict=True):
        if answer:
            weights[answer] += math.log(accuracy * wrong / (1 - accuracy))
    key = weights.pop(question.answer or "", 0.0)
    other = max(weights, key=weights.__getitem__, default=None)
    # Every other letter may be the right one; those that nobody gave have weight 0.
    odds = [weight - key for weight in weights.values()] + [-key] * max(wrong - len(weights), 0)
    # A log-sum-exp: with dozens of runs the odds themselves are beyond a float.
    highest = max(odds)
    log_sum = highest + math.log(sum(math.exp(log_odds - highest) for log_odds in odds))
    return other, (log_sum + math.log(PRIOR / wrong / (1 - PRIOR))) / math.log(10)


def _below(correlation: float, n: int) -> bool:
    """Return whether a correlation over n runs is too low for chance (Fisher's transformation, one-sided 1%)."""
    # atanh(-1) is infinite; the normal approximation of Fisher's z has a standard error of 1 / sqrt(n - 3).
    return math.atanh(max(correlation, -0.999999)) * math.sqrt(n - 3) < _Z


def rows(suspects: Sequence[Suspect], questions: Sequence[Question]) -> list[dict[str, str]]:
    """Return the lines of the sheet."""
    by_id = {question.id: question for question in questions}
    return [
        {
            **question_cells(by_id[suspect.question_id]),
            "key": by_id[suspect.question_id].answer or "",
            "explanation": by_id[suspect.question_id].explanation or "",
            "other answer": suspect.other or "",
            "runs": ", ".join(f"{answer}: {count}" for answer, count in suspect.votes.items()),
            "signs": "\n".join(suspect.signs),
        }
        for suspect in suspects
    ]


class Review(NamedTuple):
    """What a person wrote into a row: the columns of `SHEET.review`."""

    verdict: str
    answer: str
    reviewer: str
    reason: str

    def problem(self, question: Question) -> str | None:
        """Say why this is no review of the question, or return None."""
        if self.verdict not in VERDICTS:
            return f"verdict {self.verdict!r} is not one of {', '.join(VERDICTS)}"
        if self.verdict != "key right" and not (self.reviewer and self.reason):
            return "a verdict needs a reviewer and a reason"
        if self.verdict == "key wrong" and not (self.answer and set(letters(self.answer)) <= set(question.options)):
            return f"answer {self.answer!r}: the right letters are needed, of {''.join(question.options)}"
        return None


def reviewed(sheet: ReviewSheet, name: str, questions: Sequence[Question]) -> list[dict[str, object]]:
    """Return the entries of errata.yaml that people's verdicts in a sheet come to, one for each reviewer and verdict.

    Args:
        sheet: The workbook as it came back.
        name: Its name, which the entries keep.
        questions: The exam; the sheet may hold no others.

    Raises:
        DataError: a verdict that is none, one without reviewer or reason, or letters that the question lacks; names the
            row.
    """
    by_id = {question.id: question for question in questions}
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for (question_id,), row in sorted(sheet.rows.items(), key=lambda pair: pair[1]):
        review = Review(*(sheet.text(row, column).strip() for column in SHEET.review))
        if not review.verdict and not (review.answer or review.reason):
            continue
        if question_id not in by_id:
            raise DataError(f"{name}: row {row}: question {question_id!r} is not in --questions.")
        if problem := review.problem(by_id[question_id]):
            raise DataError(f"{name}: row {row}: {problem}.")
        if review.verdict == "key right":
            continue
        what = "the key is wrong" if review.verdict == "key wrong" else "the question is broken"
        entry = entries.setdefault(
            (review.reviewer, review.verdict),
            asdict(Erratum(f"{name}, {review.reviewer}", f"reviewed by {review.reviewer}", what, ()))
            | {"reviewer": review.reviewer},
        )
        entry["ids"] = [*entry["ids"], question_id]
        entry["reasons"][question_id] = review.reason
        if review.verdict == "key wrong":
            entry["answers"][question_id] = letters(review.answer)
    return list(entries.values())
