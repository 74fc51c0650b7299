"""The rows of the papers: which recipe reproduces which published row, and what its numbers are.

`rows.yaml` maps recipes to rows, `published.yaml` holds the numbers; both lie beside this file.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.variants import suggest

HERE = Path(__file__).resolve().parent
ZERO_SHOT = "zeroshot_"
METRICS = {
    "accuracy": "Acc", "weighted_f1": "F1", "bleu1": "BLEU-1", "bleu4": "BLEU-4", "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2", "rougeL": "ROUGE-L",
}  # fmt: skip
"""Columns of CMExam's Table 3: key of report.json -> heading."""
OF_ANSWERS = ("accuracy", "weighted_f1")
"""Columns that come from the run that predicts answers; the others come from the one that explains."""


@dataclass(frozen=True)
class Row:
    """One recipe and what it reproduces."""

    recipe: str
    """Name of the recipe without `.yaml`."""
    paper: tuple[str, str] | None = None
    """(table in published.yaml, name of its row)."""
    explain: tuple[str, ...] | None = None
    """Overrides of a second run that writes explanations; None: one run serves both, or there are none."""
    exam: str = "cmexam"
    source: str | None = None
    """Where weights that are on no hub come from."""
    billions: float = 0.0
    """Parameters of the model, for the time estimate."""
    tokens: int = 0
    """Tokens of a training question for this model's tokenizer, for the time estimate."""
    questions: int = 54_497
    """Training questions of the exam, for the time estimate."""
    epochs: float | None = None
    """Epochs where the recipe states steps, for the time estimate."""

    @property
    def title(self) -> str:
        """The published name where there is one."""
        return self.paper[1] if self.paper else self.recipe

    @property
    def trained(self) -> bool:
        """Whether anything is trained; off-the-shelf rows only predict."""
        return not self.recipe.startswith(ZERO_SHOT)

    @property
    def published(self) -> Mapping[str, float]:
        """The published numbers as percentages, where the paper's table is entered; else empty."""
        if self.paper is None:
            return {}
        table, name = self.paper
        found = [row for row in _yaml("published.yaml")[table]["rows"] if row["name"] == name]
        return {key: value for key, value in found[0].items() if key != "name"} if found else {}


@functools.cache
def _yaml(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return values


@functools.cache
def known() -> Mapping[str, Row]:
    """Return every row by the name of its recipe."""
    found = {}
    for recipe, values in _yaml("rows.yaml").items():
        rest = {key: value for key, value in values.items() if key not in ("row", "explain")}
        paper = tuple(values["row"]) if "row" in values else None
        explain = tuple(values["explain"]) if "explain" in values else None
        found[recipe] = Row(recipe, paper, explain, **rest)
    return found


def find(name: str) -> Row:
    """Return the row with that recipe or published name, or one without published numbers for any other YAML file.

    Raises:
        UserError: neither a row nor a file; the message suggests the nearest name.
    """
    rows = known()
    if name.removesuffix(".yaml") in rows:
        return rows[name.removesuffix(".yaml")]
    for row in rows.values():
        if row.paper and row.paper[1] == name:
            return row
    if Path(name).is_file():
        return Row(name)
    titles = [row.paper[1] for row in rows.values() if row.paper]
    raise UserError(f"{name}: no such row{suggest(name, [*rows, *titles])}\nRows: {', '.join(rows)}")


def order(names: Sequence[str]) -> list[str]:
    """Return recipe names in the order of rows.yaml, unknown ones last."""
    places = list(known())
    return sorted(names, key=lambda name: (places.index(name) if name in places else len(places), name))
