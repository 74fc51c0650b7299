"""What grading returns of each question, and what scorers, metrics and breakdowns count."""

from collections.abc import Mapping
from dataclasses import dataclass

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation.text_metrics import PairStatistics


@dataclass(frozen=True)
class OrderedAnswer:
    """How the scorer read one of several outputs of a question, each with the options in another order."""

    order: str | None
    answer: str | None
    """In the exam's letters."""
    right: float
    probabilities: Mapping[str, float] | None
    """Of the allowed answers, in the exam's letters, where the model chose by likelihood."""


@dataclass(frozen=True)
class Graded:
    """One question, what was predicted, and how the scorer read it."""

    question: Question
    prediction: Prediction
    answer: str | None
    """As the scorer read `prediction.text`; None is unreadable."""
    explanation: str | None
    text: PairStatistics | None
    """Statistics of explanation against reference; None where there is no pair to score."""
    right: float = 0.0
    """1 or 0 as the scorer counts; a chance where its script draws letters. 0 where the answer is unpublished."""
    counted: bool = True
    """Whether the question stays in the denominator of accuracy."""
    orders: tuple[OrderedAnswer, ...] = ()
    """The answers with the options in several orders; the first of them is `answer`."""

    @property
    def correct(self) -> bool:
        """Whether the scorer counts the answer as right."""
        return self.right == 1
