"""The Trainer's checkpoints, made safe: staged, summed, renamed; only what is trained is in them."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from cmexam_tune.training import checkpoints, processes


class SafeTrainer(Trainer):
    """A Trainer whose checkpoint folders are whole or not there, with and without DeepSpeed."""

    @property
    def run_folder(self) -> Path:
        """The run folder, where checkpoints lie."""
        return Path(str(self.args.output_dir))

    @property
    def tuned(self) -> Any:
        """The model without what DDP or DeepSpeed put around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def zero3(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return plugin is not None and plugin.zero_stage == 3

    def weights(self) -> Any:
        """Return the trained parameters on the CPU; on all processes, since ZeRO-3 has to collect them."""
        return checkpoints.trainable(self.tuned, gather=self.zero3)

    # Writing

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run_folder / checkpoints.STAGING)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = self.run_folder / f"{checkpoints.PREFIX}{self.state.global_step}"
        staged = self.run_folder / checkpoints.STAGING / target.name
        if self.args.should_save:
            checkpoints.clear_staging(self.run_folder)
        processes.barrier()
        try:
            super()._save_checkpoint(model, trial)
            processes.barrier()
            if self.args.should_save:
                self._name_best(target)
                self.state.save_to_json(str(staged / "trainer_state.json"))
                checkpoints.publish(staged, target)
        except (OSError, RuntimeError) as error:
            checkpoints.clear_staging(self.run_folder)
            if checkpoints.is_full_disk(error, self.run_folder):
                raise checkpoints.no_space(self.run_folder) from error
            raise
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

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        engine: Any = self.model_wrapped
        engine.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        scheduler: Any = self.lr_scheduler
        if self.args.should_save and not isinstance(scheduler, DeepSpeedSchedulerWrapper):
            torch.save(scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    # Reading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.read_weights(Path(resume_from_checkpoint), self.tuned)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        base: Any = super()
        if not (self.is_deepspeed_enabled and resume_from_checkpoint):
            return base._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # The Trainer would look for the frozen weights too, which are not in the checkpoint.
        prepared = base._prepare_for_training(max_steps, train_dataloader, None)
        self._load_engine(resume_from_checkpoint)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_engine(self, folder: str) -> None:
        engine: Any = self.model_wrapped
        path, _ = engine.load_checkpoint(folder, load_module_strict=False)
        if path is None:
            raise RuntimeError(f"{folder}: DeepSpeed finds no checkpoint in it.")

    def _load_best_model(self) -> None:
        """Put the best checkpoint's trained parameters back into the model."""
        best = str(self.state.best_model_checkpoint)
        if self.is_deepspeed_enabled:
            self._load_engine(best)
        else:
            checkpoints.read_weights(Path(best), self.tuned)
