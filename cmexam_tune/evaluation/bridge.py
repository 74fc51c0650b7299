"""From our score to a published script's on the same outputs: which points come from where.

In four steps, each a difference of two accuracies, so that they add up: the questions that the script scores, how it
reads and compares, what it leaves out of the denominator, and how it averages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Prediction, Question, Scores
from cmexam_tune.evaluation import grading, scorers
from cmexam_tune.evaluation.grading import Graded, average
from cmexam_tune.evaluation.scorers import Profile

STANDARD = "standard"


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
class Bridge:
    """The way from our accuracy to a script's score, in points of percent: standard + the four steps = theirs.

    A score or step is None where there is none, because the script scores none of these questions.
    """

    profile: str
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
    """The average that it reports: `accuracy` (over questions) or a key of the profile's `averages`."""
    differing: tuple[Differing, ...]
    mark: str | None = None
    """Says so where the run was asked in other words than the script asks in."""


def build(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    profile: str | Profile,
    style: str | None = None,
    standard: Sequence[Graded] | None = None,
) -> Bridge:
    """Return the bridge from `standard` to a profile.

    Args:
        questions: All questions that were predicted.
        predictions: Their outputs.
        profile: The script's.
        style: Prompt style of the run, where it is known (`notes.style`); see `prompt_mark`.
        standard: What `grading.grade` returned for the standard profile, where it is there already.

    Raises:
        DataError: predictions and questions do not match.
        ConfigError: an unknown profile.
    """
    rules = scorers.get(profile) if isinstance(profile, str) else profile
    ours = list(standard) if standard is not None else grading.grade(questions, predictions)
    return between(ours, grading.grade(questions, predictions, rules), rules, style)


def to_profiles(
    graded: Sequence[Graded],
    names: Sequence[str],
    style: str | None = None,
    option_order: str | None = None,
    explanations: bool | None = None,
) -> tuple[dict[str, Scores], dict[str, Bridge]]:
    """Return the scores of the same outputs by each of several profiles, and the bridge to each but `standard`.

    Args:
        graded: All questions and outputs, by any profile.
        names: Of the profiles.
        style: See `build`.
        option_order: See `grading.grade`.
        explanations: See `grading.grade`.
    """
    asked, predictions = [one.question for one in graded], [one.prediction for one in graded]
    ours = grading.grade(asked, predictions, STANDARD, option_order, explanations)
    scores, bridges = {}, {}
    for name in Progress("evaluate", "profiles", len(names), patience=1).each(names):
        rules = scorers.get(name)
        theirs = ours if name == STANDARD else grading.grade(asked, predictions, rules, option_order, explanations)
        scores[name] = grading.score(theirs, rules)
        if name != STANDARD:
            bridges[name] = between(ours, theirs, rules, style)
    return scores, bridges


def between(ours: Sequence[Graded], theirs: Sequence[Graded], rules: Profile, style: str | None = None) -> Bridge:
    """Return the bridge between two gradings of the same outputs; `theirs` was graded by `rules`.

    Raises:
        ValueError: the two hold different questions.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.question.answer is not None]
    if any(a.question.id != b.question.id for a, b in pairs):
        raise ValueError("a bridge is between two gradings of the same questions in the same order")
    inside = [(a, b) for a, b in pairs if rules.subset is None or rules.subset(b.question)]
    counted = [b for _, b in pairs if b.counted]
    facets = rules.averages.get(rules.headline, ())
    stops = (
        average([a for a, _ in pairs], ()),
        average([a for a, _ in inside], ()),
        average([b for _, b in inside], ()),
        average(counted, ()),
        average(counted, facets),
    )
    steps = [None if a is None or b is None else b - a for a, b in pairwise(stops)]
    return Bridge(
        profile=rules.name,
        n=len(pairs),
        standard=stops[0],
        by_subset=steps[0],
        by_reading=steps[1],
        by_denominator=steps[2],
        by_average=steps[3],
        theirs=stops[4],
        scored=len(counted),
        subset=rules.subset_name,
        headline=rules.headline,
        differing=tuple(
            Differing(a.question.id, a.answer, b.answer, a.question.answer or "", a.right, b.right)
            for a, b in inside
            if a.answer != b.answer or a.right != b.right
        ),
        mark=prompt_mark(rules, style),
    )


def prompt_mark(rules: Profile, style: str | None) -> str | None:
    """Return a plain remark where a run of this prompt style was asked in other words than the script asks in.

    None where the words are the script's, where it has none of its own, or where the style of the run is unknown.
    """
    if style is None or not rules.prompt or style in rules.styles:
        return None
    return f"asked in style {style!r}, not in the words of {rules.name}"
