"""The one table: four renderings, and that nothing in a cell can act in any of them."""

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cmexam_tune.core import cli
from cmexam_tune.report.table import Table, escape_latex

TABLE = Table(("", "a_b", "c & d"), (("<甲>", "1±2%", "3"), ("long name", "4", "5")), "50% of x_1", "a note")
HOSTILE = [
    "^^5cinput secret.tex", "\\input{secret}", "~^#$%&_{}\\", "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "a\nb | c", "\x1b]0;owned\x07\x1b[31mred", "[optional]", "`code`", "\u202egnol", "$x^2$", "end\\",
]  # fmt: skip


def test_the_same_table_in_four_forms() -> None:
    assert TABLE.text().splitlines() == [
        "50% of x_1", "", "            a_b  c & d", "<甲>       1±2%      3", "long name     4      5", "", "a note",
    ]  # fmt: skip
    assert TABLE.markdown().splitlines()[:5] == [
        "## 50% of x_1", "", "|  | a_b | c & d |", "| --- | --- | --- |", "| &lt;甲&gt; | 1±2% | 3 |",
    ]  # fmt: skip
    latex = TABLE.latex()
    assert r"\textless{}甲\textgreater{} & 1$\pm$2\% & 3 \\" in latex and r" & a\_b & c \& d \\" in latex
    assert r"\begin{tabular}{lrr}" in latex and r"\caption{50\% of x\_1. a note}" in latex
    assert r"\label{tab:50-of-x-1}" in latex and "a note. n = 7}" in TABLE.latex("n = 7")
    assert r"a & $-$0.50 & -- \\" in Table(("", "x", "y"), (("a", "-0.50", "-"),)).latex()
    assert "| 1-2 &amp;lt; |" in Table(("",), (("1-2 &lt;",),)).markdown()
    assert TABLE._repr_html_() == TABLE.html() and "<td>&lt;甲&gt;</td>" in TABLE.html()


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_cell_acts(text: str) -> None:
    table = Table(("", text), ((text, "1"),), text, text)
    # Only commands that the escaper itself writes, no active character, no catcode trick, no bare bracket.
    left = re.sub(
        r"\\(text(backslash|asciicircum|asciitilde|less|greater|bar)\{\}|[&%$#_{}])|\$\\pm\$|\{[][]\}",
        "",
        escape_latex(text),
    )
    assert not set(left) & set("\\^~$%#&_{}[]") and left.isprintable()
    for line in table.markdown().splitlines():
        assert "<" not in line and not re.search(r"(?<!\\)[][`]", line)
    assert "\x1b" not in table.text() + table.markdown() + table.latex() and "\u202e" not in table.text()
    shown = html.parser.HTMLParser()
    shown.handle_starttag = lambda tag, attrs: tags.add(tag)  # type: ignore[method-assign]
    tags: set[str] = set()
    shown.feed(table.html())
    assert tags == {"table", "caption", "thead", "tbody", "tr", "th", "td", "p"}


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_compiles_and_reads_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret.tex").write_text("\\typeout{READ}")
    lines = tuple((text.encode("ascii", "ignore").decode(), "1") for text in HOSTILE)
    body = Table(("", "n"), lines, "^^5cinput secret.tex").latex()
    (tmp_path / "t.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}" + body + "\\end{document}"
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert b"READ" not in done.stdout


def test_data_of_others_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    cli.say("题 \x1b[31m\u202e\x07 \ud800\t|\nnext")
    cli.note("id \x9b2J")
    printed = capsys.readouterr()
    assert printed.out == "题 \\x1b[31m\\u202e\\x07 \\ud800\t|\nnext\n" and printed.err == "id \\x9b2J\n"
