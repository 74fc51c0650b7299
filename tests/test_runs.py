"""`runs` lists what training left; the loss as a plot."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import train_helpers

from cmexam_tune import runs
from cmexam_tune.core import config
from cmexam_tune.core.errors import UserError
from cmexam_tune.runfolder import curve

LOG = [{"step": i, "loss": 3 * math.exp(-i / 30) + 1} for i in range(1, 101)]


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    made = train_helpers.recipe(Path("/data"), out=str(path), **changes)
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
    (half / "log.jsonl").write_text(
        '{"step": 4, "eval_exam_accuracy": 20.0}\n{"step": 8, "eval_exam_accuracy": 30.0}\n'
    )
    (tmp_path / "config.yaml").write_text("somebody: else")
    found = {line.path.name: line for line in runs.runs(tmp_path)}
    assert found.keys() == {"a run", "half"}
    assert found["a run"].loss == pytest.approx(LOG[-1]["loss"])
    assert (found["a run"].accuracy, found["half"].accuracy) == (61.25, 30.0)
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
    (folder_of(tmp_path / "broken") / "config.yaml").write_text("[")
    assert runs.runs(tmp_path) == []
    assert "broken is left out" in capsys.readouterr().err


def test_plot_falls_as_the_loss_does() -> None:
    lines = curve.text(LOG).splitlines()[1 : 1 + curve.HEIGHT]
    heights = [
        next(row for row, line in enumerate(lines) if line[10:].ljust(60)[column] == "*") for column in range(60)
    ]
    assert heights == sorted(heights) and heights[0] == 0 and heights[-1] == curve.HEIGHT - 1
    assert lines[0].split()[0] == "3.85", "the mean of the first two steps"
    assert curve.text(LOG[:1]) == ""


def test_picture_is_xml_with_both_curves() -> None:
    both = [*LOG, {"step": 50, "eval_loss": 2.0}, {"step": 100, "eval_loss": 1.5}]
    root = ElementTree.fromstring(curve.svg(both))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert [len(line.get("points", "").split()) for line in lines] == [100, 2]
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "validation loss" in texts and "step 100" in texts
    assert ElementTree.fromstring(curve.svg([])) is not None
