"""What a report holds, as tables: one function for each."""

from collections.abc import Mapping, Sequence
from typing import Any

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation.breakdowns import Breakdown, Cell
from cmexam_tune.evaluation.bridge import Bridge
from cmexam_tune.evaluation.comparison import Comparison, Pair
from cmexam_tune.evaluation.letter_counts import PartialCredit
from cmexam_tune.evaluation.subsets import Share, Subset
from cmexam_tune.report.building import FullReport
from cmexam_tune.report.headings import COLUMNS, cell, short
from cmexam_tune.report.published import Published
from cmexam_tune.report.table import Table, escape_markdown

BASELINES = {
    "uniform_subset": "Random set of letters",
    "uniform_single": "Random single letter",
    "majority": "Most frequent answer",
}
LATEX_HEAD = "% \\usepackage{booktabs}; Chinese names need ctex or xeCJK.\n"


def tables(report: FullReport) -> list[Table]:
    """Return every table of a report, in its order."""
    columns = _columns(report.overall)
    return [
        _scores("Overall", columns, {report.name: report.overall}),
        *([cut_off(report)] if any(one.cut for one in report.cut.values()) else []),
        *([intervals(report)] if report.intervals else []),
        *([_scores("Runs", columns, report.runs)] if report.runs else []),
        *([by_profile(report)] if report.profiles else []),
        *([bridges(tuple(report.bridges.values()))] if report.bridges else []),
        *([summary(report)] if report.summary else []),
        *([agreement(report)] if report.agreement else []),
        *([pairs(report.pairs)] if report.pairs else []),
        *([credit(report.partial_credit)] if "multiple" in report.partial_credit else []),
        *([baselines(report)] if report.baselines else []),
        *([published(report.published, report.overall)] if report.published else []),
        *([comparison(report.comparison)] if report.comparison else []),
        *([subsets(report.subsets)] if report.subsets else []),
        *(breakdown(one, columns, report.published) for one in report.tables),
        by_length(report.by_length),
    ]


def headline(report: FullReport) -> Table:
    """Return what the program prints: the run, or several runs or profiles beside each other."""
    scores = report.runs or report.profiles or {report.name: report.overall}
    return _scores("", COLUMNS, scores)


def by_profile(report: FullReport) -> Table:
    """Return the outputs of the first run as every profile scores them."""
    title = "The same outputs by every profile" if len(report.runs) < 2 else f"{report.name} by every profile"
    return _scores(title, _columns(report.overall), report.profiles)


def _columns(overall: Scores) -> tuple[str, ...]:
    return tuple(key for key in COLUMNS if overall.get(key) is not None or key == "accuracy")


def _scores(title: str, columns: Sequence[str], scores: Mapping[str, Scores]) -> Table:
    columns = [key for key in columns if key == "accuracy" or any(one.get(key) is not None for one in scores.values())]
    lines = tuple(_line(name, one, columns) for name, one in scores.items())
    return Table(("", *map(short, columns)), lines, title)


def _line(name: str, scores: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    return (name, *(cell(key, scores.get(key)) for key in columns))


def intervals(report: FullReport) -> Table:
    """Return the bootstrap intervals of the text metrics."""
    return Table(
        ("", *map(short, report.intervals)),
        ((report.name, *(cell(key, value) for key, value in report.intervals.items())),),
        "95% intervals of the text metrics (bootstrap)",
    )


def bridges(found: Sequence[Bridge]) -> Table:
    """Return how far each profile is from the standard one, in points of percent: the steps add up."""
    head = ("", "standard", "subset", "reading", "denominator", "average", "theirs", "read differently")
    lines = tuple(
        (
            f"{one.profile} *" if one.mark else one.profile,
            cell("", one.standard),
            *(_points(step) for step in (one.by_subset, one.by_reading, one.by_denominator, one.by_average)),
            cell("", one.theirs),
            str(len(one.differing)),
        )
        for one in found
    )
    marks = sorted({one.mark.split(", not")[0] for one in found if one.mark})
    note = "In points of percent; subset: " + "; ".join(
        f"{one.profile} {one.subset}" for one in found if one.subset != "all questions"
    )
    note += f". * {', '.join(marks)}, which are not the words of that script" if marks else ""
    return Table(head, lines, "From the standard score to every profile's", note)


def _points(step: float | None) -> str:
    return "-" if step is None else f"{step:+.2f}"


def summary(report: FullReport) -> Table:
    """Return mean and deviation over the runs."""
    lines = tuple((short(k), cell(k, s.mean), cell(k, s.std), str(s.runs)) for k, s in report.summary.items())
    return Table(("", "mean", "std", "runs"), lines, "Mean and deviation of the runs")


def agreement(report: FullReport) -> Table:
    """Return how often two runs gave the same readable answer."""
    lines = tuple((pair, f"{share:.1f}") for pair, share in report.agreement.items())
    changed = ("questions whose answer changes", f"{report.flips} of {report.overall['n']}")
    return Table(("", "%"), (*lines, changed), "Same readable answer")


def cut_off(report: FullReport) -> Table:
    """Return how many outputs of each run were cut off by their limit."""
    lines = tuple((name, str(one.outputs), str(one.cut), str(one.thinking)) for name, one in report.cut.items())
    return Table(("", "outputs", "cut off", "while thinking"), lines, "Outputs cut off by their limit")


def baselines(report: FullReport) -> Table:
    """Return what guessing scores."""
    lines = tuple((BASELINES[name], cell("", one["expected"]), _spread(one)) for name, one in report.baselines.items())
    return Table(("", "expected accuracy", "simulated"), lines, "Guessing on the same questions")


def _spread(one: Mapping[str, Any]) -> str:
    if "mean" not in one:
        return f"always {one['answer']}"
    return f"{one['mean']:.2f} ± {one['std']:.2f} ({one['seeds']} seeds)"


def published(numbers: Published, overall: Scores) -> Table:
    """Return the published models, the run above them."""
    keys = [key for key in dict.fromkeys(key for row in numbers.rows for key in row) if _shown(key)]
    own = tuple(cell(key, overall.get(key)) for key in keys)
    lines = [(str(row["name"]), *(str(row.get(key, "-")) for key in keys)) for row in numbers.rows]
    return Table(
        ("", *map(short, keys)), (("this run", *own), *lines), f"Published: {numbers.source}", _warning(numbers)
    )


def _shown(key: str) -> bool:
    return key != "name" and not key.endswith("_std")


def _warning(numbers: Published) -> str:
    return f"Not the same questions: {numbers.caveat}." if numbers.caveat else ""


def comparison(found: Comparison) -> Table:
    """Return the differences from another run."""
    lines = tuple(
        (short(name), f"{one.difference:+.2f}", f"{one.low:+.2f} to {one.high:+.2f}", one.p_text)
        for name, one in found.metrics.items()
    )
    title = (
        f"Against {found.name}: {len(found.gained)} questions newly right, {len(found.lost)} newly wrong, "
        f"exact McNemar p = {found.mcnemar_p:.4g}"
    )
    notes = [] if found.smallest_difference is None else [smallest(found.n, found.smallest_difference)]
    notes += [] if found.clusters is None else [f"{found.clusters} groups of questions were drawn together"]
    return Table(("", "difference", "95% interval", "p"), lines, title, ". ".join(notes))


def smallest(n: int, difference: float) -> str:
    """Return what these questions can show, in words."""
    return f"With these {n} questions a difference of {difference:.1f} points would be found four times out of five"


def pairs(found: Sequence[Pair]) -> Table:
    """Return each two runs, corrected for being several."""
    lines = tuple(
        (
            f"{one.first} | {one.second}",
            f"{one.difference:+.2f}",
            f"{one.p_value:.4g}",
            f"{one.adjusted_p:.4g}",
            "-" if one.smallest_difference is None else f"{one.smallest_difference:.1f}",
        )
        for one in found
    )
    head = ("", "difference", "p (McNemar)", "p (Holm)", "smallest difference found")
    return Table(head, lines, "Each two runs", "The smallest difference is what would be found four times out of five")


def credit(found: Mapping[str, PartialCredit]) -> Table:
    """Return exact scores beside credit for a part of the right letters."""
    lines = tuple(
        (name, str(one.n), *(f"{value:.2f}" for value in (one.accuracy, one.jaccard, one.precision, one.recall)))
        for name, one in found.items()
    )
    head = ("right letters", "n", "exact", "Jaccard", "precision of letters", "recall of letters")
    return Table(head, lines, "Questions with one and with several right letters")


def subsets(found: Sequence[Subset]) -> Table:
    """Return accuracy with and without some questions, and what it says in words."""
    lines = [("all", *_accuracy(found[0].everything))]
    for one in found:
        lines += [(f"{one.name}: only", *_accuracy(one.only)), (f"{one.name}: without", *_accuracy(one.without))]
    words = " ".join(one.sentence for one in found)
    return Table(("", "n", "Acc", "95% CI"), tuple(lines), "With and without", words)


def _accuracy(share: Share) -> tuple[str, str, str]:
    return str(share.n), cell("", share.accuracy), cell("", share.accuracy_ci)


def breakdown(one: Breakdown, columns: Sequence[str], numbers: Published | None) -> Table:
    """Return the scores by the values of a facet, published accuracies of the same groups beside them."""
    theirs = numbers.of_facet(one.facet) if numbers else None
    models = tuple(dict.fromkeys(model for cells in theirs.cells.values() for model in cells)) if theirs else ()
    lines = []
    for group in one.cells:
        beside = theirs.cells.get(group.name, {}) if theirs else {}
        name = f"{label(group)}{' *' if group.small else ''}"
        lines.append((*_line(name, group.scores, columns), *(cell("", beside.get(model)) for model in models)))
    if one.macro_accuracy is not None:
        lines.append((*_line("macro average", {"accuracy": one.macro_accuracy}, columns), *("-" for _ in models)))
    notes = [f"* fewer than {one.minimum} questions"] if any(group.small for group in one.cells) else []
    if theirs and numbers:
        notes += [f"Columns with † are published: {theirs.source}", *filter(None, [_warning(numbers).rstrip(".")])]
    title = f"{one.facet} {one.zh}" + (f", {one.source}" if one.source else "")
    head = ("", *map(short, columns), *(f"{model} †" for model in models))
    return Table(head, tuple(lines), title, ". ".join(notes))


def label(one: Cell) -> str:
    """Return abbreviation and Chinese name of a group."""
    return one.name if one.name == one.zh else f"{one.name} {one.zh}"


def by_length(bins: Sequence[Mapping[str, Any]]) -> Table:
    """Return accuracy by the length of the question."""
    lines = tuple(
        (f"{b['from']}-{b['to'] or ''}", str(b["n"]), cell("", b["accuracy"]), cell("", b["accuracy_ci"])) for b in bins
    )
    return Table(("", "n", "Acc", "95% CI"), lines, "Accuracy by length of the question (characters)")


def markdown(report: FullReport) -> str:
    """Return report.md: every table, how each number was computed, and where it comes from."""
    head = "Accuracy, F1, BLEU and ROUGE in percent; an unreadable output counts as the profile says.\n"
    if report.selection:
        head = f"**{escape_markdown(report.selection.sentence)}**\n\n{head}"
    signatures = "".join(f"- {escape_markdown(k)}: {escape_markdown(str(v))}\n" for k, v in report.signature.items())
    parts = ["# Evaluation report\n", head, *(one.markdown() for one in tables(report)), "## Signatures\n", signatures]
    return "\n".join(parts)


def latex(report: FullReport) -> str:
    """Return report.tex: the tables for a paper."""
    return LATEX_HEAD + "\n".join(one.latex() for one in tables(report))
