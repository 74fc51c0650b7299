"""The report of an evaluation: built once, written as JSON, Markdown, HTML and LaTeX."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune import profiles
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import atomic_write, check_output
from cmexam_tune.core.schema import Report, Scores
from cmexam_tune.core.variants import suggest
from cmexam_tune.profiles import Profile
from cmexam_tune.report import page, tables
from cmexam_tune.scoring import baselines, breakdowns, comparison, grading
from cmexam_tune.scoring.grading import Graded


@dataclass(frozen=True)
class FullReport(Report):
    """A report with everything its pages show; each further field is one more key of report.json."""

    intervals: Mapping[str, list[float]] = field(default_factory=dict)
    """Bootstrap 95% intervals of the text metrics."""
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tables: tuple[breakdowns.Table, ...] = ()
    by_length: list[dict[str, Any]] = field(default_factory=list)
    confusion: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None


@cache
def published_numbers() -> dict[str, Any]:
    """Return the published reference numbers by exam: `cmexam`, `cmb`."""
    path = Path(__file__).resolve().parents[1] / "paper" / "published.yaml"
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def build(
    graded: Sequence[Graded], profile: str | Profile, provenance: Mapping[str, Any], published: str | None = None
) -> FullReport:
    """Return the report of one run.

    Args:
        graded: What `grading.grade` returned, all questions.
        profile: The profile it was graded by.
        provenance: What was scored and how it was made, taken over as it is.
        published: Exam whose published numbers are shown beside the run: `cmexam` or `cmb`.

    Raises:
        UserError: nothing is published under that name.
    """
    rules = profiles.get(profile) if isinstance(profile, str) else profile
    numbers = published_numbers()
    if published is not None and published not in numbers:
        raise UserError(
            f"published numbers of {published!r} are unknown{suggest(published, numbers)}; known: {', '.join(numbers)}."
        )

    def score(some: Sequence[Graded]) -> Scores:
        return grading.score(some, rules)

    facets = breakdowns.by_facet(graded, score)
    return FullReport(
        overall=score(graded),
        by_facet=facets,
        signature={"profile": rules.name, "summary": rules.summary, **rules.signature},
        provenance=provenance,
        intervals=comparison.text_intervals(graded, rules.smoothing),
        baselines=baselines.compute([one.question for one in graded]),
        tables=breakdowns.tables(graded, facets, score),
        by_length=breakdowns.by_length(graded, score),
        confusion=breakdowns.confusion(graded),
        published=numbers[published] if published else None,
    )


def as_object(report: Report, compared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what report.json holds; `compared` adds its keys (`comparison`, `runs`, `profiles`, ...)."""
    return {**asdict(report), **(compared or {})}


def write(
    report: FullReport,
    graded: Sequence[Graded],
    out: str | Path,
    overwrite: bool = False,
    latex: bool = False,
    compared: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write report.json, report.md, report.html and with `latex` report.tex to the folder `out`.

    Args:
        report: What `build` returned.
        graded: The questions and predictions of the error browser.
        out: Folder, made where it is missing.
        overwrite: Replace reports that lie there.
        latex: Also write tables for a paper.
        compared: Optional further sections: `comparison` (what `comparison.compare` returned, with `name`), `runs`
            ({name: scores}), `summary` (`comparison.summarise`), `agreement`, `profiles` ({name: scores}).

    Returns:
        The files written.

    Raises:
        UserError: a report is there and `overwrite` is false.
    """
    value = as_object(report, compared)
    texts = {
        "report.json": json.dumps(value, ensure_ascii=False, indent=2) + "\n",
        "report.md": tables.markdown(value),
        "report.html": page.page(value, graded),
    }
    if latex:
        texts["report.tex"] = tables.latex(value)
    paths = [check_output(Path(out) / name, overwrite) for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        with atomic_write(path) as handle:
            handle.write(text)
    return paths
