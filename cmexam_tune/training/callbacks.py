"""What a run tells while it goes: log.jsonl, its progress, and the answer to signals."""

import contextlib
import json
import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cmexam_tune.core import jsonl
from cmexam_tune.core.progress import Progress, duration
from cmexam_tune.models import device
from cmexam_tune.training.run_directory.log import read_log

if TYPE_CHECKING:
    from cmexam_tune.training.safe_trainer import SafeTrainer


EVALUATED = {"eval_loss": "validation loss {:.4f}", "eval_exam_accuracy": "exam accuracy {:.1f}%"}
"""How the Trainer's metrics of an evaluation are shown."""


class FirstStep(TrainerCallback):
    """Calls a function once, after the first step."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Call the function and forget it."""
        if self._action is not None:
            self._action()
            self._action = None


class JsonlLog(TrainerCallback):
    """Appends everything that is logged to `log.jsonl`, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Drop what a killed run has logged after the checkpoint that is resumed from."""
        if not state.is_world_process_zero or not self.path.exists():
            return
        entries = [entry for entry in read_log(self.path) if entry["step"] <= state.global_step]
        jsonl.write(self.path, entries, overwrite=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Log the first and the last step too, so that a short run has a curve."""
        control.should_log = control.should_log or state.global_step in (1, state.max_steps)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Append one entry."""
        if not state.is_world_process_zero:
            return
        # NaN is no JSON; the norm of a step that loss scaling has skipped is one.
        numbers = {name: None if is_broken(value) else value for name, value in (logs or {}).items()}
        entry = {"step": state.global_step, "time": round(time.time(), 3), **numbers}
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(entry, allow_nan=False) + "\n")


def is_broken(value: object) -> bool:
    """Return whether a value is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


class Screen(TrainerCallback):
    """Shows how far training is, with loss, learning rate and memory; as a context it takes its bar away at the end."""

    def __init__(self, trainer: "SafeTrainer") -> None:
        self.trainer = trainer
        self._progress: Progress | None = None
        self._started, self._tokens = 0.0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin at the step that is resumed from."""
        self._started, self._tokens = time.monotonic(), self.trainer.tokens_done
        self._progress = Progress(
            "train", "steps", state.max_steps, done=state.global_step, shown=not args.disable_tqdm
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step."""
        if self._progress is not None:
            rate = f"lr {kwargs['optimizer'].param_groups[0]['lr']:.1e}"
            facts = f"{self.trainer.shown()}, {rate}, {self._usage()}"
            self._progress.move(state.global_step - self._progress.done, facts)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        """Show the loss and accuracy of an evaluation."""
        if self._progress is not None:
            shown = [EVALUATED[name].format(value) for name, value in (metrics or {}).items() if name in EVALUATED]
            self._progress.say(f"step {state.global_step}: {', '.join(shown)}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Show how many steps were taken, in what time, and the last loss."""
        if self._progress is not None:
            self._progress.close()
            took = duration(time.monotonic() - self._started)
            steps = f"{state.global_step:,} of {state.max_steps:,} steps"
            self._progress.say(f"trained {steps} in {took}: last {self.trainer.shown()}, {self._usage()}")
            if skipped := self.trainer.monitor.skipped:
                self._progress.say(f"{skipped} steps were skipped by loss scaling: their gradients exceeded float16")

    def _usage(self) -> str:
        rate = (self.trainer.tokens_done - self._tokens) / max(time.monotonic() - self._started, 1e-9)
        return f"{peak_memory() / 2**30:.1f} GiB, {rate:,.0f} tokens/s"

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.close()


def peak_memory() -> int:
    """Return the most bytes that this process has held: on its card, or without one in the machine's memory."""
    on_card = device.peak_memory()
    if on_card is not None:
        return on_card
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class StopOnRequest(TrainerCallback):
    """Saves a checkpoint and ends training after the step in which any process was asked to stop."""

    def __init__(self, trainer: "SafeTrainer") -> None:
        self.trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Ask the Trainer to save and stop."""
        resumable = state.global_step % self.trainer.resumable_every == 0
        if resumable and self.trainer.stop_agreed and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            self.trainer.interrupted = True
        return control


@contextlib.contextmanager
def signals(trainer: "SafeTrainer") -> Iterator[None]:
    """Turn SIGTERM and the first Ctrl-C into a request to stop; a second Ctrl-C interrupts at once.

    A handler runs in the middle of anything, and perhaps on one process only. So it leaves a flag, and the processes
    agree on it in the next step (`SafeTrainer.judge_step`): all of them save the same checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals; a notebook's thread is interrupted by its own means
        return

    def request_stop(number: int, _frame: FrameType | None) -> None:
        if trainer.stop_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        trainer.stop_asked = True

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
