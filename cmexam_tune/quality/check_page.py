"""What a check found, as Markdown and as one HTML page in two languages with the pairs side by side."""

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
from cmexam_tune.quality.wrong_keys import Suspect
from cmexam_tune.report.html_page import PageSection, in_both, two_languages
from cmexam_tune.report.table import Table, Text

SHOWN = 200
"""Pairs and findings of one kind that the page shows; the files beside it have all."""
N = Text("questions", "题数")
Lines = Mapping[tuple[str, int], Question]


def tables(result: Checked) -> list[Table]:
    """Return the summary: files, pairs, findings, answer letters."""
    dropped = {name: len(lines) for name, lines in result.dropped.items()}
    files = [(name, f"{n:,}", f"{dropped[name]:,}", f"{n - dropped[name]:,}") for name, n in result.questions.items()]
    files += [(Text(f"against: {name}", f"对照：{name}"), f"{n:,}", "", "") for name, n in result.against.items()]
    pairs = []
    for reason, meaning in PAIRS.items():
        count = result.count(reason)
        pairs.append((meaning, f"{count['within']:,}", f"{count['against']:,}"))
    counts = Counter(finding.finding for finding in result.findings)
    single = [(text, f"{counts[name]:,}") for name, text in SINGLE.items()]
    return [
        Table(
            (Text("File", "文件"), N, Text("dropped", "剔除"), Text("clean", "保留")),
            tuple(files),
            Text("Files", "文件"),
        ),
        Table(
            (
                Text("Pairs", "题对"),
                Text("within these files", "这些文件之内"),
                Text("with files held against", "与对照文件之间"),
            ),
            tuple(pairs),
            Text("Overlap", "重复与重叠"),
        ),
        Table((Text("Finding", "发现"), N), tuple(single), Text("Single questions", "单题问题")),
        *_letters(result),
        *([_suspects(result.suspects)] if result.suspects else []),
    ]


def _suspects(suspects: Sequence[Suspect]) -> Table:
    lines = tuple(
        (suspect.question_id, suspect.other or "-", f"{suspect.odds:+.1f}", "; ".join(suspect.signs))
        for suspect in suspects[:SHOWN]
    )
    note = Text(
        "For a person to judge, in keys.review.xlsx: models that learnt from the same texts share their errors.",
        "由人在 keys.review.xlsx 中判断：学过同样文本的模型会犯同样的错。",
    )
    title = Text(f"Keys that may be wrong ({len(suspects):,})", f"可能有误的标准答案（{len(suspects):,}）")
    head = (
        Text("question", "题目"),
        Text("other answer", "另一答案"),
        Text("log10 odds", "对数几率"),
        Text("signs", "迹象"),
    )
    return Table(head, lines, title, note)


def _letters(result: Checked) -> list[Table]:
    letter_tables = []
    for name, rows in result.letters.items():
        for row in rows:
            counts = row["counts"]
            total = sum(counts.values())
            shares = tuple(f"{count / total:.1%}" for count in counts.values())
            title = Text(
                f"{name}: answer letters of {total:,} questions with {row['options']} options and one right letter",
                f"{name}：{total:,} 道 {row['options']} 个选项的单选题，各选项作答案的比例",
            )
            note = Text(
                f"Chi-square test against equal shares: p = {row['p']:.2g}.",
                f"与均匀分布的卡方检验：p = {row['p']:.2g}。",
            )
            share = ((Text("share", "占比"), *shares),)
            letter_tables.append(Table((Text("Answer", "答案"), *counts), share, title, note))
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
    summary = "".join(table.html(two_languages=True) for table in tables(result))
    sections = [PageSection("summary", "Summary", "概览", summary)]
    for reason, pairs in shown.items():
        total = sum(result.count(reason).values())
        sections += _section(reason, PAIRS[reason], total, [_pair(pair, lines) for pair in pairs])
    for kind, findings in by_kind.items():
        total = sum(finding.finding == kind for finding in result.findings)
        sections += _section(kind, SINGLE[kind], total, [_finding(finding, lines) for finding in findings])
    return two_languages("Check of question files", "题目文件检查", sections)


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


def _section(name: str, title: Text, total: int, entries: Sequence[str]) -> list[PageSection]:
    """Return the section of one kind of finding, none where nothing was found."""
    if not total:
        return []
    opened = " open" if total <= SHOWN else ""
    shown = in_both(f"{total:,} found, {len(entries)} shown", f"共 {total:,} 处，显示 {len(entries)} 处")
    body = f"<details{opened}><summary>{shown}</summary>{''.join(entries)}</details>"
    return [PageSection(name, title, title.zh, body)]


def _pair(pair: Overlap, lines: Lines) -> str:
    question, other = lines[pair.file, pair.line], lines[pair.other_file, pair.other_line]
    left, right = _marked(_text(question), _text(other))
    heads = (_place(pair.file, pair.id), f"{_place(pair.other_file, pair.other_id)}, Jaccard {pair.jaccard:.2f}")
    sides = [
        f"<div><h4>{html.escape(head)}</h4><pre>{text}</pre></div>"
        for head, text in zip(heads, (left, right), strict=True)
    ]
    return f'<article class="card unknown"><div class="two">{"".join(sides)}</div></article>'


def _place(file: str, name: str) -> str:
    return name if name.startswith(f"{file}:") else f"{file}: {name}"


def _finding(finding: Finding, lines: Lines) -> str:
    question = lines.get((finding.file, finding.line))
    text = f"{_text(question)}\n解析：{question.explanation or '-'}" if question else ""
    place = html.escape(_place(finding.file, finding.id))
    where = in_both(f"line {finding.line}", f"第 {finding.line} 行")
    seen = in_both(f"Seen: {finding.seen}", f"发现：{finding.seen}")
    return (
        f'<article class="card unknown"><div class="two"><div><h4>{place}, {where}</h4><p>{seen}</p>'
        f"<pre>{html.escape(text)}</pre></div></div></article>"
    )


def _text(question: Question) -> str:
    return f"{question.stem}\n{question.option_lines}\n答案：{question.answer or '未公布'}"


def _marked(a: str, b: str) -> tuple[str, str]:
    """Return both texts as HTML, with what the other does not have marked."""
    left, right = [], []
    # By default difflib does not match characters that are more than 1% of a text of 200 or longer.
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        in_a, in_b = html.escape(a[a0:a1]), html.escape(b[b0:b1])
        left.append(in_a if tag == "equal" or not in_a else f"<mark>{in_a}</mark>")
        right.append(in_b if tag == "equal" or not in_b else f"<mark>{in_b}</mark>")
    return "".join(left), "".join(right)
