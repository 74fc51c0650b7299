"""Table 2 of the CMExam paper for any question files.

The paper's 'tokens' are characters, its vocabulary is the set of characters of questions and explanations together,
a missing answer or explanation has length 0, quartiles are interpolated linearly, and rows that preprocessing had to
drop are counted. Those rows are not in a questions file: they are read from the `<stem>.report.json` beside it,
provided that it was written together with that questions file (checked by its SHA-256).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from statistics import quantiles
from typing import Any

from cmexam_tune.core import cli, documents, jsonl
from cmexam_tune.core.cli import File
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.files import sha256
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.significance import smallest_difference
from cmexam_tune.report.table import Table

FIELDS = ("question", "answer", "explanation")
_SUFFIX = ".questions.jsonl"
DISAGREEMENT = (0.05, 0.1, 0.2, 0.3, 0.4)
"""Shares of the questions that only one of two models answers right: two seeds, two methods, two models."""

EPILOG = """Lengths are in characters; Vocab counts the distinct characters of questions and explanations together.
As in the paper every row of the exam file counts. Rows that preprocess dropped (a question without an answer, say)
are not among the questions, so they are read from DIR/<stem>.report.json beside DIR/<stem>.questions.jsonl; without
that report only the questions in the file are counted. A line on standard error says which rows were added.

example:
  cmexam-tune preprocess cmexam --input data/train.csv data/val.csv --out data/cmexam
  cmexam-tune stats --questions data/cmexam/train.questions.jsonl data/cmexam/val.questions.jsonl
"""


class Tally:
    """Lengths and characters of the questions seen so far; adding two tallies gives that of their union."""

    def __init__(self) -> None:
        self.vocabulary: set[str] = set()
        self.lengths: dict[str, Counter[int]] = {field: Counter() for field in FIELDS}

    def add(self, stem: str, answer: str | None, explanation: str | None) -> None:
        """Count one question."""
        self.vocabulary.update(stem, explanation or "")
        for field, text in zip(FIELDS, (stem, answer, explanation), strict=True):
            self.lengths[field][len(text or "")] += 1

    def update(self, other: "Tally") -> None:
        """Count everything that `other` has counted."""
        self.vocabulary |= other.vocabulary
        for field in FIELDS:
            self.lengths[field].update(other.lengths[field])

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the paper's Table 2."""
        rows: dict[str, object] = {"questions": self.lengths["question"].total(), "vocabulary": len(self.vocabulary)}
        for field, lengths in self.lengths.items():
            low, middle, high = quartiles(lengths)
            rows[field] = {
                "max": max(lengths),
                "mean": sum(length * count for length, count in lengths.items()) / lengths.total(),
                "median": middle,
                "q1": low,
                "q3": high,
            }
        return rows


def quartiles(lengths: Counter[int]) -> tuple[float, float, float]:
    """Return the quartiles of a histogram, by linear interpolation between neighbours (numpy's default)."""
    values = sorted(lengths.elements())
    low, middle, high = quantiles(values * 2 if len(values) == 1 else values, n=4, method="inclusive")
    return low, middle, high


def stats(questions: Sequence[str | Path]) -> dict[str, dict[str, Any]]:
    """Return the numbers of Table 2 for each questions file, and for all together under `Total` if there are several.

    Args:
        questions: files that preprocess wrote.

    Returns:
        Name of the file without `.questions.jsonl` -> `questions`, `vocabulary`, and for each of question, answer
        and explanation `max`, `mean`, `median`, `q1`, `q3` of its length in characters; `dropped_rows` says how many
        rows were added from the preprocess report.

    Raises:
        UserError: a file is missing or empty, or two have the same name.
        DataError: a line is not a question, or there is a broken report beside the file.
    """
    table: dict[str, dict[str, object]] = {}
    total, added_in_all = Tally(), 0
    for path in map(Path, questions):
        name = path.name.removesuffix(_SUFFIX)
        if name in table:
            raise UserError(f"{path}: a second file called {name!r}. Each file is one column, named by it.")
        tally = Tally()
        for question in jsonl.read(path, Question):
            tally.add(question.stem, question.answer, question.explanation)
        added = _add_dropped(path, tally)
        table[name] = {**tally.to_dict(), "dropped_rows": added}
        total.update(tally)
        added_in_all += added
    if len(table) > 1:
        table["Total"] = {**total.to_dict(), "dropped_rows": added_in_all}
    return table


def _add_dropped(path: Path, tally: Tally) -> int:
    """Add the rows that preprocess dropped from the exam file of `path`; return how many."""
    beside = path.with_name(path.name.removesuffix(_SUFFIX) + ".report.json")
    if not path.name.endswith(_SUFFIX) or not beside.exists():
        return 0
    try:
        report = documents.read_json(beside, "report of preprocess")
        items = [(row["stem"], row["answer"], row["explanation"]) for row in report["dropped_items"] if row["stem"]]
        if report["questions_sha256"] != sha256(path):
            cli.note(f"{beside}: belongs to another version of {path.name}, not used.")
            return 0
        for item in items:
            tally.add(*item)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{beside}: not a report of preprocess. Run preprocess again, or move it away.") from None
    if items:
        cli.note(f"{path}: {len(items):,} dropped row(s) of the exam file added, from {beside.name}.")
    return len(items)


def _power(questions: int) -> dict[str, float | None]:
    differences = {share: smallest_difference(questions, share) for share in DISAGREEMENT}
    return {str(share): None if difference is None else 100 * difference for share, difference in differences.items()}


def power_table(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what each file can show: the smallest difference in accuracy that would be found with 80% power."""
    lines = []
    for share in DISAGREEMENT:
        points = [_power(column["questions"])[str(share)] for column in columns.values()]
        lines.append((f"{share:.0%} disagree", *("-" if point is None else f"{point:.2f}" for point in points)))
    title = "Smallest difference of two models, points of accuracy (McNemar's test at 5%, 80% power)"
    return Table(("", *columns), tuple(lines), title)


def as_table(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the numbers in the lines and words of the paper's Table 2."""
    lines = [
        ("Question", *(f"{column['questions']:,}" for column in columns.values())),
        ("Vocab", *(f"{column['vocabulary']:,}" for column in columns.values())),
    ]
    for label, shape in (
        ("Max {} tokens", "{max:,}"),
        ("Avg {} tokens", "{mean:.2f}"),
        ("Median (Q1, Q3) {} tokens", "{median:g} ({q1:g}, {q3:g})"),
    ):
        for field in FIELDS:
            cells = [shape.format(**column[field]) for column in columns.values()]
            lines.append((label.format(field[0].upper()), *cells))
    return Table(("", *columns), tuple(lines))


@cli.program(stats, EPILOG)
def main(*, questions: Sequence[File], json: bool = False, power: bool = False) -> None:
    """Table 2 of the CMExam paper for question files.

    Args:
        json: print JSON.
        power: also the smallest difference of two models that these questions would show with 80% power.
    """
    table = stats(questions)
    if json:
        if power:
            table = {
                name: {**column, "smallest_difference": _power(column["questions"])} for name, column in table.items()
            }
        cli.say(dumps(table, ensure_ascii=False, indent=1))
        return
    cli.say(as_table(table).text())
    if power:
        cli.say(f"\n{power_table(table).text()}")


if __name__ == "__main__":
    cli.run(main)
