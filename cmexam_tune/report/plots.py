"""The report's charts as files for a paper: one PNG and one SVG each, drawn with matplotlib (an extra)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cmexam_tune.core.errors import UserError
from cmexam_tune.evaluation.breakdowns import Breakdown
from cmexam_tune.report.curves import FIGURES
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.sections import SECTIONS
from cmexam_tune.report.table import Bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

FOLDER = "plots"
SHOWN = 20
"""Groups in a chart, the first of the table."""
CHINESE = ("Noto Sans CJK SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei", "SimHei", "WenQuanYi Micro Hei")
"""Fonts for names that nobody has translated; the first that is there is used."""
MARKERS = "DsoXv"
_WIDTH, _LINE = 6.4, 0.28


def draw(report: FullReport, out: Path) -> list[Path]:
    """Write `plots/<chart>.png` and `.svg` into a folder; charts of an earlier report are replaced.

    Args:
        report: What is drawn: accuracy of several runs, by each facet and by length, published values marked, and
            training curves.
        out: Folder of the report.

    Returns:
        The files written.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plots needs matplotlib: pip install 'cmexam_tune[plots]'.") from None
    from matplotlib import font_manager

    matplotlib.use("agg")
    known = {font.name for font in font_manager.fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in CHINESE if name in known)]
    with matplotlib.rc_context({"font.family": fonts}):
        return _draw(report, out)


def _draw(report: FullReport, out: Path) -> list[Path]:
    charts: dict[str, Sequence[Bar]] = {_file(table.facet): _of_facet(report, table) for table in report.tables}
    charts["comparison"] = _of_systems(report)
    for section in SECTIONS:
        if section.bars and section.key in report.computed:
            charts[section.key] = section.bars(report.computed[section.key])
    written = [path for name, bars in charts.items() if bars for path in _bars(bars, out / FOLDER / name)]
    return written + (_curves(report.training, out / FOLDER / "training") if report.training else [])


def _of_systems(report: FullReport) -> list[Bar]:
    """Return the accuracy of every run and of the baseline, with what guessing reaches; [] for a run alone."""
    systems = {**(report.runs or {report.name: report.overall})}
    if report.comparison and report.comparison.scores:
        name = report.comparison.name
        systems[f"{name} (baseline)" if name in systems else name] = report.comparison.scores
    bars = []
    for name, scores in systems.items():
        accuracy, interval = scores["accuracy"], scores["accuracy_ci"]
        if isinstance(accuracy, int | float) and isinstance(interval, list):
            bars.append(Bar(f"{name} (n={scores['n']})", accuracy, interval))
    guesses = [
        guess["expected"] for guess in report.computed.get("baselines", {}).values() if guess["expected"] is not None
    ]
    marks = {"guessing, at best": max(guesses)} if guesses else {}
    return [bar._replace(marks=marks) for bar in bars] if len(bars) > 1 else []


def _file(facet: str) -> str:
    return re.sub(r"\W+", "_", facet.lower()).strip("_") or "facet"


def _of_facet(report: FullReport, table: Breakdown) -> list[Bar]:
    printed = report.published.of_facet(table.facet) if report.published else None
    bars = []
    for group in table.cells[:SHOWN]:
        accuracy, interval = group.scores["accuracy"], group.scores["accuracy_ci"]
        if isinstance(accuracy, int | float) and isinstance(interval, list):
            published = printed.cells.get(group.name, {}) if printed else {}
            marks = {f"{model} (published)": number for model, number in published.items()}
            bars.append(Bar(f"{_latin(group.en, group.name)} (n={group.scores['n']})", accuracy, interval, marks))
    return bars


def _latin(en: str, name: str) -> str:
    """Return the English name; matplotlib's own font has no Chinese, so another name stays as it is."""
    return en if en.isascii() else name


def _bars(bars: Sequence[Bar], stem: Path) -> list[Path]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 1.1 + _LINE * len(bars)), layout="constrained")
    axes: Axes = figure.subplots()
    places = range(len(bars))
    errors = [[bar.value - bar.interval[0] for bar in bars], [bar.interval[1] - bar.value for bar in bars]]
    axes.barh(places, [bar.value for bar in bars], xerr=errors, color="#4878a8", ecolor="#222222", capsize=2)
    models = dict.fromkeys(model for bar in bars for model in bar.marks)
    for model, marker in zip(models, MARKERS, strict=False):
        points = [(bar.marks[model], place) for place, bar in zip(places, bars, strict=True) if model in bar.marks]
        values, heights = zip(*points, strict=True)
        axes.scatter(values, heights, marker=marker, s=22, zorder=3, label=model)
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, % (95% interval)")
    if models:
        figure.legend(loc="outside upper center", ncols=2, fontsize="small", frameon=False)
    return _save(figure, stem)


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]], stem: Path) -> list[Path]:
    from matplotlib.figure import Figure

    drawn = [(figure, [name for name in figure.names if name in curves]) for figure in FIGURES]
    shown = [(figure, names) for figure, names in drawn if names]
    figure = Figure(figsize=(_WIDTH, 1.9 * len(shown)), layout="constrained")
    for axes, (content, names) in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        for name in names:
            steps, values = zip(*curves[name], strict=True)
            axes.plot(steps, values, label=content.names[name])
        axes.set_ylabel(content.title)
        if len(names) > 1:
            axes.legend(frameon=False)
    axes.set_xlabel("step")
    return _save(figure, stem)


def _save(figure: "Canvas", stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.savefig(paths[0], dpi=200)
    # Without its date an SVG of the same numbers is the same file, which a repository of a paper shows as unchanged.
    figure.savefig(paths[1], metadata={"Date": None})
    return paths
