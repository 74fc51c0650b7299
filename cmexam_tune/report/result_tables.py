"""The tables of a report, and report.md and report.tex, which are made of them.

What sets runs, scorers, papers and parts of a run beside each other is here, a function for each table; what is
computed from the graded answers of the report alone is in `sections.py`.
"""

from collections.abc import Callable, Mapping, Sequence

from cmexam_tune.core.schema import Scores
from cmexam_tune.evaluation.breakdowns import Breakdown, Cell, FacetValue, Share, Subset
from cmexam_tune.evaluation.comparison import Comparison, RunPair, ScoreDecomposition
from cmexam_tune.report.full_report import FullReport, Published
from cmexam_tune.report.sections import SECTIONS
from cmexam_tune.report.table import COLUMNS, SECOND_MINUS_FIRST, Table, cell, escape_markdown, short

LATEX_HEAD = "% \\usepackage{booktabs}; Chinese names need ctex or xeCJK.\n"


def tables(report: FullReport) -> list[Table]:
    """Return every table of report.md and report.tex in order; report.html draws its own from the same numbers."""
    columns = _columns(report)
    # Whether there is anything to show -> what shows it.
    of_runs: tuple[tuple[object, Callable[[], Table]], ...] = (
        # Without a baseline the first of several runs is all that "Overall" would hold, and "Runs" has it.
        (report.comparison or not report.runs, lambda: _scores("Overall", columns, _with_baseline(report))),
        (any(run.cut for run in report.cut.values()), lambda: cut_off(report)),
        (report.runs, lambda: _scores("Runs", columns, report.runs)),
        (report.profiles, lambda: by_scorer(report)),
        (report.bridges, lambda: decompositions(tuple(report.bridges.values()))),
        (report.summary, lambda: summary(report)),
        (report.agreement, lambda: agreement(report)),
        (report.pairs, lambda: pairs(report.pairs)),
    )
    shown = [make() for has_content, make in of_runs if has_content]
    if report.published:
        shown.append(published(report.published, report.overall))
    if report.comparison:
        shown.append(comparison(report.comparison, report.name))
    if report.subsets:
        shown.append(subsets(report.subsets))
    shown += [breakdown(table, columns, report.published) for table in report.tables]
    for section in SECTIONS:
        if section.key in report.computed:
            shown += section.tables(report.computed[section.key])
    return shown


def headline(report: FullReport) -> Table:
    """Return what the program prints: the run, or several runs or scorers beside each other."""
    return _scores("", (*COLUMNS, *report.metrics), report.runs or report.profiles or _with_baseline(report))


def _with_baseline(report: FullReport) -> dict[str, Scores]:
    """Return name -> scores of the run, and of its baseline where its scores are known."""
    baseline = report.comparison
    if baseline is None or not baseline.scores:
        return {report.name: report.overall}
    name = f"{baseline.name} (baseline)" if baseline.name == report.name else baseline.name
    return {report.name: report.overall, name: baseline.scores}


def by_scorer(report: FullReport) -> Table:
    """Return the outputs of the first run as every scorer scores them."""
    title = "The same outputs by every profile" if len(report.runs) < 2 else f"{report.name} by every profile"
    return _scores(title, _columns(report), report.profiles)


def _columns(report: FullReport) -> tuple[str, ...]:
    """Return the scores that the run has; accuracy stays where no answer is published, and says so with a dash."""
    keys = (*COLUMNS, *report.metrics)
    return tuple(key for key in keys if report.overall.get(key) is not None or key == "accuracy")


def _scores(title: str, columns: Sequence[str], scores: Mapping[str, Scores]) -> Table:
    columns = [key for key in columns if key == "accuracy" or any(row.get(key) is not None for row in scores.values())]
    lines = tuple(_line(name, row, columns) for name, row in scores.items())
    return Table(("", *map(short, columns)), lines, title)


def _line(name: str, scores: Mapping[str, object], columns: Sequence[str]) -> tuple[str, ...]:
    return (name, *(cell(key, scores.get(key)) for key in columns))


def decompositions(ways: Sequence[ScoreDecomposition]) -> Table:
    """Return how far each scorer is from the standard one, in points of percent: the steps add up."""
    head = ("", "standard", "subset", "reading", "denominator", "average", "theirs", "read differently")
    lines = tuple(
        (
            f"{way.profile} *" if way.mark else way.profile,
            cell("", way.standard),
            *(_points(step) for step in (way.by_subset, way.by_reading, way.by_denominator, way.by_average)),
            cell("", way.theirs),
            str(len(way.differing)),
        )
        for way in ways
    )
    marks = sorted({way.mark.split(", not")[0] for way in ways if way.mark})
    note = "In points of percent; subset: " + "; ".join(
        f"{way.profile} {way.subset}" for way in ways if way.subset != "all questions"
    )
    note += f". * {', '.join(marks)}, which are not the words of that script" if marks else ""
    note += ". -: none of these questions counts there" if any(way.theirs is None for way in ways) else ""
    return Table(head, lines, "From the standard score to every profile's", note)


def _points(step: float | None) -> str:
    return "-" if step is None else f"{step:+.2f}"


def summary(report: FullReport) -> Table:
    """Return mean and deviation over the runs."""
    lines = tuple(
        (short(key), cell(key, spread.mean), cell(key, spread.std), str(spread.runs))
        for key, spread in report.summary.items()
    )
    return Table(("", "mean", "std", "runs"), lines, "Mean and deviation of the runs")


def agreement(report: FullReport) -> Table:
    """Return how often two runs gave the same readable answer."""
    lines = tuple((pair, f"{share:.1f}") for pair, share in report.agreement.items())
    changed = ("questions whose answer changes", f"{report.flips} of {report.overall['n']}")
    return Table(("", "% of questions"), (*lines, changed), "Same readable answer in both")


def cut_off(report: FullReport) -> Table:
    """Return how many outputs of each run were cut off by their limit."""
    lines = tuple((name, str(run.outputs), str(run.cut), str(run.thinking)) for name, run in report.cut.items())
    return Table(("", "outputs", "cut off", "while thinking"), lines, "Outputs cut off by their limit")


def published(numbers: Published, overall: Scores) -> Table:
    """Return the published models, the run above them."""
    keys = [key for key in dict.fromkeys(key for row in numbers.rows for key in row) if _shown(key)]
    this_run = ("this run", *(cell(key, overall.get(key)) for key in keys))
    # As they are printed, not as `cell` would round them: a paper's 78 is no 78.00.
    lines = [(str(row["name"]), *(str(row.get(key, "-")) for key in keys)) for row in numbers.rows]
    return Table(("", *map(short, keys)), (this_run, *lines), f"Published: {numbers.source}", _warning(numbers))


def _shown(key: str) -> bool:
    return key != "name" and not key.endswith("_std")


def _warning(numbers: Published) -> str:
    return f"Not the same questions: {numbers.caveat}." if numbers.caveat else ""


def comparison(compared: Comparison, run: str) -> Table:
    """Return the differences of the run called `run` from its baseline."""
    lines = tuple(
        (short(name), f"{metric.difference:+.2f}", f"{metric.low:+.2f} to {metric.high:+.2f}", metric.p_text)
        for name, metric in compared.metrics.items()
    )
    title = (
        f"{compared.name} | {run}: {len(compared.gained)} questions newly right, {len(compared.lost)} newly wrong"
        # Of questions that share cases McNemar's p is too small: there the bootstrap's stands in the line of accuracy.
        + (f", exact McNemar p = {compared.mcnemar_p:.4g}" if compared.clusters is None else "")
    )
    notes = []
    if compared.smallest_difference is not None:
        notes.append(
            f"{compared.n} questions detect a difference of {compared.smallest_difference:.1f} points with 80% power"
        )
    if compared.clusters is not None:
        notes.append(f"{compared.clusters} groups of questions were drawn together")
    if compared.computed is not None and "accuracy" in compared.metrics:
        accuracy = compared.metrics["accuracy"]
        shown = "changed" if accuracy.low > 0 or accuracy.high < 0 else "did not change, as far as these questions show"
        notes.append(
            f"Nothing but what computed them is different ({compared.computed}): {compared.other_answers} of "
            f"{compared.n} answers are others, and the accuracy {shown}"
        )
    return Table(("", SECOND_MINUS_FIRST, "95% interval", "p"), lines, title, ". ".join(notes))


def pairs(run_pairs: Sequence[RunPair]) -> Table:
    """Return every pair of runs, with p-values corrected for multiple comparisons."""
    lines = tuple(
        (
            f"{pair.first} | {pair.second}",
            f"{pair.difference:+.2f}",
            f"{pair.p_value:.4g}",
            f"{pair.adjusted_p:.4g}",
            "-" if pair.smallest_difference is None else f"{pair.smallest_difference:.1f}",
        )
        for pair in run_pairs
    )
    head = ("", SECOND_MINUS_FIRST, "p (McNemar)", "p (Holm)", "smallest detectable")
    return Table(head, lines, "Pairwise", "Smallest difference detectable with 80% power")


def subsets(parts: Sequence[Subset]) -> Table:
    """Return accuracy with and without some questions, and what it says in words."""
    lines = [("all", *_accuracy(parts[0].everything))]
    for part in parts:
        lines += [(f"{part.name}: only", *_accuracy(part.only)), (f"{part.name}: without", *_accuracy(part.without))]
    return Table(
        ("", "n", "Acc", "95% CI"), tuple(lines), "With and without", " ".join(part.sentence for part in parts)
    )


def _accuracy(share: Share) -> tuple[str, str, str]:
    return str(share.n), cell("", share.accuracy), cell("", share.accuracy_ci)


def breakdown(table: Breakdown, columns: Sequence[str], numbers: Published | None) -> Table:
    """Return the scores by the values of a facet, published accuracies of the same groups beside them."""
    printed = numbers.of_facet(table.facet) if numbers else None
    # In the order in which the paper names them; a model may be missing for a group.
    models = tuple(dict.fromkeys(model for cells in printed.cells.values() for model in cells)) if printed else ()
    lines = []
    for group in table.cells:
        accuracies = printed.cells.get(group.name, {}) if printed else {}
        name = f"{label(group)}{' *' if group.small else ''}"
        lines.append((*_line(name, group.scores, columns), *(cell("", accuracies.get(model)) for model in models)))
    if table.macro_accuracy is not None:
        lines.append((*_line("macro average", {"accuracy": table.macro_accuracy}, columns), *("-" for _ in models)))
    notes = [f"* fewer than {table.minimum} questions"] if any(group.small for group in table.cells) else []
    if printed and numbers:
        notes += [f"Columns with † are published: {printed.source}", *filter(None, [_warning(numbers).rstrip(".")])]
    title = f"{table.facet} {table.zh}" + (f", {table.source}" if table.source else "")
    head = ("", *map(short, columns), *(f"{model} †" for model in models))
    return Table(head, tuple(lines), title, ". ".join(notes))


def label(group: Cell | FacetValue) -> str:
    """Return the paper's abbreviation, or else the English name, and the Chinese name of a group."""
    first = group.en if group.name == group.zh else group.name
    return first if first == group.zh else f"{first} {group.zh}"


def markdown(report: FullReport) -> str:
    """Return report.md: every table, how each number was computed, and where it comes from."""
    head = "Accuracy, F1, BLEU and ROUGE in percent; an unreadable output counts as the profile says.\n"
    if report.selection:
        head = f"**{escape_markdown(report.selection.sentence)}**\n\n{head}"
    signatures = "".join(
        f"- {escape_markdown(key)}: {escape_markdown(str(value))}\n" for key, value in report.signature.items()
    )
    parts = [
        "# Evaluation report\n",
        head,
        *(table.markdown() for table in tables(report)),
        "## Signatures\n",
        signatures,
    ]
    return "\n".join(parts)


def latex(report: FullReport) -> str:
    """Return report.tex: the tables for a paper."""
    day = f", {report.identity.date}" if report.identity else ""
    about = f"n = {report.overall['n']:,}{day}"
    return LATEX_HEAD + "\n".join(table.latex(about) for table in tables(report))
