"""Others' code runs only when the command, or the importing program, names it; never because a file does."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import training_kit
import yaml
from kit import changed

pytest.importorskip("torch")

from cmexam_tune import config
from cmexam_tune.__main__ import main
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models.families import Family

DOCS = Path(__file__).resolve().parents[1] / "docs" / "extending.md"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `my_lab` with the method of docs/extending.md, which leaves a file when it is run."""
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[0]
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").touch()
    ran = tmp_path / "ran"
    (tmp_path / "my_lab" / "norms.py").write_text(f"{code}\nopen({str(ran)!r}, 'w').close()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield ran
    for name in ("my_lab.norms", "my_lab"):
        sys.modules.pop(name, None)


def experiment(folder: Path, **changes: object) -> Path:
    training_kit.world(folder)
    values = changed(training_kit.recipe(folder, training__max_steps=2).to_dict(), changes)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    return path


def test_a_file_cannot_make_a_module_run(lab: Path, tmp_path: Path) -> None:
    path = experiment(tmp_path, tuning={"method": "my_lab.norms"})
    with pytest.raises(ConfigError, match=r"tuning\.method: 'my_lab\.norms' is a module from outside .*command line"):
        main(["train", "--config", str(path)])
    assert not lab.exists() and not (tmp_path / "run").exists()
    (tmp_path / "other").mkdir()
    path = experiment(tmp_path / "other", model__family="my_lab.norms")
    with pytest.raises(ConfigError, match=r"model\.family: 'my_lab\.norms'"):
        main(["train", "--config", str(path), "--print-config"])
    assert not lab.exists()


def test_the_command_can_and_so_can_an_import(lab: Path, tmp_path: Path) -> None:
    """Train, resume, predict and export with the method of the documents; each asks for consent again."""
    path, run = experiment(tmp_path), tmp_path / "run"
    consent = "tuning.method=my_lab.norms"
    assert not main(["train", "--config", str(path), consent])
    assert lab.exists() and yaml.safe_load((run / "config.yaml").read_text())["tuning"]["method"] == "my_lab.norms"
    commands = {
        "train": ["train", "--config", str(run / "config.yaml")],
        "predict": ["predict", "--config", str(run), "--questions", str(tmp_path / "val.jsonl"),
                    "--out", str(tmp_path / "answers.jsonl"), "generation.mode=constrained"],
        "export": ["export", "--run", str(run), "--out", str(tmp_path / "exported")],
    }  # fmt: skip
    for name, command in commands.items():
        sys.modules.pop("my_lab.norms")
        lab.unlink()
        with pytest.raises(ConfigError, match="is a module from outside"):
            main(command)
        assert not lab.exists()
        assert not main([*command, consent])
        assert lab.exists(), name
    assert config.load_config(run / "config.yaml").tuning.method == "my_lab.norms", (
        "imported before: the program's own will"
    )


def test_only_the_command_asks_for_a_checkpoint_s_code(tmp_path: Path) -> None:
    path = experiment(tmp_path, model__trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"add model\.trust_remote_code=true to the command"):
        main(["train", "--config", str(path), "--dry-run"])
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {path.name}\nout: elsewhere\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="trust its author"):
        config.load_config(child)
    assert not config.load_config(path, ["model.trust_remote_code=false"]).model.trust_remote_code
    asked = ["train", "--config", str(path), "model.trust_remote_code=true"]
    assert not main(asked)
    assert not main(asked), "the run that lies there is the same experiment"
    run = ["predict", "--config", str(tmp_path / "run"), "--questions", str(tmp_path / "val.jsonl"),
           "--out", str(tmp_path / "answers.jsonl"), "generation.mode=constrained"]  # fmt: skip
    with pytest.raises(ConfigError, match="trust its author"):
        main(run)
    assert not main([*run, "model.trust_remote_code=true"])


def test_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no module 'my_labb\.x' can be imported\. Is its folder on PYTHONPATH"):
        config.load_config("lora_llama", ["model.family=my_labb.x"])
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        Family.named("llamas")
    (tmp_path / "broken_lab").mkdir()
    (tmp_path / "broken_lab" / "needs.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        config.load_config("lora_llama", ["model.family=broken_lab.needs"])
