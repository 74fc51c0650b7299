"""A run that was killed, stopped or damaged ends bit-identical to one that was left alone."""

import functools
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_programs
import psutil
import pytest
import training_kit
from forked_programs import Hook, die, finish, start

from cmexam_tune import config, tiny

pytest.importorskip("torch")

from cmexam_tune.training import checkpoints


def adapter(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def experiment(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    if "model__model_name_or_path" in changes:
        changes["model__model_name_or_path"] = str(folder / changes["model__model_name_or_path"])
    if "data__train" in changes:
        changes["data__train"] = [str(folder / name) for name in changes["data__train"]]
    path.write_text(config.dump_config(training_kit.recipe(folder, **changes)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert (
        forked_programs.Program("train", ["--help"]).wait()[0] == 0
    )  # the libraries are loaded before anything is timed
    folder = training_kit.world(tmp_path_factory.mktemp("resume"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    pairs = [{**row, "chosen": f"答案: {row['answer']}", "rejected": "不知道"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    text = training_kit.questions(folder / "other.jsonl", 6, seed=3).read_text(encoding="utf-8")
    (folder / "other.jsonl").write_text(text.replace('"q:', '"other:'), encoding="utf-8")
    for layout in ("chatglm", "chatglm2"):
        tiny.build(layout, folder / layout, hidden=32, layers=2)
    return folder


LEARNING_FROM_OUTPUTS: dict[str, Any] = {
    "prompt__style": "answer",
    "training__max_steps": 5,
    "training__global_batch_size": 4,
    "training__gradient_checkpointing": False,
}
GRPO = {
    **LEARNING_FROM_OUTPUTS,
    "training__objective": "grpo",
    "training__num_generations": 4,
    "training__max_completion_length": 12,
    "training__per_device_train_batch_size": 8,
}
DPO = {**LEARNING_FROM_OUTPUTS, "training__objective": "dpo", "data__train": ["pairs.jsonl"]}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "packed": (1, {"training__packing": True}),
    "ptuning": (1, {"tuning": {"method": "ptuning", "num_virtual_tokens": 4, "prefix_dropout": 0.1}}),
    "chatglm": (
        1,
        {
            "model__family": "chatglm",
            "model__model_name_or_path": "chatglm",
            "tuning": {"method": "ptuning", "num_virtual_tokens": 4, "prefix_dropout": 0.1},
        },
    ),
    "fused_lora": (1, {"model__family": "chatglm", "model__model_name_or_path": "chatglm2"}),
    "ddp": (2, {}),
    "zero2": (2, {"training__deepspeed": "zero2"}),
    "mixture": (
        2,
        {
            "training__deepspeed": "zero2",
            "data__train": ["train.jsonl", "other.jsonl"],
            "data__mixture": [0.5, 2],
            "data__shuffle_options": True,
        },
    ),
    "zero3": (2, {"training__deepspeed": "zero3"}),
    "fused_lora_zero3": (
        2,
        {"model__family": "chatglm", "model__model_name_or_path": "chatglm2", "training__deepspeed": "zero3"},
    ),
    "grpo": (1, GRPO),
    "grpo_zero3": (2, {**GRPO, "training__deepspeed": "zero3"}),
    "dpo": (1, DPO),
    "dpo_zero2": (2, {**DPO, "training__deepspeed": "zero2"}),
}


def settings_of(name: str) -> tuple[int, dict[str, Any], Hook | None]:
    """Return processes and changes of `SETTINGS`, and what is called in each first; skip what needs TRL without it."""
    processes, changes = SETTINGS[name]
    objective = changes.get("training__objective")
    if objective:
        pytest.importorskip("trl")
    return processes, changes, forked_programs.judge_by_characters if objective == "grpo" else None


def losses(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def killed(
    processes: int, command: Callable[[Path], list[str]], out: Path, kills: int, hook: Hook | None = None
) -> tuple[Path, list[Path]]:
    """Run `command(whole)` undisturbed, and others killed at random moments until there were `kills` kills in all."""

    def place(name: str) -> Path:
        return out.with_name(f"{out.name}_{kills}_{name}")

    started = time.monotonic()
    finish(command(place("whole")), processes, hook)
    seconds, rng = time.monotonic() - started, random.Random(kills)
    broken: list[Path] = []
    done = 0
    while done < kills:
        assert len(broken) < 3 * kills, f"{done} kills in {len(broken)} runs of {seconds} s"
        broken.append(place(f"broken{len(broken)}"))
        while done < kills:
            programs = start(command(broken[-1]), processes, hook)
            time.sleep(rng.uniform(0.05 * seconds, 0.8 * seconds))
            if not any(program.running for program in programs):
                break
            for program in programs:
                program.kill()
            done += 1
        finish(command(broken[-1]), processes, hook)
    return place("whole"), broken


def kill_and_compare(folder: Path, name: str, kills: int) -> None:
    processes, changes, hook = settings_of(name)
    path = experiment(folder, name, **changes)

    def command(out: Path) -> list[str]:
        return ["train", "--config", str(path), f"out={out}"]

    whole, broken = killed(processes, command, folder / name, kills, hook)
    for out in broken:
        assert adapter(out) == adapter(whole)
        assert losses(out) == losses(whole)


@pytest.mark.parametrize(
    "name",
    ["plain", "mixture", "grpo"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("packed", "ptuning", "fused_lora", "dpo")],
)
def test_killed_after_a_step_was_logged(folder: Path, name: str) -> None:
    """Step 3 is in the log and in no checkpoint. The others of SETTINGS, and other moments, are among the slow ones."""
    processes, changes, hook = settings_of(name)
    command = ["train", "--config", str(experiment(folder, name, **changes))]
    whole, broken = folder / f"{name}_whole", folder / f"{name}_broken"
    finish([*command, f"out={whole}"], processes, hook)
    die([*command, f"out={broken}"], processes, functools.partial(forked_programs.die_at_step, 3, hook))
    assert [step for step, _ in losses(broken)] == [1, 2, 3]
    if name == "plain":
        die([*command, f"out={broken}"], processes, functools.partial(forked_programs.die_at_save, 5))
    noted = finish([*command, f"out={broken}"], processes, hook)
    assert f"resuming from {broken}/checkpoint-{4 if name == 'plain' else 2}" in noted
    assert adapter(broken) == adapter(whole)
    assert losses(broken) == losses(whole)
    if name == "grpo":  # else it would have learnt nothing, killed or not
        log = (whole / "log.jsonl").read_text(encoding="utf-8")
        assert min(json.loads(line).get("groups_without_signal", 1) for line in log.splitlines()) < 1


def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(folder: Path) -> None:
    path = experiment(folder, "term", training__num_train_epochs=6, training__save_steps=5)
    program = forked_programs.Program("train", ["--config", str(path), f"out={folder / 'term'}"])
    while not checkpoints.newest_first(folder / "term"):
        assert program.running, program.err.read_text()
        time.sleep(0.01)
    program.send(signal.SIGTERM)
    code, _, noted = program.wait(120)
    assert code == 130
    check_saved_and_resumed(folder, "term", noted, processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_processes_of_torchrun_end_with_it(folder: Path, number: signal.Signals) -> None:
    """It hands SIGTERM on and reports it in a way of its own; killed, it can do neither."""
    changes = {"training__num_train_epochs": 6, "training__save_steps": 5, "training__deepspeed": "zero2"}
    name = f"torchrun_{number.name}"
    path, out, log = experiment(folder, name, **changes), folder / name, folder / f"{name}.log"
    command = [*training_kit.torchrun(), "--config", str(path), f"out={out}"]
    with log.open("w") as handle:
        process = subprocess.Popen(command, env=training_kit.ENVIRONMENT, stdout=handle, stderr=handle)
        while not checkpoints.newest_first(out):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(timeout=120) != 0
        _, alive = psutil.wait_procs(workers, timeout=60)
        for worker in alive:
            worker.kill()
        assert len(workers) == 2 and not alive
    check_saved_and_resumed(folder, name, log.read_text(), processes=2)


def check_saved_and_resumed(folder: Path, name: str, noted: str, processes: int) -> None:
    out, whole = folder / name, folder / f"{name}_whole"
    assert "a checkpoint was saved" in noted
    assert not (out / "adapter").exists()
    stopped = checkpoints.step_of(checkpoints.newest_first(out)[0])
    command = ["train", "--config", str(folder / f"{name}.yaml")]
    assert f"resuming from {out}/checkpoint-{stopped}" in finish([*command, f"out={out}"], processes)
    finish([*command, f"out={whole}"], processes)
    assert adapter(out) == adapter(whole)


@pytest.mark.slow
def test_prediction_killed_at_twenty_random_moments(folder: Path) -> None:
    """`test_predict.py` has the quick one."""
    path = experiment(folder, "predict", generation__batch_size=2)

    def command(out: Path) -> list[str]:
        return ["predict", "--config", str(path), "--questions", str(folder / "train.jsonl"), "--out", f"{out}.jsonl"]

    whole, broken = killed(1, command, folder / "predictions", kills=20)
    expected = sorted(Path(f"{whole}.jsonl").read_text().splitlines())
    assert len(expected) == 20
    for out in broken:
        assert sorted(Path(f"{out}.jsonl").read_text().splitlines()) == expected, (
            "a question is lost, doubled or changed"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_at_twenty_random_moments(folder: Path, name: str) -> None:
    kill_and_compare(folder, name, kills=20)
