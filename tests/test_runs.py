"""`runs` lists what training left; the loss as a plot."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import training_kit

from cmexam_tune import config, runs
from cmexam_tune.core.errors import UserError
from cmexam_tune.training.run_directory import log

LOG = [{"step": i, "loss": 3 * math.exp(-i / 30) + 1} for i in range(1, 101)]


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    made = training_kit.recipe(Path("/data"), out=str(path), **changes)
    (path / "config.yaml").write_text(config.dump_config(made), encoding="utf-8")
    (path / "environment.json").write_text('{"cmexam_tune": "0"}')
    return path


def test_runs_with_loss_accuracy_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, half = folder_of(tmp_path / "a run"), folder_of(tmp_path / "group" / "half", tuning={"method": "full"})
    (done / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in LOG))
    (done / "adapter").mkdir()
    (done / "trainer_state.json").write_text("{}")
    (done / "report").mkdir()
    (done / "report" / "report.json").write_text('{"overall": {"accuracy": 61.25}}')
    deep = folder_of(tmp_path / "lora_llama" / "seed1" / "run")  # as `reproduce` and recipes/run.sh put it
    (deep.parent / "report").mkdir()
    (deep.parent / "report" / "report.json").write_text('{"overall": {"accuracy": 40}}')
    (deep.parent / "report2").mkdir()  # newer, and of another run
    of_other = '{"overall": {"accuracy": 90}, "identity": {"adapter": "seed1/other"}}'
    (deep.parent / "report2" / "report.json").write_text(of_other)
    (half / "log.jsonl").write_text(
        '{"step": 4, "eval_exam_accuracy": 20.0}\n{"step": 8, "eval_exam_accuracy": 30.0}\n'
    )
    (tmp_path / "config.yaml").write_text("somebody: else")
    found = {line.path.name: line for line in runs.runs(tmp_path)}
    assert found.keys() == {"a run", "half", "run"}
    assert found["a run"].loss == pytest.approx(LOG[-1]["loss"])
    assert {name: line.accuracy for name, line in found.items()} == {"a run": 61.25, "half": 30.0, "run": 40.0}
    assert (found["a run"].method, found["half"].method) == ("llama lora", "llama full")
    assert found["a run"].next.startswith(f"cmexam-tune predict --run '{done}'")
    assert found["half"].next == f"cmexam-tune train --config {half}/config.yaml out={half}"
    assert runs.main([str(tmp_path)]) is None
    shown = capsys.readouterr().out
    assert "61.2%" in shown and "train.jsonl" in shown


def test_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.main([str(tmp_path)])
    assert "no run in it" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such folder"):
        runs.runs(tmp_path / "nowhere")
    (folder_of(tmp_path / "unread") / "report.json").write_text("{")
    assert [line.accuracy for line in runs.runs(tmp_path / "unread")] == [None]
    assert "a report is left out" in capsys.readouterr().err
    (folder_of(tmp_path / "broken") / "config.yaml").write_text("[")
    assert [line.path.name for line in runs.runs(tmp_path)] == ["unread"]
    assert "broken is left out" in capsys.readouterr().err


def heights(plot: str, mark: str = "*") -> list[int | None]:
    """Return for each column in which row its mark stands."""
    lines = [line[10:].ljust(60) for line in plot.splitlines()[1 : 1 + log.HEIGHT]]
    return [next((row for row, line in enumerate(lines) if line[x] == mark), None) for x in range(60)]


def test_plot_falls_as_the_loss_does() -> None:
    shown = log.terminal_plot(LOG)
    assert heights(shown) == sorted(row for row in heights(shown) if row is not None), "one mark in each column"
    assert (heights(shown)[0], heights(shown)[-1]) == (0, log.HEIGHT - 1)
    assert shown.splitlines()[1].split()[0] == "3.9" and shown.endswith("step 100")


def test_plot_of_a_short_run_and_of_validation() -> None:
    two = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 3.0}]
    assert log.terminal_plot(two[:1]) == "loss: 2 at step 1" and log.terminal_plot([]) == ""
    shown = log.terminal_plot(two)
    assert [row for row in heights(shown, "o") if row is not None] == [0] and "o validation" in shown
    line = heights(shown)[:-1]
    assert line[0] == 4 and None not in line and line == sorted(line), "halfway between 3 and 1, then down"


def test_picture_is_xml_with_both_curves() -> None:
    both = [*LOG, {"step": 50, "eval_loss": 2.0}, {"step": 100, "eval_loss": 1.5}]
    root = ElementTree.fromstring(log.svg_plot(both))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(line.get("points", "").split()) for line in lines] == [100, 2]
    assert sum(element.tag.endswith("circle") for element in root.iter()) == 2, "a single point must be seen too"
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "validation loss" in texts and "step 100" in texts
    assert ElementTree.fromstring(log.svg_plot([])) is not None
