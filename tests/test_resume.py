"""A run that was killed, stopped or damaged ends bit-identical to one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import train_helpers

from cmexam_tune import config

pytest.importorskip("torch")
HERE = Path(__file__).parent


def drive(job: dict[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "resume_driver.py"), json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=HERE.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    log = Path(job["out"] + ".0.log")
    assert set(result["codes"]) == {0}, log.read_text()[-3000:]
    return result


def adapter(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def experiment(folder: Path, name: str, **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(config.dump(train_helpers.recipe(folder, **changes)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_helpers.world(tmp_path_factory.mktemp("resume"))


SETTINGS = {
    "plain": (1, {}),
    "packed": (1, {"training__packing": True}),
    "ptuning": (1, {"tuning": {"method": "ptuning", "num_virtual_tokens": 4, "prefix_dropout": 0.1}}),
    "zero2": (2, {"training__deepspeed": "zero2"}),
}


def losses(out: Path) -> list[tuple[int, float]]:
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def kill_and_compare(folder: Path, name: str, kills: int) -> None:
    """Kill runs at random moments of the time that an unbroken one takes until there were `kills` kills in all."""
    processes, changes = SETTINGS[name]
    path = experiment(folder, name, **changes)
    job = {"config": str(path), "processes": processes}
    whole = folder / f"{name}_{kills}_whole"
    seconds = drive({**job, "out": str(whole), "kills": 0})["seconds"]
    done = turn = 0
    while done < kills:
        turn += 1
        broken = folder / f"{name}_{kills}_broken{turn}"
        window = [0.05 * seconds, 0.8 * seconds]
        result = drive({**job, "out": str(broken), "kills": kills - done, "seed": 100 * kills + turn, "window": window})
        done += result["kills"]
        assert turn <= 3 * kills, f"{done} kills in {turn} runs of {seconds} s"
        assert adapter(broken) == adapter(whole), result
        assert losses(broken) == losses(whole)


@pytest.mark.parametrize("name", ["plain", "packed", "ptuning"])
def test_killed_at_random_moments(folder: Path, name: str) -> None:
    kill_and_compare(folder, name, kills=2)


def test_killed_zero2(folder: Path) -> None:
    kill_and_compare(folder, "zero2", kills=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_killed_at_twenty_random_moments(folder: Path, name: str) -> None:
    kill_and_compare(folder, name, kills=20)
