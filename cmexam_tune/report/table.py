"""The one table of this project: built once, shown as text, Markdown, LaTeX or HTML."""

import html
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from cmexam_tune.core.cli import printable

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
_MARKDOWN = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {character: f"\\{character}" for character in "\\`[]|"}
)


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it is: nothing in it can be a command, also not as `^^5c`."""
    return _flat(text).translate(_LATEX)


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no link, no end of a table cell."""
    return _flat(text).translate(_MARKDOWN)


def _flat(text: str) -> str:
    """Return the text on one line, its other control characters spelled out."""
    return printable(" ".join(text.splitlines()).replace("\t", " "))


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

    def latex(self) -> str:
        """Return a LaTeX table; needs the package booktabs, and ctex or xeCJK for Chinese."""
        cells = [" & ".join(map(escape_latex, line)) + r" \\" for line in (self.head, *self.lines)]
        caption = escape_latex(". ".join(part.rstrip(".") for part in (self.title, self.note) if part))
        return "\n".join(
            [
                r"\begin{table}[t]\centering",
                *([rf"\caption{{{caption}}}"] if caption else []),
                rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}",
                *(r"\toprule", cells[0], r"\midrule", *cells[1:], r"\bottomrule"),
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def html(self) -> str:
        """Return an HTML table."""
        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        head = f"<thead>{_html('th', [self.head])}</thead>"
        return f"<table>{title}{head}<tbody>{_html('td', self.lines)}</tbody></table>{note}"

    def _repr_html_(self) -> str:
        return self.html()

    def __str__(self) -> str:
        return self.text()


def _html(tag: str, lines: Iterable[Iterable[str]]) -> str:
    return "".join(f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in line)}</tr>" for line in lines)


def _width(cell: str) -> int:
    """Return how many columns of a terminal a cell takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in cell)


def _pad(cell: str, width: int, left: bool = False) -> str:
    fill = " " * (width - _width(cell))
    return cell + fill if left else fill + cell
