"""Known errors of released exams: `errata.yaml`, what people found, and what can be seen in a question itself."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cmexam_tune.core import documents
from cmexam_tune.core.errors import DataError
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
    ids: tuple[int | str, ...]
    facets: Mapping[str, str] = field(default_factory=dict)
    """What a question with one of these ids must have as well: other exams number their questions too."""
    reviewer: str | None = None
    """Who says so."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Id -> why."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """Id -> the right letters, where the key is wrong."""

    def hits(self, question: Question) -> bool:
        """Whether the question is one of these."""
        # YAML reads a bare id as a number. A longer one is no number of a question, and int() takes its time for it.
        number = int(question.id) if question.id.isdecimal() and len(question.id) < 10 else None
        known = question.id in self.ids or number in self.ids
        return known and all(question.facets.get(name) == value for name, value in self.facets.items())


@cache
def errata() -> tuple[Erratum, ...]:
    """Return the known errors."""
    return read(Path(__file__).with_suffix(".yaml"))


def read(path: str | Path) -> tuple[Erratum, ...]:
    """Return the errors that a file lists.

    Raises:
        UserError: the file is missing or no YAML.
        DataError: it is no list of errata; every problem is named.
    """
    problems, values = Problems(), documents.read_yaml(Path(path), "errata")
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise DataError(f"{path}: a list of errata is needed: `check --reviewed` writes one.")
    known = tuple(build(Erratum, value, f"[{place}]", problems) for place, value in enumerate(values))
    if problems:
        raise DataError("\n".join([f"{path} is no list of errata:", *(f"  - {problem}" for problem in problems)]))
    return tuple(erratum for erratum in known if erratum is not None)


def known_problems(question: Question) -> Iterator[tuple[str, str]]:
    """Yield `known-error` and the problem for each erratum that lists the question."""
    for erratum in errata():
        if erratum.hits(question):
            yield "known-error", f"{erratum.name}: {erratum.problem}"


def by_erratum(questions: Iterable[Question], further: Iterable[Erratum] = ()) -> dict[tuple[str, str], set[str]]:
    """Return (erratum, problem) -> ids of the questions that it lists; errata that list none are left out.

    `missing-stem` are questions that point at a case which is not there. Only CMB's are looked at, whose C type lacks
    its cases in the released files.

    Args:
        questions: what is looked at.
        further: errata of the user's own, beside the known ones.
    """
    ids: dict[tuple[str, str], set[str]] = {}
    for question in questions:
        for erratum in (*errata(), *further):
            if erratum.hits(question):
                ids.setdefault((erratum.name, erratum.problem), set()).add(question.id)
        if "exam_class" in question.facets and missing_case(question):
            ids.setdefault(MISSING_STEM, set()).add(question.id)
    return ids
