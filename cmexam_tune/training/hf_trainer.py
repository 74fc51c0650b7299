"""All that this project does inside transformers' Trainer, accelerate and DeepSpeed, beyond what they make public.

Four private methods of the Trainer are overridden here, and two private attributes set; `tests/test_canaries.py` names
them and fails when a new version changes one.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.trainer_utils import SaveStrategy

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models import checkpoint
from cmexam_tune.training import checkpoints, processes


def one_card(arguments: TrainingArguments) -> None:
    """Keep a single process from spreading its batches over all cards by itself (DataParallel)."""
    arguments._n_gpu = 1


def skip_cpu_compilation() -> None:
    """Do without DeepSpeed's fast path for CPUs, which it would compile first.

    That takes minutes, processes race for it, and one killed meanwhile leaves a lock on which every later run waits.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def whole_weights(arguments: TrainingArguments) -> Iterator[None]:
    """Load models unpartitioned under ZeRO-3, which gets the weights afterwards; each process holds all of them.

    For what has to change weights before training: an adapter that is merged into its base.
    """
    unset: Any = unset_hf_deepspeed_config
    unset()
    try:
        yield
    finally:
        put: Any = set_hf_deepspeed_config
        put(arguments.hf_deepspeed_config)


class SafeTrainer(Trainer):
    """A Trainer whose checkpoint folders are whole or not there, with and without DeepSpeed."""

    def __init__(self, *, args: TrainingArguments, **options: Any) -> None:
        self.run_folder = Path(str(args.output_dir))
        super().__init__(args=args, **options)

    @property
    def tuned(self) -> Any:
        """The model without what DDP or DeepSpeed put around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def zero3(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return plugin is not None and plugin.zero_stage == 3

    @property
    def overflowed(self) -> bool:
        """Whether DeepSpeed has skipped the last step because float16 gradients were infinite."""
        engine: Any = self.model_wrapped
        return bool(self.is_deepspeed_enabled and getattr(engine.optimizer, "overflow", False))

    @property
    def loss_scale(self) -> float | None:
        """The factor on float16 losses, None where there is none."""
        if self.accelerator.scaler is not None:
            return float(self.accelerator.scaler.get_scale())
        engine: Any = self.model_wrapped
        return float(engine.optimizer.loss_scale) if self.is_deepspeed_enabled and self.args.fp16 else None

    def weights(self, everything: bool = False) -> dict[str, Any]:
        """Return the trained parameters (or all of them) on the first process's CPU, from all processes together."""
        first = self.args.process_index == 0
        return checkpoints.parameters(self.tuned, everything, keep=first, deepspeed=self.is_deepspeed_enabled)

    def judge(self, norm: float | None) -> None:
        """Called with the norm of all gradients of each step before clipping; may end the run."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        base: Any = super()
        norm = base._get_grad_norm(model, grad_norm=grad_norm)
        self.judge(None if norm is None else float(norm))
        return norm

    # Writing

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = self.run_folder / f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = self.run_folder / checkpoints.STAGING / target.name
        if self.args.should_save:
            checkpoints.clear_staging(self.run_folder)
        processes.barrier()
        try:
            self.args.output_dir = str(staged.parent)
            super()._save_checkpoint(model, trial)
            processes.barrier()
            # On every process: all of them read the best checkpoint again at the end.
            self._name_best(target)
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))
            processes.barrier()
            checkpoints.publish(staged, target, self.is_deepspeed_enabled)
        except (OSError, RuntimeError) as error:
            checkpoints.clear_staging(self.run_folder)
            if checkpoints.is_full_disk(error, self.run_folder):
                raise checkpoints.no_space(self.run_folder) from error
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

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained parameters to a checkpoint folder."""
        weights = self.weights()
        if self.args.should_save:
            checkpoints.write_weights(Path(output_dir or self.run_folder), weights)

    # Reading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.read_weights(Path(resume_from_checkpoint), self.tuned)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        base: Any = super()
        if not self.is_deepspeed_enabled:
            return base._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        try:
            # The Trainer would write and look for the frozen weights too, except for models of PEFT.
            prepared = base._prepare_for_training(max_steps, train_dataloader, None)
        except checkpoint.LOADING as error:
            said = " ".join(str(error).split())[:600]
            raise ConfigError(f"training.deepspeed={self.args.deepspeed}: cannot be used ({said}).") from error
        engine: Any = self.model_wrapped
        engine.save_checkpoint = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)
        if resume_from_checkpoint is not None:
            self._load_engine(resume_from_checkpoint)
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_engine(self, folder: str) -> None:
        engine: Any = self.model_wrapped
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
            checkpoints.read_weights(Path(best), self.tuned)
