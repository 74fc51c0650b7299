"""`SafeTrainer`: checkpoints that are whole or not there, guards, stops on request, exam accuracy, for any Trainer.

Its subclasses take the steps: `trainer.py` those of supervised tuning, `trl_trainer.py` TRL's. It calls `super()`
wherever it overrides, so that it can stand in front of any trainer that inherits from transformers'.

Four private methods of the Trainer are overridden; `tests/test_canaries.py` names them, and what else training relies
on inside of transformers, accelerate and DeepSpeed, and fails when a new version changes one.
"""

import contextlib
import functools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.trainer_utils import SaveStrategy

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.progress import Progress
from cmexam_tune.models import checkpoint, device
from cmexam_tune.models import precision as model_precision
from cmexam_tune.training import checkpoints, monitor, processes
from cmexam_tune.training.task import Task


class SafeTrainer(Trainer):
    """A Trainer whose checkpoint folders are whole or not there, with and without DeepSpeed."""

    def __init__(self, task: Task, **options: Any) -> None:
        """Take what is trained; `options` go to the Trainer."""
        self.config, self.loaded = task.config, task.loaded
        self.family, self.method = task.family, task.method
        self.training_files = task.train.paths
        self.validation_questions = list(task.validation)
        self.run_folder = Path(str(task.arguments.output_dir))
        self.monitor = self.make_monitor(task.arguments.fp16)
        self.stop_asked = False
        """Set by a signal on this process."""
        self.stop_agreed = False
        """Whether any process was asked to stop; the same on all of them."""
        self.interrupted = False
        """Whether training has ended because of that."""
        self.tokens_done = 0
        """Tokens without padding since this command started, over all processes."""
        self.last_loss = math.nan
        """Mean loss of the last step on this process."""
        self.resumable_every = 1
        """Steps between those after which a checkpoint can be gone on from exactly."""
        self._autocast_dtype = model_precision.mixed(cast(Any, task.loaded.model))
        super().__init__(model=task.loaded.model, args=task.arguments, **options)

    def make_monitor(self, fp16: bool) -> monitor.TrainingMonitor:
        """Return what judges each step."""
        return monitor.TrainingMonitor(fp16=fp16)

    @property
    def unwrapped_model(self) -> Any:
        """The model without what DDP or DeepSpeed put around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def zero3(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return plugin is not None and plugin.zero_stage == 3

    def summary(self) -> str:
        """Return what is trained, on what."""
        raise NotImplementedError

    def shown(self) -> str:
        """Return what the screen shows of the last step."""
        skipped = self.monitor.skipped
        return f"loss {self.last_loss:.4f}" + (f" ({skipped} steps skipped)" if skipped else "")

    def probe_logits(self) -> torch.Tensor:
        """Return float32 logits that the adapter must reproduce once it has been saved and read back.

        Not under ZeRO-3, where one process cannot run a forward pass by itself.
        """
        raise NotImplementedError

    def padding(self) -> float:
        """Return the share of padding in what was computed; NaN where it is not known."""
        return math.nan

    def out_of_memory(self, error: BaseException) -> str:
        """Return the message for a training that ran out of its card's memory."""
        raise NotImplementedError

    def trained_share(self) -> str:
        """Return how many of the parameters are trained."""
        trained, total = count_parameters(self.loaded.model, trained_only=True), count_parameters(self.loaded.model)
        return f"{trained:,} of {total:,} parameters are trained ({100 * trained / total:.3g}%)"

    def try_optimizer(self) -> None:
        """Make the optimizer and its schedule for a single number: what they refuse, they refuse before the run starts.

        Raises:
            LOADING: whatever the optimizer raises (`cmexam_tune.models.checkpoint.LOADING`).
        """
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, cast(Any, self.loaded.model))
        # Optimizers like GaLore and LOMO carry the model's own parameters in these options; no stand-in can be made.
        if not {"params", "model", "optimizer_dict"} & set(options):
            optimizer = optimizer_class([nn.Parameter(torch.zeros(1))], **options)
            steps = max(self.args.max_steps, len(self.get_train_dataloader()))
            get_scheduler(
                self.args.lr_scheduler_type,
                optimizer,
                self.args.get_warmup_steps(steps),
                steps,
                cast(Any, self.args.lr_scheduler_kwargs),
            )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every forward pass: what `bf16` and `fp16` say, else what the weights need."""
        if self.args.bf16 or self.args.fp16 or self.is_deepspeed_enabled:
            return self.compute_loss_context_manager()
        return torch.autocast(self.args.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)

    # Guards

    def judge_step(self) -> None:
        """Let all processes learn what any of them has met; called by all of them in every step.

        Raises:
            TrainingStopped: a step went wrong on any process.
        """
        # One all-reduce for both flags, where every process passes in every step: a collective that only some of them
        # reach would wait for ever.
        flags = (self.monitor.problem is not None, self.stop_asked)
        degenerated, self.stop_agreed = processes.any_true(flags, self.args.device)
        if degenerated:
            self._stop_training()

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> Any:
        """Judge the norm of all gradients of a step before clipping; it is the same on all processes, so all agree."""
        base: Any = super()
        raw = base._get_grad_norm(model, grad_norm=grad_norm)
        norm = None if raw is None else float(raw)
        scaler, engine = self.accelerator.scaler, cast(Any, self.model_wrapped)
        skipped, scale = False, None
        if self.is_deepspeed_enabled:
            # DeepSpeed has stepped already, and skipped the step if float16 gradients were infinite.
            skipped = bool(getattr(engine.optimizer, "overflow", False))
            scale = float(engine.optimizer.loss_scale) if self.args.fp16 else None
        if scaler is not None:
            # Infinite gradients tell GradScaler that its scale is too high: it skips the step, which is no failure yet.
            skipped = skipped or not math.isfinite(norm or 0.0)
            scale = float(scaler.get_scale())
        self.monitor.on_grad_norm(norm, skipped)
        self.monitor.on_loss_scale(scale, skipped)
        if self.monitor.problem is not None:
            self._stop_training()
        return raw

    def _stop_training(self) -> None:
        """Save the state as it was before the step that went wrong, and end the run.

        Raises:
            TrainingStopped: always.
        """
        step = self.state.global_step
        if step and not (self.run_folder / f"{checkpoints.PREFIX}{step}" / checkpoints.MANIFEST).is_file():
            self._save_checkpoint(self.unwrapped_model, None)
        saved = checkpoints.newest_first(self.run_folder)
        raise self.monitor.error(step + 1, str(saved[0]) if saved else None)

    # Evaluation

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return and log what `validation_metrics` measures; nothing of it changes the training that follows."""
        started = time.monotonic()
        # `training_step` goes back to training mode.
        self.unwrapped_model.eval()
        with preserved_rng_state(), torch.no_grad():
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.validation_metrics().items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - started, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def validation_metrics(self) -> dict[str, float]:
        """Return what is measured on the validation questions."""
        return {"exam_accuracy": self.exam_accuracy()}

    def exam_accuracy(self) -> float:
        """Return the percentage of validation questions answered exactly right, with the config's decoding.

        The questions are shared out among the processes; under ZeRO-3, where every forward pass needs all of them, each
        answers everything.
        """
        args, questions = self.args, self.validation_questions
        mine = questions if self.zero3 else questions[args.process_index :: args.world_size]
        right = {question.id: question.answer for question in mine}
        predictions = self.family.answer(self.loaded, mine, self.config) if mine else iter(())
        predictions = Progress("exam accuracy", "questions", len(mine), patience=5).each(predictions)
        hits = sum(prediction.answer == right[prediction.question_id] for prediction in predictions)
        if not self.zero3:
            hits = int(processes.total((float(hits),), args.device)[0])
        return 100 * hits / len(questions)

    # Checkpoints

    def state_dict_on_rank0(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters on the first process's CPU, in float32 under DeepSpeed; {} on the others.

        Called by all processes: under ZeRO each holds a part of every parameter.
        """
        return checkpoints.trained_parameters(
            self.unwrapped_model, keep=self.args.process_index == 0, deepspeed=self.is_deepspeed_enabled
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained parameters to a checkpoint folder, except with DeepSpeed, which keeps and reads its own.

        Gathering them would cost a collective for each parameter, and the first process a copy of all in its memory.
        """
        if self.is_deepspeed_enabled:
            return
        state_dict = self.state_dict_on_rank0()
        if self.args.should_save:
            checkpoints.write_weights(Path(output_dir or self.run_folder), state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Let the Trainer write into a staging folder, then rename it: a kill leaves a whole checkpoint or none."""
        if self.state.global_step % self.resumable_every:
            return  # in the middle of what cannot be drawn again
        target = self.run_folder / f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = self.run_folder / checkpoints.STAGING / target.name
        if self.args.should_save:
            checkpoints.clear_staging(self.run_folder)
        # Nobody may write into the staging folder before the first process has cleared it.
        processes.barrier()
        try:
            # The Trainer puts checkpoints under `output_dir`, so that is what moves while it saves.
            self.args.output_dir = str(staged.parent)
            with checkpoints.naming_full_disk(self.run_folder):
                super()._save_checkpoint(model, trial)
                processes.barrier()
                # On every process: all of them read the best checkpoint again at the end.
                self._name_best(target)
                if self.args.should_save:
                    # Once more: the state that the Trainer has written names the staging folder as the best one.
                    self.state.save_to_json(str(staged / "trainer_state.json"))
                processes.barrier()
                checkpoints.publish(staged, target, self.is_deepspeed_enabled)
        except (OSError, RuntimeError):
            # Never without an error: the first process is still renaming when the others are done.
            checkpoints.clear_staging(self.run_folder)
            raise
        finally:
            self.args.output_dir = str(self.run_folder)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            checkpoints.rotate(self.run_folder, self.args.save_total_limit, Path(best) if best else None)
        processes.barrier()

    def _name_best(self, target: Path) -> None:
        """Point the state at the best checkpoint's final place; while saving, the Trainer only sees the staging one."""
        step = self.state.best_global_step
        if not step or self.args.save_strategy == SaveStrategy.NO:
            return
        best = self.run_folder / f"{checkpoints.PREFIX}{step}"
        self.state.best_model_checkpoint = str(best) if best.is_dir() or best == target else None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.read_weights(Path(resume_from_checkpoint), self.unwrapped_model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: object, resume_from_checkpoint: str | None
    ) -> Any:
        """Wrap model and optimizer; with DeepSpeed also resume, which the Trainer does for models of PEFT only."""
        base: Any = super()
        if not self.is_deepspeed_enabled:
            return base._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        try:
            # The Trainer would write and look for the frozen weights too, except for models of PEFT.
            prepared = base._prepare_for_training(max_steps, train_dataloader, None)
        except checkpoint.LOADING as error:
            reason = " ".join(str(error).split())[:600]
            raise ConfigError(f"training.deepspeed={self.args.deepspeed}: cannot be used ({reason}).") from error
        engine: Any = self.model_wrapped
        engine.save_checkpoint = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)
        if resume_from_checkpoint is not None:
            self._load_engine(resume_from_checkpoint)
            # The engine has read the optimizer; what is left is the Trainer's own learning rate schedule.
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_engine(self, folder: str) -> None:
        engine: Any = self.model_wrapped
        # Not strict: `exclude_frozen_parameters` left the frozen weights out of the checkpoint.
        path, _ = engine.load_checkpoint(folder, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"{folder}: DeepSpeed finds no checkpoint in it.")

    def load_best(self) -> None:
        """Put the best checkpoint's trained parameters back into the model."""
        best = self.state.best_model_checkpoint
        if best is None:
            return
        if self.is_deepspeed_enabled:
            self._load_engine(best)
        else:
            checkpoints.read_weights(Path(best), self.unwrapped_model)


def count_parameters(model: nn.Module, *, trained_only: bool = False) -> int:
    """Return the numbers in the parameters of a model.

    Under ZeRO-3 a parameter is empty outside of its module's forward pass; `ds_numel` is its whole size.
    """
    parameters = (p for p in model.parameters() if p.requires_grad or not trained_only)
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters)


@contextlib.contextmanager
def preserved_rng_state() -> Iterator[None]:
    """Leave the random state as it was, so that evaluating changes nothing in the training that follows."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cards = device.rng_states()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        device.set_rng_states(cards)
