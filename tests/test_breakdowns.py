"""The papers' tables: names, spellings, limits, order, averages, lengths and the confusion of letters."""

import json

import pytest
import real_data

from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import breakdowns, grading

ANSWERS = real_data.find("CMB-test-choice-answer.json")


def grade(rows):
    """rows: (gold, given, facets[, stem])."""
    questions, predictions = [], []
    for i, (gold, given, facets, *stem) in enumerate(rows):
        options = {letter: f"选项{letter}" for letter in "ABCDEF"}
        questions.append(Question(str(i), stem[0] if stem else "题干", options, gold, None, None, facets))
        predictions.append(Prediction(str(i), f"答案: {given}" if given else "无法判断"))
    return grading.grade(questions, predictions, "standard")


def score(some):
    return grading.score(some, "standard")


def tables(graded):
    return {one.facet: one for one in breakdowns.tables(graded, breakdowns.by_facet(graded, score), score)}


@pytest.mark.parametrize(
    ("facet", "value", "name"),
    [
        ("Disease Group", "循环系统疾病", "Circ"),
        ("ICD-11", "补充章传统医学病证-模块1", "TCMDP"),
        ("Disease Group", "TMDP", "TCMDP"),
        ("Disease Group", "BLOOD", "Blood"),
        ("Disease Group", "症状、体征或临床所见", "Sym"),
        ("Disease Group", "损伤、中毒或…", "Inj"),
        ("Clinical Department", "DENT", "Dent"),
        ("Subject", "重症医学科", "ICM"),
        ("一级标签", "公卫预防", "PH&PM"),
        ("Area of Competency", "公共卫生法律伦理", "PHL"),
        ("Medical Competency", "MeFund", "MedFund"),
        ("Difficulty level", "Managable", "2"),
        ("exam_type", "医学考研", "Graduate"),
        ("Clinical Department", "宇航科", "宇航科"),
        ("anything else", "some value", "some value"),
    ],
)
def test_values_are_recognised_by_every_spelling(facet, value, name):
    assert breakdowns.define(facet).recognise(value).name == name


def test_names_are_unambiguous():
    for one in breakdowns.definitions():
        if one.facet != "exam_class":
            for value in one.values:
                for text in (value.name, value.zh, value.en, *value.also):
                    assert one.recognise(text) == value, one.facet
    limits = {one.facet: one.minimum for one in breakdowns.definitions()}
    assert (limits["Disease Group"], limits["Clinical Department"]) == (100, 50)


def test_cells_hold_exactly_their_questions():
    rows = [
        ("A", "A", {"Clinical Department": "内科"}),
        ("B", "A", {"Clinical Department": "内科"}),
        ("AC", "AC", {"Clinical Department": "外科"}),
        ("C", None, {"Clinical Department": " "}),
        ("D", "D", {}),
    ]
    scores = breakdowns.by_facet(grade(rows), score)
    assert list(scores) == ["Clinical Department"]
    assert {value: (s["n"], s["accuracy"]) for value, s in scores["Clinical Department"].items()} == {
        "内科": (2, 50.0),
        "外科": (1, 100.0),
    }


def test_two_spellings_are_one_cell_but_two_values():
    rows = [("A", "A", {"Medical Competency": "公卫法律伦理"}), ("A", "B", {"Medical Competency": "公共卫生法律伦理"})]
    graded = grade(rows)
    (cell,) = tables(graded)["Medical Competency"].cells
    assert (cell.name, cell.scores["n"], cell.scores["accuracy"]) == ("PHL", 2, 50.0)
    assert sorted(cell.values) == sorted(breakdowns.by_facet(graded, score)["Medical Competency"])


def test_small_cells_are_marked_at_the_papers_limit():
    rows = [("A", "A", {"Clinical Department": "内科"})] * 50 + [("A", "A", {"Clinical Department": "眼科"})] * 49
    assert [(c.name, c.small) for c in tables(grade(rows))["Clinical Department"].cells] == [
        ("IM", False),
        ("Ophth", True),
    ]


def test_order_largest_first_or_as_in_the_paper():
    rows = [
        ("A", "A", {"Difficulty level": d, "Clinical Department": c})
        for d, c in [("3", "外科"), ("1", "内科"), ("3", "外科")]
    ]
    found = tables(grade(rows))
    assert [c.name for c in found["Difficulty level"].cells] == ["1", "3"]
    assert [c.name for c in found["Clinical Department"].cells] == ["Surg", "IM"]
    assert list(found) == ["Clinical Department", "Difficulty level"]


def test_cmb_average_is_the_mean_of_the_categories():
    rows = [("A", "A", {"exam_type": "医师考试"})] * 3 + [("A", "B", {"exam_type": "护理考试"})]
    table = tables(grade(rows))["exam_type"]
    assert table.macro_accuracy == 50.0
    assert score(grade(rows))["accuracy"] == 75.0


@pytest.mark.skipif(not ANSWERS.exists(), reason="the released CMB answers are not here")
def test_every_category_and_class_of_cmb_is_known():
    items = json.loads(ANSWERS.read_text(encoding="utf-8"))
    for facet, count in (("exam_type", 6), ("exam_class", 28)):
        found = {item[facet] for item in items}
        assert len(found) == count
        assert {one.zh for one in breakdowns.define(facet).values} == found


def test_lengths_cover_every_question_once():
    rows = [("A", "A", {}, "题" * n) for n in (1, 10, 11, 300, 301, 999)]
    bins = breakdowns.by_length(grade(rows), score)
    assert [(b["from"], b["to"], b["n"]) for b in bins] == [(1, 10, 2), (11, 20, 1), (201, 300, 1), (301, None, 2)]
    assert all(b["accuracy"] == 100.0 and b["small"] for b in bins)


def test_confusion_counts_every_answered_question():
    rows = [("A", "A", {}), ("A", "B", {}), ("A", "AB", {}), ("C", None, {}), ("BC", "C", {}), (None, "A", {})]
    found = breakdowns.confusion(grade(rows))
    assert found["gold"] == ["A", "B", "C", "several"]
    assert found["predicted"] == ["A", "B", "C", "several", "unreadable"]
    assert found["counts"] == [[1, 1, 0, 1, 0], [0] * 5, [0, 0, 0, 0, 1], [0, 0, 1, 0, 0]]
