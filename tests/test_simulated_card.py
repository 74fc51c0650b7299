"""Commands on a card that is not there (`simulated_card`): V100 in float16, A100 in bfloat16.

In a process of its own, because torch is told of the card while it is imported.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kit
import pytest
import training_kit

from cmexam_tune import config
from cmexam_tune.config import dump_config
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction
from cmexam_tune.train import train
from cmexam_tune.training.run_directory import run as runs

Report = list[dict[str, Any]]
Runner = Callable[[str, Sequence[Sequence[str]]], Report]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 4},
    "full": {"method": "full"},
    "head": {"method": "head"},
}
WRITERS = ("lora", "ptuning", "full")
FAMILIES = {"llama": WRITERS, "chatglm": WRITERS, "chatglm2": WRITERS, "bert": (*WRITERS, "head")}
MODES = ("generate", "constrained", "likelihood")


@pytest.fixture(scope="module")
def card_library() -> Path:
    from simulated_card import building

    try:
        return building.library()
    except building.CannotBuild as reason:
        pytest.skip(f"no simulated card: {reason}")


@pytest.fixture
def on_card(tmp_path: Path, card_library: Path) -> Runner:
    """Run commands on a card; all have to end well."""

    def run(card: str, commands: Sequence[Sequence[str]]) -> Report:
        (tmp_path / "commands.json").write_text(json.dumps(commands), encoding="utf-8")
        words = [str(card_library), card, str(tmp_path / "commands.json"), str(tmp_path / "report.json")]
        environment = {**training_kit.ENVIRONMENT, "PYTHONPATH": f"{training_kit.ROOT}:{training_kit.ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-m", "simulated_card", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        report: Report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert [entry["status"] for entry in report] == [0] * len(commands), done.stderr[-6000:]
        return report

    return run


def write_recipe(folder: Path, family: str = "llama", method: str = "lora", **changes: Any) -> str:
    """Write a recipe of three steps on the card, beside its questions; return its path."""
    training_kit.questions(folder / "train.jsonl", 18)
    training_kit.questions(folder / "val.jsonl", 4, seed=1)
    settings: dict[str, Any] = {
        "model": {"family": family.removesuffix("2"), "model_name_or_path": kit.checkpoint(family)},
        "tuning": METHODS[method],
        "training__use_cpu": False,
        "training__max_steps": 3,
        "training__save_steps": 2,
        "generation": {"max_new_tokens": 4},
    }
    if family == "bert":
        settings["model"]["head"] = "choice"
        settings["generation"] = {}
    recipe = training_kit.recipe(folder, **settings, **changes)
    path = folder / "recipe.yaml"
    path.write_text(dump_config(recipe), encoding="utf-8")
    return str(path)


def predicting(folder: Path, name: str, *words: str) -> list[str]:
    files = ["--questions", str(folder / "val.jsonl"), "--out", str(folder / name)]
    return ["predict", "--run-folder", str(folder / "run"), *files, *words]


def each(report: Report, short: int, long: int, count: int) -> dict[str, float]:
    """Return the syncs by line that each of `count` more steps or tokens of the longer command costs."""
    lines = {*report[short]["syncs"], *report[long]["syncs"]}
    more = {line: report[long]["syncs"].get(line, 0) - report[short]["syncs"].get(line, 0) for line in lines}
    return {line: waits / count for line, waits in sorted(more.items()) if waits}


def test_lora_on_a_v100(tmp_path: Path, on_card: Runner) -> None:
    """Train, predict and export end well, give what the CPU gives, and wait for the card no more often than known."""
    recipe = write_recipe(tmp_path, tuning__lora_dropout=0.0, training__save_strategy="no")
    quiet = ["train", "--config", recipe, "training.logging_steps=100"]
    report = on_card("V100", [
        [*quiet, f"out={tmp_path / 'short'}", "training.max_steps=1"],
        [*quiet, f"out={tmp_path / 'long'}"],
        ["train", "--config", recipe],
        predicting(tmp_path, "few.jsonl"),
        predicting(tmp_path, "many.jsonl", "generation.max_new_tokens=8"),
        ["export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "merged"), "--merge"],
    ])  # fmt: skip
    assert report[1]["kernels"].keys() == {"efficient"}, "the formula would keep whole matrices of scores"
    steps, tokens = each(report, 0, 1, 2), each(report, 3, 4, 4)
    # Loss, norm, scale and whether it was skipped, once a step; transformers looks for packed rows in each of 3
    # micro-batches. The last step is logged.
    assert sum(steps.values()) <= 4 + 3 + 1, steps
    # Whether all rows have ended, and whether there is padding.
    assert sum(tokens.values()) <= 2, tokens
    settings = config.load_config(recipe, [f"out={tmp_path / 'cpu'}", "training.use_cpu=true"])
    there, here = (training_kit.losses(run) for run in (runs.open_run(tmp_path / "run"), train(settings)))
    assert there == pytest.approx(here, rel=2e-3) and there != here


@pytest.mark.slow
@pytest.mark.parametrize("card", ["V100", "A100"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_method(tmp_path: Path, on_card: Runner, card: str, family: str) -> None:
    """Train with evaluation, checkpoints and the best of them, packed too, answer in every mode, export."""
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "exam_accuracy",
                  "load_best_model_at_end": True}  # fmt: skip
    changes = {f"training__{key}": value for key, value in evaluation.items()}
    commands = []
    for method in FAMILIES[family]:
        folder = tmp_path / method
        folder.mkdir()
        recipe = write_recipe(folder, family, method, **changes, data__validation=[str(folder / "val.jsonl")])
        commands.append(["train", "--config", recipe])
        modes = ("likelihood",) if family == "bert" else MODES
        commands += [predicting(folder, f"{mode}.jsonl", f"generation.mode={mode}") for mode in modes]
        export = ["export", "--run", str(folder / "run"), "--out", str(folder / "exported")]
        # A choice among random answers is decided by less than float16 rounds.
        rounding = ["model.dtype=float32"] * (family == "bert")
        commands.append([*export, *rounding, *["--merge"] * (method == "lora")])
        if family != "bert":
            commands.append(["train", "--config", recipe, f"out={folder / 'packed'}", "training.packing=true"])
    on_card(card, commands)
    for file in tmp_path.glob("*/*.jsonl"):
        if file.stem in MODES:
            assert len(list(jsonl.read(file, Prediction))) == 4


@pytest.mark.slow
def test_skipped_steps_do_not_advance_the_schedule(
    tmp_path: Path, on_card: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first loss scale beyond what float16 holds, as a large model's is; it is halved until the gradients fit."""
    monkeypatch.setitem(training_kit.ENVIRONMENT, "FIRST_LOSS_SCALE", "24")
    recipe = write_recipe(tmp_path, training__save_strategy="no", training__lr_scheduler_type="constant_with_warmup",
                          training__warmup_steps=100)  # fmt: skip
    on_card("V100", [["train", "--config", recipe, "training.max_steps=12"]])
    log = runs.open_run(tmp_path / "run").log
    steps = [entry for entry in log if "loss" in entry]
    skipped = [int(entry.get("skipped_steps", 0)) for entry in steps]
    assert 0 < skipped[-1] < len(steps)
    taken = [entry["step"] - 1 - before for entry, before in zip(steps, [0, *skipped], strict=False)]
    assert [entry["learning_rate"] for entry in steps] == pytest.approx([1e-3 * count / 100 for count in taken])
