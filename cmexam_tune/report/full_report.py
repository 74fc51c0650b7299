"""A report as it is passed on: every number that its files and its page show."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cmexam_tune.core.schema import Report, Scores
from cmexam_tune.evaluation import breakdowns
from cmexam_tune.evaluation.breakdowns import Breakdown, Subset
from cmexam_tune.evaluation.comparison import Comparison, RunPair, ScoreDecomposition, Spread
from cmexam_tune.evaluation.grading import OutputTruncation, QuestionSelection
from cmexam_tune.evaluation.metrics import Metric
from cmexam_tune.report.identity import Identity

_ALWAYS = ("overall", "by_facet", "signature", "provenance", "name", "tables", "published")
"""Keys of report.json that stand there also where they hold nothing."""


@dataclass(frozen=True)
class FacetNumbers:
    """A published table of accuracies by groups of questions."""

    facet: str
    source: str
    cells: Mapping[str, Mapping[str, float]]
    """Name of the group -> model -> accuracy in percent."""


@dataclass(frozen=True)
class Published:
    """Published numbers beside a run, in percent."""

    source: str
    n: int
    """Questions of the paper's test split, which the numbers are of."""
    rows: tuple[Mapping[str, Any], ...]
    """{"name":, metric: number, ...} of each model; KEY_std is the printed ±."""
    facets: tuple[FacetNumbers, ...] = ()
    facet: str | None = None
    """The facet whose groups stand among the metrics of `rows`."""
    lengths: tuple[int, ...] = ()
    """From and to: the question lengths at which the paper saw the best accuracies."""
    metric: str = "accuracy"
    """The number of a run that theirs is compared with: `accuracy`, or `accuracy_macro` where they averaged groups."""
    caveat: str = ""
    """Why the two are not of the same questions; empty where they are."""

    def of_facet(self, facet: str) -> FacetNumbers | None:
        """Return the published accuracies by this facet, its groups named as in a breakdown."""
        definition = breakdowns.define(facet)
        for table in self.facets:
            if breakdowns.define(table.facet).facet == definition.facet:
                cells = {definition.recognise(group).name: numbers for group, numbers in table.cells.items()}
                return FacetNumbers(facet, table.source, cells)
        return None


@dataclass(frozen=True)
class FullReport(Report):
    """A report with everything its pages show.

    Each field is a key of report.json, which keeps its names: what is `profiles` and `bridges` there are scorers and
    the decompositions of their scores inside this library.
    """

    name: str = "this run"
    computed: Mapping[str, Any] = field(default_factory=dict)
    """Key -> numbers of each of `sections.SECTIONS` that has something to say; keys of report.json, too."""
    tables: tuple[Breakdown, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Those beside the usual ones: key of the scores -> what it is called."""
    published: Published | None = None
    runs: Mapping[str, Scores] = field(default_factory=dict)
    """Scores of several runs; the other fields are about the first."""
    summary: Mapping[str, Spread] = field(default_factory=dict)
    agreement: Mapping[str, float] = field(default_factory=dict)
    """`first | second` -> share in percent of questions with the same readable answer."""
    flips: int = 0
    """Questions whose answer is not the same in all runs."""
    ranking: tuple[str, ...] = ()
    """The runs by accuracy, the best first."""
    pairs: tuple[RunPair, ...] = ()
    """Every pair of runs, p-values corrected for multiple comparisons (Holm)."""
    bridges: Mapping[str, ScoreDecomposition] = field(default_factory=dict)
    """Scorer -> the way from our accuracy to its score."""
    comparison: Comparison | None = None
    profiles: Mapping[str, Scores] = field(default_factory=dict)
    """The same outputs by every scorer."""
    subsets: tuple[Subset, ...] = ()
    """Scores with and without questions that were in the training data or whose answers are doubtful."""
    cut: Mapping[str, OutputTruncation] = field(default_factory=dict)
    """Run -> outputs that its limit cut off; runs whose files do not say it are left out."""
    selection: QuestionSelection | None = None
    """Where only a part of the questions file is scored."""
    identity: Identity | None = None
    training: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Curves of the run that made the predictions: name -> (step, value)."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(_cell(value))}</td></tr>"
            for name, value in self.overall.items()
            if value is not None
        )
        return f"<table>{rows}</table>"

    def to_pandas(self) -> Any:
        """Return the scores as a `pandas.DataFrame`: one line overall and one for each value of each facet."""
        import pandas as pd

        cells = {("overall", ""): self.overall}
        cells |= {(facet, value): scores for facet, values in self.by_facet.items() for value, scores in values.items()}
        return pd.DataFrame(cells.values(), index=pd.MultiIndex.from_tuples(cells, names=["facet", "value"]))

    def to_dict(self) -> dict[str, Any]:
        """Return what report.json holds; sections that were not asked for are left out."""
        values = {key: value for key, value in asdict(self).items() if value or key in _ALWAYS}
        values |= values.pop("computed", {})
        if self.metrics:
            values["metrics"] = {key: {"en": metric.en, "zh": metric.zh} for key, metric in self.metrics.items()}
        # Thousands of questions for each scorer: the page opens them, `comparison.decompose` returns them.
        for decomposition in values.get("bridges", {}).values():
            decomposition["differing"] = len(decomposition["differing"])
        return values


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return " to ".join(_cell(item) for item in value)
    return str(value)
