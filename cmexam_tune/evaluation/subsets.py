"""Scores with and without some questions: those that were in the training data, those whose answers are doubtful."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cmexam_tune.evaluation.comparison import Comparison
from cmexam_tune.evaluation.grading import Graded
from cmexam_tune.evaluation.significance import wilson


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
    return f"{round(points, 2) + 0.0:+.2f}"  # never -0.00


def subset(name: str, graded: Sequence[Graded], ids: Collection[str], against: Comparison | None = None) -> Subset:
    """Return the scores of the questions with these ids, and of the others.

    Args:
        name: what the questions are, to follow `questions are`.
        graded: all questions of a run.
        ids: the questions that are meant; others than the run's are ignored.
        against: the comparison with a baseline: which questions are newly right or wrong.
    """
    counted = [one for one in graded if one.counted]
    chosen = [one for one in counted if one.question.id in ids]
    gain = gain_only = None
    if against is not None and counted:
        gain = 100 * (len(against.gained) - len(against.lost)) / len(counted)
        of_these = sum(i in ids for i in against.gained) - sum(i in ids for i in against.lost)
        gain_only = 100 * of_these / len(counted)
    return Subset(
        name,
        _share(counted),
        _share(chosen),
        _share([one for one in counted if one.question.id not in ids]),
        gain,
        gain_only,
    )


def _share(graded: Sequence[Graded]) -> Share:
    right = sum(one.right for one in graded)
    if not graded:
        return Share(0, 0, None, None)
    low, high = wilson(right, len(graded))
    return Share(len(graded), right, 100 * right / len(graded), (100 * low, 100 * high))
