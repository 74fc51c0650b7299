"""What a report shows of published numbers; the program brings them (`paper.published.beside`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cmexam_tune.evaluation import breakdowns


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
        for one in self.facets:
            if breakdowns.define(one.facet).facet == definition.facet:
                cells = {definition.recognise(group).name: numbers for group, numbers in one.cells.items()}
                return FacetNumbers(facet, one.source, cells)
        return None
