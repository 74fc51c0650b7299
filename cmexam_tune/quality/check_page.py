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
from cmexam_tune.report.table import Table

SHOWN = 200
"""Pairs and findings of one kind that the page shows; the files beside it have all."""
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --mark: #f5c54266; }
body { font: 15px/1.6 system-ui, "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; margin: 0 auto;
  max-width: 1180px; padding: 20px; }
table { border-collapse: collapse; margin: 12px 0; max-width: 100%; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: 4px 12px;
  text-align: right; } td:first-child, th:first-child { text-align: left; }
caption { text-align: left; font-weight: 600; white-space: nowrap; }
details { margin: 14px 0; } summary { cursor: pointer; font-weight: 600; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 4px 24px;
  border-top: 1px solid var(--line); padding: 8px 0; }
.pair p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; } .soft { opacity: .65; font-size: 13px; }
.alone { display: block; max-width: 50em; }
mark { background: var(--mark); color: inherit; border-radius: 2px; }
@media (max-width: 700px) { body { padding: 12px; } h1 { font-size: 24px; } .pair { grid-template-columns: 1fr;
  gap: 10px; } table { display: block; }
  caption { white-space: normal; } td, th { padding: 4px 7px; font-size: 14px; } }
"""
Lines = Mapping[tuple[str, int], Question]


def tables(result: Checked) -> list[Table]:
    """Return the summary: files, pairs, findings, answer letters."""
    drops = {name: len(lines) for name, lines in result.dropped.items()}
    files = [(name, f"{n:,}", f"{drops[name]:,}", f"{n - drops[name]:,}") for name, n in result.questions.items()]
    files += [(f"against: {name}", f"{n:,}", "", "") for name, n in result.against.items()]
    pairs = [(PAIRS[r], f"{(c := result.count(r))['within']:,}", f"{c['against']:,}") for r in PAIRS]
    counts = Counter(one.finding for one in result.findings)
    single = [(text, f"{counts[name]:,}") for name, text in SINGLE.items()]
    return [
        Table(("File", "questions", "dropped", "clean"), tuple(files), "Files"),
        Table(("Pairs", "within these files", "with files held against"), tuple(pairs), "Overlap"),
        Table(("Finding", "questions"), tuple(single), "Single questions"),
        *_letters(result),
    ]


def _letters(result: Checked) -> list[Table]:
    found = []
    for name, rows in result.letters.items():
        for row in rows:
            counts = row["counts"]
            total = sum(counts.values())
            shares = tuple(f"{count / total:.1%}" for count in counts.values())
            title = f"{name}: answer letters of {total:,} questions with {row['options']} options and one right letter"
            note = f"Chi-square test against equal shares: p = {row['p']:.2g}."
            found.append(Table(("Answer", *counts), (("share", *shares),), title, note))
    return found


def markdown(result: Checked) -> str:
    """Return check.md: the summary, and every finding that is rarer than the page's limit."""
    by_kind = _by_kind(result.findings)
    lists = [
        f"## {SINGLE[kind]} ({len(found):,})\n\n"
        + Table(("question", "line", "seen"), tuple((f"{o.file}: {o.id}", str(o.line), o.seen) for o in found[:SHOWN]))
        .markdown()
        for kind, found in by_kind.items()
    ]  # fmt: skip
    return "\n".join(["# Check of question files\n", *(table.markdown() for table in tables(result)), *lists])


def page(result: Checked, paths: Mapping[str, Path]) -> str:
    """Return check.html; the questions that it shows are read again from `paths`."""
    shown = {reason: [one for one in result.overlaps if one.reason == reason][:SHOWN] for reason in PAIRS}
    by_kind = {kind: found[:SHOWN] for kind, found in _by_kind(result.findings).items()}
    wanted = [(one.file, one.line) for found in by_kind.values() for one in found if one.finding != "unreadable"]
    for pairs in shown.values():
        wanted += [place for one in pairs for place in ((one.file, one.line), (one.other_file, one.other_line))]
    lines = _read(wanted, paths)
    parts = [table.html() for table in tables(result)]
    for reason, pairs in shown.items():
        total = sum(result.count(reason).values())
        parts.append(_section(PAIRS[reason], total, [_pair(one, lines) for one in pairs]))
    for kind, found in by_kind.items():
        total = sum(one.finding == kind for one in result.findings)
        parts.append(_section(SINGLE[kind], total, [_finding(one, lines) for one in found]))
    title = "Check of question files"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><h1>{title}</h1>{''.join(parts)}</html>\n"


def _by_kind(found: Sequence[Finding]) -> dict[str, list[Finding]]:
    kinds = defaultdict(list)
    for one in found:
        kinds[one.finding].append(one)
    return {kind: kinds[kind] for kind in SINGLE if kind in kinds}


def _read(wanted: Sequence[tuple[str, int]], paths: Mapping[str, Path]) -> Lines:
    lines: dict[tuple[str, int], Question] = {}
    for name in {name for name, _ in wanted}:
        numbers = {number for other, number in wanted if other == name}
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


def _pair(one: Overlap, lines: Lines) -> str:
    a, b = lines[one.file, one.line], lines[one.other_file, one.other_line]
    left, right = _marked(_text(a), _text(b))
    heads = (_place(one.file, one.id), f"{_place(one.other_file, one.other_id)}, Jaccard {one.jaccard:.2f}")
    sides = [
        f"<div><p class=soft>{html.escape(head)}</p><p>{text}</p></div>"
        for head, text in zip(heads, (left, right), strict=True)
    ]
    return f"<div class=pair>{''.join(sides)}</div>"


def _place(file: str, name: str) -> str:
    return name if name.startswith(f"{file}:") else f"{file}: {name}"


def _finding(one: Finding, lines: Lines) -> str:
    question = lines.get((one.file, one.line))
    text = f"{_text(question)}\nExplanation: {question.explanation or 'none'}" if question else ""
    head = f"{_place(one.file, one.id)}, line {one.line}. Seen: {one.seen}"
    return f'<div class="pair alone"><p class=soft>{html.escape(head)}</p><p>{html.escape(text)}</p></div>'


def _text(question: Question) -> str:
    options = "\n".join(f"{letter} {text}" for letter, text in question.options.items())
    return f"{question.stem}\n{options}\nAnswer: {question.answer or 'not published'}"


def _marked(a: str, b: str) -> tuple[str, str]:
    """Return both texts as HTML, with what the other does not have marked."""
    left, right = [], []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        one, other = html.escape(a[a0:a1]), html.escape(b[b0:b1])
        left.append(one if tag == "equal" or not one else f"<mark>{one}</mark>")
        right.append(other if tag == "equal" or not other else f"<mark>{other}</mark>")
    return "".join(left), "".join(right)
