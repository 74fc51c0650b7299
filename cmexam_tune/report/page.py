"""The report as one HTML file that needs no network: data as JSON, drawn by the page's own script."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cmexam_tune.report import sections
from cmexam_tune.report.building import FullReport
from cmexam_tune.report.headings import COLUMNS, HEADINGS
from cmexam_tune.scoring.grading import Graded

PAGE = Path(__file__).with_name("assets")
SCRIPTS = ("report",)
"""The page's script, in the order in which its files are joined."""
LONGEST = 4000
"""Characters of an output that are shown; a model that never stops must not make the page unusable."""


def page(report: FullReport, graded: Sequence[Graded]) -> str:
    """Return report.html.

    Args:
        report: What is shown.
        graded: Questions, predictions and how they were read, for the error browser.
    """
    facets = list(report.by_facet)
    data = {
        **{key: value for key, value in report.to_dict().items() if key != "by_facet"},
        "headings": {key: asdict(heading) for key, heading in HEADINGS.items()},
        "columns": COLUMNS,
        "facets": facets,
        "items": [_item(one, facets) for one in graded],
    }
    script = "".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "NOSCRIPT": html.escape(sections.markdown(report)),
        "STYLE": (PAGE / "report.css").read_text(encoding="utf-8"),
        "SCRIPT": script,
        # Output of a model may hold anything, "</script>" too: no < of the data reaches the HTML parser.
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    text = (PAGE / "report.html").read_text(encoding="utf-8")
    before, *rest = text.split("{{")
    return before + "".join(parts[name] + tail for name, tail in (piece.split("}}", 1) for piece in rest))


def _item(one: Graded, facets: Sequence[str]) -> list[Any]:
    question = one.question
    return [
        question.id,
        question.stem,
        list(question.options.items()),
        question.answer,
        one.answer,
        _cut(one.prediction.text),
        _cut(question.explanation or ""),
        [question.facets.get(facet, "") for facet in facets],
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters in all)"
