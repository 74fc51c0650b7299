"""The one table of this project: built once, shown as text, Markdown, LaTeX or HTML; and the names of its columns."""

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cmexam_tune.core.cli import printable
from cmexam_tune.report.html_page import in_both

_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        # A bracket after \\ would be read as its optional argument.
        "[": "{[}",
        "]": "{]}",
    }
)
_MARKDOWN = str.maketrans({"<": "&lt;", ">": "&gt;"} | {character: f"\\{character}" for character in "\\`[]|"})
_ENTITY = re.compile(r"&(?=#?\w+;)")
"""An ampersand that Markdown would read as the beginning of a character's name; others stand for themselves."""
# A hyphen before a number that is neither a part of a word nor between the ends of an interval.
_NEGATIVE = re.compile(r"(?<![\w-])-(?=[\d.])")


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it is: nothing in it can be a command, also not as `^^5c`."""
    return _flat(text).translate(_LATEX)


def _latex_cell(text: str) -> str:
    """Return a cell with minus signs where a hyphen would be printed, and a dash for a number that is not there."""
    return "--" if text == "-" else _NEGATIVE.sub("$-$", escape_latex(text))


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no link, no end of a table cell."""
    return _ENTITY.sub("&amp;", _flat(text)).translate(_MARKDOWN)


def _flat(text: str) -> str:
    """Return the text on one line, its other control characters spelled out."""
    return printable(" ".join(text.splitlines()).replace("\t", " "))


class Text(str):
    """Words of ours: English wherever a text is wanted, and their Chinese for the page, which has both languages.

    A str, so that what prints a table on a terminal or in LaTeX need not know of languages at all.
    """

    zh: str

    def __new__(cls, en: str, zh: str) -> "Text":
        """Take both languages."""
        text = super().__new__(cls, en)
        text.zh = zh
        return text


def for_page(text: str) -> str | list[str]:
    """Return a text as the page's script reads it: [English, Chinese], or what is the same in both."""
    return [str(text), text.zh] if isinstance(text, Text) else text


class Bar(NamedTuple):
    """One bar of a chart, in percent."""

    label: str
    value: float
    interval: Sequence[float]
    marks: Mapping[str, float] = {}
    """Name -> another value that is marked on the same line."""

    def page(self) -> dict[str, object]:
        """Return the bar as the page's script reads it."""
        marks = [{"name": for_page(name), "at": at} for name, at in self.marks.items()]
        return {"label": for_page(self.label), "value": self.value, "interval": list(self.interval), "marks": marks}


@dataclass(frozen=True)
class Table:
    """A head and lines of cells; the first column is a name, the others are numbers."""

    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    title: str = ""
    note: str = ""

    def text(self) -> str:
        """Return the table for a terminal or a text file."""
        lines = [[_flat(cell) for cell in line] for line in (self.head, *self.lines)]
        widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
        body = "\n".join(
            "  ".join([_pad(line[0], widths[0], left=True), *map(_pad, line[1:], widths[1:])]).rstrip()
            for line in lines
        )
        return "\n\n".join(part for part in (_flat(self.title), body, _flat(self.note)) if part)

    def markdown(self) -> str:
        """Return a Markdown table, its title as a heading."""
        title = [f"## {escape_markdown(self.title)}", ""] if self.title else []
        note = ["", escape_markdown(self.note)] if self.note else []
        rule = ["| " + " | ".join("---" for _ in self.head) + " |"]
        cells = ["| " + " | ".join(map(escape_markdown, line)) + " |" for line in (self.head, *self.lines)]
        return "\n".join([*title, cells[0], *rule, *cells[1:], *note, ""])

    @property
    def label(self) -> str:
        """What LaTeX refers to the table by: `tab:` and the plain words of its title up to a colon or a comma."""
        words = re.findall(r"[a-z0-9]+", re.split(r"[:,(]", self.title.lower(), maxsplit=1)[0])
        return f"tab:{'-'.join(words)}" if words else ""

    def latex(self, about: str = "") -> str:
        """Return a LaTeX table; needs the package booktabs, and ctex or xeCJK for Chinese.

        Args:
            about: ends the caption, for example the number of questions and the day.
        """
        cells = [" & ".join(map(_latex_cell, line)) + r" \\" for line in (self.head, *self.lines)]
        caption = escape_latex(". ".join(part.rstrip(".") for part in (self.title, self.note, about) if part))
        return "\n".join(
            [
                r"\begin{table}[t]\centering",
                *([rf"\caption{{{caption}}}"] if caption else []),
                *([rf"\label{{{self.label}}}"] if caption and self.label else []),
                rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}",
                *(r"\toprule", cells[0], r"\midrule", *cells[1:], r"\bottomrule"),
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def html(self, two_languages: bool = False) -> str:
        """Return an HTML table; with `two_languages` for a page that shows one of them and sorts its tables."""
        shown = _in_both if two_languages else html.escape
        title = f"<caption>{shown(self.title)}</caption>" if self.title else ""
        note = f"<p>{shown(self.note)}</p>" if self.note else ""
        head = f"<thead>{_html('th', [self.head], shown)}</thead>"
        table = f"{title}{head}<tbody>{_html('td', self.lines, shown)}</tbody></table>"
        return (
            f'<div class="scroll"><table class="sort">{table}</div>{note}' if two_languages else f"<table>{table}{note}"
        )

    def page(self) -> dict[str, object]:
        """Return the table as the script of the report's page reads it, in both languages."""
        return {
            "title": for_page(self.title),
            "note": for_page(self.note),
            "head": [*map(for_page, self.head)],
            "lines": [[*map(for_page, line)] for line in self.lines],
        }

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()


def _html(tag: str, lines: Iterable[Iterable[str]], shown: Callable[[str], str]) -> str:
    cells = ("".join(f"<{tag}>{shown(cell)}</{tag}>" for cell in line) for line in lines)
    return "".join(f"<tr>{line}</tr>" for line in cells)


def _in_both(text: str) -> str:
    return in_both(text, text.zh if isinstance(text, Text) else text)


def _width(cell: str) -> int:
    """Return how many columns of a terminal a cell takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in cell)


def _pad(cell: str, width: int, left: bool = False) -> str:
    fill = " " * (width - _width(cell))
    return cell + fill if left else fill + cell


@dataclass(frozen=True)
class Heading:
    """The names of one number of report.json."""

    short: str
    """For narrow tables."""
    en: str
    zh: str
    kind: str = "percent"
    """`percent` (0 to 100), `fraction` (0 to 1, shown in percent), `count` or `interval`."""


HEADINGS = {
    "n": Heading("n", "Questions", "题数", "count"),
    "accuracy": Heading("Acc", "Accuracy %", "正确率 %"),
    "accuracy_ci": Heading("95% CI", "95% interval", "95% 区间", "interval"),
    "accuracy_macro": Heading("Macro acc", "Macro average %", "宏平均 %"),
    "weighted_f1": Heading("F1", "Weighted F1 %", "加权 F1 %", "fraction"),
    "precision": Heading("P", "Precision %", "精确率 %", "fraction"),
    "recall": Heading("R", "Recall %", "召回率 %", "fraction"),
    "answered": Heading("Read", "Readable", "可解析", "count"),
    "scored": Heading("Scored", "Scored", "计分题数", "count"),
    "explanations": Heading("Expl.", "Explanations", "解析数", "count"),
    "bleu1": Heading("BLEU-1", "BLEU-1", "BLEU-1"),
    "bleu2": Heading("BLEU-2", "BLEU-2", "BLEU-2"),
    "bleu4": Heading("BLEU-4", "BLEU-4", "BLEU-4"),
    "rouge1": Heading("ROUGE-1", "ROUGE-1", "ROUGE-1"),
    "rouge2": Heading("ROUGE-2", "ROUGE-2", "ROUGE-2"),
    "rougeL": Heading("ROUGE-L", "ROUGE-L", "ROUGE-L"),
}
"""Key of report.json -> its names, in the order of columns."""
COLUMNS = (
    "n", "accuracy", "accuracy_macro", "accuracy_ci", "weighted_f1", "answered", "bleu1", "bleu4", "rouge1", "rouge2",
    "rougeL",
)  # fmt: skip
"""What the tables show of each set of scores."""
SECOND_MINUS_FIRST = "second minus first"
"""The head of every column of differences, so that no reader need guess their sign."""


def short(key: str) -> str:
    """Return the short name of a number; a key that has none stands for itself."""
    return HEADINGS[key].short if key in HEADINGS else key


def cell(key: str, value: object) -> str:
    """Return a number as the tables print it: two decimals, fractions in percent."""
    if value is None:
        return "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(f"{end:.1f}" for end in value)
    if isinstance(value, float):
        fraction = key in HEADINGS and HEADINGS[key].kind == "fraction"
        return f"{value * 100 if fraction else value:.2f}"
    return str(value)
