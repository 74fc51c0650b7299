"""A leaderboard as one HTML page: ranking, who cannot be told apart, profiles, facets, how each was asked."""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cmexam_tune.core.schema import Question, Scores
from cmexam_tune.evaluation import breakdowns, comparison
from cmexam_tune.evaluation.breakdowns import Breakdown
from cmexam_tune.evaluation.comparison import RunPair
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.scorers import STANDARD
from cmexam_tune.report.full_report import Published
from cmexam_tune.report.html_page import PageSection, in_both, two_languages
from cmexam_tune.report.identity import Identity
from cmexam_tune.report.option_orders import OptionOrders
from cmexam_tune.report.table import HEADINGS, Table, Text, cell

SIGNIFICANT = 0.05
"""Two systems are told apart where their corrected p is below."""
MOST_VALUES = 40
"""Of a facet with more values the table would be no overview."""
_STYLE = """
h2 { overflow-wrap: anywhere; }
.scroll th:first-child, .scroll td:first-child { min-width: 9em; } .scroll td { white-space: nowrap; }
.scroll th { word-break: keep-all; }
.systems .scroll th, .systems .scroll td { text-align: left; white-space: normal; min-width: 6em; }
"""
_SCRIPT = """
for (const [number, board] of BOARDS.entries()) {
  const [first, second] = ["first", "second"].map(side => byId(`${side}-${number}`));
  if (!first) continue;
  const show = () => {
    const [a, b] = [+first.value, +second.value];
    const pair = board.pairs.find(one => one[0] === Math.min(a, b) && one[1] === Math.max(a, b));
    const sign = a < b ? 1 : -1, p = value => value < 0.0001 ? "< 0.0001" : value.toFixed(4);
    const cells = pair ? [(sign * pair[2]).toFixed(2), p(pair[3]), p(pair[4])] : ["–", "–", "–"];
    cells.forEach((text, i) => { byId(`pair-${number}-${i}`).textContent = text; });
  };
  for (const [select, chosen] of [[first, 0], [second, 1]]) {
    board.names.forEach((name, i) => select.append(new Option(name, i, false, i === chosen)));
    select.onchange = show;
  }
  show();
}
startFrame();
"""


@dataclass(frozen=True)
class System:
    """One row: a system whose scores have been recomputed."""

    name: str
    identity: Identity
    graded: Sequence[Graded]
    """By our own scorer."""
    scores: Mapping[str, Scores]
    """By every scorer."""
    by_facet: Mapping[str, Mapping[str, Scores]]
    option_orders: OptionOrders | None
    engine: str
    code: str
    seal: str
    taken_over: int | None
    """Readings that were not recomputed, because the questions' texts were not there; None where they were."""

    def number(self, key: str) -> float | None:
        """Return a score of ours, or of the first scorer that has it (CMB's averages)."""
        for scores in (self.scores[STANDARD], *self.scores.values()):
            if isinstance(value := scores.get(key), int | float):
                return float(value)
        return None


@dataclass(frozen=True)
class Board:
    """Systems that answered the same questions, and what papers print beside them."""

    title: str
    systems: Sequence[System]
    """The best first."""
    published: Sequence[Published] = ()

    # Cached: places, groups, the page and its JSON all ask, and 50 systems are 1,225 tests.
    @cached_property
    def pairs(self) -> tuple[RunPair, ...]:
        """Every two systems, in the order of the ranking."""
        return comparison.pairwise({system.name: system.graded for system in self.systems})

    @cached_property
    def apart(self) -> frozenset[frozenset[str]]:
        """The pairs that can be told apart."""
        return frozenset(frozenset((pair.first, pair.second)) for pair in self.pairs if pair.adjusted_p < SIGNIFICANT)

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """System -> the best and the worst place that the data allow it.

        Only systems that are surely better come before it, and only those that are surely worse after it.
        """
        names = [system.name for system in self.systems]
        places = {}
        for place, name in enumerate(names):
            better = sum(frozenset((name, other)) in self.apart for other in names[:place])
            worse = sum(frozenset((name, other)) in self.apart for other in names[place + 1 :])
            places[name] = (better + 1, len(names) - worse)
        return places

    @property
    def groups(self) -> dict[str, str]:
        """System -> numbers of the groups it belongs to: neighbours in the ranking no two of which are told apart.

        Groups overlap, as in a compact letter display: "cannot be told apart" is not transitive, so that A and B may be
        alike, and B and C, while A and C differ.
        """
        names = [system.name for system in self.systems]
        runs: list[range] = []
        for start in range(len(names)):
            end = start + 1
            while end < len(names) and not any(
                frozenset((names[end], member)) in self.apart for member in names[start:end]
            ):
                end += 1
            # A group that ends no later than the one before it is a part of that one.
            if not runs or end > runs[-1].stop:
                runs.append(range(start, end))
        return {
            name: " ".join(str(number) for number, run in enumerate(runs, 1) if place in run)
            for place, name in enumerate(names)
        }


def board(title: str, systems: Sequence[System], published: Sequence[Published] = ()) -> Board:
    """Return a board with its systems in order of accuracy; systems without one come last."""
    order = comparison.ranking({system.name: system.scores[STANDARD] for system in systems})
    by_name = {system.name: system for system in systems}
    return Board(title, [by_name[name] for name in order], published)


def questions_of(systems: Sequence[System]) -> list[Question]:
    """Return the questions that the systems have in common."""
    return [item.question for item in systems[0].graded] if systems else []


def ranking(board: Board) -> Table:
    """Return the ranking."""
    places, groups = board.places, board.groups
    lines = [_line(system, places[system.name], groups[system.name]) for system in board.systems]
    head = (
        Text("System", "系统"),
        Text("Place", "名次"),
        Text("Group", "组"),
        Text("Accuracy %", "正确率 %"),
        Text("95% interval", "95% 区间"),
        Text("One letter", "单个字母"),
        Text("Several letters", "多个字母"),
        Text("Readable", "可解析"),
        Text("Right in all orders", "各顺序全对"),
        Text("Changed by order", "随顺序改变"),
    )
    note = Text(
        "Place: from the best to the worst that the data allow. Systems that share a group cannot be told apart "
        "(McNemar's exact test of every two, Holm's correction, p ≥ 0.05). Percent; letters by the answer key.",
        "名次：数据所允许的最好与最差名次。同组的系统无法区分（两两 McNemar 精确检验，Holm 校正，p ≥ 0.05）。"
        "数值为百分比；字母数以标准答案为准。",
    )
    return Table(head, tuple(lines), "", note)


def _line(system: System, places: tuple[int, int], groups: str) -> tuple[str, ...]:
    scores, parts, orders = system.scores[STANDARD], breakdowns.partial_credit(system.graded), system.option_orders
    best, worst = places
    return (
        system.name,
        str(best) if best == worst else f"{best}–{worst}",
        groups,
        cell("accuracy", scores["accuracy"]),
        cell("accuracy_ci", scores["accuracy_ci"]),
        *(cell("accuracy", parts[part].accuracy if part in parts else None) for part in ("single", "multiple")),
        f"{scores['answered']}/{scores['n']}",
        *((cell("", orders.all_right), cell("", orders.changed)) if orders else ("-", "-")),
    )


def published_table(published: Published) -> Table:
    """Return the rows that a paper prints."""
    keys = [key for key in (published.metric, "weighted_f1") if any(key in row for row in published.rows)]
    lines = tuple(
        (str(row["name"]), *(_printed(row, key) for key in keys))
        for row in sorted(published.rows, key=lambda row: -row.get(published.metric, -1.0))
    )
    note = Text(
        "As the paper prints them: no outputs were published, so nothing here was recomputed or tested.",
        "论文所印数值：未公布模型输出，因此未经复算和检验。",
    )
    head = (Text("Published row", "论文数据"), *(Text(HEADINGS[key].en, HEADINGS[key].zh) for key in keys))
    return Table(head, lines, published.source, note)


def _printed(row: Mapping[str, object], key: str) -> str:
    if key not in row:
        return "-"
    return str(row[key]) + (f" ± {row[f'{key}_std']}" if f"{key}_std" in row else "")


def profiles(board: Board) -> Table:
    """Return the accuracy of each system by every scorer."""
    names = list(board.systems[0].scores)
    lines = tuple(
        (system.name, *(cell("accuracy", system.scores[name]["accuracy"]) for name in names))
        for system in board.systems
    )
    note = Text(
        "Accuracy in percent of the same outputs, read and counted as each published script does (docs/protocols.md).",
        "同一输出按各公开脚本的判读与计分方式得到的正确率（%），见 docs/protocols.zh.md。",
    )
    return Table((Text("System", "系统"), *names), lines, "", note)


def facets(board: Board) -> list[Table]:
    """Return the accuracy of each system by every facet that is no longer than an overview."""
    tables = {
        system.name: breakdowns.tables(
            system.graded, system.by_facet, lambda items: {"n": len(items), "accuracy": None}
        )
        for system in board.systems
    }
    shown = []
    # All systems answered the same questions, so that the first one's tables have the columns of all.
    for number, first in enumerate(tables[board.systems[0].name]):
        if len(first.cells) > MOST_VALUES:
            continue
        head = tuple(
            Text(f"{group.en} ({group.scores['n']})", f"{group.zh}（{group.scores['n']}）") for group in first.cells
        )
        lines = tuple((name, *_accuracies(by_facet[number], first)) for name, by_facet in tables.items())
        shown.append(Table((Text("System", "系统"), *head), lines, Text(first.facet, first.zh)))
    return shown


def _accuracies(breakdown: Breakdown, columns: Breakdown) -> list[str]:
    """Return a system's accuracies in the order of another one's groups, whose order is by size and then by name."""
    accuracies = {group.name: group.scores["accuracy"] for group in breakdown.cells}
    return [cell("accuracy", accuracies.get(group.name)) for group in columns.cells]


def conditions(board: Board) -> Table:
    """Return how each system was asked, and what was recomputed."""
    head = (
        Text("System", "系统"),
        Text("Model", "模型"),
        Text("Prompt", "提示词"),
        Text("Answering mode", "作答方式"),
        Text("Engine", "推理引擎"),
        Text("Sealed", "封存日期"),
        Text("Code", "代码版本"),
        Text("Recomputed", "复算"),
        Text("Seal", "封条"),
    )
    lines = []
    for system in board.systems:
        identity = system.identity
        model = " + ".join(text for text in (identity.model, identity.adapter) if text) or "-"
        checked = (
            Text("everything", "全部")
            if not system.taken_over
            else Text(
                f"all but {system.taken_over:,} readings that need the questions' texts",
                f"除 {system.taken_over:,} 个需要题目文本的判读外",
            )
        )
        asked = (identity.prompt or "-", identity.mode or "-", system.engine)
        lines.append((system.name, model, *asked, identity.date, system.code, checked, system.seal[:12]))
    return Table(head, tuple(lines))


class ChartBar(NamedTuple):
    """One line of the chart."""

    value: float
    """In percent."""
    kind: str
    """`own` or `published`: its class in the page's style."""
    label: str
    """HTML."""
    interval: Sequence[float] | None
    """Low and high end in percent; None where no outputs are known."""


def chart(board: Board, metric: str, rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return bars of systems and published rows by one metric, the longest first."""
    bars = []
    for system in board.systems:
        if (value := system.number(metric)) is not None:
            interval = system.scores[STANDARD]["accuracy_ci"] if metric == "accuracy" else None
            known = interval if isinstance(interval, list) else None
            bars.append(ChartBar(value, "own", html.escape(system.name), known))
    mark = in_both(" (published)", "（论文）")
    bars += [
        ChartBar(row[metric], "published", html.escape(str(row["name"])) + mark, None)
        for row in rows
        if row.get(metric) is not None
    ]
    if not bars:
        return ""
    # The axis ends at the next 20% above all that is drawn: the bars of weak systems fill it, too.
    highest = max(end for bar in bars for end in (bar.value, *(bar.interval or ())))
    top = min(100, 20 * math.ceil(max(10, highest) / 20))
    lines = "".join(_bar(bar, top) for bar in sorted(bars, key=lambda bar: -bar.value))
    ticks = "".join(f'<i style="left:{25 * i}%">{top * i / 4:g}</i>' for i in range(5))
    axis = f'<div class="bar axis"><span class="label"></span><span class="track">{ticks}</span><span></span></div>'
    return f'<h3>{in_both(HEADINGS[metric].en, HEADINGS[metric].zh)}</h3><div class="bars">{lines}{axis}</div>'


def _bar(bar: ChartBar, top: float) -> str:
    whisker = ""
    if bar.interval:
        low, high = bar.interval
        whisker = f'<i class="whisker" style="left:{100 * low / top:.2f}%;width:{100 * (high - low) / top:.2f}%"></i>'
    return (
        f'<div class="bar {bar.kind}"><span class="label">{bar.label}</span><span class="track">'
        f'<i class="fill" style="width:{100 * bar.value / top:.2f}%"></i>{whisker}</span>'
        f'<span class="value">{bar.value:.1f}</span></div>'
    )


def page(boards: Sequence[Board]) -> str:
    """Return index.html."""
    sections = []
    for number, shown in enumerate(boards):
        for key, en, zh, part in _PARTS:
            if body := part(shown, number):
                about = f" · {shown.title}" if len(boards) > 1 else ""
                sections.append(PageSection(f"{key}-{number}", en + about, zh + about, body))
    data = [{"names": [system.name for system in shown.systems], "pairs": _indexed(shown)} for shown in boards]
    # A name may hold "</script>": no < of the data reaches the HTML parser.
    script = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return two_languages("Leaderboard", "排行榜", sections, f"const BOARDS = {script};\n{_SCRIPT}", _STYLE)


def _indexed(board: Board) -> list[list[float]]:
    """Return [place, place, difference, p, corrected p] of each pair; pairs are many, and names would be most of it."""
    place = {system.name: number for number, system in enumerate(board.systems)}
    return [
        [
            *(place[pair.first], place[pair.second]),
            *(round(pair.difference, 4), round(pair.p_value, 6), round(pair.adjusted_p, 6)),
        ]
        for pair in board.pairs
    ]


def _ranking(board: Board, number: int) -> str:
    parts = []
    if board.systems:
        systems, n = len(board.systems), len(board.systems[0].graded)
        count = in_both(
            f"{systems} system{'s' * (systems > 1)}, {n:,} questions ({board.title}).",
            f"{systems} 个系统，{n:,} 题（{board.title}）。",
        )
        parts.append(f"<p>{count}</p>")
    by_metric: dict[str, list[Mapping[str, Any]]] = {"accuracy": []}
    for published in board.published:
        by_metric.setdefault(published.metric, []).extend(published.rows)
    parts += [chart(board, metric, rows) for metric, rows in by_metric.items()]
    parts += [ranking(board).html(two_languages=True)] if board.systems else []
    parts += [published_table(published).html(two_languages=True) for published in board.published]
    return "".join(parts)


def _profiles(board: Board, number: int) -> str:
    return profiles(board).html(two_languages=True) if board.systems else ""


def _facets(board: Board, number: int) -> str:
    if not board.systems:
        return ""
    return "".join(
        f"<details><summary>{in_both(table.title, table.title.zh if isinstance(table.title, Text) else table.title)}"
        f"</summary>{Table(table.head, table.lines).html(two_languages=True)}</details>"
        for table in facets(board)
    )


def _pairs(board: Board, number: int) -> str:
    if len(board.systems) < 2:
        return ""
    head = "".join(
        f"<th>{in_both(en, zh)}</th>"
        for en, zh in (
            ("Accuracy, B − A", "正确率，B − A"),
            ("p (McNemar)", "p（McNemar）"),
            ("p, Holm", "p（Holm 校正）"),
        )
    )
    cells = "".join(f'<td id="pair-{number}-{i}"></td>' for i in range(3))
    return (
        f'<div class="tools">A <select id="first-{number}" aria-label="A"></select> → B '
        f'<select id="second-{number}" aria-label="B"></select></div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody><tr>{cells}</tr></tbody></table></div>'
    )


def _conditions(board: Board, number: int) -> str:
    return f'<div class="systems">{conditions(board).html(two_languages=True)}</div>' if board.systems else ""


_PARTS: tuple[tuple[str, str, str, Callable[[Board, int], str]], ...] = (
    ("ranking", "Ranking", "排名", _ranking),
    ("pairs", "Two systems", "两两比较", _pairs),
    ("profiles", "Profiles", "评分规则", _profiles),
    ("facets", "Facets", "分类", _facets),
    ("systems", "Systems", "各系统", _conditions),
)


def numbers(boards: Sequence[Board]) -> list[dict[str, object]]:
    """Return leaderboard.json: everything that the page shows, as numbers."""
    return [
        {
            "questions": shown.title,
            "systems": [
                {
                    "name": system.name,
                    "seal": system.seal,
                    "places": list(shown.places[system.name]),
                    "groups": shown.groups[system.name].split(),
                    "identity": asdict(system.identity),
                    "engine": system.engine,
                    "code": system.code,
                    "taken_over": system.taken_over,
                    "profiles": system.scores,
                    "by_facet": system.by_facet,
                    "partial_credit": {
                        part: asdict(credit) for part, credit in breakdowns.partial_credit(system.graded).items()
                    },
                    "option_orders": asdict(system.option_orders) if system.option_orders else None,
                }
                for system in shown.systems
            ],
            "pairs": [asdict(pair) for pair in shown.pairs],
            "published": [{"source": paper.source, "rows": paper.rows} for paper in shown.published],
        }
        for shown in boards
    ]
