"""The report as Markdown tables and as LaTeX (booktabs) tables."""

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    ("n", "n"),
    ("accuracy", "Acc"),
    ("accuracy_ci", "95% CI"),
    ("weighted_f1", "F1"),
    ("answered", "Read"),
    ("bleu1", "BLEU-1"),
    ("bleu4", "BLEU-4"),
    ("rouge1", "R-1"),
    ("rouge2", "R-2"),
    ("rougeL", "R-L"),
)
BASELINES = {
    "uniform_subset": "Random set of letters",
    "uniform_single": "Random single letter",
    "majority": "Most frequent answer",
}
_FRACTIONS = ("weighted_f1", "precision", "recall")
_ESCAPES = str.maketrans({c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "\\": r"\textbackslash{}"})


def cell(name: str, value: Any) -> str:
    """Return a score as the tables print it: two decimals, F1 in percent."""
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(f"{end:.1f}" for end in value)
    if isinstance(value, float):
        return f"{value * 100 if name in _FRACTIONS else value:.2f}"
    return str(value)


def _rows(report: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return (title, rows with their header first) of every table."""
    shown = [(key, head) for key, head in COLUMNS if report["overall"].get(key) is not None or key == "accuracy"]

    def line(first: str, scores: Mapping[str, Any]) -> list[str]:
        return [first, *(cell(key, scores.get(key)) for key, _ in shown)]

    head = [head for _, head in shown]
    tables = [("Overall", [["", *head], line("this run", report["overall"])])]
    if report["intervals"]:
        names = list(report["intervals"])
        values = [cell(name, report["intervals"][name]) for name in names]
        tables.append(("95% intervals of the text metrics (bootstrap)", [["", *names], ["this run", *values]]))
    tables += [
        (title, [["", *head], *(line(name, scores) for name, scores in report[key].items())])
        for key, title in (("runs", "Runs"), ("profiles", "The same outputs by every profile"))
        if key in report
    ]
    if "summary" in report:
        rows = [
            [name, cell(name, s["mean"]), cell(name, s["std"]), str(s["runs"])] for name, s in report["summary"].items()
        ]
        tables.append(("Mean and deviation of the runs", [["", "mean", "std", "runs"], *rows]))
    if report["baselines"]:
        rows = [[BASELINES[name], cell("", one["expected"]), spread(one)] for name, one in report["baselines"].items()]
        tables.append(("Guessing on the same questions", [["", "expected accuracy", "simulated"], *rows]))
    if report["published"]:
        keys = [key for key, _ in shown if key != "n"]
        rows = [[str(row["name"]), *(str(row.get(key, "-")) for key in keys)] for row in report["published"]["rows"]]
        tables.append(
            (f"Published: {report['published']['source']}", [["", *(h for k, h in shown if k != "n")], *rows])
        )
    if "comparison" in report:
        tables.append(_comparison(report["comparison"]))
    for table in report["tables"]:
        rows = [line(f"{label(one)}{' *' if one['small'] else ''}", one["scores"]) for one in table["cells"]]
        if table["macro_accuracy"] is not None:
            rows.append(line("macro average", {"accuracy": table["macro_accuracy"]}))
        source = f", {table['source']}" if table["source"] else ""
        note = f" (* fewer than {table['minimum']} questions)" if any(one["small"] for one in table["cells"]) else ""
        tables.append((f"{table['facet']} {table['zh']}{source}{note}", [["", *head], *rows]))
    lengths = [
        [f"{b['from']}-{b['to'] or ''}", str(b["n"]), cell("", b["accuracy"]), cell("", b["accuracy_ci"])]
        for b in report["by_length"]
    ]
    tables.append(("Accuracy by length of the question (characters)", [["", "n", "Acc", "95% CI"], *lengths]))
    return tables


def label(one: Mapping[str, Any]) -> str:
    """Return abbreviation and Chinese name of a cell."""
    return one["name"] if one["name"] == one["zh"] else f"{one['name']} {one['zh']}"


def spread(one: Mapping[str, Any]) -> str:
    """Return mean and deviation of a simulated baseline."""
    if "mean" not in one:
        return f"always {one['answer']}"
    return f"{one['mean']:.2f} ± {one['std']:.2f} ({one['seeds']} seeds)"


def _comparison(found: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
    rows = [
        [name, f"{one['difference']:+.2f}", f"{one['low']:+.2f} to {one['high']:+.2f}", f"{one['p_value']:.4f}"]
        for name, one in found["metrics"].items()
    ]
    title = (
        f"Against {found.get('name', 'the baseline')}: {len(found['gained'])} questions newly right, "
        f"{len(found['lost'])} newly wrong, exact McNemar p = {found['mcnemar_p']:.4g}"
    )
    return title, [["", "difference", "95% interval", "p (paired bootstrap)"], *rows]


def markdown(report: Mapping[str, Any]) -> str:
    """Return report.md: every table, how each number was computed, and where it comes from."""
    lines = [
        "# Evaluation report",
        "",
        "Accuracy, F1, BLEU and ROUGE in percent; an unreadable output counts as the profile says.",
        "",
    ]
    for title, (head, *rows) in _rows(report):
        lines += [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        lines += ["| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |" for row in rows]
        lines.append("")
    lines += ["## Signatures", "", *(f"- {name}: `{text}`" for name, text in report["signature"].items()), ""]
    return "\n".join(lines)


def latex(report: Mapping[str, Any]) -> str:
    """Return report.tex: tables for a paper (needs the packages booktabs, and ctex or xeCJK for Chinese names)."""
    parts = ["% \\usepackage{booktabs}; Chinese names need ctex or xeCJK."]
    for title, (head, *rows) in _rows(report):
        parts += ["\\begin{table}[t]\\centering", f"\\caption{{{title.translate(_ESCAPES)}}}"]
        parts += [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\\toprule"]
        parts += [" & ".join(text.translate(_ESCAPES).replace("±", "$\\pm$") for text in head) + r" \\ \midrule"]
        parts += [" & ".join(text.translate(_ESCAPES).replace("±", "$\\pm$") for text in row) + r" \\" for row in rows]
        parts += ["\\bottomrule\\end{tabular}\\end{table}", ""]
    return "\n".join(parts)
