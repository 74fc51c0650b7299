"""A selection's funnel as tables, and as one HTML page with outputs that were kept and dropped."""

import html
from collections import Counter
from collections.abc import Sequence

from cmexam_tune.core.schema import Question
from cmexam_tune.quality.selection import KEPT, OUTCOMES, Funnel, Selection, Verdict
from cmexam_tune.report.html_page import html_page
from cmexam_tune.report.table import Table

SHOWN = 20
"""Rows that the page shows."""
MOST_VALUES = 40
"""Of a facet with more values the table would be no overview."""
_STYLE = """
details { margin: 14px 0; } summary { font-weight: 600; }
.output { border-top: 1px solid var(--line); padding: 8px 0; max-width: 60em; }
.output p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; } .output .soft { font-size: 13px; }
"""


def tables(funnel: Funnel) -> list[Table]:
    """Return what became of the questions and of their outputs, and both by facet."""
    outputs = sum(funnel.outputs.values())
    note = f"{funnel.right:,} of {outputs:,} outputs are right ({100 * funnel.right / max(outputs, 1):.1f}%)."
    facets = [
        Table(
            (facet, "questions", "outputs", "right %", "questions kept"),
            tuple(
                (
                    value,
                    f"{cell['questions']:,}",
                    f"{cell['outputs']:,}",
                    f"{100 * cell['right'] / max(cell['outputs'], 1):.1f}",
                    f"{cell['kept']:,}",
                )
                for value, cell in sorted(values.items(), key=lambda item: -item[1]["questions"])
            ),
        )
        for facet, values in funnel.by_facet.items()
        if len(values) <= MOST_VALUES
    ]
    return [_outcomes("Questions", funnel.questions), _outcomes("Outputs", funnel.outputs, note), *facets]


def _outcomes(title: str, counts: Counter[str], note: str = "") -> Table:
    total = sum(counts.values())
    lines = [
        (OUTCOMES[name], f"{counts[name]:,}", f"{100 * counts[name] / total:.1f}") for name in OUTCOMES if counts[name]
    ]
    return Table((title, "number", "%"), (*lines, ("all", f"{total:,}", "100.0")), "", note)


def page(selection: Selection) -> str:
    """Return funnel.html."""
    title = f"Selected for {selection.funnel.made}: {selection.funnel.rows:,} rows"
    parts = [table.html() for table in tables(selection.funnel)]
    parts.append(_section(OUTCOMES[KEPT], [_row(row) for row in selection.rows[:SHOWN]]))
    for outcome, examples in selection.dropped.items():
        parts.append(_section(OUTCOMES[outcome], [_example(question, verdict) for question, verdict in examples]))
    return html_page(title, f"<main><h1>{html.escape(title)}</h1>{''.join(parts)}</main>", style=_STYLE)


def _section(title: str, entries: Sequence[str]) -> str:
    if not entries:
        return ""
    return f"<details><summary>{html.escape(title)} (first {len(entries)})</summary>{''.join(entries)}</details>"


def _row(row: dict[str, object]) -> str:
    texts = [f"{name}: {row[name]}" for name in ("chosen", "rejected", "explanation", "pass_rate") if row.get(name)]
    return _entry(f"{row['id']}, answer {row['answer']}", f"{row['stem']}\n" + "\n".join(texts))


def _example(question: Question, verdict: Verdict) -> str:
    head = f"{question.id}, answer {question.answer}, output {verdict.sample.number}"
    return _entry(head, f"{question.stem}\n{verdict.sample.text}")


def _entry(head: str, text: str) -> str:
    return f"<div class=output><p class=soft>{html.escape(head)}</p><p>{html.escape(text)}</p></div>"
