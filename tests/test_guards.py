"""Training that goes wrong stops with the step, the questions, the cause and a remedy."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_kit

torch = pytest.importorskip("torch")

from cmexam_tune.core.errors import ConfigError, TrainingStopped
from cmexam_tune.models.adapters import Method
from cmexam_tune.train import train
from cmexam_tune.training import arguments, callbacks, checkpoints, logits, monitor
from cmexam_tune.training.monitor import TrainingMonitor

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([2.0, NAN], "loss is nan"),
        ([2.0, INF], "loss is inf"),
        ([2.0, 0.0], "exactly 0"),
        ([0.0], "exactly 0"),
        ([2.0, 1e-3, 0.0], None),
        ([2.0, 1.9], None),
    ],
)
def test_loss(losses: list[float], words: str | None) -> None:
    watched = TrainingMonitor()
    for value in losses:
        watched.on_loss(value, step_targets=3)
    assert (words is None) == (watched.problem is None)
    assert words is None or words in str(watched.problem)


def test_batch_without_labels() -> None:
    watched = TrainingMonitor()
    watched.on_loss(1.0, step_targets=0)
    assert "no token in this batch carries a label" in str(watched.problem)


@pytest.mark.parametrize(
    ("norm", "overflow", "words"),
    [(0.0, False, "gradients are 0"), (NAN, False, "norm is nan"), (INF, True, None), (0.0, True, None),
     (1.0, False, None)],
)  # fmt: skip
def test_gradient(norm: float, overflow: bool, words: str | None) -> None:
    """What a step that loss scaling has skipped reports as its norm, 0 or infinity, is no finding."""
    watched = TrainingMonitor(fp16=True)
    watched.on_grad_norm(norm, overflow)
    assert (words is None) == (watched.problem is None)
    assert words is None or words in str(watched.problem)


def test_loss_scale_collapses() -> None:
    watched = TrainingMonitor(fp16=True)
    scale = 65536.0
    for _ in range(16):
        scale /= 2
        watched.on_loss_scale(scale, skipped=True)
    assert watched.problem is None
    watched.on_loss_scale(scale / 2, skipped=True)
    assert "loss scale has collapsed" in str(watched.problem)
    steady = TrainingMonitor(fp16=True)
    for turn in range(100):
        steady.on_loss_scale(1024.0, skipped=turn % 2 == 0)
    assert steady.problem is None


def test_message_names_everything() -> None:
    watched = TrainingMonitor()
    watched.on_step_begin([f"q:{i}" for i in range(10)])
    watched.on_loss(NAN, 3)
    text = str(watched.error(7, "run/checkpoint-6"))
    for part in ("step 7", "q:0", "and 2 more", "nan", "learning_rate", "run/checkpoint-6"):
        assert part in text


def test_question_without_label_is_refused_before_the_first_step() -> None:
    monitor.refuse_unlabelled([])
    with pytest.raises(TrainingStopped, match="1 questions carry no label, the first is b"):
        monitor.refuse_unlabelled(["b"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("guards"), count=12)


@pytest.mark.parametrize(("value", "words"), [(NAN, "loss is nan"), (0.0, "exactly 0")])
def test_run_stops_after_saving(folder: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str) -> None:
    """The third step degenerates: the run ends with its weights as they were after the second."""
    loss_of = logits.LabelLogits.loss
    calls = []

    def broken(*words: Any) -> Any:
        calls.append(1)
        loss = loss_of(*words)
        return loss if len(calls) <= 6 else loss * value

    monkeypatch.setattr(logits.LabelLogits, "loss", broken)
    out = folder / f"stop_{value}"
    settings = training_kit.recipe(folder, out=str(out), training__save_steps=100)
    with pytest.raises(TrainingStopped, match=words) as stopped:
        train(settings)
    assert "step 3, questions q:" in str(stopped.value)
    (saved,) = checkpoints.newest_first(out)
    assert saved.name == "checkpoint-2"
    assert checkpoints.damage(saved) is None
    assert not (out / "adapter").exists()


def test_unreadable_adapter_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmexam_tune.models.adapters.lora.LoRA.load", lambda self, model, path: None)
    with pytest.raises(TrainingStopped, match="gives other logits"):
        train(training_kit.recipe(folder, out=str(folder / "unread"), training__learning_rate=1e-2))
    assert not (folder / "unread" / "adapter").exists()


# Precision

V100 = arguments.Card("V100", accelerated=True, bf16=False)
A800 = arguments.Card("A800", accelerated=True, bf16=True)
CPU = arguments.Card("CPU", accelerated=False, bf16=True)


@pytest.mark.parametrize(
    ("card", "given", "expected"),
    [
        (V100, {}, {"bf16": False, "fp16": True}),
        (A800, {}, {"bf16": True, "fp16": False}),
        (CPU, {}, {"bf16": False, "fp16": False}),
        (A800, {"fp16": True}, {"bf16": False, "fp16": True}),
        (V100, {"fp16": False}, {"bf16": False, "fp16": False}),
    ],
)
def test_precision_suits_the_card(card: arguments.Card, given: dict[str, bool], expected: dict[str, bool]) -> None:
    assert arguments.choose_precision(given, card) == expected


def test_bf16_on_v100_is_refused() -> None:
    with pytest.raises(ConfigError, match="V100 has no bfloat16"):
        arguments.choose_precision({"bf16": True}, V100)


def test_harmful_settings_are_named(folder: Path) -> None:
    risky = training_kit.recipe(
        folder, tuning={"method": "ptuning", "num_virtual_tokens": 4}, training__learning_rate=2e-2
    )
    fp16: Any = SimpleNamespace(fp16=True)
    said = arguments.harmful_settings(
        risky.training, Method.named("ptuning"), fp16, torch.nn.Linear(2, 2, dtype=torch.float16)
    )
    assert any("float16" in line for line in said)
    assert any("0.02 with P-tuning in fp16" in line for line in said)
    calm = training_kit.recipe(folder)
    bf16: Any = SimpleNamespace(fp16=False)
    assert arguments.harmful_settings(calm.training, Method.named("lora"), bf16, torch.nn.Linear(2, 2)) == []


def test_the_log_stays_json_where_a_norm_is_none(tmp_path: Path) -> None:
    log = callbacks.JsonlLog(tmp_path / "log.jsonl")
    state: Any = SimpleNamespace(global_step=3, is_world_process_zero=True)
    log.on_log(None, state, None, {"loss": 2.0, "grad_norm": math.nan, "eval_loss": math.inf, "skipped_steps": 1})
    entry = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)
    assert (entry["loss"], entry["grad_norm"], entry["eval_loss"], entry["skipped_steps"]) == (2.0, None, None, 1)
