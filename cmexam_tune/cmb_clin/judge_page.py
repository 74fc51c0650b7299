"""judge.html: the tables of a judging, and below them every answer with what each judge gave it and wrote."""

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cmexam_tune.cmb_clin.judgements import Judged, Judgement
from cmexam_tune.core.schema import Case, Prediction
from cmexam_tune.prompts import dialogue
from cmexam_tune.report.html_page import PageSection, in_both, two_languages
from cmexam_tune.report.table import Table, Text

SHOWN = 6000
"""Characters of a text that the page shows."""
VARIANTS = {
    "plain": Text("", ""),
    "reversed": Text(" (axes reversed)", "（评分项倒序）"),
    "no_reference": Text(" (no reference)", "（无参考答案）"),
}
ORDERS = {
    "asked": Text("as asked", "按提问顺序"),
    "low": Text("lowest scores first", "得分最低的在前"),
    "apart": Text("judges furthest apart first", "评委分歧最大的在前"),
}
SCRIPT = """
const cards = [...document.querySelectorAll("#answers article")];
const order = byId("order"), search = byId("search");
function arrange() {
  const words = search.value.trim().toLowerCase(), by = order.value;
  const key = card => by === "low" ? +card.dataset.low : by === "apart" ? -card.dataset.apart : +card.dataset.asked;
  const kept = cards.filter(card => !words || card.textContent.toLowerCase().includes(words));
  cards.forEach(card => { card.hidden = !kept.includes(card); });
  kept.sort((a, b) => key(a) - key(b)).forEach(card => card.parentNode.append(card));
  byId("count").textContent = `${kept.length} / ${cards.length}`;
}
order.onchange = search.oninput = arrange;
arrange();
startFrame(() => {
  const language = isChinese() ? "zh" : "en";
  for (const option of order.options) option.textContent = option.dataset[language];
  search.placeholder = search.dataset[language];
});
"""


@dataclass(frozen=True)
class Answered:
    """What was judged."""

    cases: Sequence[Case]
    predictions: Mapping[str, Sequence[Prediction]]
    """Name -> answers."""
    judged: Sequence[Judged]


def page(tables: Sequence[Table], answered: Answered, axes: Sequence[str]) -> str:
    """Return judge.html.

    Args:
        tables: of the result, the scores first.
        answered: what was judged.
        axes: of the rubric, with their Chinese names.
    """
    sections = [
        PageSection(f"table{number}", table.title, getattr(table.title, "zh", table.title), _untitled(table))
        for number, table in enumerate(tables)
    ]
    cards = "".join(_cards(answered, axes))
    options = "".join(
        f'<option value="{name}" data-en="{text}" data-zh="{text.zh}">{text}</option>' for name, text in ORDERS.items()
    )
    tools = (
        f'<div class="tools"><select id="order">{options}</select>'
        '<input id="search" type="search" data-en="search" data-zh="搜索">'
        '<span class="soft" id="count"></span></div>'
    )
    sections.append(PageSection("answers", "Answers", "逐题作答", tools + cards))
    return two_languages("CMB-Clin: judged answers", "CMB-Clin：作答与评分", sections, SCRIPT)


def _untitled(table: Table) -> str:
    return Table(table.head, table.lines, note=table.note).html(two_languages=True)


def _cards(answered: Answered, axes: Sequence[str]) -> Iterator[str]:
    """Yield a card for each turn of each case that anybody answered."""
    texts = {name: {answer.question_id: answer for answer in answers} for name, answers in answered.predictions.items()}
    judgements: dict[tuple[str, str], list[tuple[Judged, Judgement]]] = {}
    for run in answered.judged:
        for judgement in run.judgements:
            judgements.setdefault((run.model, judgement.question_id), []).append((run, judgement))
    place = 0
    for case in answered.cases:
        for number, turn in enumerate(case.turns, 1):
            key = dialogue.key(case, number)
            of_models = {name: judgements.get((name, key), []) for name, by_key in texts.items() if key in by_key}
            if not of_models:
                continue
            place += 1
            means = [[mean for _, mean in _means(judged)] for judged in of_models.values()]
            lowest = min(itertools.chain(*means), default=9)
            spreads = [max(of_judges) - min(of_judges) for of_judges in means if of_judges]
            turns = in_both(f"turn {number} of {len(case.turns)}", f"第 {number} 问，共 {len(case.turns)} 问")
            outputs = "".join(_output(name, texts[name][key], judged, axes) for name, judged in of_models.items())
            yield (
                f'<article class="card unknown" data-asked="{place}" data-low="{lowest:.3f}" '
                f'data-apart="{max(spreads, default=0):.3f}">'
                f'<div class="soft">{html.escape(case.title)} · {turns} · {html.escape(key)}</div>'
                f'<div class="stem">{html.escape(turn.question)}</div>'
                f"<details><summary>{in_both('Case', '病历')}</summary>{_text(case.record)}</details>"
                f'<div class="two"><div><h4>{in_both("Reference answer", "参考答案")}</h4>{_text(turn.answer)}</div>'
                f"{outputs}</div></article>"
            )


def _means(judgements: Sequence[tuple[Judged, Judgement]]) -> Iterator[tuple[str, float]]:
    """Yield each judge and the mean of the axes, of judgements as the rubric says."""
    for run, judgement in judgements:
        if run.variant == "plain" and judgement.scores:
            yield run.judge, fmean(judgement.scores.values())


def _output(name: str, answer: Prediction, judgements: Sequence[tuple[Judged, Judgement]], axes: Sequence[str]) -> str:
    """Return a model's answer, a line of scores for each judge, and the judges' own words."""
    lines, words = [], []
    for run, judgement in judgements:
        variant = VARIANTS[run.variant]
        judge = Text(f"{run.judge}{variant}", f"{run.judge}{variant.zh}")
        if judgement.scores is None:
            state = Text("failed", "请求失败") if judgement.finish == "error" else Text("unreadable", "无法读取")
            lines.append((judge, *("-" for _ in axes), state))
        else:
            scores = [judgement.scores[axis] for axis in axes]
            lines.append((judge, *map(str, scores), f"{fmean(scores):.2f}"))
        words.append(f"<p><b>{in_both(judge, judge.zh)}</b></p>{_text(judgement.text or judgement.reason or '')}")
    head = (Text("judge", "评委"), *axes, Text("mean", "平均"))
    table = Table(head, tuple(lines)).html(two_languages=True) if lines else ""
    comments = f"<details><summary>{in_both('What the judges wrote', '评委原文')}</summary>{''.join(words)}</details>"
    empty = in_both("no answer", "没有作答")
    text = _text(answer.text) if answer.text.strip() else f'<p class="warning">{empty}</p>'
    return f"<div><h4>{html.escape(name)}</h4>{text}{table}{comments if words else ''}</div>"


def _text(text: str) -> str:
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,})"
    return f"<pre>{html.escape(shown)}</pre>"
