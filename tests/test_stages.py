"""Stages of one model: the tables of two by two, by hand and as published, and how each stage writes."""

import dataclasses
import json
from pathlib import Path

import pytest
from kit import question

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import grading
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.report import stages


def graded(questions: list[Question], answers: list[str]) -> list[Graded]:
    outputs = [Prediction(q.id, text) for q, text in zip(questions, answers, strict=True)]
    return grading.grade(questions, outputs)


def test_the_published_pattern() -> None:
    """chinese-medical-exam-llm, segment credit against GRPO on CMExam: 5,426 / 80 / 148 / 1,003, +1.02, p 8e-6."""
    counts = {(True, True): 5426, (True, False): 80, (False, True): 148, (False, False): 1003}
    asked = [question(i) for i in range(4)]
    right, wrong = graded(asked[:1], ["答案: C"])[0], graded(asked[:1], ["答案: D"])[0]
    cells = [cell for cell, count in counts.items() for _ in range(count)]
    runs = {
        name: [dataclasses.replace(right if cell[side] else wrong) for cell in cells]
        for side, name in enumerate(("grpo", "segment"))
    }
    result = stages.stages(runs)
    assert result is not None
    step = result.steps[0]
    assert (step.both, step.only_first, step.only_second, step.neither) == (5426, 80, 148, 1003)
    assert step.difference == pytest.approx(1.02, abs=0.005)
    assert step.p_value == pytest.approx(8e-6, rel=0.1)
    assert step.adjusted_p == step.p_value  # of a single pair nothing has to be corrected


def test_single_and_several_letters_apart() -> None:
    asked = [question(0), question(1), question(2, answer="AC"), question(3, answer="AC")]
    runs = {
        "base": graded(asked, ["答案: C", "答案: D", "答案: A", "答案: A"]),
        "sft": graded(asked, ["答案: C", "答案: C", "答案: AC", "答案: C"]),
        "grpo": graded(asked, ["答案: D", "答案: C", "答案: AC", "答案: AC"]),
    }
    result = stages.stages(runs)
    assert result is not None
    seen = {(s.first, s.second, s.part): (s.both, s.only_first, s.only_second, s.neither) for s in result.steps}
    assert len(seen) == 9
    assert seen["base", "sft", "all"] == (1, 0, 2, 1)
    assert seen["base", "sft", "single"] == (1, 0, 1, 0)
    assert seen["sft", "grpo", "several"] == (1, 0, 1, 0)
    assert seen["sft", "grpo", "single"] == (1, 1, 0, 0)
    assert stages.stages({"base": runs["base"]}) is None


def test_letters_and_explanations_are_compared_apart() -> None:
    """Holm's correction, too, is for the pairs of one task: of two direct runs and two with reasons one pair each."""
    asked = [question(i) for i in range(8)]
    answers = {"sft": "CCDDDDDD", "grpo": "CCCCCCCC", "sft_reasons": "CDDDDDDD", "grpo_reasons": "CCCCDDDD"}
    runs = {name: graded(asked, [f"答案: {a}" for a in letters]) for name, letters in answers.items()}
    explained = {name: name.endswith("reasons") for name in runs}
    result = stages.stages(runs, explained)
    assert result is not None
    everything = [step for step in result.steps if step.part == "all"]
    tasks = [(step.task, step.first, step.second) for step in everything]
    assert tasks[:2] == [("both", "sft", "sft_reasons"), ("both", "sft", "grpo_reasons")]
    assert tasks[4:] == [("explanation", "sft_reasons", "grpo_reasons"), ("letters", "sft", "grpo")]
    assert all(step.adjusted_p == step.p_value for step in everything[4:])
    assert any(step.adjusted_p > step.p_value for step in everything[:4])
    assert [manner.task for manner in result.manners] == ["letters", "letters", "explanation", "explanation"]


def test_how_a_stage_writes() -> None:
    asked = [
        dataclasses.replace(question(0), kind="single"),
        dataclasses.replace(question(1, answer="AC"), kind="multiple"),
        question(2),
        question(3),
    ]
    texts = ["答案: AC", "答案: AC", f"{'综合分析各个选项之后可以看到，' * 3}所以答案是C。", "不知道"]
    manner = stages.stages({"a": graded(asked, texts), "b": graded(asked, texts)}).manners[0]  # type: ignore[union-attr]
    assert manner.unreadable == 25
    assert manner.impossible == 50  # several letters where one is right; nothing is printed of the last two
    assert manner.at_once == 50
    assert manner.length_right == (len(texts[1]) + len(texts[2])) / 2
    assert manner.length_wrong == (len(texts[0]) + len(texts[3])) / 2


def test_the_report_shows_them(tmp_path: Path) -> None:
    asked = [question(i) for i in range(4)]
    jsonl.write(tmp_path / "q.questions.jsonl", asked)
    for name, answers, style in (("sft", "CDDD", "cmb_answer"), ("grpo", "CCCD", "cmb_cot")):
        lines = [Prediction(q.id, f"答案: {a}") for q, a in zip(asked, answers, strict=True)]
        jsonl.write(tmp_path / f"{name}.jsonl", lines)
        note = json.dumps({"config": {"prompt": {"style": style}}})
        (tmp_path / f"{name}.jsonl.meta.json").write_text(note, "utf-8")
    files = [tmp_path / "sft.jsonl", tmp_path / "grpo.jsonl"]
    report = evaluate(files, tmp_path / "q.questions.jsonl", tmp_path / "report")
    assert report.computed["stages"].steps[0].only_second == 2
    text = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "only the second" in text and "answer at once" in text
    assert "| letters and explanation |" in text and "| letters |" in text
