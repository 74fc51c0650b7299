"""transformers' Trainer with whole optimizer steps, label-only logits and guards."""

import contextlib
import itertools
import math
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainingArguments

from cmexam_tune.config import Config
from cmexam_tune.models import precision as model_precision
from cmexam_tune.models.families import Classifier, Family, Loaded
from cmexam_tune.training import (
    checkpoints,
    checksums,
    logits,
    monitor,
    processes,
)
from cmexam_tune.training.data.datasets import Data
from cmexam_tune.training.data.sampler import Batch, StepLoader
from cmexam_tune.training.hf_trainer import SafeTrainer


class StepTrainer(SafeTrainer):
    """The Trainer of every family and method, without its evaluation.

    One item of its data loader is a whole optimizer step (`Batch`): its micro-batches are run inside `training_step`,
    so their number may change from step to step while a step keeps its questions.
    """

    def __init__(
        self, config: Config, family: Family, loaded: Loaded, arguments: TrainingArguments, data: Data, **options: Any
    ) -> None:
        self.config, self.family, self.loaded, self.data = config, family, loaded, data
        self.guards = monitor.Guards(fp16=arguments.fp16)
        self.stop_asked = False
        """Set by a signal on this process."""
        self.stop_agreed = False
        """Whether any process was asked to stop; the same on all of them."""
        self.interrupted = False
        """Whether training has ended because of that."""
        self.tokens_done = 0
        self.last_loss = math.nan
        self._mixed = model_precision.mixed(cast(Any, loaded.model))
        super().__init__(model=loaded.model, args=arguments, train_dataset=data.train, **options)
        self.label_logits = logits.LabelLogits(loaded.model) if family.task == "generate" else None
        self._flos_per_token = 6 * sum(int(getattr(p, "ds_numel", p.numel())) for p in loaded.model.parameters())

    # Batches

    def get_train_dataloader(self) -> StepLoader:
        """Return the loader of this process's share of each step."""
        args = self.args
        workers = args.dataloader_num_workers
        return StepLoader(
            self.data.train,
            self.data.sampler(args.process_index, args.world_size),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers and workers > 0,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the questions of an optimizer step."""
        return self.data.layout.global_batch

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], None]:
        """Return the next step; the loss is divided inside it."""
        return list(itertools.islice(epoch_iterator, num_batches)), None

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of forward and backward over one process's share of a step."""
        return self._flos_per_token * sum(int(micro["input_ids"].numel()) for micro in inputs.micro)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the tokens seen so far over all processes."""
        super().log({**logs, "num_input_tokens_seen": self.state.num_input_tokens_seen}, start_time)

    # One optimizer step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward over the micro-batches of a step; return the loss of the step."""
        batch: Batch = inputs
        self.guards.begin([name for ids in batch.ids for name in ids])
        model.train()
        done = torch.zeros((), device=self.args.device)
        for turn, micro in enumerate(batch.micro):
            final = turn == len(batch.micro) - 1
            alone = final or self.is_deepspeed_enabled
            with contextlib.nullcontext() if alone else self.accelerator.no_sync(model=model):
                loss = self.loss_of(model, self.on_device(micro), (batch.weights[turn], batch.items))
                loss = loss * self.args.world_size
                done = done + loss.detach()
                if final:
                    # DeepSpeed's backward also takes the optimizer's step, so this is the last moment to judge.
                    self._judge(float(done), batch)
                self._backward(model, loss, final)
        self.last_loss = float(done)
        self.tokens_done += batch.tokens
        self.state.num_input_tokens_seen += batch.tokens
        return done

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a collated micro-batch on this process's device."""
        return {name: value.to(self.args.device, non_blocking=True) for name, value in inputs.items()}

    def _backward(self, model: Any, loss: torch.Tensor, final: bool) -> None:
        if not self.is_deepspeed_enabled:
            self.accelerator.backward(loss)
            return
        model.set_gradient_accumulation_boundary(final)
        model.backward(loss, scale_wrt_gas=False)
        if final:
            model.step()

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], share: tuple[int, int]) -> torch.Tensor:
        """Return a micro-batch's part of the mean loss over all labels (classifiers: all questions) of a step.

        Args:
            model: wrapped for training, or not.
            inputs: one collated micro-batch; its labels are taken out.
            share: labels (questions) in this micro-batch, 0 for one that only keeps a process busy; in the step.
        """
        with self.mixed():
            return self._loss(model, inputs, share)

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every forward pass: what `bf16` and `fp16` say, else what the weights need."""
        if self.args.bf16 or self.args.fp16 or self.is_deepspeed_enabled:
            return self.compute_loss_context_manager()
        return torch.autocast(self.args.device.type, self._mixed, enabled=self._mixed is not None)

    def _loss(self, model: nn.Module, inputs: dict[str, Any], share: tuple[int, int]) -> torch.Tensor:
        weight, items = share
        if self.label_logits is None:
            classifier = cast(Classifier, self.family)
            loss: torch.Tensor = classifier.loss(model, inputs)
            return loss * (weight / max(items, 1))
        labels = inputs.pop("labels")
        summed = self.label_logits.loss(model, inputs, labels, self.args.label_smoothing_factor)
        return summed * (min(weight, 1) / max(items, 1))

    def _judge(self, loss: float, batch: Batch) -> None:
        if any(batch.weights) or not batch.items:
            self.guards.loss(loss, batch.items)
        flags = (self.guards.problem is not None, self.stop_asked)
        bad, self.stop_agreed = processes.any_true(flags, self.args.device)
        if bad:
            self._stop()

    def _stop(self) -> None:
        """Save the state as it was before the step that went wrong, and end the run."""
        step = self.state.global_step
        if step and not (self.run_folder / f"{checkpoints.PREFIX}{step}" / checksums.MANIFEST).is_file():
            self._save_checkpoint(self.tuned, None)
        saved = checkpoints.found(self.run_folder)
        raise self.guards.stop(step + 1, str(saved[0]) if saved else None)

    def judge(self, norm: float | None) -> None:
        """Judge the gradients of a step; they are summed over the processes, so that all of them come to the same."""
        overflow = self.overflowed or (self.accelerator.scaler is not None and not math.isfinite(norm or 0.0))
        self.guards.gradient(norm, overflow)
        self.guards.scale(self.loss_scale, overflow)
        if self.guards.problem is not None:
            self._stop()
