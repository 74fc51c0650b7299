"""Programs in processes of their own, forked from one that has imported the libraries: a start takes no seconds."""

import dataclasses
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from training_kit import free_port

from cmexam_tune.core import cli

LIBRARIES = [
    "torch", "deepspeed", "peft", "datasets", "cmexam_tune.training.loop", "cmexam_tune.models.families.llama",
    "cmexam_tune.models.families.chatglm", "cmexam_tune.train", "cmexam_tune.inference.answering",
    "cmexam_tune.predict", "cmexam_tune.inference.merging", "cmexam_tune.training.policy_trainer",
    "cmexam_tune.training.preference_trainer",
]  # fmt: skip
Hook = Callable[[], None]
context: Any = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(LIBRARIES)


class Program:
    """One process of a program such as `train`; what it prints goes to files. In it, `hook` is called first."""

    def __init__(
        self, name: str, words: list[str], hook: Hook | None = None, daemon: bool = True, **environment: str
    ) -> None:
        self._printed = tempfile.TemporaryDirectory(prefix="printed_")
        self.out, self.err = (Path(self._printed.name) / name for name in ("out", "err"))
        self.process: BaseProcess = context.Process(
            target=_run, args=(name, words, hook, environment, str(self.out), str(self.err)), daemon=daemon
        )
        self.process.start()

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def send(self, signal_number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal_number)

    def wait(self, seconds: float = 400) -> tuple[int, str, str]:
        """Return the exit status, and what was printed and noted."""
        self.process.join(seconds)
        assert not self.running, f"still running after {seconds} s"
        code = self.process.exitcode
        assert code is not None
        return code, self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")


def _run(name: str, words: list[str], hook: Hook | None, environment: dict[str, str], out: str, err: str) -> None:
    gc.freeze()  # a collection, which the trainer asks for, leaves the libraries out
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) for descriptor in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    sys.argv = [f"cmexam_tune.{name}", *words]
    if hook is not None:
        hook()
    cli.run(importlib.import_module(f"cmexam_tune.{name}").main)


def group(name: str, words: list[str], count: int = 2, hook: Hook | None = None) -> list[Program]:
    """Start what `torchrun --nproc_per_node COUNT -m cmexam_tune.NAME WORDS` would."""
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    return [Program(name, words, hook, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(count)]


def start(command: list[str], processes: int, hook: Hook | None = None) -> list[Program]:
    """Start a program and its words, as torchrun does where there are several processes."""
    name, *words = command
    return [Program(name, words, hook)] if processes == 1 else group(name, words, processes, hook)


def finish(command: list[str], processes: int, hook: Hook | None = None) -> str:
    """Run a program to its end; return what the first process noted."""
    ended = [program.wait(1200) for program in start(command, processes, hook)]
    assert {code for code, _, _ in ended} == {0}, ended[0][2][-3000:]
    return ended[0][2]


def die(command: list[str], processes: int, hook: Hook) -> None:
    """Run a program whose first process kills itself; the launcher then kills the others."""
    first, *others = start(command, processes, hook)
    first.process.join(400)
    assert first.process.exitcode == -signal.SIGKILL, first.err.read_text()
    for program in others:
        program.kill()


def judge_by_characters() -> None:
    """Let the characters of an output decide whether it is right: a tiny model never states the right letters."""
    from cmexam_tune.rewards import Reward

    def term(self: Any, name: str, question: Any, output: Any, step: int = 0) -> float:
        return float(sum(map(ord, output.text)) % 2) if name == "exact" else 0.0

    Reward.term = term  # type: ignore[method-assign]


def die_at_step(step: int, hook: Hook | None = None) -> None:
    """Make training kill itself when it has logged a step and not yet saved it; `hook` is called first."""
    if hook is not None:
        hook()
    from cmexam_tune.training.callbacks import JsonlLog

    on_log = JsonlLog.on_log

    def log_and_die(self: Any, args: Any, state: Any, *rest: Any, **more: Any) -> None:
        on_log(self, args, state, *rest, **more)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    JsonlLog.on_log = log_and_die  # type: ignore[method-assign]


def die_at_save(step: int) -> None:
    """Make training kill itself when a checkpoint is written and not yet in its place."""
    from cmexam_tune.training import checkpoints

    publish = checkpoints.publish

    def publish_or_die(staged: Path, target: Path, deepspeed: bool) -> None:
        if target.name == f"checkpoint-{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(staged, target, deepspeed)

    checkpoints.publish = publish_or_die


def by_torchrun() -> None:
    """As a hook of a program that is no daemon: let torchrun start two of it, which are forked and no new Pythons."""
    from torch.distributed import run

    launch = run.elastic_launch
    run.elastic_launch = lambda config, entrypoint: launch(dataclasses.replace(config, start_method="fork"), _worker)
    run.main(["--nproc_per_node", "2", "--master_port", str(free_port()), "-m", *sys.argv])
    sys.exit()


def _worker(*words: str) -> None:
    """Do what `python WORDS` would, where the words are torchrun's own: `-u -m MODULE ...`."""
    assert words[:2] == ("-u", "-m")
    sys.argv = list(words[2:])
    try:
        cli.run(importlib.import_module(sys.argv[0]).main)
    except SystemExit as end:
        if end.code:  # torch waits for a function to return
            raise
