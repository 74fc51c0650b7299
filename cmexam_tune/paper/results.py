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
from cmexam_tune.paper import rows

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
class Line:
    """One row of the papers with what was measured for it."""

    row: rows.Row
    scores: Mapping[str, Score]
    seeds: int
    reports: tuple[str, ...]
    """HTML reports, relative to the folder that was collected."""


@dataclass(frozen=True)
class Table:
    """Lines that print as text and show themselves in a notebook."""

    head: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]
    caption: str

    def markdown(self) -> str:
        """Return a Markdown table."""
        lines = [self.head, tuple("---" for _ in self.head), *self.body]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{self.caption}\n"

    def latex(self) -> str:
        """Return a LaTeX table that needs the package booktabs."""
        special = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"±": r"$\pm$", "\\": r"\textbackslash{}"})
        body = [" & ".join(cell.translate(special) for cell in line) + r" \\" for line in (self.head, *self.body)]
        columns = "l" + "r" * (len(self.head) - 1)
        rules = (r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule")
        return "\n".join(
            (
                r"\begin{table}\centering",
                rf"\begin{{tabular}}{{{columns}}}",
                *rules,
                r"\end{tabular}",
                rf"\caption{{{self.caption.translate(special)}}}",
                r"\end{table}",
                "",
            )
        )

    def _repr_html_(self) -> str:
        cells = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) for tag, line in self._lines())
        table = "".join(f"<tr>{line}</tr>" for line in cells)
        return f"<table>{table}</table><p>{html.escape(self.caption)}</p>"

    def _lines(self) -> list[tuple[str, tuple[str, ...]]]:
        return [("th", self.head), *(("td", line) for line in self.body)]

    def __str__(self) -> str:
        widths = [max(_width(line[i]) for line in (self.head, *self.body)) for i in range(len(self.head))]
        text = [
            "  ".join(c + " " * (w - _width(c)) for c, w in zip(line, widths, strict=True)) for _, line in self._lines()
        ]
        return "\n".join([*(line.rstrip() for line in text), "", self.caption])


def _width(cell: str) -> int:
    return sum(2 if "\u2e80" <= character <= "\uffef" else 1 for character in cell)


def lines(out: Path) -> list[Line]:
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
    known = rows.known()
    return [_line(known.get(name, rows.Row(name)), found[name], out) for name in rows.order(list(found))]


def _line(row: rows.Row, reports: Mapping[str, Sequence[Path]], out: Path) -> Line:
    answer = [_overall(path) for path in reports.get("answer", ())]
    explain = [_overall(path) for path in reports.get("explain", ())] or answer
    scores = {}
    for metric in rows.METRICS:
        measured = answer if metric in rows.OF_ANSWERS else explain
        values = [value for one in measured if (value := _value(metric, one, row)) is not None]
        if values:
            scores[metric] = _score(metric, values, int(measured[0]["n"]))
    pages = (page for kind in reports.values() for path in kind if (page := path.with_suffix(".html")).is_file())
    return Line(row, scores, len(answer), tuple(str(page.relative_to(out)) for page in pages))


def _overall(path: Path) -> dict[str, Any]:
    overall: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["overall"]
    return overall


def _value(metric: str, overall: Mapping[str, Any], row: rows.Row) -> float | None:
    """Return a metric in percent; for CMB accuracy is the mean over its categories, as in its tables."""
    if metric == "accuracy" and row.exam == "cmb" and overall.get("accuracy_macro") is not None:
        return float(overall["accuracy_macro"])
    if (value := overall.get(metric)) is None:
        return None
    return float(value) * (100 if metric == "weighted_f1" else 1)


def _score(metric: str, values: Sequence[float], n: int) -> Score:
    k = len(values)
    mean, deviation = mean_std(values)
    half = None
    if metric == "accuracy" and n:
        half = 1.96 * math.sqrt(mean * (100 - mean) / n + (deviation or 0.0) ** 2 / k)
    elif deviation is not None:
        half = T95[min(k - 2, len(T95) - 1)] * deviation / math.sqrt(k)
    return Score(mean, deviation, None if half is None else (mean - half, mean + half))


def comparison(found: Sequence[Line]) -> Table:
    """Return one line for each row and metric: measured, published, difference and its interval."""
    body = []
    for line in found:
        published = line.row.published
        for metric, score in line.scores.items():
            theirs = published.get(metric)
            cell = "-" if theirs is None else f"{theirs:g}"
            if (spread := published.get(f"{metric}_std")) is not None:
                cell += f"±{spread:g}"
            difference = "-" if theirs is None else f"{score.mean - theirs:+.2f}"
            interval = "-"
            if score.interval is not None:
                shift = theirs or 0.0
                low, high = (end - shift for end in score.interval)
                interval = f"{low:+.2f} to {high:+.2f}" if theirs is not None else f"{low:.2f} to {high:.2f}"
            name = f"{line.row.title} ({line.row.recipe})" if line.row.paper else line.row.recipe
            body.append((name, rows.METRICS[metric], str(score), cell, difference, interval))
    head = ("row", "metric", "measured", "published", "difference", "95% interval")
    caption = (
        "Percent; ± is the standard deviation over seeds. The interval is that of the difference, or of the score "
        "where nothing is published; for accuracy it holds the sampling of questions and seeds, else of seeds."
    )
    return Table(head, tuple(body), caption)


def table3(found: Sequence[Line]) -> Table:
    """Return the runs in the layout of CMExam's Table 3, published numbers below each row."""
    body = []
    for line in found:
        name = f"{line.row.title} ({line.row.recipe})" if line.row.paper else line.row.recipe
        body.append((name, *(str(line.scores[m]) if m in line.scores else "-" for m in rows.METRICS)))
        if published := line.row.published:
            body.append(("  published", *(f"{published[m]:g}" if m in published else "-" for m in rows.METRICS)))
    seeds = sorted({line.seeds for line in found})
    caption = f"Answer prediction and explanation, percent, {' or '.join(map(str, seeds))} seed(s) a row."
    return Table(("model", *rows.METRICS.values()), tuple(body), caption)


def write(table: Table, stem: Path, reports: Sequence[str] = ()) -> None:
    """Write a table as `stem`.md, .tex and .html; the page links to the reports."""
    links = "".join(f'<li><a href="{html.escape(page)}">{html.escape(page)}</a></li>' for page in reports)
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>cmexam_tune</title><style>{STYLE}</style>'
        f"{table._repr_html_()}<ul>{links}</ul></html>\n"
    )
    for suffix, text in ((".md", table.markdown()), (".tex", table.latex()), (".html", page)):
        with atomic_write(stem.with_suffix(suffix)) as handle:
            handle.write(text)
