"""The report as one HTML file that needs no network: data as JSON, drawn by the page's own script.

The page holds every question and output: an index that filters are answered from, and texts in blocks opened on demand.
Both are gzip in base64, which every current browser unpacks by itself; a few questions stay as they are.
"""

import base64
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import combinations

from cmexam_tune.core.schema import IN_CARDS, Prediction
from cmexam_tune.evaluation import significance
from cmexam_tune.evaluation.breakdowns import conflicts
from cmexam_tune.evaluation.comparison import ScoreDecomposition
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.report import result_tables, sections
from cmexam_tune.report.curves import FIGURES
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.html_page import ASSETS, html_page
from cmexam_tune.report.table import COLUMNS, HEADINGS, Heading

SCRIPTS = (
    *("frame", "base", "charts", "store"),
    *("headline", "compared", "runs", "profiles", "facets", "length", "training", "confusion", "explanations"),
    *("computed", "questions", "method", "main"),
)
"""The page's script, in the order in which its files are joined; each draws its own section."""
BLOCK = 200
"""Questions in a block."""
PLAIN = 500
"""So many questions need no packing."""
BUDGET = 24 << 20
"""Bytes that all blocks may take; a page of 30 MB still opens in two seconds."""
_SMALLER = 0.45
"""Base64 of gzip over UTF-8, for Chinese (CMExam: 0.38), with a margin."""
LIMITS = ((4000, 4000), (4000, 600), (1500, 300), (600, 150), (200, 80), (80, 40))
"""Characters shown of a text of a wrong and of a right answer: the first that keeps the budget."""
FACTS = {field.name: field.metadata[IN_CARDS] for field in fields(Prediction) if IN_CARDS in field.metadata}
"""Field of a prediction -> its name in the cards, in English and Chinese."""
FACT = 200
"""Characters shown of a field."""
Runs = Mapping[str, Sequence[Graded]]
"""Name -> graded questions of every run; all of the same questions, the first is what the report is about."""


def page(report: FullReport, runs: Runs) -> str:
    """Return report.html.

    Args:
        report: What is shown.
        runs: Every run that can be looked at, for the cards.
    """
    facets = list(report.by_facet)
    # These the page shows as tables and bars, and needs no numbers of.
    drawn = {section.key for section in sections.SECTIONS if section.title} & set(report.computed)
    data = {
        **{key: value for key, value in report.to_dict().items() if key not in {"by_facet", *drawn}},
        "headings": {
            **{key: asdict(heading) for key, heading in HEADINGS.items()},
            **{key: asdict(Heading(key, metric.en, metric.zh)) for key, metric in report.metrics.items()},
        },
        "columns": [*COLUMNS, *report.metrics],
        "sections": [
            section.page(report.computed[section.key]) for section in sections.SECTIONS if section.key in drawn
        ],
        "facts": list(FACTS.values()),
        "figures": [figure.page() for figure in FIGURES],
        "facets": facets,
        "run_names": list(runs),
        "flips_of": _pairs(runs),
        "index": index(runs, facets, report.bridges.values()),
        "block": BLOCK,
        "blocks": blocks(runs),
    }
    script = "\n".join((ASSETS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "NOSCRIPT": html.escape(result_tables.markdown(report)),
        "SCRIPT": f'"use strict";\n{script}',
        # Output of a model may hold anything, "</script>" too: no < of the data reaches the HTML parser.
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    before, *rest = template.split("{{")
    # In one pass: what a part holds is never taken for the name of another.
    body = before + "".join(parts[name] + tail for name, tail in (piece.split("}}", 1) for piece in rest))
    style = (ASSETS / "report.css").read_text(encoding="utf-8")
    title = f"{report.name} · Exam report 考试评测报告"
    return html_page(title, body, style=style, root='lang="en" data-lang="en"')


def _pairs(runs: Mapping[str, Sequence[Graded]]) -> list[dict[str, object]]:
    """Return for each two runs how many questions only one of them answered right, and McNemar's exact p."""
    right = [{item.question.id for item in graded if item.correct} for graded in runs.values()]
    pairs = []
    for first, second in combinations(range(len(right)), 2):
        only = len(right[first] - right[second]), len(right[second] - right[first])
        pairs.append({"runs": [first, second], "only": only, "p": significance.mcnemar(*only)})
    return pairs


def index(runs: Runs, facets: Sequence[str], decompositions: Iterable[ScoreDecomposition]) -> object:
    """Return ids, right and given answers, facet values and explanation scores of all questions, packed.

    Args:
        runs: Every run.
        facets: Names of the facets.
        decompositions: What other scorers read in the first run.
    """
    first = next(iter(runs.values()))
    values = [sorted({item.question.facets.get(facet, "") for item in first}) for facet in facets]
    rank = {item.question.id: i for i, item in enumerate(first)}
    places = [{value: i for i, value in enumerate(facet_values)} for facet_values in values]
    return _pack(
        {
            "ids": [item.question.id for item in first],
            "gold": [item.question.answer for item in first],
            "answers": [[item.answer for item in graded] for graded in runs.values()],
            "values": values,
            "of": [
                [place[item.question.facets.get(facet, "")] for item in first]
                for facet, place in zip(facets, places, strict=True)
            ],
            # A character for each question; JSON's true and false would take five times as much.
            "right": ["".join(str(int(item.correct)) for item in graded) for graded in runs.values()],
            "rougeL": [None if item.text is None else round(100 * item.text.rougeL.f, 1) for item in first],
            "conflicts": [i for i, item in enumerate(first) if conflicts(item)],
            "readings": {
                decomposition.profile: {rank[item.question_id]: item.theirs for item in decomposition.differing}
                for decomposition in decompositions
            },
        },
        len(first),
    )


def blocks(runs: Runs) -> list[object]:
    """Return stem, options, reference explanation and what each run wrote, packed by `BLOCK` questions."""
    items = list(zip(*runs.values(), strict=True))
    wrong, right = _limits(items)
    shown = [_item(group, wrong, right) for group in items]
    return [_pack(shown[at : at + BLOCK], len(items)) for at in range(0, len(items), BLOCK)]


def _limits(items: Sequence[Sequence[Graded]]) -> tuple[int, int]:
    """Return how many characters are shown of the texts of a wrong and of a right answer."""
    lengths = [(group[0].correct, [len(text) for text in _texts(group)], _fixed(group)) for group in items]
    for wrong, right in LIMITS:
        size = sum(
            fixed + 3 * sum(min(length, right if correct else wrong) for length in texts)
            for correct, texts, fixed in lengths
        )
        if size * _SMALLER <= BUDGET:
            break
    return wrong, right


def _fixed(group: Sequence[Graded]) -> int:
    """Return about how many bytes of a card no limit shortens; a Chinese character takes three in UTF-8."""
    question = group[0].question
    facts = sum(len(text) for item in group for _, text in _facts(item.prediction))
    return 3 * (len(question.stem) + sum(map(len, question.options.values())) + facts) + 40


def _texts(group: Sequence[Graded]) -> list[str]:
    return [group[0].question.explanation or "", *(item.prediction.text for item in group)]


def _item(group: Sequence[Graded], wrong: int, right: int) -> list[object]:
    """Return what a card shows of one question: stem, options, reference, output and facts of each run."""
    question, limit = group[0].question, right if group[0].correct else wrong
    reference, *outputs = (_cut(text, limit) for text in _texts(group))
    facts = [_facts(item.prediction) for item in group]
    return [question.stem, list(question.options.items()), reference, outputs, facts]


def _facts(prediction: Prediction) -> list[tuple[int, str]]:
    """Return the place in `FACTS` and the text of each field that says something."""
    values = enumerate(getattr(prediction, name) for name in FACTS)
    return [(number, _cut(_plain(value), FACT)) for number, value in values if value not in (None, ())]


def _plain(value: object) -> str:
    """Return a field's value in a line; numbers by name stand from the largest down."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:.4g}" for name, number in sorted(value.items(), key=lambda pair: -pair[1]))
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters in all)"


def _pack(value: object, count: int) -> object:
    """Return a value as gzip in base64; in a page of few questions as it is, for whoever reads its source."""
    if count <= PLAIN:
        return value
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate of a broken output is shown as a question mark. Without a time the same report is the same file.
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")
