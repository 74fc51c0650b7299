"""The dry run against measured runs on tiny models."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import training_kit

torch = pytest.importorskip("torch")

from cmexam_tune import config, tiny
from cmexam_tune import train as program
from cmexam_tune.train import question_files, train
from cmexam_tune.training import arguments, estimate
from cmexam_tune.training.run_directory import run as runs

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
    "ptuning": {"method": "ptuning", "num_virtual_tokens": 5},
    "full": {"method": "full"},
    "head": {"method": "head"},
}
CASES = [("llama", "lora"), ("llama", "ptuning"), ("llama", "full"), ("chatglm", "ptuning"), ("chatglm2", "lora"),
         ("bert", "head")]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training_kit.world(tmp_path_factory.mktemp("estimate"))
    for name in ("chatglm", "chatglm2", "bert"):
        tiny.build(name, folder / name, hidden=32, layers=2)
    return folder


@pytest.mark.parametrize(("family", "method"), CASES)
def test_counts_are_those_of_the_loaded_model(folder: Path, family: str, method: str) -> None:
    changes: dict[str, Any] = {
        "model__family": family.rstrip("2"), "model__model_name_or_path": str(folder / family),
        "tuning": METHODS[method], "prompt__style": "answer",
    }  # fmt: skip
    if family == "bert":
        changes["model__head"] = "choice"
    settings = training_kit.recipe(folder, **changes)
    questions = question_files(settings)[0]
    found = estimate.dry_run(settings, questions)
    module, tuning = runs.parts(settings)
    loaded = module.load(settings.model, questions)
    real: Any = tuning.attach(loaded.model, module, settings.tuning.settings)
    assert found.parameters == sum(p.numel() for p in real.parameters())
    assert found.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert found.steps == 8
    assert found.memory["none"] > sum(p.numel() * p.element_size() for p in real.parameters())
    assert min(found.memory.values()) > 0
    assert found.hours > 0


def test_measured_run_has_the_estimated_steps_tokens_and_padding(folder: Path) -> None:
    settings = training_kit.recipe(folder, out=str(folder / "measured"), training__include_num_input_tokens_seen=True)
    found = estimate.dry_run(settings, question_files(settings)[0])
    run = train(settings)
    last = [entry for entry in run.log if "loss" in entry][-1]
    assert last["step"] == found.steps
    assert last["num_input_tokens_seen"] == found.tokens
    assert run.metrics["padding"] == found.padding


def test_hours_are_of_the_right_size(tmp_path: Path) -> None:
    """A model large enough for matrix products to rule: measured within a factor of four."""
    training_kit.questions(tmp_path / "train.jsonl", 12)
    tiny.build("llama", tmp_path / "llama", hidden=256, layers=4)
    settings = training_kit.recipe(
        tmp_path, training__save_strategy="no", training__num_train_epochs=1,
        training__per_device_train_batch_size=6,
    )  # fmt: skip
    found = estimate.dry_run(settings, question_files(settings)[0])
    run = train(settings)
    assert 0.25 < run.metrics["train_runtime"] / (found.hours * 3600) < 4


def test_memory_by_stage(folder: Path, tmp_path: Path) -> None:
    """ZeRO-2 shares out Adam's eight bytes for each trained parameter and its gradient's four; buffers come on top."""
    settings = training_kit.recipe(folder, tuning=METHODS["full"])
    module, tuning = runs.parts(settings)
    questions = question_files(settings)[0]
    loaded = module.load(settings.model, questions)
    model: Any = tuning.attach(loaded.model, module, settings.tuning.settings)
    from cmexam_tune.training.data import batches, encoding

    encoder = encoding.Encoder(settings.prompt, settings.model, module, loaded, tmp_path)
    layout = arguments.layout(settings.training, settings.prompt, 4)
    data = batches.TrainingData(encoder.encode(questions), layout)
    size = estimate.ModelSize.of(model, generates=True)
    need = estimate.memory(size, estimate.activations(model.config, data, checkpointing=False, generates=True), 4)
    trained = sum(p.numel() for p in model.parameters())
    held = estimate.buffers(size)
    less = {stage: need[stage] - held[stage] for stage in held}
    assert need["none"] - less["zero2"] == pytest.approx(trained * 12 * 3 / 4, abs=4)
    assert less["zero2"] - less["zero3"] == pytest.approx(trained * 4 * 3 / 4, abs=4)
    assert less["zero3"] - (need["zero3_offload"] - held["zero3"]) == pytest.approx(trained * 16 / 4, abs=4)


LOOK = """
import sys
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from cmexam_tune.train import train

setup = DeepSpeedZeroOptimizer.setup_buckets

def look(self):
    setup(self)
    buffers = [buffer for bucket in self.ipg_buckets.values() for buffer in bucket.buffer]
    print("held", sum(buffer.numel() * buffer.element_size() for buffer in buffers))

DeepSpeedZeroOptimizer.setup_buckets = look
train(sys.argv[1])
"""


def test_buffers_are_those_that_deepspeed_holds(folder: Path, tmp_path: Path) -> None:
    """Measured in DeepSpeed's own optimizer, in a process of its own."""
    settings = training_kit.recipe(
        folder, out=str(tmp_path / "zero2"), tuning=METHODS["full"], training__deepspeed="zero2", training__max_steps=1
    )
    path = tmp_path / "zero2.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")
    command = [sys.executable, "-c", LOOK, str(path)]
    done = subprocess.run(command, env=training_kit.ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module, _ = runs.parts(settings)
    model: Any = module.load(settings.model, device="meta").model
    trained = sum(p.numel() for p in model.parameters())
    assert trained > 2**16
    held = {line for line in done.stdout.splitlines() if line.startswith("held")}
    assert held == {f"held {estimate.buffers(estimate.ModelSize.of(model, generates=True))['zero2']}"}


PEAK = """
import re, sys
from pathlib import Path
from cmexam_tune.train import question_files, train
from cmexam_tune.config import load_config
from cmexam_tune.training import estimate

config = load_config(sys.argv[2])
if sys.argv[1] == "dry":
    print(estimate.dry_run(config, question_files(config)[0]).host["none"])
else:
    train(config)
    # Not `ru_maxrss`, which begins with what the process had that started this one.
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_host_memory_is_what_is_measured(tmp_path: Path, method: str) -> None:
    """158 million parameters, 630 MB of weights, on the CPU: the peak of a whole training is within 20 %."""
    training_kit.questions(tmp_path / "train.jsonl", 12)
    tiny.build("llama", tmp_path / "llama", hidden=1024, layers=8, vocab=32000)
    settings = training_kit.recipe(tmp_path, tuning=METHODS[method], training__max_steps=2)
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")
    found = []
    for what in ("dry", "run"):
        command = [sys.executable, "-c", PEAK, what, str(path)]
        done = subprocess.run(command, env=training_kit.ENVIRONMENT, capture_output=True, text=True, check=True)
        found.append(int(done.stdout.split()[-1]))
    print(f"{method}: foreseen {found[0] / 2**20:.0f} MiB, measured {found[1] / 2**20:.0f} MiB")
    assert found[0] == pytest.approx(found[1], rel=0.2)


def test_host_memory_on_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process holds the model, but where an adapter is merged for ZeRO-3; what is offloaded is shared out."""
    settings = training_kit.recipe(folder, training__use_cpu=False)
    model: Any = runs.parts(settings)[0].load(settings.model, device="meta").model.requires_grad_(False)
    size, needed = sum(p.numel() * p.element_size() for p in model.parameters()), dict.fromkeys(estimate.STAGES, 0)
    card = arguments.Card("A800", cuda=True, bf16=True)
    monkeypatch.setattr(arguments.Card, "here", lambda use_cpu=False: card)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1000)))
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    weights = estimate.ModelSize.of(model, generates=True)
    processes = {"world": 16, "local": 8, "use_cpu": False}
    plain = estimate.host_memory(weights, needed, **processes, merges_adapter=False)
    assert plain["none"] == plain["zero2"] == plain["zero3"] == 8 * (1000 + largest)
    assert plain["zero3_offload"] == 8 * (1000 + max(largest, size // 16))
    found = estimate.host_memory(weights, needed, **processes, merges_adapter=True)
    assert found["zero3"] == 8 * (1000 + size) and found["zero2"] == plain["zero2"]


def test_program_prints_it_without_writing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = training_kit.recipe(folder, out=str(tmp_path / "dry"))
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")
    program.main(["--config", str(path), "--dry-run"])
    told = capsys.readouterr().out
    for words in ("ZeRO-2", "ZeRO-3, offloaded", "of the host's", "optimizer steps", "hours", "stem shortened"):
        assert words in told
    assert not (tmp_path / "dry").exists()
