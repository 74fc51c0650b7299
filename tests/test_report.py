"""The written report: what it holds, that it is safe and self-contained, and the comparison of runs."""

import base64
import dataclasses
import gzip
import html.parser
import json
import random
import re

import pytest

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import comparison, grading
from cmexam_tune.report import building, page, writing
from cmexam_tune.report.full_report import FullReport
from cmexam_tune.report.papers import published_tables

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{DATA}} {{STYLE}}"


def questions(count=80):
    rng = random.Random(0)
    return [
        Question(
            f"q:{i}",
            f"第{i}题，患者首选的治疗是",
            {letter: f"选项{letter}{i}" for letter in "ABCDE"},
            None if i == 7 else rng.choice(["A", "B", "C", "AC"]),
            "".join(rng.choices("细菌感染首选青霉素过敏者用阿奇霉素", k=30)) if i % 3 else None,
            None,
            {"Clinical Department": rng.choice(["内科", "外科"]), "Difficulty level": str(i % 5 + 1)},
        )
        for i in range(count)
    ]


def predictions(asked, share, seed):
    rng = random.Random(seed)
    for i, one in enumerate(asked):
        answer = one.answer if one.answer and rng.random() < share else "D"
        text = EVIL if i == 3 else f"答案: {answer}. \n 解释:{(one.explanation or '无')[: rng.randrange(4, 30)]}"
        yield Prediction(one.id, text)


@pytest.fixture(scope="module")
def graded():
    asked = questions()
    return grading.grade(asked, predictions(asked, 0.6, 1), "standard")


@pytest.fixture(scope="module")
def other():
    asked = questions()
    return grading.grade(asked, predictions(asked, 0.3, 2), "standard")


@pytest.fixture(scope="module")
def written(graded, other, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    numbers = published_tables.beside("cmexam", [one.question for one in graded])
    built = building.build(graded, "standard", {"questions": "测试"}, published=numbers)
    built = dataclasses.replace(built, comparison=comparison.compare(other, graded, name="zero | shot"))
    writing.write(built, {"this run": graded, "zero | shot": other}, out, latex=True)
    assert {path.name for path in out.iterdir()} == {"report.json", "report.md", "report.html", "report.tex"}
    return out


class Scripts(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.inside = True
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def test_json_holds_the_contract(written, graded):
    value = json.loads((written / "report.json").read_text(encoding="utf-8"))
    assert {"overall", "by_facet", "signature", "provenance"} <= set(value)
    assert value["overall"] == grading.score(graded, "standard")
    assert value["provenance"] == {"questions": "测试"}
    inner = [one for one in graded if one.question.facets["Clinical Department"] == "内科"]
    assert value["by_facet"]["Clinical Department"]["内科"] == grading.score(inner, "standard")
    assert sum(map(sum, value["confusion"]["counts"])) == 79
    assert set(value["baselines"]) == {"uniform_subset", "uniform_single", "majority"}


def unpack(packed):
    return packed if not isinstance(packed, str) else json.loads(gzip.decompress(base64.b64decode(packed)))


def test_page_survives_what_a_model_may_write(written, graded, other):
    text = (written / "report.html").read_text(encoding="utf-8")
    found = Scripts()
    found.feed(text)
    assert len(found.scripts) == 2
    assert not [tag for tag, _ in found.tags if tag in ("img", "link", "iframe")]
    data = json.loads(found.scripts[0])
    index, items = unpack(data["index"]), [item for block in data["blocks"] for item in unpack(block)]
    assert items[3][3][0] == EVIL
    assert [item[0] for item in items] == [one.question.stem for one in graded]
    assert index["ids"] == [one.question.id for one in graded]
    assert index["answers"] == [[one.answer for one in run] for run in (graded, other)]
    assert [index["values"][f][index["of"][f][1]] for f in (0, 1)] == list(graded[1].question.facets.values())
    flips = comparison.compare(other, graded)
    assert data["flips_of"] == [{"runs": [0, 1], "only": [len(flips.gained), len(flips.lost)], "p": flips.mcnemar_p}]
    assert "http:" not in text
    assert "https:" not in text
    assert not [attrs for _, attrs in found.tags if "src" in attrs or "href" in attrs]


def test_page_cuts_endless_outputs():
    asked = questions(1)
    long = grading.grade(asked, [Prediction("q:0", "答案: A" + "啊" * 100_000)], "standard")
    text = page.page(building.build(long, "standard", {}), {"this run": long})
    assert len(text) < 100_000
    found = Scripts()
    found.feed(text)
    assert "100,005 characters in all" in unpack(json.loads(found.scripts[0])["blocks"][0])[0][3][0]


def test_markdown_and_latex(written):
    text = (written / "report.md").read_text(encoding="utf-8")
    value = json.loads((written / "report.json").read_text(encoding="utf-8"))
    assert f"| this run | 80 | {value['overall']['accuracy']:.2f} |" in text
    for words in ("ChatGLM-CMExam | 45.3", "Surg 外科 *", "tok:char", "Most frequent answer", "zero \\| shot"):
        assert words in text, words
    for line in (line for line in text.splitlines() if line.startswith("| ") and line.endswith(" |")):
        assert line.count("|") - line.count("\\|") >= 3
    tex = (written / "report.tex").read_text(encoding="utf-8")
    assert tex.count("\\toprule") == tex.count("\\bottomrule") == tex.count("\\begin{table}") > 5
    assert tex.count("\\label{tab:") == len(set(re.findall(r"\\label\{(.*?)\}", tex))) > 5
    assert "n = 80" in tex
    assert "uniform_subset" not in tex.replace("\\_", "")
    assert " 95% " not in tex


def test_in_a_notebook_the_scores_that_there_are():
    scores = {"accuracy": 51.234, "accuracy_ci": [1.0, 2.0], "bleu1": None, "<b>": 3}
    shown = FullReport(scores, {}, {}, {})._repr_html_()
    assert "51.23" in shown and "1.00 to 2.00" in shown and "bleu1" not in shown and "&lt;b&gt;" in shown


def test_nothing_is_overwritten(written, graded):
    built = building.build(graded, "standard", {})
    before = (written / "report.json").read_bytes()
    with pytest.raises(UserError, match=r"exists\. Add --overwrite"):
        writing.write(built, {"this run": graded}, written)
    assert (written / "report.json").read_bytes() == before
    writing.write(built, {"this run": graded}, written, overwrite=True)
    assert (written / "report.json").read_bytes() != before


def test_unpublished_exam_is_named(graded):
    with pytest.raises(UserError, match=r"'cmexm' are unknown.*cmexam"):
        published_tables.beside("cmexm", [one.question for one in graded])


def test_unanswered_questions_make_a_report(tmp_path):
    asked = [Question(str(i), "题干", {"A": "甲", "B": "乙"}, None, facets={"exam_type": "护理考试"}) for i in range(3)]
    none = grading.grade(asked, [Prediction(one.id, "答案: A") for one in asked], "standard")
    built = building.build(none, "standard", {})
    writing.write(built, {"this run": none}, tmp_path / "new", latex=True)
    assert built.overall["accuracy"] is None
    assert built.computed["baselines"] == {}
    assert "| this run | 3 | - |" in (tmp_path / "new" / "report.md").read_text(encoding="utf-8")


def test_intervals_hold_the_scores(graded):
    scores = grading.score(graded, "standard")
    intervals = comparison.text_intervals(graded, "exp")
    assert set(intervals) == set(comparison.TEXT)
    for name, (low, high) in intervals.items():
        assert low < scores[name] < high


def test_comparison_counts_flips(graded, other):
    found = comparison.compare(other, graded)
    right = [{one.question.id for one in run if one.correct} for run in (other, graded)]
    assert set(found.gained) == right[1] - right[0]
    assert set(found.lost) == right[0] - right[1]
    assert found.both == len(right[0] & right[1])
    assert found.both + found.neither + len(found.gained) + len(found.lost) == found.n == 79
    assert found.mcnemar_p < 0.01
    a, b = grading.score(other, "standard"), grading.score(graded, "standard")
    for name in ("accuracy", *comparison.TEXT):
        assert found.metrics[name].difference == pytest.approx(b[name] - a[name], abs=1e-9)


def test_a_few_flips_do_not_exclude_a_difference_of_0():
    """4 newly right and none newly wrong of 200: p is 0.125."""
    asked = [Question(str(i), "题干", {"A": "甲", "B": "乙"}, "A") for i in range(200)]
    runs = [
        grading.grade(asked, [Prediction(one.id, f"答案: {'B' if i < wrong else 'A'}") for i, one in enumerate(asked)])
        for wrong in (54, 50)
    ]
    accuracy = comparison.compare(*runs).metrics["accuracy"]
    assert (accuracy.difference, accuracy.p_value, accuracy.resolution) == (2.0, 0.125, 0.0)
    assert accuracy.low < 0 < accuracy.high
    back = comparison.compare(*reversed(runs)).metrics["accuracy"]
    assert (back.low, back.high) == pytest.approx((-accuracy.high, -accuracy.low))


def test_a_run_does_not_differ_from_itself(graded):
    found = comparison.compare(graded, graded)
    assert (found.gained, found.lost, found.mcnemar_p) == ((), (), 1.0)
    assert all(one.p_value == 1.0 and one.difference == 0 for one in found.metrics.values())
    assert comparison.agreement({"a": graded, "b": graded}) == {"a | b": pytest.approx(100 * 79 / 80)}


def test_summary_of_runs(graded, other):
    scores = {"1": grading.score(graded, "standard"), "2": grading.score(other, "standard")}
    found = comparison.summarise(scores)["accuracy"]
    pair = [one["accuracy"] for one in scores.values()]
    assert (found.mean, found.runs) == (pytest.approx(sum(pair) / 2), 2)
    assert found.std == pytest.approx(abs(pair[0] - pair[1]) / 2**0.5)
