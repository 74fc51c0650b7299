"""A tiny model behind `cmexam-tune serve` does all that a model behind an address does, by commands."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "cmexam_tune" / "sample" / "cmb"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PROGRAM = [sys.executable, "-m", "cmexam_tune"]


def call(folder: Path, *words: str) -> str:
    done = subprocess.run([*PROGRAM, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(folder: Path) -> None:
    call(folder, "tiny", "--family", "llama", "--out", "tiny", "--hidden", "32")
    call(folder, "preprocess", "cmb", "--input", str(SAMPLE / "train.json"), str(SAMPLE / "clin.json"), "--out", "data")
    few = ["training.eval_strategy=no", "training.save_strategy=no", "training.max_steps=1", "data.max_train_samples=4"]
    few += ["training.global_batch_size=2", "training.per_device_train_batch_size=2", "prompt.max_source_length=512"]
    places = ["model.model_name_or_path=tiny", "data.train=data/train.questions.jsonl", "data.validation=[]", "out=run"]
    call(folder, "train", "--config", "lora_llama", *places, *few)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the trained run while the block runs, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PROGRAM, "serve", "--run", "run", "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    address, deadline = f"http://127.0.0.1:{port}/v1", time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{address}/models").close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_everything(tmp_path: Path) -> None:
    train(tmp_path)
    with served(tmp_path) as address:
        there = [f"model.base_url={address}", "model.model_name_or_path=run", "generation.max_new_tokens=8"]
        ask = ["--config", "zeroshot_vllm", "--questions", "data/train.questions.jsonl", "--limit", "2", *there]
        call(tmp_path, "predict", *ask, "--out", "p.jsonl")
        call(tmp_path, "predict", *ask, "--out", "v.jsonl", "generation.votes=3", "generation.do_sample=true")
        call(tmp_path, "predict", *ask, "--out", "c.jsonl", "prompt.style=cmb_cot")
        cases = ["--cases", "data/clin.cases.jsonl"]
        call(tmp_path, "predict", *ask[:2], "--questions", cases[1], "--out", "clin.jsonl", *there)
        panel = ["--config", "zeroshot_vllm", "--out", "judged", *there]
        assert "Scores" in call(tmp_path, "judge", "--predictions", "clin.jsonl", *cases, *panel)
        lines = (tmp_path / "data" / "train.questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:2]
        (tmp_path / "two.jsonl").write_text("".join(lines), encoding="utf-8")
        call(tmp_path, "annotate", "--questions", "two.jsonl", *ask[:2], "--out", "a.jsonl", *there)
    assert [len(one.votes) for one in jsonl.read(tmp_path / "v.jsonl", Prediction)] == [3, 3]
    assert len(list(jsonl.read(tmp_path / "clin.jsonl", Prediction))) >= 4
    assert json.loads((tmp_path / "judged" / "judge.json").read_text())["models"]["clin"]["judges"]
