"""Finished runs of `reproduce` as tables: beside the published numbers, and in the layouts of the papers' tables."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.files import atomic_write
from cmexam_tune.evaluation import breakdowns
from cmexam_tune.evaluation.prediction_metadata import section
from cmexam_tune.evaluation.significance import mean_std
from cmexam_tune.report.html_page import html_page
from cmexam_tune.report.identity import portable
from cmexam_tune.report.papers import entries, published_tables
from cmexam_tune.report.result_tables import label
from cmexam_tune.report.table import Table, cell, short

REPORT = Path("report") / "report.json"
EXPLAIN = "explain"
BY_GROUPS = range(4, 9)
"""CMExam's tables of accuracy by groups of questions: disease group, department, discipline, competency, difficulty."""
INCIDENTAL = (
    "training.seed", "training.disable_tqdm", "training.report_to", "training.logging_steps", "training.save_steps",
    "training.save_strategy", "training.save_total_limit", "generation.batch_size", "generation.concurrency",
    "model.base_url", "model.api_key_env",
)  # fmt: skip
"""Settings of a recipe that may be others without a word: no score depends on them."""
Numbers = Mapping[str, float | tuple[float, ...] | None]
"""Scores of a report as JSON has them: numbers, intervals, and null for what could not be computed."""


@dataclass(frozen=True)
class SavedScores:
    """What a report.json holds, as far as it is collected."""

    overall: Numbers
    by_facet: Mapping[str, Mapping[str, Numbers]]
    published: Mapping[str, Any] | None = None
    """What stood beside the run: `caveat` says why its questions are not the paper's."""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config that `predict` recorded; empty where it is unknown."""
        predictions = self.provenance.get("predictions") or [{}]
        return section(section(predictions[0], "made_by"), "config")


@dataclass(frozen=True)
class Score:
    """One metric of one row over its seeds, in percent."""

    mean: float
    deviation: float | None
    """Sample standard deviation over seeds; None for a single one."""
    interval: tuple[float, float] | None
    """95%: for accuracy the sampling of questions and of seeds together, for the others of seeds; None where nothing
    varied."""

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f"±{self.deviation:.2f}" if self.deviation is not None else "")


@dataclass(frozen=True)
class Measured:
    """One entry of the papers with what was measured for it."""

    entry: entries.Entry
    scores: Mapping[str, Score]
    by_seed: tuple[SavedScores, ...]
    """What the run of each seed scored that predicts answers."""
    pages: tuple[str, ...]
    """HTML reports, relative to the folder that was collected."""
    n: int = 0
    """Questions."""
    caveats: tuple[str, ...] = ()
    """How the runs differ from what the paper measured: their questions, and keys that are not the recipe's."""
    setting: str = "answer"
    """One of `entries.SETTINGS`."""

    @property
    def name(self) -> str:
        """The published name with the recipe, or the recipe alone, and how it was asked."""
        name = f"{self.entry.title} ({self.entry.recipe})" if self.entry.paper else self.entry.recipe
        return name if self.setting == "answer" else f"{name}, {self.setting}"

    @property
    def published(self) -> Mapping[str, float]:
        """What the paper prints in this setting, in percent."""
        line = self.entry.printed(self.setting)
        return line.values if line else {}

    def accuracies(self, facet: breakdowns.FacetDefinition) -> dict[breakdowns.FacetValue, list[float]]:
        """Return group -> accuracy in percent of each seed, where the questions hold this facet."""
        accuracies: dict[breakdowns.FacetValue, list[float]] = {}
        for scores in self.by_seed:
            for column, groups in scores.by_facet.items():
                if breakdowns.define(column).facet != facet.facet:
                    continue
                for value, cells in groups.items():
                    if (accuracy := _percent("accuracy", cells)) is not None:
                        accuracies.setdefault(facet.recognise(value), []).append(accuracy)
        return accuracies


def collect(out: Path) -> list[Measured]:
    """Return what the finished runs in a folder of `reproduce` scored, in the order of the papers.

    Raises:
        UserError: nothing has finished there.
    """
    reports: dict[str, dict[str, list[Path]]] = {}
    for path in sorted(out.glob(f"*/seed*/{REPORT}")):
        unit = path.parents[1]
        reports.setdefault(unit.parent.name, {}).setdefault(unit.name.partition("-")[2] or "answer", []).append(path)
    if not reports:
        raise UserError(f"{out}: holds no finished run (looked for ROW/seedN/{REPORT}).")
    known = entries.by_recipe()
    return [
        _measured(known.get(name, entries.Entry(name)), reports[name], setting, out)
        for name in entries.order(list(reports))
        for setting in entries.SETTINGS
        if setting in reports[name] or (setting == "answer" and EXPLAIN in reports[name])
    ]


def _measured(entry: entries.Entry, reports: Mapping[str, Sequence[Path]], setting: str, out: Path) -> Measured:
    paths = list(reports.get(setting, ()))
    explain_paths = list(reports.get(EXPLAIN, ())) if setting == "answer" else []
    answer = [read_report(path) for path in paths]
    # Where nothing was run for explanations alone, one run serves both.
    explain = [read_report(path) for path in explain_paths] or answer
    scores = {}
    for metric in entries.METRICS:
        runs = [report.overall for report in (answer if metric in entries.OF_ANSWERS else explain)]
        values = [value for overall in runs if (value := _percent(metric, overall)) is not None]
        if values:
            scores[metric] = _score(metric, values, _count(runs[0]))
    pages = [page for path in (*paths, *explain_paths) if (page := path.with_suffix(".html")).is_file()]
    asked = [(report, entries.SETTINGS[setting]) for report in answer]
    asked += [(report, entry.explain or ()) for report in explain if report not in answer]
    return Measured(
        entry,
        scores,
        tuple(answer),
        tuple(str(page.relative_to(out)) for page in pages),
        n=_count(explain[0].overall),
        caveats=tuple(
            dict.fromkeys(caveat for report, overrides in asked for caveat in _caveats(entry, report, overrides))
        ),
        setting=setting,
    )


def _caveats(entry: entries.Entry, report: SavedScores, overrides: Sequence[str]) -> Iterator[str]:
    """Yield how a run differs from what the paper measured, as far as its report says."""
    if report.published and report.published.get("caveat"):
        yield str(report.published["caveat"])
    if entry.paper is not None and (changed := _changed(entry, report.config, overrides)):
        yield f"not the recipe's: {', '.join(changed)}"


def _changed(entry: entries.Entry, recorded: Mapping[str, object], overrides: Sequence[str]) -> list[str]:
    """Return `key=value` of every setting that is not the recipe's, with those that its row is asked with."""
    if not recorded:
        return []
    from cmexam_tune.config import load_config

    recipe = load_config(entry.recipe, overrides).to_dict()
    return [
        f"{name}.{key}={portable(value)}"
        for name in ("prompt", "model", "tuning", "training", "generation")
        for key, value in section(recorded, name).items()
        if f"{name}.{key}" not in INCIDENTAL and portable(value) != portable(recipe[name].get(key))
    ]


def read_report(path: Path) -> SavedScores:
    """Return the scores of a report.json.

    Raises:
        DataError: the file is damaged.
    """
    return jsonl.read_one(path, SavedScores, "report")


def _count(overall: Numbers) -> int:
    """Return the number of questions, which a report holds as an integer."""
    return int(n) if isinstance(n := overall.get("n"), int | float) else 0


def _percent(metric: str, overall: Numbers) -> float | None:
    if not isinstance(value := overall.get(metric), float):
        return None
    return value * (100 if metric == "weighted_f1" else 1)


def _score(metric: str, values: Sequence[float], n: int) -> Score:
    k = len(values)
    mean, deviation = mean_std(values)
    half = None
    if metric.startswith("accuracy") and n:
        # All seeds answer the same n questions: only the second part of the variance shrinks with their number.
        half = 1.96 * math.sqrt(mean * (100 - mean) / n + (deviation or 0.0) ** 2 / k)
    elif deviation is not None:
        from scipy import stats

        half = float(stats.t.ppf(0.975, k - 1)) * deviation / math.sqrt(k)
    # Seeds that all came to the same score say nothing about others.
    return Score(mean, deviation, (mean - half, mean + half) if half else None)


def comparison(measured: Sequence[Measured]) -> Table:
    """Return one line for each entry and metric: measured, published, difference and its interval."""
    lines = [_compared(row, metric) for row in measured for metric in row.scores]
    note = (
        "Percent; ± is the standard deviation over seeds. 95% interval of the difference, or of the score where "
        "nothing is published. Accuracy: questions and seeds; other metrics: seeds only."
    )
    head = ("row", "metric", "n", "measured", "published", "difference", "95% interval")
    return Table(head, tuple(lines), note=_with_caveats(note, measured))


def _with_caveats(note: str, measured: Sequence[Measured]) -> str:
    """Return a note with what each row was run with that is not the paper's."""
    caveats = [f"{row.name}: {'; '.join(row.caveats)}." for row in measured if row.caveats]
    return " ".join([note.rstrip(), *caveats])


def _compared(row: Measured, metric: str) -> tuple[str, ...]:
    score, published = row.scores[metric], row.published.get(metric)
    ends = score.interval
    if published is None:
        interval = "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
        return (row.name, short(metric), str(row.n), str(score), "-", "-", interval)
    interval = "-" if ends is None else f"{ends[0] - published:+.2f} to {ends[1] - published:+.2f}"
    difference = f"{score.mean - published:+.2f}"
    return (row.name, short(metric), str(row.n), str(score), _printed(row, metric), difference, interval)


def _printed(row: Measured, metric: str) -> str:
    """Return the published number with its ±."""
    value, spread = (row.published.get(key) for key in (metric, f"{metric}_std"))
    return "-" if value is None else f"{value:g}" + (f"±{spread:g}" if spread is not None else "")


def table3(measured: Sequence[Measured]) -> Table:
    """Return the runs in the layout of CMExam's Table 3, published numbers below each entry."""
    columns = published_tables.table("cmexam", "table3").columns
    lines = []
    for row in measured:
        lines.append((row.name, *(str(row.scores[key]) if key in row.scores else "-" for key in columns)))
        if row.published:
            lines.append(("  published", *(_printed(row, key) for key in columns)))
    seeds = sorted({len(row.by_seed) for row in measured})
    plural = "" if seeds == [1] else "s"
    note = f"Answer prediction and explanation, percent, {' or '.join(map(str, seeds))} seed{plural} per row."
    return Table(("model", *map(short, columns)), tuple(lines), note=_with_caveats(note, measured))


def by_groups(number: int, measured: Sequence[Measured]) -> Table:
    """Return CMExam's table of that number, one of `BY_GROUPS`, with a column for each of our runs, mean over seeds."""
    printed = published_tables.table("cmexam", f"table{number}")
    facet = breakdowns.define(str(printed.facet))
    rows = [row for row in measured if row.entry.exam == "cmexam" and row.setting == "answer"]
    ours = {row.name: row.accuracies(facet) for row in rows}
    published = {facet.recognise(line.name): line.values for line in printed.lines}
    groups = [*published, *(name for name in facet.values if name not in published)]
    lines = tuple(
        (
            label(group),
            *(_mean_and_deviation(accuracies.get(group, [])) for accuracies in ours.values()),
            *(cell("", published[group].get(key)) if group in published else "-" for key in printed.columns),
        )
        for group in groups
        if group in published or any(group in accuracies for accuracies in ours.values())
    )
    head = ("", *ours, *(f"{heading} †" for heading in printed.columns.values()))
    note = f"Accuracy in percent; † published. {printed.note}".rstrip(". ") + "."
    return Table(head, lines, printed.title, _with_caveats(note, rows))


def _mean_and_deviation(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, deviation = mean_std(values)
    return f"{mean:.1f}" + (f"±{deviation:.1f}" if deviation is not None else "")


def cmb(measured: Sequence[Measured]) -> Table:
    """Return the runs in the layout of CMB's Tables 3 and 4: three-shot in parentheses, published lines below."""
    printed_columns = published_tables.table("cmb", "table3").columns
    columns = {key: heading for key, heading in printed_columns.items() if key != "average"}
    by_line: dict[tuple[str, str], dict[bool, Measured]] = {}
    for row in measured:
        if row.entry.exam == "cmb":
            style, _, shots = row.setting.partition("-")
            by_line.setdefault((row.entry.recipe, style), {})[bool(shots)] = row
    lines, caveats = [], []
    for (_, style), pair in by_line.items():
        entry = next(iter(pair.values())).entry
        zero_and_few = [pair.get(False), pair.get(True)]
        ours = [_by_category(row) if row else {} for row in zero_and_few]
        shown = (*columns, "accuracy_macro")
        words = "answer-only" if style == "answer" else "CoT"
        lines.append(
            (f"{entry.title} ({entry.recipe})", words, *(_both(*(side.get(key) for side in ours)) for key in shown))
        )
        printed = [entry.printed(style), entry.printed(f"{style}-3shot")]
        if any(printed):
            values = [line.values if line else {} for line in printed]
            lines.append(("  published", words, *(_both(*(side.get(key) for side in values)) for key in shown)))
            caveats += [f"{entry.title}, {words}: {line.note}" for line in printed if line and line.note]
    note = "Percent, three-shot in parentheses; average: mean of the six categories. "
    note = _with_caveats(note + ". ".join(dict.fromkeys(caveats)), [row for row in measured if row.entry.exam == "cmb"])
    return Table(("model", "setting", *columns.values(), "Average"), tuple(lines), "CMB-Exam", note)


def _by_category(row: Measured) -> dict[str, float | None]:
    """Return key of the printed column -> accuracy in percent, mean over seeds."""
    accuracies = row.accuracies(breakdowns.define("exam_type"))
    means: dict[str, float | None] = {name.name.lower(): mean_std(values)[0] for name, values in accuracies.items()}
    return means | {"accuracy_macro": row.scores["accuracy_macro"].mean if "accuracy_macro" in row.scores else None}


def _both(zero: float | None, three: float | None) -> str:
    first = "-" if zero is None else f"{zero:.2f}"
    return first if three is None else f"{first} ({three:.2f})"


def write(table: Table, stem: Path, reports: Sequence[str] = ()) -> None:
    """Write a table as `stem`.md, .tex and .html; the page links to the reports."""
    links = "".join(f'<li><a href="{html.escape(path)}">{html.escape(path)}</a></li>' for path in reports)
    page = html_page(table.title or "cmexam_tune", f"<main>{table.html()}<ul>{links}</ul></main>")
    for suffix, text in ((".md", table.markdown()), (".tex", table.latex()), (".html", page)):
        with atomic_write(stem.with_suffix(suffix)) as handle:
            handle.write(text)
