"""What judges said about answers, and what is computed from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Literal

from cmexam_tune.cmb_clin.rubric import Variant
from cmexam_tune.core.schema import OMIT_IF_DEFAULT
from cmexam_tune.evaluation.significance import correlations, judge_agreement

Key = tuple[str, str]
"""(predictions, id of the turn)."""


@dataclass(frozen=True)
class Judgement:
    """What one judge said about one answer."""

    question_id: str
    text: str
    """The judge's raw output."""
    scores: Mapping[str, int] | None
    """Score of each axis; None: nothing could be read, also when asked again."""
    asked: int = 1
    """How often the judge was asked."""
    finish: Literal["stop", "length", "error"] | None = field(default=None, metadata=OMIT_IF_DEFAULT)
    reason: str | None = field(default=None, metadata=OMIT_IF_DEFAULT)
    """Why a request failed."""


@dataclass(frozen=True)
class Judged:
    """All judgements of one judge about one predictions file."""

    judge: str
    model: str
    """Name of the predictions."""
    judgements: tuple[Judgement, ...]
    variant: Variant = "plain"

    @property
    def scores(self) -> dict[str, Mapping[str, int]]:
        """Id of the turn -> scores, of judgements that could be read."""
        return {
            judgement.question_id: judgement.scores for judgement in self.judgements if judgement.scores is not None
        }

    @property
    def unread(self) -> int:
        """Judgements that could not be read."""
        return sum(judgement.scores is None and judgement.finish != "error" for judgement in self.judgements)

    @property
    def failed(self) -> int:
        """Judgements whose request failed; asked again at the next start."""
        return sum(judgement.finish == "error" for judgement in self.judgements)

    def means(self, axes: Sequence[str]) -> dict[str, float | int | None]:
        """Return `n`, mean and deviation (n-1) of each axis over turns, and `average`, the mean of the axis means.

        `average_by_case` takes the mean of each case's turns first: the paper does not say which it prints.
        """
        scores = self.scores
        means: dict[str, float | int | None] = {"n": len(scores), "unread": self.unread, "failed": self.failed}
        by_case: dict[str, list[Mapping[str, int]]] = {}
        for name, by_axis in scores.items():
            by_case.setdefault(name.rpartition(":")[0], []).append(by_axis)
        for axis in axes:
            values = [by_axis[axis] for by_axis in scores.values()]
            means[axis] = fmean(values) if values else None
            means[f"{axis}_std"] = stdev(values) if len(values) > 1 else None
        means["average"] = (
            fmean(fmean(by_axis[axis] for by_axis in scores.values()) for axis in axes) if scores else None
        )
        cases = [fmean(fmean(by_axis.values()) for by_axis in turns) for turns in by_case.values()]
        means["average_by_case"] = fmean(cases) if cases else None
        return means


def pairs(judged: Sequence[Judged], judge: str) -> dict[Key, Mapping[str, int]]:
    """Return everything that a judge scored as the rubric says."""
    return {
        (run.model, name): scores
        for run in judged
        if run.judge == judge and run.variant == "plain"
        for name, scores in run.scores.items()
    }


def agreements(judged: Sequence[Judged], axes: Sequence[str]) -> list[dict[str, str | float | int | None]]:
    """Return for every two judges and each axis `n` and the measures of `judge_agreement` over what both scored.

    The line `ranking` compares the order of the models by the mean of their axes (Spearman), where both judged at
    least three models.
    """
    judges = list(dict.fromkeys(run.judge for run in judged))
    rows: list[dict[str, str | float | int | None]] = []
    for place, first in enumerate(judges):
        for second in judges[place + 1 :]:
            first_scores, second_scores = pairs(judged, first), pairs(judged, second)
            common = [key for key in first_scores if key in second_scores]
            for axis in axes:
                a, b = [first_scores[key][axis] for key in common], [second_scores[key][axis] for key in common]
                rows.append({"first": first, "second": second, "axis": axis, "n": len(common), **judge_agreement(a, b)})
            models = list(dict.fromkeys(model for model, _ in common))
            # Two models stand in the same order or in the opposite one: 1 or -1 would look like a finding.
            if len(models) > 2:
                order = [[_mean(side, common, model) for model in models] for side in (first_scores, second_scores)]
                spearman = correlations(*order)["spearman"]
                rows.append(
                    {"first": first, "second": second, "axis": "ranking", "n": len(models), "spearman": spearman}
                )
    return rows


def by_length(
    judged: Sequence[Judged], lengths: Mapping[Key, int], axes: Sequence[str]
) -> list[dict[str, str | float | int | None]]:
    """Return for every judge and each axis how its scores go with the length of the answers (Spearman).

    Args:
        judged: of every judge and predictions file.
        lengths: characters of each answer.
        axes: of the rubric.
    """
    rows: list[dict[str, str | float | int | None]] = []
    for judge in dict.fromkeys(run.judge for run in judged):
        scores = pairs(judged, judge)
        for axis in axes:
            values = [scores[key][axis] for key in scores]
            spearman = correlations(values, [lengths[key] for key in scores])["spearman"]
            rows.append({"judge": judge, "axis": axis, "n": len(values), "spearman": spearman})
    return rows


def _mean(scores: Mapping[Key, Mapping[str, int]], keys: Sequence[Key], model: str) -> float:
    return fmean(fmean(scores[key].values()) for key in keys if key[0] == model)


def sensitivity(judged: Sequence[Judged], axes: Sequence[str]) -> list[dict[str, str | float | int | None]]:
    """Return how far scores move when the same answers are judged in another variant, for each judge and axis.

    `moved` is the share of scores that changed, `by` their mean absolute change, `shift` the mean change (variant less
    plain).
    """
    plain = {(run.judge, run.model): run.scores for run in judged if run.variant == "plain"}
    changes: dict[tuple[str, Variant], dict[str, list[int]]] = {}
    for run in judged:
        before = plain.get((run.judge, run.model), {})
        if run.variant == "plain":
            continue
        for name, scores in run.scores.items():
            for axis in axes if name in before else ():
                by_axis = changes.setdefault((run.judge, run.variant), {})
                by_axis.setdefault(axis, []).append(scores[axis] - before[name][axis])
    return [
        {
            "judge": judge,
            "variant": variant,
            "axis": axis,
            "n": len(values),
            "moved": fmean(value != 0 for value in values),
            "by": fmean(map(abs, values)),
            "shift": fmean(values),
        }
        for (judge, variant), by_axis in changes.items()
        for axis, values in by_axis.items()
    ]
