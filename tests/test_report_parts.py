"""What the report says beside scores: who it is about, explanations against answers, packed questions, plots."""

import base64
import contextlib
import gzip
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import grading
from cmexam_tune.evaluation.answer_parsing import conclusion
from cmexam_tune.evaluation.breakdowns import consistency, treated
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata
from cmexam_tune.report import identity, page, plots
from cmexam_tune.report.identity import identify, portable
from cmexam_tune.training.run_directory import log


@contextlib.contextmanager
def processor_seconds(limit: float) -> Iterator[None]:
    """Fail what takes longer; also inside of a regular expression, which looks for signals as it goes."""

    def fail(*_: object) -> None:
        raise AssertionError(f"more than {limit} processor seconds")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


OPTIONS = {"A": "甲", "B": "乙", "C": "丙"}


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("青霉素过敏者用阿奇霉素，故选C。", "C"),
        ("A错；B对。故本题选 B、A。", "AB"),
        ("因此，答案为：A", "A"),
        ("故选A。再想想，所以正确答案是B项", "B"),
        ("综上所述，本题选择AC", "AC"),
        ("故选 ACEI 类药物", None),
        ("患者有 A 型血，可选 B 超检查", None),
        ("", None),
        (None, None),
    ],
)
def test_what_an_explanation_concludes_with(text: str | None, letters: str | None) -> None:
    assert conclusion(text) == letters


@pytest.mark.parametrize(
    "text", ["故" * 100_000, "故选A、" * 30_000, "所以" + " " * 100_000 + "选"], ids=["same", "list", "gap"]
)
def test_conclusions_are_read_in_linear_time(text: str) -> None:
    """Each takes milliseconds; a pattern that backtracks would take hours, and fails here after 5 processor seconds."""
    with processor_seconds(5):
        conclusion(text)


def test_conflicts_are_counted() -> None:
    outputs = ["答案: A\n解释: 故选A", "答案: A\n解释: 故选B", "答案: B\n解释: 故选A", "答案: A\n解释: 无"]
    asked = [Question(str(i), "题", OPTIONS, "A", "解") for i in range(4)]
    found = consistency(grading.grade(asked, [Prediction(str(i), text) for i, text in enumerate(outputs)]))
    assert found is not None
    assert (found.concluding, found.conflicting, found.conflicting_right, found.agreeing_right) == (3, 2, 1, 1)


def test_options_that_an_explanation_treats_are_counted() -> None:
    options = {"A": "青霉素钠", "B": "阿奇霉素", "C": "手术", "D": "ACEI类药物"}
    assert treated("首选青霉素钠，过敏者用阿奇霉素。", options) == 0.5
    assert treated("A对，BC错；D 项无效", options) == 1 and treated("ACEI有效", options) == 0
    asked = [Question(str(i), "题", options, "A", "首选青霉素钠") for i in range(2)]
    outputs = ["答案: A\n解释: A对，BCD错", "答案: A\n解释: 手术无效"]
    found = consistency(grading.grade(asked, [Prediction(str(i), text) for i, text in enumerate(outputs)]))
    assert found is not None
    assert (found.treated, found.treat_all, found.reference_treated) == (62.5, 1, 25)


def test_no_folder_of_this_machine_is_left() -> None:
    note = {
        "run": "/home/me/runs/a",
        "files": ["C:\\me\\b.bin", "~/c"],
        "n": 1,
        "model": "THUDM/chatglm-6b",
        "r": "runs/x",
    }
    assert portable(note) == {
        "run": "a", "files": ["b.bin", "c"], "n": 1, "model": "THUDM/chatglm-6b", "r": "runs/x",
    }  # fmt: skip
    assert identity.names(["/x/a/p.jsonl", "/x/b/p.jsonl"]) == ["a/p.jsonl", "b/p.jsonl"]
    assert identity.names(["/x/p.jsonl"]) == ["p.jsonl"] and identity.names(["r/p.jsonl"]) == ["r/p.jsonl"]
    config = {
        "model": {"model_name_or_path": "/m/chatglm"},
        "prompt": {"style": "answer"},
        "tuning": {"method": "lora"},
    }
    metadata = PredictionMetadata({"config": config, "run": "/r/one", "mode": "generate"})
    who = identify(metadata, "/d/test.questions.jsonl", 3, "cmb", "2026")
    assert (who.model, who.adapter, who.method, who.prompt) == ("chatglm", "one", "lora", "style answer")
    assert (who.questions, who.n, who.mode) == ("test.questions.jsonl", 3, "generate")


def test_a_report_of_files_names_no_folder(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"id": "1", "stem": "题", "options": OPTIONS, "answer": "A"}) + "\n")
    (tmp_path / "p.jsonl").write_text('{"question_id": "1", "text": "答案: A"}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    note = {"config": {"model": {"model_name_or_path": str(tmp_path / "base")}}, "run": str(run)}
    (tmp_path / "p.jsonl.meta.json").write_text(json.dumps(note))
    report = evaluate(tmp_path / "p.jsonl", tmp_path / "q.jsonl", tmp_path / "out", name="mine", latex=True)
    assert report.training == {"loss": [(1, 2.0), (2, 1.0)]} and log.curves(tmp_path) == {}
    assert report.identity is not None and report.identity.model == "base" and report.name == "mine"
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path) not in path.read_text(encoding="utf-8"), path.name
    with pytest.raises(UserError, match="1 predictions need as many different names"):
        evaluate(tmp_path / "p.jsonl", tmp_path / "q.jsonl", name=["a", "b"])


def test_many_questions_are_packed_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    count = page.PLAIN + page.BLOCK
    asked = [Question(str(i), f"题{i}", OPTIONS, "A", "解释" * 100) for i in range(count)]
    said = [Prediction(str(i), ("答案: A\n" if i % 2 else "答案: B\n") + "长" * 900) for i in range(count)]
    runs = {"one": grading.grade(asked, said)}

    def items() -> list[list[object]]:
        packed = page.blocks(runs)
        assert all(isinstance(block, str) for block in packed)
        return [item for block in packed for item in json.loads(gzip.decompress(base64.b64decode(block)))]

    assert [item[0] for item in items()] == [one.stem for one in asked]
    assert items()[1][3] == [said[1].text]
    monkeypatch.setattr(page, "BUDGET", 1_000_000)
    wrong, right = items()[0][3][0], items()[1][3][0]  # type: ignore[index]
    assert wrong == said[0].text and len(right) < 640 and "906 characters in all" in right


def test_plots_are_files_for_a_paper(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facets = [{"Difficulty level": str(i % 5 + 1), "我的类别": "甲"} for i in range(40)]
    asked = [Question(str(i), "题" * (i + 1), OPTIONS, "A", facets=facets[i]) for i in range(40)]
    report = evaluate([Prediction(one.id, "答案: A") for one in asked], asked, published="cmexam")
    written = plots.draw(report, tmp_path)
    names = {path.name for path in written}
    assert "comparison.png" not in names  # of one run alone
    said = {letter: [Prediction(one.id, f"答案: {letter}") for one in asked] for letter in "AB"}
    both = evaluate(said["A"], asked, baseline=said["B"])
    assert {"comparison.png", "comparison.svg"} <= {path.name for path in plots.draw(both, tmp_path / "both")}
    assert {"difficulty_level.png", "difficulty_level.svg", "by_length.png", "by_length.svg"} <= names
    for path in written:
        start = path.read_bytes()[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml" in start
