"""Programs in processes of their own, forked from one that has imported the libraries: a start takes no seconds."""

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from train_helpers import free_port

from cmexam_tune.core import cli

LIBRARIES = [
    "torch", "deepspeed", "peft", "datasets", "cmexam_tune.training.loop", "cmexam_tune.models.families.llama",
    "cmexam_tune.models.families.chatglm", "cmexam_tune.train", "cmexam_tune.inference.answering",
    "cmexam_tune.predict", "cmexam_tune.models.merging",
]  # fmt: skip
context: Any = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(LIBRARIES)


class Program:
    """One process of a program such as `train`; what it prints goes to files."""

    def __init__(self, name: str, words: list[str], **environment: str) -> None:
        self._printed = tempfile.TemporaryDirectory(prefix="printed_")
        self.out, self.err = (Path(self._printed.name) / name for name in ("out", "err"))
        self.process: BaseProcess = context.Process(
            target=_run, args=(name, words, environment, str(self.out), str(self.err)), daemon=True
        )
        self.process.start()

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def wait(self, seconds: float = 400) -> tuple[int, str, str]:
        """Return the exit status, and what was printed and noted."""
        self.process.join(seconds)
        assert not self.running, f"still running after {seconds} s"
        code = self.process.exitcode
        assert code is not None
        return code, self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")


def _run(name: str, words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) for descriptor in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    sys.argv = [f"cmexam_tune.{name}", *words]
    cli.run(importlib.import_module(f"cmexam_tune.{name}").main)


def group(name: str, words: list[str], count: int = 2) -> list[Program]:
    """Start what `torchrun --nproc_per_node COUNT -m cmexam_tune.NAME WORDS` would."""
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    return [Program(name, words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(count)]
