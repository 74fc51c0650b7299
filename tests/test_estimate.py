"""The dry run against measured runs on tiny models."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_programs
import pytest
import training_kit

torch = pytest.importorskip("torch")

from cmexam_tune import config, tiny
from cmexam_tune import train as program
from cmexam_tune.core.errors import UserError
from cmexam_tune.train import train
from cmexam_tune.training import arguments, estimate
from cmexam_tune.training.data import batches, encoding
from cmexam_tune.training.data.questions import question_files
from cmexam_tune.training.run_directory import run as runs
from cmexam_tune.training.trainer import ExamTrainer

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


def print_buffers() -> None:
    """Let DeepSpeed's optimizer print how many bytes its buckets hold."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    setup = DeepSpeedZeroOptimizer.setup_buckets

    def setup_and_print(self: Any) -> None:
        setup(self)
        buffers = [buffer for bucket in self.ipg_buckets.values() for buffer in bucket.buffer]
        print("held", sum(buffer.numel() * buffer.element_size() for buffer in buffers))

    DeepSpeedZeroOptimizer.setup_buckets = setup_and_print


def test_buffers_are_those_that_deepspeed_holds(folder: Path, tmp_path: Path) -> None:
    """Measured in DeepSpeed's own optimizer, in a process of its own."""
    settings = training_kit.recipe(
        folder, out=str(tmp_path / "zero2"), tuning=METHODS["full"], training__deepspeed="zero2", training__max_steps=1
    )
    path = tmp_path / "zero2.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")
    code, printed, noted = forked_programs.Program(
        "train", ["--config", str(path)], print_buffers, DS_ACCELERATOR="cpu"
    ).wait()
    assert code == 0, noted
    module, _ = runs.parts(settings)
    model: Any = module.load(settings.model, device="meta").model
    trained = sum(p.numel() for p in model.parameters())
    assert trained > 2**16
    held = {line for line in printed.splitlines() if line.startswith("held")}
    assert held == {f"held {estimate.buffers(estimate.ModelSize.of(model, generates=True))['zero2']}"}


PEAK = """
import re, sys
from pathlib import Path
from cmexam_tune.train import train
from cmexam_tune.training.data.questions import question_files
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
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1000)))
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    weights = estimate.ModelSize.of(model, generates=True)
    processes = {"world": 16, "local": 8, "on_card": True}
    plain = estimate.host_memory(weights, needed, **processes, merges_adapter=False)
    assert plain["none"] == plain["zero2"] == plain["zero3"] == 8 * (1000 + largest)
    assert plain["zero3_offload"] == 8 * (1000 + max(largest, size // 16))
    found = estimate.host_memory(weights, needed, **processes, merges_adapter=True)
    assert found["zero3"] == 8 * (1000 + size) and found["zero2"] == plain["zero2"]
    # Fully tuned: a copy of all weights in float32, and beside it what was written, read back.
    whole = estimate.ModelSize.of(model.requires_grad_(True), generates=True)
    full = estimate.host_memory(whole, needed, **processes, merges_adapter=False, reads_whole=True)
    assert full["none"] == full["zero2"] == 8 * (1000 + largest) + 2 * size
    assert full["zero3"] == 8 * 1000 + 8 * largest + size


def test_program_prints_it_without_writing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = training_kit.recipe(folder, out=str(tmp_path / "dry"))
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")
    program.main(["--config", str(path), "--dry-run"])
    told = capsys.readouterr().out
    for words in ("ZeRO-2", "ZeRO-3, offloaded", "host RAM", "optimizer steps", "hours", "stem shortened"):
        assert words in told
    assert not (tmp_path / "dry").exists()


def test_a_card_that_is_not_here(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model too large for a V100 of 16 GB fits an A100 of 80 GB, and the settings that are named make it fit."""
    tiny.build("llama", tmp_path / "large", hidden=32, layers=2)
    content = json.loads((tmp_path / "large" / "config.json").read_text(encoding="utf-8"))
    content |= {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 32, "head_dim": 128}  # fmt: skip
    (tmp_path / "large" / "config.json").write_text(json.dumps(content), encoding="utf-8")
    settings = training_kit.recipe(folder, model__model_name_or_path=str(tmp_path / "large"), training__use_cpu=False)
    path = tmp_path / "recipe.yaml"
    path.write_text(config.dump_config(settings), encoding="utf-8")

    def told(*words: str) -> str:
        program.main(["--config", str(path), "--dry-run", *words])
        return capsys.readouterr().out

    small = told("--card", "v100-16gb", "training.per_device_train_batch_size=32")
    assert "weights in float16" in small
    match = re.search(r"does not fit V100-16GB: needs ([\d.]+) of 15.27 GiB; change (.*)", small)
    assert match is not None and float(match[1]) > 15.27
    assert "per_device_train_batch_size=16" in match[2] and "model.load_in_4bit=true" in match[2]
    fits = told("--card", "V100-16GB", "model.load_in_4bit=true", "training.gradient_checkpointing=true")
    assert "fits V100-16GB: needs" in fits and "weights in 4 bits" in fits
    large = told("--card", "A100-80GB", "training.per_device_train_batch_size=32")
    assert "fits A100-80GB: needs" in large and "weights in bfloat16" in large
    ascend = told("--card", "910B", "model.config.num_hidden_layers=160")
    assert "does not fit 910B" in ascend and "load_in_4bit" not in ascend
    with pytest.raises(UserError, match=r"bitsandbytes has no kernels for this accelerator \(910B\)"):
        told("--card", "910B", "model.load_in_4bit=true")
    with pytest.raises(UserError, match="--card V100-16 is not known, did you mean 'V100-16GB'"):
        told("--card", "V100-16")


def test_logits_of_all_labels_are_counted_only_where_they_exist(folder: Path) -> None:
    """Smoothed labels need all of them at once: in bfloat16, and three times in float32."""

    def foreseen(**changes: Any) -> int:
        settings = training_kit.recipe(folder, training__per_device_train_batch_size=6, **changes)
        return estimate.dry_run(settings, question_files(settings)[0], "H100").memory["none"]

    settings = training_kit.recipe(folder)
    loaded = runs.parts(settings)[0].load(settings.model, device="meta")
    vocabulary = loaded.model.config.vocab_size
    more = foreseen(training__label_smoothing_factor=0.1) - foreseen()
    labels = more / vocabulary + 256 * 12
    assert labels % 14 == 0 and 256 < labels / 14 <= 6 * 96


def test_the_mask_of_packed_rows_is_counted_once(folder: Path) -> None:
    """In bfloat16, for all pairs of tokens of the rows; `test_attention.py` sees that one is kept."""

    def foreseen(**changes: Any) -> int:
        settings = training_kit.recipe(folder, training__per_device_train_batch_size=6, **changes)
        return estimate.dry_run(settings, question_files(settings)[0], "H100").memory["none"]

    settings = training_kit.recipe(folder, training__per_device_train_batch_size=6, training__packing=True)
    family, _ = runs.parts(settings)
    questions = question_files(settings)[0]
    loaded = family.load(settings.model, device="meta")
    encoder = encoding.Encoder(settings.prompt, settings.model, family, loaded, folder / "packed_cache")
    data = batches.TrainingData(encoder.encode(questions), arguments.layout(settings.training, settings.prompt, 1))
    plans = [plan for (plan,) in data.sampler(0, 1)]
    shapes = [data.train[plan].micro[0]["input_ids"].shape for plan in plans]
    packed = [shape for shape, plan in zip(shapes, plans, strict=True) if any(len(row) > 1 for row in plan.micro[0])]
    assert packed and len(packed) < len(shapes), "the longest questions stay alone"
    more = foreseen(training__packing=True) - foreseen()
    assert more == 2 * max(rows * width**2 for rows, width in packed)


def test_out_of_memory_while_training_is_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card that claims 15.77 GiB; the keys are those that the recipe has not got yet."""
    settings = training_kit.recipe(folder, out=str(folder / "crowded"), training__gradient_checkpointing=True)
    loss_of, calls = ExamTrainer.loss_of, itertools.count()

    def crowded(self: Any, *given: Any, **named: Any) -> Any:
        if next(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.49 GiB.")
        return loss_of(self, *given, **named)

    monkeypatch.setattr(ExamTrainer, "loss_of", crowded)
    v100 = arguments.Card.named("V100-16GB")
    here = arguments.Card.here
    monkeypatch.setattr(arguments.Card, "here", lambda use_cpu=False: here(True) if use_cpu else v100)
    with pytest.raises(UserError) as error:
        train(settings)
    text = str(error.value)
    assert "Tried to allocate 2.49 GiB" in text and re.search(r"foresees [\d.]+ GiB; V100-16GB has 15.77", text)
    assert "training.per_device_train_batch_size=1" in text and "model.load_in_4bit=true" in text
    assert "gradient_checkpointing" not in text
    assert list((folder / "crowded").glob("checkpoint-*")), "what was learnt is kept"
    monkeypatch.setattr(arguments.Card, "here", here)
    monkeypatch.setattr(ExamTrainer, "loss_of", loss_of)
    smaller = {"training__gradient_checkpointing": True, "training__per_device_train_batch_size": 1}
    resumed = train(training_kit.recipe(folder, out=str(folder / "crowded"), tuning__lora_dropout=0.1, **smaller))
    steps = [entry["step"] for entry in resumed.log if "loss" in entry]
    assert resumed.finished and steps == list(range(1, len(steps) + 1)) and len(steps) > 3
