"""Finished runs of `reproduce` as tables: beside the published numbers, and in the layout of CMExam's Table 3."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import atomic_write
from cmexam_tune.metrics.significance import mean_std
from cmexam_tune.paper import entries, published
from cmexam_tune.report.headings import short
from cmexam_tune.report.table import Table

REPORT = Path("report") / "report.json"
EXPLAIN = "-explain"
# Two-sided 95% points of Student's t by degrees of freedom, for the mean of a few seeds.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}"
    "table{border-collapse:collapse}th,td{padding:.3em .8em;border-bottom:1px solid #ccc;text-align:right}"
    "th:first-child,td:first-child{text-align:left}"
)


@dataclass(frozen=True)
class Score:
    """One metric of one row over its seeds, in percent."""

    mean: float
    deviation: float | None
    """Sample standard deviation over seeds; None for a single one."""
    interval: tuple[float, float] | None
    """95%: for accuracy the sampling of questions and of seeds together, for the others of seeds."""

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f"±{self.deviation:.2f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Measured:
    """One entry of the papers with what was measured for it."""

    entry: entries.Entry
    scores: Mapping[str, Score]
    seeds: int
    reports: tuple[str, ...]
    """HTML reports, relative to the folder that was collected."""

    @property
    def name(self) -> str:
        """The published name with the recipe, or the recipe alone."""
        return f"{self.entry.title} ({self.entry.recipe})" if self.entry.paper else self.entry.recipe


def collect(out: Path) -> list[Measured]:
    """Return what the finished runs in a folder of `reproduce` scored, in the order of the papers.

    Raises:
        UserError: nothing has finished there.
    """
    found: dict[str, dict[str, list[Path]]] = {}
    for report in sorted(out.glob(f"*/seed*/{REPORT}")):
        unit = report.parents[1]
        kind = "explain" if unit.name.endswith(EXPLAIN) else "answer"
        found.setdefault(unit.parent.name, {}).setdefault(kind, []).append(report)
    if not found:
        raise UserError(f"{out}: holds no finished run (looked for ROW/seedN/{REPORT}).")
    known = entries.known()
    return [_measured(known.get(name, entries.Entry(name)), found[name], out) for name in entries.order(list(found))]


def _measured(entry: entries.Entry, reports: Mapping[str, Sequence[Path]], out: Path) -> Measured:
    answer = [_overall(path) for path in reports.get("answer", ())]
    explain = [_overall(path) for path in reports.get("explain", ())] or answer
    scores = {}
    for metric in entries.METRICS:
        runs = answer if metric in entries.OF_ANSWERS else explain
        values = [value for overall in runs if (value := _percent(metric, overall)) is not None]
        if values:
            scores[metric] = _score(metric, values, int(runs[0]["n"]))
    pages = (page for kind in reports.values() for path in kind if (page := path.with_suffix(".html")).is_file())
    return Measured(entry, scores, len(answer), tuple(str(page.relative_to(out)) for page in pages))


def _overall(path: Path) -> dict[str, Any]:
    overall: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["overall"]
    return overall


def _percent(metric: str, overall: Mapping[str, Any]) -> float | None:
    if (value := overall.get(metric)) is None:
        return None
    return float(value) * (100 if metric == "weighted_f1" else 1)


def _score(metric: str, values: Sequence[float], n: int) -> Score:
    k = len(values)
    mean, deviation = mean_std(values)
    half = None
    if metric.startswith("accuracy") and n:
        half = 1.96 * math.sqrt(mean * (100 - mean) / n + (deviation or 0.0) ** 2 / k)
    elif deviation is not None:
        half = T95[min(k - 2, len(T95) - 1)] * deviation / math.sqrt(k)
    return Score(mean, deviation, None if half is None else (mean - half, mean + half))


def comparison(found: Sequence[Measured]) -> Table:
    """Return one line for each entry and metric: measured, published, difference and its interval."""
    lines = [_compared(one, metric) for one in found for metric in one.scores]
    note = (
        "Percent; ± is the standard deviation over seeds. The interval is that of the difference, or of the score "
        "where nothing is published; for accuracy it holds the sampling of questions and seeds, else of seeds."
    )
    return Table(("row", "metric", "measured", "published", "difference", "95% interval"), tuple(lines), note=note)


def _compared(one: Measured, metric: str) -> tuple[str, ...]:
    score, theirs = one.scores[metric], one.entry.published.get(metric)
    ends = score.interval
    if theirs is None:
        interval = "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
        return (one.name, short(metric), str(score), "-", "-", interval)
    interval = "-" if ends is None else f"{ends[0] - theirs:+.2f} to {ends[1] - theirs:+.2f}"
    return (one.name, short(metric), str(score), _printed(one, metric), f"{score.mean - theirs:+.2f}", interval)


def _printed(one: Measured, metric: str) -> str:
    """Return the published number with its ±."""
    value, spread = (one.entry.published.get(key) for key in (metric, f"{metric}_std"))
    return "-" if value is None else f"{value:g}" + (f"±{spread:g}" if spread is not None else "")


def table3(found: Sequence[Measured]) -> Table:
    """Return the runs in the layout of CMExam's Table 3, published numbers below each entry."""
    columns = published.table("cmexam", "table3").columns
    lines = []
    for one in found:
        lines.append((one.name, *(str(one.scores[key]) if key in one.scores else "-" for key in columns)))
        if one.entry.published:
            lines.append(("  published", *(_printed(one, key) for key in columns)))
    seeds = sorted({one.seeds for one in found})
    note = f"Answer prediction and explanation, percent, {' or '.join(map(str, seeds))} seed(s) a row."
    return Table(("model", *map(short, columns)), tuple(lines), note=note)


def write(table: Table, stem: Path, reports: Sequence[str] = ()) -> None:
    """Write a table as `stem`.md, .tex and .html; the page links to the reports."""
    links = "".join(f'<li><a href="{html.escape(page)}">{html.escape(page)}</a></li>' for page in reports)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>cmexam_tune</title><style>{STYLE}</style>'
        f"{table.html()}<ul>{links}</ul></html>\n"
    )
    for suffix, text in ((".md", table.markdown()), (".tex", table.latex()), (".html", page)):
        with atomic_write(stem.with_suffix(suffix)) as handle:
            handle.write(text)
