"""The report as one HTML file that needs no network: data as JSON, drawn by the page's own script."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.grading import Graded
from cmexam_tune.report import packing, sections
from cmexam_tune.report.building import FullReport
from cmexam_tune.report.headings import COLUMNS, HEADINGS

PAGE = Path(__file__).with_name("assets")
SCRIPTS = (
    "base", "charts", "headline", "compared", "runs", "facets", "length", "training", "confusion", "explanations",
    "profiles", "store", "questions", "method", "main",
)  # fmt: skip
"""The page's script, in the order in which its files are joined."""


def page(report: FullReport, runs: packing.Runs) -> str:
    """Return report.html.

    Args:
        report: What is shown.
        runs: Name -> graded questions of every run, for the cards; the first is what the report is about.
    """
    facets = list(report.by_facet)
    data = {
        **{key: value for key, value in report.to_dict().items() if key != "by_facet"},
        "headings": {key: asdict(heading) for key, heading in HEADINGS.items()},
        "columns": COLUMNS,
        "facets": facets,
        "run_names": list(runs),
        "flips_of": _pairs(runs),
        "index": packing.index(runs, facets, tuple(report.bridges.values())),
        "block": packing.BLOCK,
        "blocks": packing.blocks(runs),
    }
    script = "\n".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "TITLE": html.escape(report.name),
        "NOSCRIPT": html.escape(sections.markdown(report)),
        "STYLE": (PAGE / "report.css").read_text(encoding="utf-8"),
        "SCRIPT": f'"use strict";\n{script}',
        # Output of a model may hold anything, "</script>" too: no < of the data reaches the HTML parser.
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = (PAGE / "report.html").read_text(encoding="utf-8")
    before, *rest = text.split("{{")
    return before + "".join(parts[name] + tail for name, tail in (piece.split("}}", 1) for piece in rest))


def _pairs(runs: Mapping[str, Sequence[Graded]]) -> list[dict[str, Any]]:
    """Return for each two runs how many questions only one of them answered right, and McNemar's exact p."""
    right = [{one.question.id for one in graded if one.correct} for graded in runs.values()]
    found = []
    for a, b in combinations(range(len(right)), 2):
        only = len(right[a] - right[b]), len(right[b] - right[a])
        found.append({"runs": [a, b], "only": only, "p": significance.mcnemar(*only)})
    return found
