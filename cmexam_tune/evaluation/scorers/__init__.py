"""Scorers: how one published script turns outputs into scores; `--profile` chooses one.

In: what a model wrote, and its question. Out: what that script reads in it, whether it counts as right, and how it is
averaged. Start reading below, then in `standard.py`, what this project reports; each other file is one script, with its
peculiarities. The file's name is the scorer's (`opencompass_cmb.py` is `opencompass-cmb`), its `SCORER` is all there
is to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from cmexam_tune.core import variants
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.metrics import Metric
from cmexam_tune.evaluation.text_metrics import PairStatistics

STANDARD = "standard"
"""The scorer of this project."""


class Reading(NamedTuple):
    """What a scorer reads in an output; None is no answer or no explanation."""

    answer: str | None
    explanation: str | None


def equal(reading: str | None, question: Question) -> float:
    """Return 1 where exactly the right letters were read, else 0: what most scripts count."""
    return float(reading is not None and reading == question.answer)


@dataclass(frozen=True)
class Scorer:
    """One way of turning outputs into scores."""

    name: str
    summary: str
    """One line: parser, denominator, text metrics."""
    read: Callable[[str, Question], Reading]
    """Some scripts look at the right answer to read the output; only those use `question.answer`."""
    signature: Mapping[str, str]
    statistics: Callable[[Sequence[str], Sequence[str]], list[PairStatistics]] | None = None
    """Hypotheses and references to per-pair statistics; None where the script scores no explanations."""
    smoothing: Literal["exp", "none"] = "exp"
    no_reference: Literal["skipped", "empty"] = "skipped"
    """Whether a question without explanation is left out of the text metrics or scored against an empty text."""
    marks_explanation: Callable[[str], bool] | None = None
    """Whether an output says where its explanation is. Where nobody knows whether the model was asked for explanations,
    they are scored if half of the outputs do; None: if one output holds any, marked or not, as scripts do."""
    vote: Callable[[Sequence[str], Question], Reading] | None = None
    """Reads several outputs to one question, where the script takes a majority of them; one output is read alone."""
    second: Callable[[str, Question], Reading] | None = None
    """Another way to read, where the script scores all questions by both and reports the better score."""
    right: Callable[[str | None, Question], float] = equal
    """1 or 0 for an answer; where the script draws letters at random, the probability of the right one."""
    subset: Callable[[Question], bool] | None = None
    """The questions that the script scores; None is all of them."""
    subset_name: str = "all questions"
    drops: Callable[[str, Reading], bool] = lambda text, reading: False
    """Whether this output leaves the denominator of accuracy, precision, recall and F1."""
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Averages beside the plain share of right answers: key of the scores -> facets, the outermost first.
    `("exam_type", "exam_class")` is the mean over the types of the mean over their classes."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """More scores, of the script or of `evaluation/metrics`, each a column of the report: key -> metric."""
    headline: str = "accuracy"
    """Key of the score that the script reports: `accuracy` or one of `averages`."""
    styles: tuple[str, ...] = ()
    """Names of the prompt styles that ask in the script's own words."""
    prompt: str = ""
    """The script's prompt in words, where it has one."""


class ScorerModule(Protocol):
    """What a file in this folder provides."""

    @property
    def SCORER(self) -> Scorer:
        """The rules; their name is the file's."""


def names() -> tuple[str, ...]:
    """Return the names of all scorers, what this project reports first."""
    dashed = (name.replace("_", "-") for name in variants.names("scorers"))
    return tuple(sorted(dashed, key=lambda name: (not name.startswith(STANDARD), name)))


def get(scorer: str | Scorer) -> Scorer:
    """Return a scorer by its name, `SCORER` of a module of your own by its dotted name, or the scorer itself.

    Raises:
        ConfigError: there is none of that name; the message suggests the nearest.
    """
    if isinstance(scorer, Scorer):
        return scorer
    if "." not in scorer and scorer not in names():
        raise ConfigError(
            f"profile {scorer!r} is unknown{variants.suggest(scorer, names())}; known: {', '.join(names())}."
        )
    module = variants.load("scorers", scorer if "." in scorer else scorer.replace("-", "_"))
    loaded: Scorer = module.SCORER
    return loaded
