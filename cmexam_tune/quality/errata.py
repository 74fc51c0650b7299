"""Known errors of released exams: `errata.yaml`, and what can be seen in a question itself."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cmexam_tune.core.schema import Question
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.prompts.question_checks import missing_case

MISSING_STEM = ("missing-stem", "points at a case or list above it that is not there")


@dataclass(frozen=True)
class Erratum:
    """One known error and the questions that have it."""

    name: str
    source: str
    problem: str
    ids: tuple[int, ...]
    facets: Mapping[str, str] = field(default_factory=dict)
    """What a question with one of these ids must have as well: other exams number their questions too."""

    def hits(self, question: Question) -> bool:
        """Whether the question is one of these."""
        known = question.id.isdecimal() and len(question.id) < 10 and int(question.id) in self.ids
        return known and all(question.facets.get(name) == value for name, value in self.facets.items())


@cache
def errata() -> tuple[Erratum, ...]:
    """Return the known errors."""
    import yaml

    problems = Problems()
    values = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    known = tuple(build(Erratum, value, "errata", problems) for value in values)
    if problems:
        raise ValueError("; ".join(problems))
    return known


def known_problems(question: Question) -> Iterator[tuple[str, str]]:
    """Yield `known-error` and the problem for each erratum that lists the question."""
    for erratum in errata():
        if erratum.hits(question):
            yield "known-error", f"{erratum.name}: {erratum.problem}"


def doubtful(questions: Iterable[Question]) -> dict[tuple[str, str], set[str]]:
    """Return (erratum, problem) -> ids of the questions that have it; `missing-stem` lacks what it points at.

    Only exams that say which exam they are (CMB's facets) are looked at; errata that hit nothing are left out.
    """
    ids: dict[tuple[str, str], set[str]] = {}
    for question in questions:
        for erratum in errata():
            if erratum.hits(question):
                ids.setdefault((erratum.name, erratum.problem), set()).add(question.id)
        if "exam_class" in question.facets and missing_case(question):
            ids.setdefault(MISSING_STEM, set()).add(question.id)
    return ids
