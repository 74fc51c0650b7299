"""The files of a report: JSON, Markdown, HTML and LaTeX."""

import json
from pathlib import Path

from cmexam_tune.core.files import write_together
from cmexam_tune.report import page, sections
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.page import Runs

NAMES = ("report.json", "report.md", "report.html", "report.tex")


def write(
    report: FullReport,
    runs: Runs,
    out: str | Path,
    *,
    overwrite: bool = False,
    latex: bool = False,
) -> FullReport:
    """Write report.json, report.md, report.html and with `latex` report.tex to the folder `out`.

    Args:
        report: What `building.build` returned.
        runs: Every run that can be looked at; the first is what the report is about.
        out: Folder, made where it is missing.
        overwrite: Replace reports that are there.
        latex: Also write tables for a paper.

    Returns:
        The report.

    Raises:
        UserError: a report is there and `overwrite` is false.
        OSError: they cannot all be written; then none is.
    """
    texts = {
        "report.json": json.dumps(report.to_dict(), ensure_ascii=False, indent=2) + "\n",
        "report.md": sections.markdown(report),
        "report.html": page.page(report, runs),
    }
    if latex:
        texts["report.tex"] = sections.latex(report)
    with write_together(Path(out), "report", overwrite) as claim:
        for name, text in texts.items():
            claim(name).write_text(text, encoding="utf-8")
    for name in set(NAMES) - set(texts):
        (Path(out) / name).unlink(missing_ok=True)  # of the report that was replaced
    return report
