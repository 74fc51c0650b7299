"""CMExam's Tables 4 to 8: finished runs of `reproduce` by groups of questions, the published accuracies beside them."""

from collections.abc import Sequence
from pathlib import Path

from cmexam_tune.evaluation import breakdowns
from cmexam_tune.evaluation.significance import mean_std
from cmexam_tune.report.headings import cell
from cmexam_tune.report.papers import published_tables
from cmexam_tune.report.papers.reproduced import REPORT, Measured, read_report
from cmexam_tune.report.table import Table

NUMBERS = range(4, 9)


def table(number: int, found: Sequence[Measured], out: Path) -> Table:
    """Return a table of the paper with a column for each of our runs, mean over seeds.

    Args:
        number: 4 (disease group), 5 (department), 6 (discipline), 7 (competency) or 8 (difficulty).
        found: What `results.collect` returned for the folder `out`; runs on other exams are left out.
        out: The folder.
    """
    printed = published_tables.table("cmexam", f"table{number}")
    facet = breakdowns.define(str(printed.facet))
    ours = [one for one in found if one.entry.exam == "cmexam" and one.setting == "answer"]
    measured = {one.name: _accuracies(one, facet, out) for one in ours}
    theirs = {facet.recognise(line.name): line.values for line in printed.lines}
    groups = [*theirs, *(name for name in facet.values if name not in theirs)]
    lines = tuple(
        (
            group.name if group.name == group.zh else f"{group.name} {group.zh}",
            *(_mean(accuracies.get(group, [])) for accuracies in measured.values()),
            *(cell("", theirs[group].get(key)) if group in theirs else "-" for key in printed.columns),
        )
        for group in groups
        if group in theirs or any(group in accuracies for accuracies in measured.values())
    )
    head = ("", *measured, *(f"{heading} †" for heading in printed.columns.values()))
    return Table(head, lines, printed.title, f"Accuracy in percent; † published. {printed.note}".rstrip(". ") + ".")


def _accuracies(one: Measured, facet: breakdowns.Definition, out: Path) -> dict[breakdowns.Name, list[float]]:
    """Return group -> accuracy of each seed, where the questions hold this facet."""
    found: dict[breakdowns.Name, list[float]] = {}
    for page in one.reports:
        if "-" in (out / page).parents[1].name:  # a run that explains
            continue
        for column, cells in read_report((out / page).with_name(REPORT.name)).by_facet.items():
            if breakdowns.define(column).facet != facet.facet:
                continue
            for value, scores in cells.items():
                if isinstance(accuracy := scores.get("accuracy"), float):
                    found.setdefault(facet.recognise(value), []).append(accuracy)
    return found


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, deviation = mean_std(values)
    return f"{mean:.1f}" + (f"±{deviation:.1f}" if deviation is not None else "")
