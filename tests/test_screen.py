"""A normal run shows its own lines and nothing of the libraries; work shows how far it is in one way."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import training_kit

from cmexam_tune.core import jsonl, progress
from cmexam_tune.core.schema import Question
from cmexam_tune.train import train


@pytest.mark.parametrize("environment", [{}, pytest.param({"CMEXAM_TUNE_VERBOSE": "1"}, marks=pytest.mark.slow)])
def test_a_local_model_is_written_and_asked_without_lines_of_libraries(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    questions = tmp_path / "one.questions.jsonl"
    jsonl.write(questions, [Question("1", "感冒多由什么引起？", {"A": "病毒", "B": "细菌"}, "A")])
    # One process for both: libraries speak at their import.
    code = """
import sys
from cmexam_tune import predict, tiny
tiny.main(["--family", "llama", "--out", "model"])
print("written", file=sys.stderr)
predict.main(["--config", "zeroshot_llama", "--questions", "one.questions.jsonl", "--out", "p.jsonl",
              "model.model_name_or_path=model", "generation.max_new_tokens=4"])"""
    python_path = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path, **environment},
    )  # fmt: skip
    lines = done.stderr.splitlines()
    written, asked = lines[: lines.index("written")], lines[lines.index("written") + 1 :]
    if environment:
        assert any("Writing model shards" in line for line in written)
        assert any("Loading weights" in line for line in asked)
    else:
        assert written == []
        assert len(asked) == 1 and asked[0].startswith("1 question asked in ")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every look at the clock take ten seconds."""
    time = iter(range(0, 100_000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(time))
    yield


def work() -> None:
    with progress.Progress("train", "steps", 1000, done=100) as shown:
        for number in range(6):
            shown.move(10, f"loss {number}")
        shown.say("step 160: validation loss 2")


@pytest.mark.usefixtures("ticks")
def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    # Every 30 s: 30 steps in 40 s leave 1160 s for 870 more; 50 in 70 s leave 1190 s for 850.
    assert capsys.readouterr().err.splitlines() == [
        "train: 130 of 1,000 steps, 1.3 s each, 19 min left; loss 2",
        "train: 150 of 1,000 steps, 1.4 s each, 20 min left; loss 4",
        "step 160: validation loss 2",
    ]


@pytest.mark.usefixtures("ticks")
def test_on_a_terminal_it_is_a_bar_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    work()
    pictures = screen.getvalue().split("\r")
    assert any(text.startswith("train: 120 of 1,000 steps") and "loss 1 |" in text for text in pictures)
    assert not pictures[-1].strip() and "step 160: validation loss 2\n" in screen.getvalue()


@pytest.mark.usefixtures("ticks")
def test_of_several_processes_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    work()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("speed", "words"), [(25.4, "25 a second"), (2.54, "2.5 a second"), (0.025, "40 s each")])
def test_pace(speed: float, words: str) -> None:
    assert progress.pace(speed) == words


def test_training_in_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    config = training_kit.recipe(
        training_kit.world(tmp_path),
        data__validation=[str(tmp_path / "val.jsonl")],
        training__max_steps=3,
        training__logging_steps=10,
        training__disable_tqdm=False,
        training__eval_strategy="epoch",
        training__save_strategy="no",
        training__metric_for_best_model="exam_accuracy",
        generation={"max_new_tokens": 4},
    )
    run = train(config)
    shown = capsys.readouterr().err
    assert "\r" not in shown and "{'loss'" not in shown
    lines = [line for line in shown.splitlines() if line.startswith("train: ")]
    assert [line.split(" steps")[0] for line in lines] == ["train: 1 of 3", "train: 2 of 3"]
    assert all(word in lines[0] for word in ("a second", "left; loss ", "lr ", "GiB", "tokens/s"))
    assert re.search(r"^step 3: validation loss [\d.]+, exam accuracy [\d.]+%$", shown, re.MULTILINE)
    assert "trained 3 of 3 steps in" in shown
    assert "loss: * training, o validation" in shown, "also where fewer steps are taken than logging_steps"
    assert [entry["step"] for entry in run.log if "loss" in entry] == [1, 3]
    assert json.loads((run.path / "metrics.json").read_text())["padding"] >= 0
