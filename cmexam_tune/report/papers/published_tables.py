"""The numbers that the papers print: the only reader of `published.yaml`, which is beside this file."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cmexam_tune.core import documents
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.core.variants import suggest
from cmexam_tune.report.full_report import FacetNumbers, Published

SETTINGS = {"answer_only": "answer-only", "cot": "CoT"}
_OF_MODELS = {"cmexam": ("table3",), "cmb": ("table3", "table4")}


@dataclass(frozen=True)
class PublishedLine:
    """One printed line of a table: a model or a group of questions."""

    name: str
    values: Mapping[str, float]
    """Key of the column -> what is printed; KEY_std is the printed ±."""
    setting: str | None = None
    """CMB: `answer_only` or `cot`; None where the paper does not say."""
    shots: int = 0
    note: str = ""
    """Caveats: averages that do not match, cells that are no k/n of the test size, repeated cells."""


@dataclass(frozen=True)
class PublishedTable:
    """One table of a paper."""

    title: str
    """Paper, number and caption."""
    columns: Mapping[str, str]
    """Key -> heading as printed."""
    lines: tuple[PublishedLine, ...]
    facet: str | None = None
    """Where the lines are groups of questions: by what."""
    note: str = ""


@functools.cache
def _yaml() -> dict[str, Any]:
    values: dict[str, object] = documents.read_yaml(Path(__file__).with_name("published.yaml"))
    return values


@functools.cache
def table(exam: str, name: str) -> PublishedTable:
    """Return a table, for example `table("cmexam", "table3")`."""
    values = _yaml()[exam][name]
    lines = tuple(line for row in values["rows"] for line in _lines(row))
    title = f"{_yaml()[exam]['source']}, Table {name.removeprefix('table')}: {values['caption']}"
    return PublishedTable(title, values["columns"], lines, values.get("facet"), values.get("note", ""))


def _lines(row: Mapping[str, Any]) -> Iterator[PublishedLine]:
    """Yield the line of a row of the file, and the line of its three-shot numbers where there are any."""
    yield PublishedLine(row["name"], _numbers(row), row.get("setting"), 0, _caveats(row, row))
    if row.get("few_shot"):
        three_shot = row["few_shot"]
        yield PublishedLine(row["name"], _numbers(three_shot), row.get("setting"), 3, _caveats(row, three_shot))


def _caveats(row: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    parts = [row["note"]] if row.get("note") else []
    if off := cells.get("off_grid"):
        parts.append(f"not k/n of the released test set, so approximate: {', '.join(off)}")
    return "; ".join(parts)


def _numbers(row: Mapping[str, object]) -> dict[str, float]:
    """Return the printed numbers of a row of the file, by the keys that report.json has for them."""
    numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "name"}
    # CMB's average is the mean of its six categories; calling it accuracy would invite the wrong comparison.
    return {"accuracy_macro" if key == "average" and "physician" in row else key: v for key, v in numbers.items()}


def line(exam: str, name: str, setting: str = "answer_only", shots: int = 0) -> PublishedLine | None:
    """Return what is printed for a model, by default answer-only and without examples; None where nothing is."""
    for number in _OF_MODELS[exam]:
        for printed in table(exam, number).lines:
            if printed.name == name and printed.setting in (setting, None) and printed.shots == shots:
                return printed
    return None


def names() -> tuple[str, ...]:
    """Return what `beside` knows: an exam, for CMB also with `-cot` and `-3shot`."""
    return ("cmexam", "cmb", "cmb-3shot", "cmb-cot", "cmb-cot-3shot")


def beside(name: str, questions: Sequence[Question]) -> Published:
    """Return what a report of these questions shows beside the run.

    Args:
        name: one of `names()`: `cmexam`; `cmb` is its answer-only, zero-shot setting.
        questions: What was scored; where these are not the paper's test questions, the numbers carry a caveat.

    Raises:
        UserError: nothing is published under that name.
    """
    if name not in names():
        known = ", ".join(names())
        raise UserError(f"published numbers of {name!r} are unknown{suggest(name, names())}; known: {known}.")
    exam, *words = name.split("-")
    return (_cmexam if exam == "cmexam" else _cmb)(_caveat(exam, questions), words)


def _cmexam(caveat: str, _words: Sequence[str]) -> Published:
    facets = []
    for number in range(4, 9):
        by_group = table("cmexam", f"table{number}")
        cells = {
            line.name: {heading: line.values[key] for key, heading in by_group.columns.items() if key != "average"}
            for line in by_group.lines
        }
        facets.append(FacetNumbers(str(by_group.facet), by_group.title, cells))
    overall = table("cmexam", "table3")
    return Published(
        source=overall.title,
        n=_yaml()["cmexam"]["questions"]["n"],
        rows=tuple({"name": line.name, **line.values} for line in overall.lines),
        facets=tuple(facets),
        lengths=tuple(_yaml()["cmexam"]["figure3"]["higher_accuracy_between"]),
        caveat=caveat,
    )


def _cmb(caveat: str, words: Sequence[str]) -> Published:
    setting, shots = ("cot" if "cot" in words else "answer_only"), (3 if "3shot" in words else 0)
    headings = {**_yaml()["cmb"]["categories"], "accuracy_macro": "accuracy_macro"}
    rows = [
        {"name": line.name, **{headings[key]: value for key, value in line.values.items() if key in headings}}
        for number in _OF_MODELS["cmb"]
        for line in table("cmb", number).lines
        if line.setting in (setting, None) and line.shots == shots
    ]
    return Published(
        source=f"{_yaml()['cmb']['source']}, Tables 3 and 4, {SETTINGS[setting]}, {shots or 'zero'}-shot",
        n=_yaml()["cmb"]["questions"]["n"],
        rows=tuple(sorted(rows, key=lambda row: -row["accuracy_macro"])),
        facet=_yaml()["cmb"]["facet"],
        metric="accuracy_macro",
        caveat=caveat,
    )


def _caveat(exam: str, questions: Sequence[Question]) -> str:
    """Return why the published numbers are of other questions than these; empty where they are the same, or none."""
    if not questions:
        return ""
    printed, split = _yaml()[exam]["questions"], _yaml()[exam]["split"]
    if exam == "cmb":
        classes = Counter(question.facets.get("exam_class") for question in questions)
        same = len(classes) == printed["classes"] and set(classes.values()) == {printed["each"]}
    else:
        # Table 2 tells the splits apart; preprocessing may drop a few rows that it counts.
        lengths = [len(question.stem) for question in questions]
        same = (
            0.999 * printed["n"] <= len(lengths) <= printed["n"]
            and max(lengths) == printed["longest"]
            and abs(fmean(lengths) - printed["mean"]) < 0.05
        )
    return "" if same else f"published numbers are of {split}, not of these {len(questions)} questions"
