"""What docs/extending.md says, done as it stands: a stranger's method, family, exam, profile and metric, and a run."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import training_kit
import yaml
from kit import changed

from cmexam_tune.__main__ import main
from cmexam_tune.config import parse_config
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.training.run_directory.run import open_run

ROOT = Path(__file__).resolve().parents[1]
BLOCKS, IN_CHINESE = (
    re.findall(r"```python\n# (.*?)\n(.*?)```", (ROOT / "docs" / name).read_text("utf-8"), re.DOTALL)
    for name in ("extending.md", "extending.zh.md")
)
MODULES = {place: code for place, code in BLOCKS if place.startswith("my_lab/")}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package `my_lab` of the page, on the path."""
    (tmp_path / "my_lab").mkdir()
    for place, code in MODULES.items():
        (tmp_path / place).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
        del sys.modules[name]


def test_the_page_has_one_of_each() -> None:
    assert sorted(MODULES) == [
        "my_lab/focal.py", "my_lab/hospital.py", "my_lab/lenient.py", "my_lab/norms.py", "my_lab/packed.py",
        "my_lab/partly_right.py", "my_lab/ward.py",
    ]  # fmt: skip
    assert IN_CHINESE == BLOCKS


def test_a_method_and_a_family_of_a_stranger(lab: Path) -> None:
    """Trained, predicted with and exported; LLaMA's norms change and nothing else does."""
    training_kit.world(lab)
    config = lab / "experiment.yaml"
    values = training_kit.recipe(lab, training__max_steps=2).to_dict()
    config.write_text(yaml.safe_dump({**values, "tuning": {"method": "full"}}, allow_unicode=True), encoding="utf-8")
    words = ["tuning.method=my_lab.norms", "tuning.final=false", "model.family=my_lab.ward"]
    assert not main(["train", "--config", str(config), *words])
    run = lab / "run"
    command = ["predict", "--run", str(run), "--questions", str(lab / "val.jsonl"), "--out", str(lab / "p.jsonl")]
    assert not main([*command, *words[::2], "generation.max_new_tokens=2"])
    assert len(list(jsonl.read(lab / "p.jsonl", Prediction))) > 0
    assert not main(["export", "--run", str(run), "--out", str(lab / "exported"), *words[::2]])
    from transformers import AutoModelForCausalLM

    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (lab / "llama", lab / "exported")
    )
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed and all("layernorm" in name for name in changed) and "model.norm.weight" not in changed


def test_a_loss_of_a_stranger(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The focal loss is cross-entropy at gamma 0, which the package computes without it, and smaller at 2."""
    training_kit.world(lab)
    config = lab / "experiment.yaml"
    values = training_kit.recipe(lab, training__max_steps=2, data__validation=[str(lab / "val.jsonl")]).to_dict()
    config.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"training\.objective: 'my_lab\.focal' is a module from outside"):
        parse_config(changed(values, {"training__objective": "my_lab.focal"}))
    assert "my_lab.focal" not in sys.modules, "a file made it run"

    def losses(objective: str) -> list[float]:
        assert not main(["train", "--config", str(config), f"training.objective={objective}", f"out={lab / objective}"])
        return training_kit.losses(open_run(lab / objective))

    plain = losses("sft")
    assert all(focal < cross for focal, cross in zip(losses("my_lab.focal"), plain, strict=True))
    monkeypatch.setattr(sys.modules["my_lab.focal"], "GAMMA", 0.0)
    shutil.rmtree(lab / "my_lab.focal")
    assert losses("my_lab.focal") == pytest.approx(plain, rel=1e-5)


def test_an_exam_and_a_profile_of_a_stranger(lab: Path) -> None:
    items = [{"q": "一加一", "choices": ["一", "二"], "key": 1}, {"q": "无", "choices": ["一", "二"], "key": None}]
    (lab / "ward.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    assert not main(["preprocess", "my_lab.hospital", "--input", "ward.jsonl", "--out", "data"])
    (question,) = jsonl.read(lab / "data" / "ward.questions.jsonl", Question)
    assert (question.id, question.answer) == ("ward:1", "B")
    assert json.loads((lab / "data" / "ward.report.json").read_text("utf-8"))["dropped"] == {"no answer": 1}
    jsonl.write(lab / "p.jsonl", [Prediction("ward:1", "也许B也许A")])
    command = ["evaluate", "--predictions", "p.jsonl", "--questions", "data/ward.questions.jsonl", "--out", "report"]
    assert not main([*command, "--profile", "my_lab.lenient"])
    report = json.loads((lab / "report" / "report.json").read_text("utf-8"))
    assert report["overall"]["accuracy"] == 100 and report["signature"]["answer"] == "my_lab.lenient"
    (lab / "my_lab" / "empty.py").touch()
    for wrong in (["preprocess", "my_lab.empty", "--input", "ward.jsonl", "--out", "x"],
                  [*command, "--profile", "my_lab.empty", "--overwrite"]):  # fmt: skip
        with pytest.raises(ConfigError, match=r"my_lab\.empty: lacks (read|SCORER)"):
            main(wrong)


def test_a_metric_of_a_stranger(lab: Path) -> None:
    """Beside one of the package: in report.json, for each facet, and as columns of the tables and of the page."""
    options = {"A": "甲", "B": "乙", "C": "丙"}
    asked = [Question(f"q{i}", "题", options, answer, facets={"科室": answer}) for i, answer in enumerate(["AB", "C"])]
    jsonl.write(lab / "q.jsonl", asked)
    jsonl.write(lab / "p.jsonl", [Prediction("q0", "答案: A"), Prediction("q1", "不知道")])
    words = ["evaluate", "--predictions", "p.jsonl", "--questions", "q.jsonl", "--out", "report", "--metric"]
    assert not main([*words, "my_lab.partly_right,macro_f1"])
    report = json.loads((lab / "report" / "report.json").read_text("utf-8"))
    scores = [report["overall"], *report["by_facet"]["科室"].values()]
    assert [score["partly_right"] for score in scores] == [50, 100, 0] and report["overall"]["macro_f1"] == 0
    assert report["metrics"]["partly_right"] == {"en": "Partly right %", "zh": "部分正确 %"}
    assert "| partly_right | macro_f1 |" in (lab / "report" / "report.md").read_text("utf-8")
    assert "部分正确 %" in (lab / "report" / "report.html").read_text("utf-8")
    with pytest.raises(ConfigError, match="'macro_f2' is unknown, did you mean 'macro_f1'"):
        main([*words, "macro_f2", "--overwrite"])
