"""The files of a report: JSON, Markdown, HTML, LaTeX, and questions that stand for the whole."""

import json
from collections.abc import Sequence
from pathlib import Path

from cmexam_tune.core import jsonl
from cmexam_tune.core.files import write_together
from cmexam_tune.core.schema import Question
from cmexam_tune.report import page, result_tables
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.page import Runs

SUBSET = "subset.questions.jsonl"
NAMES = ("report.json", "report.md", "report.html", "report.tex", SUBSET)


def write(
    report: FullReport,
    runs: Runs,
    out: str | Path,
    *,
    overwrite: bool = False,
    latex: bool = False,
    subset: Sequence[Question] = (),
) -> FullReport:
    """Write report.json, report.md, report.html, and where they are wanted the others of `NAMES`, to the folder `out`.

    Args:
        report: What `building.build` returned.
        runs: Every run that can be looked at; the first is what the report is about.
        out: Folder, made where it is missing.
        overwrite: Replace reports that are there.
        latex: Also write tables for a paper.
        subset: Questions that stand for the whole.

    Returns:
        The report.

    Raises:
        UserError: a report is there and `overwrite` is false.
        OSError: they cannot all be written; then none is.
    """
    texts = {
        "report.json": json.dumps(report.to_dict(), ensure_ascii=False, indent=2) + "\n",
        "report.md": result_tables.markdown(report),
        "report.html": page.page(report, runs),
    }
    if latex:
        texts["report.tex"] = result_tables.latex(report)
    if subset:
        texts[SUBSET] = "".join(f"{jsonl.dumps(question)}\n" for question in subset)
    with write_together(Path(out), "report", overwrite) as claim:
        for name, text in texts.items():
            claim(name).write_text(text, encoding="utf-8")
    for name in set(NAMES) - set(texts):
        (Path(out) / name).unlink(missing_ok=True)  # of the report that was replaced
    return report
