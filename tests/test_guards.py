"""Training that goes wrong stops with the step, the questions, the cause and a remedy."""

import math
from pathlib import Path
from typing import Any

import pytest
import train_helpers

torch = pytest.importorskip("torch")

from cmexam_tune.core.errors import ConfigError, TrainingStopped
from cmexam_tune.train import train
from cmexam_tune.training import (
    checkpoints,
    checksums,
    logits,
    loop,
    monitor,
    precision_checks,
    selfcheck,
)
from cmexam_tune.training.monitor import Guards

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
    judge = Guards()
    for value in losses:
        judge.loss(value, items=3)
    assert (words is None) == (judge.problem is None)
    assert words is None or words in str(judge.problem)


def test_batch_without_labels() -> None:
    judge = Guards()
    judge.loss(1.0, items=0)
    assert "no token in this batch carries a label" in str(judge.problem)


@pytest.mark.parametrize(
    ("norm", "overflow", "words"),
    [(0.0, False, "gradients are 0"), (NAN, False, "norm is nan"), (INF, True, None), (0.0, True, None),
     (1.0, False, None)],
)  # fmt: skip
def test_gradient(norm: float, overflow: bool, words: str | None) -> None:
    """What a step that loss scaling has skipped reports as its norm, 0 or infinity, is no finding."""
    judge = Guards(fp16=True)
    judge.gradient(norm, overflow)
    assert (words is None) == (judge.problem is None)
    assert words is None or words in str(judge.problem)


def test_loss_scale_collapses() -> None:
    judge = Guards(fp16=True)
    scale = 65536.0
    for _ in range(16):
        scale /= 2
        judge.scale(scale, skipped=True)
    assert judge.problem is None
    judge.scale(scale / 2, skipped=True)
    assert "loss scale has collapsed" in str(judge.problem)
    steady = Guards(fp16=True)
    for turn in range(100):
        steady.scale(1024.0, skipped=turn % 2 == 0)
    assert steady.problem is None


def test_message_names_everything() -> None:
    judge = Guards()
    judge.begin([f"q:{i}" for i in range(10)])
    judge.loss(NAN, 3)
    text = str(judge.stop(7, "run/checkpoint-6"))
    for part in ("step 7", "q:0", "and 2 more", "nan", "learning_rate", "run/checkpoint-6"):
        assert part in text


def test_question_without_label_is_refused_before_the_first_step() -> None:
    monitor.check_rows([("a", 1), ("b", 2)])
    with pytest.raises(TrainingStopped, match="1 questions carry no label, the first is b"):
        monitor.check_rows([("a", 1), ("b", 0)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_helpers.world(tmp_path_factory.mktemp("guards"), count=12)


@pytest.mark.parametrize(("value", "words"), [(NAN, "loss is nan"), (0.0, "exactly 0")])
def test_run_stops_after_saving(folder: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str) -> None:
    """The third step degenerates: the run ends with its weights as they were after the second."""
    whole = logits.LabelLogits.loss
    calls = []

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        loss = whole(*arguments)
        return loss if len(calls) <= 6 else loss * value

    monkeypatch.setattr(logits.LabelLogits, "loss", broken)
    out = folder / f"stop_{value}"
    settings = train_helpers.recipe(folder, out=str(out), training__save_steps=100)
    with pytest.raises(TrainingStopped, match=words) as stopped:
        train(settings)
    assert "step 3, questions q:" in str(stopped.value)
    (saved,) = checkpoints.found(out)
    assert saved.name == "checkpoint-2"
    assert checksums.damage(saved) is None
    assert not (out / "adapter").exists()


def test_unreadable_adapter_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmexam_tune.models.adapters.lora.load", lambda model, path: None)
    with pytest.raises(TrainingStopped, match="gives other logits"):
        train(train_helpers.recipe(folder, out=str(folder / "unread"), training__learning_rate=1e-2))
    assert not (folder / "unread" / "adapter").exists()
    assert selfcheck is not None
    assert loop is not None


# Precision

V100 = precision_checks.Card("V100", cuda=True, bf16=False)
A800 = precision_checks.Card("A800", cuda=True, bf16=True)
CPU = precision_checks.Card("CPU", cuda=False, bf16=True)


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
def test_precision_suits_the_card(
    card: precision_checks.Card, given: dict[str, bool], expected: dict[str, bool]
) -> None:
    assert precision_checks.choose(given, card) == expected


def test_bf16_on_v100_is_refused() -> None:
    with pytest.raises(ConfigError, match="V100 has no bfloat16"):
        precision_checks.choose({"bf16": True}, V100)


def test_harmful_settings_are_named(folder: Path) -> None:
    risky = train_helpers.recipe(
        folder, tuning={"method": "ptuning", "num_virtual_tokens": 4}, training__learning_rate=2e-2
    )
    said = precision_checks.warnings(risky, {"fp16": True, "bf16": False}, {"prefix": torch.float16})
    assert any("float16" in line for line in said)
    assert any("0.02 with P-tuning in fp16" in line for line in said)
    calm = train_helpers.recipe(folder)
    assert precision_checks.warnings(calm, {"fp16": False, "bf16": True}, {"lora": torch.float32}) == []
