"""What a check found, as Markdown and as one HTML page with the pairs side by side."""

import difflib
import html
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.quality.findings import (
    PAIRS,
    SINGLE,
    Checked,
    Finding,
    Overlap,
)
from cmexam_tune.report.html_page import html_page
from cmexam_tune.report.table import Table

SHOWN = 200
"""Pairs and findings of one kind that the page shows; the files beside it have all."""
_STYLE = """
details { margin: 14px 0; } summary { font-weight: 600; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 24px;
  border-top: 1px solid var(--line); padding: 8px 0; }
.pair p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; } .pair .soft { font-size: 13px; }
.alone { display: block; max-width: 50em; }
@media (max-width: 700px) { .pair { grid-template-columns: 1fr; gap: 10px; }
  table { display: block; overflow-x: auto; } }
"""
Lines = Mapping[tuple[str, int], Question]


def tables(result: Checked) -> list[Table]:
    """Return the summary: files, pairs, findings, answer letters."""
    dropped = {name: len(lines) for name, lines in result.dropped.items()}
    files = [(name, f"{n:,}", f"{dropped[name]:,}", f"{n - dropped[name]:,}") for name, n in result.questions.items()]
    files += [(f"against: {name}", f"{n:,}", "", "") for name, n in result.against.items()]
    pairs = []
    for reason, meaning in PAIRS.items():
        count = result.count(reason)
        pairs.append((meaning, f"{count['within']:,}", f"{count['against']:,}"))
    counts = Counter(finding.finding for finding in result.findings)
    single = [(text, f"{counts[name]:,}") for name, text in SINGLE.items()]
    return [
        Table(("File", "questions", "dropped", "clean"), tuple(files), "Files"),
        Table(("Pairs", "within these files", "with files held against"), tuple(pairs), "Overlap"),
        Table(("Finding", "questions"), tuple(single), "Single questions"),
        *_letters(result),
    ]


def _letters(result: Checked) -> list[Table]:
    letter_tables = []
    for name, rows in result.letters.items():
        for row in rows:
            counts = row["counts"]
            total = sum(counts.values())
            shares = tuple(f"{count / total:.1%}" for count in counts.values())
            title = f"{name}: answer letters of {total:,} questions with {row['options']} options and one right letter"
            note = f"Chi-square test against equal shares: p = {row['p']:.2g}."
            letter_tables.append(Table(("Answer", *counts), (("share", *shares),), title, note))
    return letter_tables


def markdown(result: Checked) -> str:
    """Return check.md: the summary, and every finding that is rarer than the page's limit."""
    lists = []
    for kind, findings in _by_kind(result.findings).items():
        lines = tuple(
            (f"{finding.file}: {finding.id}", str(finding.line), finding.seen) for finding in findings[:SHOWN]
        )
        table = Table(("question", "line", "seen"), lines)
        lists.append(f"## {SINGLE[kind]} ({len(findings):,})\n\n{table.markdown()}")
    return "\n".join(["# Check of question files\n", *(table.markdown() for table in tables(result)), *lists])


def page(result: Checked, paths: Mapping[str, Path]) -> str:
    """Return check.html; the questions that it shows are read again from `paths`."""
    shown = {reason: [pair for pair in result.overlaps if pair.reason == reason][:SHOWN] for reason in PAIRS}
    by_kind = {kind: findings[:SHOWN] for kind, findings in _by_kind(result.findings).items()}
    places = [(seen.file, seen.line) for kind, findings in by_kind.items() if kind != "unreadable" for seen in findings]
    for pairs in shown.values():
        places += [(pair.file, pair.line) for pair in pairs]
        places += [(pair.other_file, pair.other_line) for pair in pairs]
    lines = _read(places, paths)
    parts = [table.html() for table in tables(result)]
    for reason, pairs in shown.items():
        total = sum(result.count(reason).values())
        parts.append(_section(PAIRS[reason], total, [_pair(pair, lines) for pair in pairs]))
    for kind, findings in by_kind.items():
        total = sum(finding.finding == kind for finding in result.findings)
        parts.append(_section(SINGLE[kind], total, [_finding(finding, lines) for finding in findings]))
    title = "Check of question files"
    return html_page(title, f"<main><h1>{title}</h1>{''.join(parts)}</main>", style=_STYLE)


def _by_kind(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    kinds = defaultdict(list)
    for finding in findings:
        kinds[finding.finding].append(finding)
    return {kind: kinds[kind] for kind in SINGLE if kind in kinds}


def _read(places: Sequence[tuple[str, int]], paths: Mapping[str, Path]) -> Lines:
    lines: dict[tuple[str, int], Question] = {}
    for name in {name for name, _ in places}:
        numbers = {number for other, number in places if other == name}
        for number, value in jsonl.read_objects(paths[name]):
            if number in numbers:
                lines[name, number] = jsonl.from_object(Question, value, f"{paths[name]}:{number}")
    return lines


def _section(title: str, total: int, entries: Sequence[str]) -> str:
    if not total:
        return ""
    more = f", the first {len(entries)} shown" if total > len(entries) else ""
    opened = " open" if total <= SHOWN else ""
    return f"<details{opened}><summary>{html.escape(title)} ({total:,}{more})</summary>{''.join(entries)}</details>"


def _pair(pair: Overlap, lines: Lines) -> str:
    question, other = lines[pair.file, pair.line], lines[pair.other_file, pair.other_line]
    left, right = _marked(_text(question), _text(other))
    heads = (_place(pair.file, pair.id), f"{_place(pair.other_file, pair.other_id)}, Jaccard {pair.jaccard:.2f}")
    sides = [
        f"<div><p class=soft>{html.escape(head)}</p><p>{text}</p></div>"
        for head, text in zip(heads, (left, right), strict=True)
    ]
    return f"<div class=pair>{''.join(sides)}</div>"


def _place(file: str, name: str) -> str:
    return name if name.startswith(f"{file}:") else f"{file}: {name}"


def _finding(finding: Finding, lines: Lines) -> str:
    question = lines.get((finding.file, finding.line))
    text = f"{_text(question)}\nExplanation: {question.explanation or 'none'}" if question else ""
    head = f"{_place(finding.file, finding.id)}, line {finding.line}. Seen: {finding.seen}"
    return f'<div class="pair alone"><p class=soft>{html.escape(head)}</p><p>{html.escape(text)}</p></div>'


def _text(question: Question) -> str:
    options = "\n".join(f"{letter} {text}" for letter, text in question.options.items())
    return f"{question.stem}\n{options}\nAnswer: {question.answer or 'not published'}"


def _marked(a: str, b: str) -> tuple[str, str]:
    """Return both texts as HTML, with what the other does not have marked."""
    left, right = [], []
    # By default difflib does not match characters that are more than 1% of a text of 200 or longer.
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        in_a, in_b = html.escape(a[a0:a1]), html.escape(b[b0:b1])
        left.append(in_a if tag == "equal" or not in_a else f"<mark>{in_a}</mark>")
        right.append(in_b if tag == "equal" or not in_b else f"<mark>{in_b}</mark>")
    return "".join(left), "".join(right)
