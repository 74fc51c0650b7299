"""Invented questions, a tiny model and a recipe for the training tests."""

import json
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

from kit import changed

from cmexam_tune import config, tiny
from cmexam_tune.training.run_directory import run as runs

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
    "PATH": f"{BIN}:{os.environ['PATH']}",
}  # fmt: skip
"""Of training in processes of its own."""

CHARACTERS = "下列关于的说法正确是以不属心力衰竭感染肺炎治疗药物首选诊断检查患者男女岁发热咳嗽胸痛"


def questions(path: Path, count: int, seed: int = 0) -> Path:
    """Write `count` invented questions of very different lengths."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return "".join(rng.choices(CHARACTERS, k=rng.randint(low, high)))

    with path.open("w", encoding="utf-8") as handle:
        for i in range(count):
            letters = "ABCDE"[: rng.choice((4, 5))]
            row = {
                "id": f"q:{i}",
                "stem": text(8, 60) + "？",
                "options": {letter: text(2, 10) for letter in letters},
                "answer": rng.choice(letters),
                "explanation": text(10, 60) + "。",
                "kind": None,
                "facets": {},
            }
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun() -> list[str]:
    """Return the words that start training on two processes."""
    port = str(free_port())
    return [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", port, "-m", "cmexam_tune.train"]


def recipe(folder: Path, **changes: Any) -> config.Config:
    """Return a Config of a tiny LoRA run; `changes` are keys such as `training__max_steps=3`."""
    values: dict[str, Any] = {
        "data": {"train": [str(folder / "train.jsonl")], "num_workers": 1},
        "prompt": {"style": "answer_explain", "max_source_length": 160, "max_target_length": 96},
        "model": {"family": "llama", "model_name_or_path": str(folder / "llama")},
        "tuning": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
        "training": {
            "per_device_train_batch_size": 2,
            "global_batch_size": 6,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 1,
            "use_cpu": True,
            "disable_tqdm": True,
        },
        "out": str(folder / "run"),
    }
    return config.parse_config(changed(values, changes))


def world(folder: Path, count: int = 20) -> Path:
    """Write questions and a tiny llama into `folder`."""
    questions(folder / "train.jsonl", count)
    questions(folder / "val.jsonl", 6, seed=1)
    tiny.build("llama", folder / "llama", hidden=32, layers=2)
    return folder


def losses(run: runs.Run) -> list[float]:
    """Return the loss of each step of a run."""
    return [entry["loss"] for entry in run.log if "loss" in entry]


def weights(run: runs.Run) -> dict[str, Any]:
    """Return what a run's adapter holds."""
    from safetensors.torch import load_file

    return dict(load_file(run.adapter / "adapter_model.safetensors"))
