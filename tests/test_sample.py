"""The shipped sample: readable by the project's own readers, balanced, without a question in two splits."""

import csv
from collections import Counter
from pathlib import Path

import pytest
import real_data

import cmexam_tune
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import RowReport, cmb, cmexam
from cmexam_tune.interop.sealing import verifying

SAMPLE = Path(cmexam_tune.__file__).parent / "sample"
SHARED = Path(__file__).resolve().parents[2] / "shared"
FILES = {
    "cmexam/train.csv": (108, 1),
    "cmexam/val.csv": (25, 0),
    "cmexam/test_with_annotations.csv": (30, 0),
    "cmb/train.json": (35, 0),
    "cmb/val.json": (40, 0),
    "cmb/test.json": (18, 0),
}
ANNOTATIONS = ["Disease Group", "Clinical Department", "Medical Discipline", "Medical Competency", "Difficulty level"]


def read(name: str) -> tuple[list[Question], list[RowReport]]:
    reports: list[RowReport] = []
    exam = cmexam if name.startswith("cmexam") else cmb
    answers = SAMPLE / "cmb/test_answers.json" if name == "cmb/test.json" else None
    return list(exam.read([SAMPLE / name], answers, reports.append)), reports


@pytest.mark.parametrize("name", ["zeroshot", "lora"])
def test_the_sealed_runs_reproduce_with_the_texts(name: str, tmp_path: Path) -> None:
    jsonl.write(tmp_path / "q.jsonl", read("cmexam/test_with_annotations.csv")[0])
    verified = verifying.verify(SAMPLE / "sealed" / name, tmp_path / "q.jsonl")
    assert not verified.problems and verified.with_texts and len(verified.questions) == 30
    assert verified.derived and verified.derived.option_orders and verified.derived.option_orders.orders == 5


@pytest.fixture(scope="module")
def questions() -> dict[str, list[Question]]:
    return {name: read(name)[0] for name in FILES}


@pytest.mark.parametrize(("name", "kept", "dropped"), [(name, *counts) for name, counts in FILES.items()])
def test_every_file_reads_with_the_counts_of_its_readme(name: str, kept: int, dropped: int) -> None:
    found, reports = read(name)
    assert len(found) == kept
    assert [report.row for report in reports if report.action == "dropped"] == [1] * dropped
    assert all(question.answer for question in found)


def test_every_oddity_reads_as_a_plain_question(questions: dict[str, list[Question]]) -> None:
    train = {question.id: question for question in questions["cmexam/train.csv"]}
    answers = ["B", "AC", "D", "C", "E", "A", "B", "D", "C", "A", "D", "E", "C", "B"]
    odd = [train[f"train:{row}"] for row in range(2, 16)]
    assert [question.answer for question in odd] == answers
    assert all("".join(question.options) == "ABCDE" for question in odd)
    assert odd[0].options["D"] == "1 mg/kg"
    assert [odd[index].options["A"] for index in (3, 4, 5, 6, 7, 8, 9)] == [
        "30～50次",
        "肺栓塞",
        "反常活动",
        "膜性肾病",
        "下呼吸道梗阻",
        "偏低",
        "无菌持物钳",
    ]
    assert odd[10].explanation is not None and "\n" in odd[10].explanation
    assert odd[12].options["E"] == "用软担架搬运"
    assert len(odd[13].stem) > 400
    assert train["train:16"].explanation is None


def test_cmb_oddities(questions: dict[str, list[Question]]) -> None:
    train = questions["cmb/train.json"]
    assert train[9].answer == "BCD"
    assert train[12].answer == "ACDEF"
    assert (train[22].kind, len(train[22].answer or "")) == ("multiple", 1)
    assert "".join(train[30].options) == "ABCD"
    assert any(len(text) == 1 for question in train for text in question.options.values())


def test_annotations_and_exam_names_become_facets(questions: dict[str, list[Question]]) -> None:
    test = questions["cmexam/test_with_annotations.csv"]
    assert {name for question in test for name in question.facets} == set(ANNOTATIONS)
    assert {question.facets["Difficulty level"] for question in test} == set("12345")
    assert all(question.facets["exam_type"] and question.kind for question in questions["cmb/train.json"])


def test_correct_letters_are_spread(questions: dict[str, list[Question]]) -> None:
    for group in ("cmexam", "cmb"):
        found = [question for name, rows in questions.items() if name.startswith(group) for question in rows]
        single = Counter(question.answer for question in found if len(question.answer or "") == 1)
        assert set(single) == set("ABCDE")
        assert min(single.values()) >= 0.1 * single.total()
        assert any(len(question.answer or "") > 1 for question in found)


def test_no_stem_occurs_twice_in_any_split(questions: dict[str, list[Question]]) -> None:
    stems = Counter(question.stem.strip() for rows in questions.values() for question in rows)
    assert len(stems) == sum(kept for kept, _ in FILES.values())


def test_options_of_a_question_differ(questions: dict[str, list[Question]]) -> None:
    for question in (question for rows in questions.values() for question in rows):
        assert len(set(question.options.values())) == len(question.options), question.id


def test_explanations_call_the_answer_right(questions: dict[str, list[Question]]) -> None:
    """Every explanation that judges letters ("B对") names the gold letters as right, none of them as wrong."""
    for question in (question for rows in questions.values() for question in rows):
        text = question.explanation or ""
        if not text or "为本题正确答案" in text:
            continue
        assert f"{'、'.join(question.answer or '')}对" in text or "对）" not in text, question.id
        assert not any(f"{letter}错" in text for letter in question.answer or ""), question.id


def test_test_split_reads_without_its_answers() -> None:
    assert [question.answer for question in cmb.read([SAMPLE / "cmb/test.json"])] == [None] * 18


def test_clinical_cases_have_three_questions_each() -> None:
    assert [len(case.turns) for case in cmb.read_clin(SAMPLE / "cmb/clin.json")] == [3, 3]


def runs(text: str, length: int = 16) -> set[str]:
    return {text[start : start + length] for start in range(len(text) - length + 1)}


def test_no_question_is_copied_from_cmexam(questions: dict[str, list[Question]]) -> None:
    real = real_data.find("val.csv")
    if not real.exists():
        pytest.skip(f"real data is not at {real}")
    with real.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    ours = [question for found in questions.values() for question in found]
    mine = set().union(*(runs(text) for question in ours for text in (question.stem, question.explanation or "")))
    assert not {run for row in rows for field in ("Question", "Explanation") for run in runs(row[field]) & mine}
    long_stems = {row["Question"].strip() for row in rows if len(row["Question"].strip()) > 5}
    assert not [question.id for question in ours if any(stem in question.stem for stem in long_stems)]
