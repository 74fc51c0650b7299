"""The report of an evaluation: every number that its pages show, computed once."""

from collections.abc import Mapping, Sequence

from cmexam_tune.evaluation import breakdowns, scorers
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.scorers import Scorer
from cmexam_tune.report import sections
from cmexam_tune.report.full_report import FullReport, Published


def build(
    graded: Sequence[Graded],
    scorer: str | Scorer,
    provenance: Mapping[str, object],
    name: str = "this run",
    published: Published | None = None,
    *,
    runs: Mapping[str, Sequence[Graded]] | None = None,
    subset: int | None = None,
    explained: Mapping[str, bool | None] | None = None,
) -> FullReport:
    """Return the report of one run.

    Args:
        graded: What `grading.grade` returned, all questions.
        scorer: What it was graded by.
        provenance: What was scored and how it was made, taken over as it is.
        name: What the run is called.
        published: Published numbers to show beside it.
        runs: All runs of the report, where there are several; this one is the first.
        subset: Also choose so many questions that stand for the whole.
        explained: Run -> whether it was asked for explanations, where that is known.

    Raises:
        UserError: a subset of too few runs or questions.
    """
    evaluation = sections.Evaluation(graded, scorers.get(scorer), runs or {name: graded}, subset, explained or {})
    scorer, score = evaluation.scorer, evaluation.score
    facets = breakdowns.by_facet(graded, score)
    return FullReport(
        overall=score(graded),
        by_facet=facets,
        signature={"profile": scorer.name, "summary": scorer.summary, **scorer.signature},
        provenance=provenance,
        computed=sections.compute(evaluation),
        tables=breakdowns.tables(graded, facets, score),
        name=name,
        published=published,
    )
