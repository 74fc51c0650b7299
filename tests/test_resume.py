"""A run that was killed, stopped or damaged ends bit-identical to one that was left alone."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import train_helpers

from cmexam_tune import tiny
from cmexam_tune.core import config

pytest.importorskip("torch")

from cmexam_tune.training import checkpoints

HERE = Path(__file__).parent


class Driver:
    """`resume_driver.py`, started once for this file."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "resume_driver.py")], env=train_helpers.ENVIRONMENT, cwd=HERE.parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors.open("w"),
        )  # fmt: skip

    def __call__(self, command: list[str], log: str, processes: int = 1, **job: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        words = {"command": command, "log": log, "processes": processes, "kills": 0, **job}
        print(json.dumps(words), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-3000:]
        result: dict[str, Any] = json.loads(line)
        assert set(result["codes"]) == {0}, Path(f"{log}.0").read_text()[-3000:]
        return result


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(tmp_path_factory.mktemp("driver") / "stderr.log")
    yield driver
    driver.process.kill()
    driver.process.wait()


def adapter(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def experiment(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    if "model__model_name_or_path" in changes:
        changes["model__model_name_or_path"] = str(folder / changes["model__model_name_or_path"])
    if "data__train" in changes:
        changes["data__train"] = [str(folder / name) for name in changes["data__train"]]
    path.write_text(config.dump_config(train_helpers.recipe(folder, **changes)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = train_helpers.world(tmp_path_factory.mktemp("resume"))
    text = train_helpers.questions(folder / "other.jsonl", 6, seed=3).read_text(encoding="utf-8")
    (folder / "other.jsonl").write_text(text.replace('"q:', '"other:'), encoding="utf-8")
    tiny.build("chatglm", folder / "chatglm", hidden=32, layers=2)
    return folder


SETTINGS = {
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
}


def losses(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def killed(
    drive: Driver, processes: int, command: Callable[[Path], list[str]], out: Path, kills: int
) -> tuple[Path, list[Path]]:
    """Run `command(whole)` undisturbed, and others killed at random moments until there were `kills` kills in all."""

    def run(name: str, **more: Any) -> tuple[Path, dict[str, Any]]:
        place = out.with_name(f"{out.name}_{kills}_{name}")
        return place, drive(command(place), f"{place}.log", processes, **more)

    whole, result = run("whole")
    window = [0.05 * result["seconds"], 0.8 * result["seconds"]]
    broken: list[Path] = []
    done = 0
    while done < kills:
        assert len(broken) < 3 * kills, f"{done} kills in {len(broken)} runs of {result['seconds']} s"
        seed = 100 * kills + len(broken)
        place, result = run(f"broken{len(broken)}", kills=kills - done, seed=seed, window=window)
        broken.append(place)
        done += result["kills"]
    return whole, broken


def kill_and_compare(drive: Driver, folder: Path, name: str, kills: int) -> None:
    processes, changes = SETTINGS[name]
    path = experiment(folder, name, **changes)

    def command(out: Path) -> list[str]:
        return ["train", "--config", str(path), f"out={out}"]

    whole, broken = killed(drive, processes, command, folder / name, kills)
    for out in broken:
        assert adapter(out) == adapter(whole)
        assert losses(out) == losses(whole)


@pytest.mark.parametrize("name", ["plain", "packed", "ptuning", "chatglm"])
def test_killed_at_random_moments(drive: Driver, folder: Path, name: str) -> None:
    kill_and_compare(drive, folder, name, kills=2)


def test_killed_on_two_processes(drive: Driver, folder: Path) -> None:
    """ZeRO-2, two files with weights and shuffled options; plain files on two processes are among the slow ones."""
    kill_and_compare(drive, folder, "mixture", kills=2)


@pytest.mark.parametrize(("name", "changes"), [("term", {}), ("term2", {"training__deepspeed": "zero2"})])
def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(
    drive: Driver, folder: Path, name: str, changes: dict[str, Any]
) -> None:
    """One process exits with 130; torchrun hands the signal to its processes and reports it in a way of its own."""
    path = experiment(folder, name, training__num_train_epochs=6, training__save_steps=5, **changes)
    alone = name == "term"
    out, whole, log = folder / name, folder / f"{name}_whole", folder / f"{name}.log"

    def words(out: Path) -> list[str]:
        return ["--config", str(path), f"out={out}"]

    launcher = [sys.executable, "-m", "cmexam_tune.train"] if alone else train_helpers.torchrun()
    with log.open("w") as handle:
        process = subprocess.Popen(
            [*launcher, *words(out)], env=train_helpers.ENVIRONMENT, stdout=handle, stderr=handle
        )
        while not checkpoints.found(out):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    assert code == 130 if alone else code != 0
    assert "a checkpoint was saved" in log.read_text()
    assert not (out / "adapter").exists()
    stopped = checkpoints.step_of(checkpoints.found(out)[0])
    for run in (out, whole):
        drive(["train", *words(run)], f"{run}.log", processes=1 if alone else 2)
    assert f"resuming from {out}/checkpoint-{stopped}" in Path(f"{out}.log.0").read_text()
    assert adapter(out) == adapter(whole)


@pytest.mark.slow
def test_prediction_killed_at_twenty_random_moments(drive: Driver, folder: Path) -> None:
    """`test_predict.py` has the quick one."""
    path = experiment(folder, "predict", generation__batch_size=2)

    def command(out: Path) -> list[str]:
        return ["predict", "--config", str(path), "--questions", str(folder / "train.jsonl"), "--out", f"{out}.jsonl"]

    whole, broken = killed(drive, 1, command, folder / "predictions", kills=20)
    expected = sorted(Path(f"{whole}.jsonl").read_text().splitlines())
    assert len(expected) == 20
    for out in broken:
        assert sorted(Path(f"{out}.jsonl").read_text().splitlines()) == expected, (
            "a question is lost, doubled or changed"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_at_twenty_random_moments(drive: Driver, folder: Path, name: str) -> None:
    kill_and_compare(drive, folder, name, kills=20)
