"""The same command under python, torchrun and deepspeed, ZeRO-2 and ZeRO-3 on two processes: the loss of one."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_programs
import pytest
import training_kit
from training_kit import losses, weights

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from cmexam_tune import config, tiny
from cmexam_tune.train import train
from cmexam_tune.training import arguments
from cmexam_tune.training.run_directory import run as runs


def launch(launcher: list[str], recipe: Path, out: Path, *overrides: str) -> runs.Run:
    command = [*launcher, "--config", str(recipe), f"out={out}", *overrides]
    environment = training_kit.ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, cwd=out.parent)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return runs.open_run(out)


def two(recipe: Path, out: Path, *overrides: str) -> runs.Run:
    """Train on two processes."""
    for process in forked_programs.group("train", ["--config", str(recipe), f"out={out}", *overrides]):
        code, said, noted = process.wait()
        assert code == 0, (said + noted)[-4000:]
    return runs.open_run(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_kit.world(tmp_path_factory.mktemp("deepspeed"), count=15)


def experiment(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    settings = training_kit.recipe(
        folder,
        **{"training__save_steps": 100, "training__global_batch_size": 7, "tuning__lora_dropout": 0.0, **changes},
    )
    text = config.dump_config(settings)
    assert text.count("  use_cpu: true\n") == 1
    if not torch.accelerator.is_available():
        # Every launcher must find by itself that there is no card; nobody has to say so.
        text = text.replace("  use_cpu: true\n", "")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> runs.Run:
    """Seven questions a step do not divide by two, and the last step of an epoch has one for two processes."""
    return train(experiment(folder, "alone"), [f"out={folder / 'alone'}"])


@pytest.mark.parametrize("name", ["torchrun", "zero2", "zero3", "python-zero2"])
def test_two_processes_learn_what_one_learns(folder: Path, alone: runs.Run, name: str) -> None:
    recipe, out = folder / "alone.yaml", folder / name
    if name == "torchrun":
        # The slow tests of `test_resume.py` and `test_objectives.py` call the command itself.
        words = ["--config", str(recipe), f"out={out}"]
        code, said, noted = forked_programs.Program("train", words, forked_programs.by_torchrun, daemon=False).wait()
        assert code == 0, (said + noted)[-4000:]
        assert list(out.glob("checkpoint-*/rng_state_1.pth")), "the second process's"
        run = runs.open_run(out)
    elif name == "python-zero2":
        process = forked_programs.Program("train", ["--config", str(recipe), f"out={out}", "training.deepspeed=zero2"])
        assert process.wait()[0] == 0
        run = runs.open_run(out)
    else:
        run = two(recipe, out, f"training.deepspeed={name}")
        # All that DeepSpeed reads again is in its own folder; trained parameters beside it would be written for nobody.
        (last,) = out.glob("checkpoint-*")
        assert list(last.glob("global_step*")) and not list(last.glob("*.safetensors"))
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert weights(run).keys() == weights(alone).keys()
    for key, value in weights(alone).items():
        assert torch.allclose(weights(run)[key], value, atol=1e-5), key
    assert runs.load(run.path)[1].model is not None


@pytest.mark.skipif(shutil.which("numactl") is None, reason="the deepspeed launcher wants numactl on a CPU")
def test_deepspeed_launcher(folder: Path, alone: runs.Run) -> None:
    words = f"--num_gpus 2 --master_port {training_kit.free_port()} --module cmexam_tune.train"
    launcher = [str(training_kit.BIN / "deepspeed"), *words.split()]
    run = launch(launcher, folder / "alone.yaml", folder / "launcher", "training.deepspeed=zero2")
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


PTUNING = {"method": "ptuning", "num_virtual_tokens": 4, "prefix_projection": True}
LORA = {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


@pytest.mark.parametrize(
    ("layout", "stage", "tuning"),
    [
        ("llama", "zero3", PTUNING),
        pytest.param("chatglm", "zero2", PTUNING, marks=pytest.mark.slow),
        pytest.param("chatglm2", "zero3", PTUNING, marks=pytest.mark.slow),
        pytest.param("chatglm2", "zero2", LORA, marks=pytest.mark.slow),
        ("chatglm2", "zero3", LORA),
    ],
)
def test_tuning_on_two_processes(folder: Path, layout: str, stage: str, tuning: dict[str, Any]) -> None:
    """Activations are recomputed, and under ZeRO-3 no weight is small enough to stay whole on every process.

    LoRA on ChatGLM2 has one matrix A in three layers.
    """
    if not (folder / layout).exists():
        tiny.build(layout, folder / layout, hidden=32, layers=2)
    name = f"{layout}_{stage}_{tuning['method']}"
    content = json.loads(arguments.deepspeed_path(stage).read_text(encoding="utf-8"))
    if stage == "zero3":
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    path = experiment(
        folder, name, model__family=layout.rstrip("2"), model__model_name_or_path=str(folder / layout),
        tuning=tuning, training__gradient_checkpointing=True,
    )  # fmt: skip
    one = train(path, [f"out={folder / name}_one"])
    other = two(path, folder / f"{name}_two", f"training.deepspeed={folder / name}.json")
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    for key, value in weights(one).items():
        assert torch.allclose(weights(other)[key], value, atol=1e-5), key
    assert runs.load(other.path)[1].model is not None


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_a_run_goes_on_with_another_batch_size(folder: Path, stage: str) -> None:
    """As after running out of memory: a step has the same questions, in smaller batches."""
    path, out = experiment(folder, f"{stage}_smaller", training__save_steps=2), folder / f"{stage}_smaller"
    whole = two(path, out, f"training.deepspeed={stage}")
    expected, kept = losses(whole), out.rename(folder / f"{stage}_whole")
    out.mkdir()
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        shutil.copy(kept / name, out / name)
    shutil.copytree(kept / "checkpoint-2", out / "checkpoint-2")
    smaller = ("training.per_device_train_batch_size=1", "training.gradient_checkpointing=true")
    other = two(path, out, f"training.deepspeed={stage}", *smaller)
    assert losses(other) == pytest.approx(expected, rel=1e-5) and len(expected) > 3
    for key, value in weights(runs.open_run(kept)).items():
        assert torch.allclose(weights(other)[key], value, atol=1e-5), key


def test_buckets_are_sized_to_what_is_trained() -> None:
    most = arguments.MAX_BUCKET
    for trained, expected in ((4_000_000, 4_000_000), (7_000_000_000, most), (10, 2**16), (70_001, 70_002)):
        content = json.loads(arguments.deepspeed_path("zero2").read_text(encoding="utf-8"))
        zero2 = SimpleNamespace(config=content, is_zero3=lambda: False)
        args: Any = SimpleNamespace(deepspeed="zero2", hf_deepspeed_config=zero2, bf16=True, fp16=False)
        arguments.fit_deepspeed(args, torch.nn.Linear(trained, 1, bias=False, device="meta"))
        assert content["zero_optimization"]["reduce_bucket_size"] == expected
        assert content["zero_optimization"]["allgather_bucket_size"] == expected


@pytest.mark.parametrize("name", ["zero2", "zero3", "zero3_offload"])
def test_shipped_configs_leave_every_number_to_the_recipe(name: str) -> None:
    content = json.loads(arguments.deepspeed_path(name).read_text(encoding="utf-8"))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert content[key] == "auto"
    assert content["fp16"]["enabled"] == content["bf16"]["enabled"] == "auto"
    assert "optimizer" not in content
    assert content["zero_optimization"]["stage"] == (2 if name == "zero2" else 3)


HALF: dict[str, Any] = {
    "model__dtype": "bfloat16", "training__max_steps": 2, "training__save_steps": 1, "training__global_batch_size": 4,
    "training__eval_strategy": "steps", "training__eval_steps": 1, "training__load_best_model_at_end": True,
    "training__metric_for_best_model": "exam_accuracy", "data__max_eval_samples": 2, "prompt__style": "answer",
    "generation": {"max_new_tokens": 2},
}  # fmt: skip


def half(folder: Path, stage: str, **changes: Any) -> dict[str, Any]:
    """Train two steps in bfloat16 on two processes, load the best checkpoint, and return what was saved."""
    values = {**HALF, "data__validation": [str(folder / "val.jsonl")], **changes}
    path = folder / f"half_{stage}.yaml"
    path.write_text(config.dump_config(training_kit.recipe(folder, **values)), encoding="utf-8")
    run = two(path, folder / f"half_{stage}", f"training.deepspeed={stage}")
    assert (run.path / "checkpoint-1").is_dir()
    return weights(run)


def test_adapter_keeps_the_optimizers_float32(folder: Path) -> None:
    """Under ZeRO-2 the model holds bfloat16; what was learnt since is in the optimizer."""
    saved = half(folder, "zero2")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    learnt = [value for name, value in saved.items() if "lora_B" in name]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in learnt)
    # The same run as if it had been killed after its last checkpoint, gone on with by one process.
    out = folder / "half_zero2"
    shutil.rmtree(out / "adapter")
    (out / "trainer_state.json").unlink()
    again = ["--config", str(out / "config.yaml"), "training.deepspeed=zero2"]
    code, _, noted = forked_programs.Program("train", again).wait()
    assert code == 2 and "was saved by 2 processes and this command has 1" in noted
    assert (out / "checkpoint-2").is_dir() and not (out / "adapter").exists()


def test_zero3_trains_whole_modules_in_half_precision(folder: Path) -> None:
    changes = {"method": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "modules_to_save": ["lm_head"]}
    assert any("lm_head" in name for name in half(folder, "zero3", tuning=changes))


def test_adapter_is_merged_under_zero3(folder: Path, alone: runs.Run) -> None:
    words = [f"model.adapter_name_or_path={alone.adapter}", "training.max_steps=2"]
    one = train(folder / "alone.yaml", [f"out={folder / 'merged_one'}", *words])
    other = two(folder / "alone.yaml", folder / "merged_two", "training.deepspeed=zero3", *words)
    assert losses(other) == pytest.approx(losses(one), rel=1e-4)
