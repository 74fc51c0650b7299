"""How hard each question is and how able each run, from which questions which runs answered right.

A run of ability t answers a question of difficulty d right with probability 1 / (1 + exp(d - t)) (Rasch 1960). Runs
are few and questions many, so abilities are parameters and difficulties are drawn from a normal distribution around 0,
whose width is estimated, too (marginal maximum likelihood). With `ENOUGH` runs questions also differ in how sharply
they tell able runs from others (two-parameter logistic model).
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.breakdowns import define
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.significance import SEED, correlations

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float64]

FEWEST = 3
"""Runs from which on hard questions can be told from weak runs."""
ENOUGH = 50
"""Runs from which on the sharpness (discrimination) of each question is estimated; fewer say nothing about it."""
DRAWS = 20
"""Subsets that are drawn to see how far they are off."""
_SHARPNESS = 0.5
"""Deviation of the logarithm of the sharpness."""
DIFFICULTY = "Difficulty level"
"""CMExam's own facet: the share of people who answered right, in five levels."""


@dataclass(frozen=True)
class Ability:
    """One run."""

    name: str
    ability: float
    """In logits; 0 answers a question of mean difficulty right half of the time."""
    interval: tuple[float, float]
    """95%, by the curvature of the likelihood."""


@dataclass(frozen=True)
class ItemParameters:
    """One question."""

    difficulty: float
    """In logits: mean of what is possible after its answers were seen."""
    deviation: float
    """Of the same: wide where few runs answered."""
    sharpness: float = 1.0
    """How steeply the chance of a right answer rises with ability; 1 in the Rasch model."""


@dataclass(frozen=True)
class Level:
    """The questions of one of the exam's own levels of difficulty."""

    en: str
    zh: str
    n: int
    difficulty: float


@dataclass(frozen=True)
class ItemSubset:
    """Questions that stand for the whole exam: one drawn from each of as many groups of equal difficulty."""

    ids: tuple[str, ...]
    error: float
    """Points by which the accuracy of such a subset misses that of the whole: root mean square over runs that had no
    part in drawing it."""
    random_error: float
    """The same for questions drawn at random."""


@dataclass(frozen=True)
class ItemResponse:
    """Abilities of the runs and difficulties of the questions."""

    model: str
    """`Rasch` or `2PL`."""
    n: int
    abilities: tuple[Ability, ...]
    spread: float
    """Deviation of the difficulties, in logits."""
    items: Mapping[str, ItemParameters]
    """Id of the question -> what was estimated."""
    levels: tuple[Level, ...] = ()
    """By CMExam's own difficulty, easiest first; empty where the questions do not say it."""
    spearman: float | None = None
    """Rank correlation of our difficulty with the exam's levels."""
    subset: ItemSubset | None = None


@dataclass(frozen=True)
class Fit:
    """What `fit` estimates; difficulties are in the order of the questions."""

    abilities: "Matrix"
    """[runs]."""
    errors: "Matrix"
    """[runs] standard errors."""
    spread: float
    difficulty: "Matrix"
    """[questions]."""
    deviation: "Matrix"
    sharpness: "Matrix"


def item_response(runs: Mapping[str, Sequence[Graded]], subset: int | None = None) -> ItemResponse | None:
    """Return abilities and difficulties over several runs; None of fewer than `FEWEST`.

    Args:
        runs: Name -> graded questions, all of the same in the same order.
        subset: Also draw so many questions that stand for the whole.

    Raises:
        UserError: a subset of too few runs or questions.
    """
    asked = [items for items in zip(*runs.values(), strict=True) if all(item.counted for item in items)]
    if len(runs) < FEWEST or not asked:
        if subset is not None:
            raise UserError(
                f"--subset {subset}: at least {FEWEST} runs are needed to tell hard questions from easy ones."
            )
        return None
    import numpy as np

    right = np.array([[float(item.correct) for item in items] for items in asked])
    fitted = fit(right, sharp=len(runs) >= ENOUGH)
    questions = [items[0].question for items in asked]
    levels, spearman = _levels(questions, fitted.difficulty)
    return ItemResponse(
        model="2PL" if len(runs) >= ENOUGH else "Rasch",
        n=len(asked),
        abilities=tuple(
            Ability(name, float(ability), (float(ability - 1.96 * error), float(ability + 1.96 * error)))
            for name, ability, error in zip(runs, fitted.abilities, fitted.errors, strict=True)
        ),
        spread=fitted.spread,
        items={
            question.id: ItemParameters(*(round(float(value), 3) for value in values))
            for question, *values in zip(questions, fitted.difficulty, fitted.deviation, fitted.sharpness, strict=True)
        },
        levels=levels,
        spearman=spearman,
        subset=None if subset is None else _subset(questions, right, fitted.difficulty, subset),
    )


def fit(right: "Matrix", sharp: bool = False) -> Fit:
    """Return abilities, and difficulties as their posterior means and deviations.

    Args:
        right: [questions, runs], 1 where the run answered right, else 0.
        sharp: Whether questions differ in sharpness, too.
    """
    import numpy as np
    from scipy.optimize import minimize

    # Questions that the same runs answered right have the same posterior: with 3 runs there are 8 patterns at most.
    patterns, place, counts = np.unique(right, axis=0, return_inverse=True, return_counts=True)
    # Nodes of the prior: [nodes] standard normal difficulties and sharpnesses; a width scales the former.
    line = np.linspace(-4, 4, 41 if sharp else 81)
    sharpness = np.exp(_SHARPNESS * np.linspace(-2.5, 2.5, 9)) if sharp else np.ones(1)
    nodes, slopes = (grid.ravel() for grid in np.meshgrid(line, sharpness))
    weights = -(nodes**2) / 2 - ((np.log(slopes) / _SHARPNESS) ** 2 / 2 if sharp else 0)
    weights -= np.log(np.exp(weights).sum())

    def posterior(parameters: "Matrix") -> "tuple[Matrix, Matrix, Matrix]":
        """Return [patterns] log-likelihoods, [patterns, nodes] shares of the nodes and [runs, nodes] chances."""
        abilities, width = parameters[:-1], np.exp(parameters[-1])
        logits = slopes * (abilities[:, None] - width * nodes)
        joint = patterns @ logits - np.logaddexp(0, logits).sum(0) + weights
        most = joint.max(1, keepdims=True)
        shares = np.exp(joint - most)
        total = shares.sum(1, keepdims=True)
        return (np.log(total) + most)[:, 0], shares / total, 1 / (1 + np.exp(-logits))

    def loss(parameters: "Matrix") -> "tuple[float, Matrix]":
        logs, shares, chances = posterior(parameters)
        by_node = counts @ shares  # [nodes] questions
        seen = (counts[:, None] * shares).T @ patterns  # [nodes, runs] right answers
        slope = slopes[:, None] * (seen - by_node[:, None] * chances.T)
        width = np.exp(parameters[-1])
        gradient = np.append(slope.sum(0), -(width * nodes * slope.sum(1)).sum())
        # A weak prior (normal, deviation 10) keeps a run without a single right or wrong answer finite.
        decay = np.append(parameters[:-1] / 100, parameters[-1] / 4)
        return float(-counts @ logs + (decay * parameters).sum() / 2), -gradient + decay

    # Started at the log-odds of the plain accuracies, from where a few steps lead to the optimum.
    share = np.clip(right.mean(0), 0.01, 0.99)
    start = np.append(np.log(share / (1 - share)), 0.0)
    best = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(-12, 12)] * right.shape[1] + [(-4, 2)]).x
    # Standard errors come from the curvature at the optimum: the Hessian by central differences of the gradient.
    step = 1e-4
    rows = [loss(best + step * unit)[1] - loss(best - step * unit)[1] for unit in np.eye(len(best))]
    # pinv, not inv: a run at its bound has a flat likelihood, and the matrix is singular there.
    covariance = np.linalg.pinv(np.array(rows) / (2 * step))
    _, shares, _ = posterior(best)
    width = float(np.exp(best[-1]))
    mean = shares @ (width * nodes)
    deviation = np.sqrt(np.maximum(shares @ (width * nodes) ** 2 - mean**2, 0))
    return Fit(
        best[:-1],
        np.sqrt(np.maximum(np.diag(covariance)[:-1], 0)),
        width,
        *(values[place.ravel()] for values in (mean, deviation, shares @ slopes)),
    )


def _levels(questions: Sequence[Question], difficulty: Iterable[float]) -> tuple[tuple[Level, ...], float | None]:
    definition = define(DIFFICULTY)
    order = [name.name for name in definition.values]
    by_level: dict[str, list[float]] = defaultdict(list)
    pairs: list[tuple[float, float]] = []
    for question, value in zip(questions, difficulty, strict=True):
        printed = next((text for facet, text in question.facets.items() if define(facet).facet == DIFFICULTY), "")
        if (name := definition.recognise(printed).name) in order:
            by_level[name].append(value)
            pairs.append((float(order.index(name)), value))
    levels = tuple(
        Level(name.en, name.zh, len(by_level[name.name]), fmean(by_level[name.name]))
        for name in definition.values
        if name.name in by_level
    )
    spearman = correlations([level for level, _ in pairs], [value for _, value in pairs])["spearman"]
    return levels, spearman


def _subset(questions: Sequence[Question], right: "Matrix", difficulty: "Matrix", size: int) -> ItemSubset:
    import numpy as np

    if not 1 <= size < len(questions):
        raise UserError(f"--subset {size}: at least 1 and fewer than the {len(questions)} scored questions are needed.")
    chosen = draw(difficulty, size, SEED)
    stratified, plain = [], []
    for run in range(right.shape[1]):
        # What a run did itself must not decide by which questions it is measured.
        without = fit(np.delete(right, run, axis=1)).difficulty
        whole = right[:, run].mean()
        for seed in range(DRAWS):
            stratified.append((right[draw(without, size, seed), run].mean() - whole) ** 2)
        # Of a sample without replacement the variance is known.
        plain.append(whole * (1 - whole) / size * (len(right) - size) / (len(right) - 1))
    return ItemSubset(
        tuple(questions[i].id for i in sorted(chosen)),
        error=100 * float(np.sqrt(np.mean(stratified))),
        random_error=100 * float(np.sqrt(np.mean(plain))),
    )


def draw(difficulty: "Matrix", size: int, seed: int) -> list[int]:
    """Return the places of `size` questions, one drawn from each of as many groups of about equal difficulty.

    The groups have the same number of questions, give or take one, so that the plain accuracy of what is drawn is an
    estimate of the whole's.
    """
    dice = random.Random(seed)
    order = sorted(range(len(difficulty)), key=lambda i: (float(difficulty[i]), dice.random()))
    ends = [round(len(order) * part / size) for part in range(size + 1)]
    return [order[dice.randrange(low, high)] for low, high in itertools.pairwise(ends)]
