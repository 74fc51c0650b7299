"""What guessing scores on the same questions: no result means anything before it is compared with these."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation.significance import mean_std

SEEDS = 10
NAMES = ("uniform_subset", "uniform_single", "majority")


def guess(name: str, questions: Sequence[Question], seed: int = 0) -> Iterator[Prediction]:
    """Yield a guess for every question.

    Args:
        name: `uniform_subset` (any non-empty set of the letters offered, equally likely: the paper's random row),
            `uniform_single` (any one letter) or `majority` (always the most frequent answer of these questions).
        questions: What is guessed at, with or without answers.
        seed: Of the generator.

    Raises:
        ValueError: an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no baseline; known: {', '.join(NAMES)}")
    # A text as the seed, which Python hashes in the same way in every process, keeps the baselines' draws apart.
    generator = random.Random(f"{name}:{seed}")
    common = majority(questions)
    for question in questions:
        offered = "".join(question.options)
        if name == "uniform_subset":
            # A number of as many bits as there are letters is a set of them; 0 is the empty one.
            bits = generator.randrange(1, 1 << len(offered))
            answer = "".join(sorted(letter for i, letter in enumerate(offered) if bits >> i & 1))
        else:
            answer = generator.choice(offered) if name == "uniform_single" else common
        yield Prediction(question.id, f"答案: {answer}", answer)


def majority(questions: Sequence[Question]) -> str:
    """Return the most frequent right answer, the alphabetically first of equals; `A` where none is published."""
    counts = Counter(question.answer for question in questions if question.answer)
    return min(counts, key=lambda answer: (-counts[answer], answer)) if counts else "A"


def expected(name: str, questions: Sequence[Question]) -> float | None:
    """Return the accuracy in percent that a baseline has on average; None where no answers are published.

    Raises:
        ValueError: an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no baseline; known: {', '.join(NAMES)}")
    answered = [question for question in questions if question.answer]
    if not answered:
        return None
    common = majority(answered)
    chances = {
        "uniform_subset": lambda q: 1 / ((1 << len(q.options)) - 1),
        "uniform_single": lambda q: 1 / len(q.options) if len(q.answer) == 1 else 0.0,
        "majority": lambda q: float(q.answer == common),
    }
    return 100 * sum(map(chances[name], answered)) / len(answered)


def simulated(name: str, questions: Sequence[Question], seeds: int = SEEDS) -> list[float]:
    """Return the accuracy in percent of each of `seeds` runs of a baseline.

    `expected` says what guessing has on average; their spread says how far luck alone carries on so many questions.
    """
    answered = [question for question in questions if question.answer]
    gold = [question.answer for question in answered]
    runs = []
    for seed in range(seeds):
        right = sum(guessed.answer == answer for guessed, answer in zip(guess(name, answered, seed), gold, strict=True))
        runs.append(100 * right / len(answered))
    return runs


def compute(questions: Sequence[Question], seeds: int = SEEDS) -> dict[str, dict[str, object]]:
    """Return {baseline: {"expected":, "mean":, "std":, "seeds":}}, accuracies in percent; empty without answers."""
    if not any(question.answer for question in questions):
        return {}
    table: dict[str, dict[str, object]] = {}
    for name in NAMES:
        table[name] = {"expected": expected(name, questions)}
        if name == "majority":
            table[name]["answer"] = majority(questions)
            continue
        mean, std = mean_std(simulated(name, questions, seeds))
        table[name] |= {"mean": mean, "std": std, "seeds": seeds}
    return table
