"""Stages of one model, or any runs on the same questions: what each next one gained and lost, and how it writes.

Accuracy alone hides what training did: a stage may win as many questions as it loses, learn the number of letters
rather than medicine, or answer first and argue afterwards.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.answer_parsing import final_part, parse
from cmexam_tune.evaluation.graded import Graded

HEAD = 20
"""Characters within which an answer counts as given at once."""
PARTS: Mapping[str, Callable[[Question], bool]] = {
    "all": lambda question: True,
    "single": lambda question: len(question.answer or "") == 1,
    "several": lambda question: len(question.answer or "") > 1,
}
"""Questions by their right letters."""
Task = Literal["letters", "explanation", "unknown", "both"]
"""What a run was asked for: letters alone, or an explanation too; `both`: two runs of which one was asked for each."""


@dataclass(frozen=True)
class Step:
    """Two runs on some of the questions: a table of two by two."""

    first: str
    second: str
    part: str
    """Key of `PARTS`."""
    task: Task
    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float
    """McNemar's exact test."""
    adjusted_p: float
    """Corrected by Holm's method for all pairs of runs with this task on these questions."""

    @property
    def difference(self) -> float:
        """Points of accuracy, second minus first."""
        count = self.both + self.only_first + self.only_second + self.neither
        return 100 * (self.only_second - self.only_first) / count


@dataclass(frozen=True)
class Manner:
    """How a run writes; shares in percent of the outputs."""

    run: str
    task: Task
    unreadable: float
    impossible: float | None
    """Several letters where the exam prints that one is right, or one where it prints several; None: nothing is."""
    at_once: float
    """The answer can be read from the first characters already."""
    length_right: float | None
    """Mean characters of right outputs; None without any."""
    length_wrong: float | None


@dataclass(frozen=True)
class Stages:
    """Every pair of runs, and how each writes."""

    steps: tuple[Step, ...]
    manners: tuple[Manner, ...]


def stages(runs: Mapping[str, Sequence[Graded]], explained: Mapping[str, bool | None] | None = None) -> Stages | None:
    """Compare every two runs on the same questions in the same order; None of a single one.

    Args:
        runs: name -> graded answers.
        explained: name -> whether an explanation was asked for, where that is known. Runs that were asked for other
            things are compared apart: what training gained must not be mixed up with what reasoning gained.
    """
    if len(runs) < 2:
        return None
    tasks = {name: _TASKS[(explained or {}).get(name)] for name in runs}
    pairs: dict[Task, list[tuple[str, str]]] = {}
    for pair in itertools.combinations(runs, 2):
        first, second = (tasks[name] for name in pair)
        pairs.setdefault(first if first == second else "both", []).append(pair)
    steps = [
        step
        for task, task_pairs in sorted(pairs.items())
        for part in PARTS
        for step in _steps(runs, task_pairs, part, task)
    ]
    return Stages(tuple(steps), tuple(_manner(name, tasks[name], graded) for name, graded in runs.items()))


_TASKS: Mapping[bool | None, Task] = {False: "letters", True: "explanation", None: "unknown"}


def _steps(runs: Mapping[str, Sequence[Graded]], pairs: Sequence[tuple[str, str]], part: str, task: Task) -> list[Step]:
    right = {
        name: [item.correct for item in graded if item.question.answer and PARTS[part](item.question)]
        for name, graded in runs.items()
    }
    tables = [two_by_two(right[first], right[second]) for first, second in pairs]
    if not any(map(sum, tables)):
        return []
    p_values = [significance.mcnemar(only_first, only_second) for _, only_first, only_second, _ in tables]
    adjusted = significance.holm(p_values)
    rows = zip(pairs, tables, p_values, adjusted, strict=True)
    return [Step(*pair, part, task, *table, p_value, corrected) for pair, table, p_value, corrected in rows]


def two_by_two(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int, int, int]:
    """Return on how many questions both are right, only the first, only the second, and neither."""
    cells = list(zip(first, second, strict=True))
    both, only_first, only_second, neither = (
        cells.count(cell) for cell in ((True, True), (True, False), (False, True), (False, False))
    )
    return both, only_first, only_second, neither


def _manner(name: str, task: Task, graded: Sequence[Graded]) -> Manner:
    read = [item for item in graded if item.answer is not None]
    typed = [item for item in read if item.question.kind is not None]
    impossible = [item for item in typed if (len(item.answer or "") > 1) != (item.question.kind == "multiple")]
    at_once = [item for item in read if parse(final_part(item.prediction.text)[:HEAD], item.question) == item.answer]
    return Manner(
        name,
        task,
        unreadable=_share(len(graded) - len(read), len(graded)) or 0.0,
        impossible=_share(len(impossible), len(typed)),
        at_once=_share(len(at_once), len(graded)) or 0.0,
        length_right=_mean([len(item.prediction.text) for item in graded if item.correct]),
        length_wrong=_mean([len(item.prediction.text) for item in graded if not item.correct]),
    )


def _share(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
