"""`ExamTrainer`: supervised tuning with whole optimizer steps and exact loss weighting.

In `loss_of` every label of a step weighs the same, whichever process and micro-batch holds it. What keeps a run safe is
in `safe_trainer.py`.
"""

import contextlib
import itertools
from typing import Any, cast

import torch
from torch import nn
from transformers import TrainingArguments

from cmexam_tune.models import device
from cmexam_tune.models.families import Classifier
from cmexam_tune.training import estimate, logits, processes
from cmexam_tune.training.data.batches import StepBatch, StepLoader, TrainingData
from cmexam_tune.training.data.sampler import StepPlan, spread
from cmexam_tune.training.safe_trainer import SafeTrainer, count_parameters
from cmexam_tune.training.task import Task


class ExamTrainer(SafeTrainer):
    """The Trainer of every family and method.

    One item of its data loader is a whole optimizer step (`StepBatch`): its micro-batches are run inside
    `training_step`, so their number may change from step to step while a step keeps its questions.
    """

    def __init__(self, task: Task, data: TrainingData, criterion: logits.Criterion | None) -> None:
        """Take what is trained on what; `criterion` is of token labels, None their cross-entropy."""
        self.data, self.criterion = data, criterion
        super().__init__(task, train_dataset=data.train, eval_dataset=cast(Any, data.validation))
        self.label_logits = logits.LabelLogits(self.loaded.model) if self.family.task == "generate" else None
        # 2 operations for each weight and token forward, 4 backward.
        self._flos_per_token = 6 * count_parameters(self.loaded.model)

    def summary(self) -> str:
        """Return what is trained, on what."""
        plan = self.data.sampler(0, self.args.world_size)
        plural = "" if self.args.world_size == 1 else "es"
        text = (
            f"{self.trained_share()}; "
            f"{plan.questions:,} questions, {self.data.layout.global_batch} in each step on "
            f"{self.args.world_size} process{plural}; padding {100 * plan.padding():.1f}%"
        )
        if self.data.mixture is None:
            return text
        shares = zip(self.data.mixture.counts(), self.training_files, strict=True)
        return f"{text}\neach epoch: " + ", ".join(f"{count:,} of {path}" for count, path in shares)

    # Batches

    def get_train_dataloader(self) -> StepLoader:
        """Return the loader of this process's share of each step."""
        args = self.args
        workers = args.dataloader_num_workers
        return StepLoader(
            self.data.train,
            self.data.sampler(args.process_index, args.world_size),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == device.kind() != device.CPU,
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
        """Log, with the tokens seen so far over all processes, and the steps that loss scaling has skipped."""
        skipped = {"skipped_steps": self.monitor.skipped} if self.monitor.skipped else {}
        super().log({**logs, "num_input_tokens_seen": self.state.num_input_tokens_seen, **skipped}, start_time)

    # One optimizer step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: object = None) -> torch.Tensor:
        """Run forward and backward over the micro-batches of a step.

        Returns:
            A float32 scalar: this process's part of the mean loss of the step, times the number of processes.
        """
        batch: StepBatch = inputs
        self.monitor.on_step_begin([name for ids in batch.ids for name in ids])
        model.train()
        step_loss = torch.zeros((), device=self.args.device)
        for turn, micro in enumerate(batch.micro):
            final = turn == len(batch.micro) - 1
            # DDP sums gradients over the processes in the backward pass; once a step, with the last one, is enough.
            sync_gradients = final or self.is_deepspeed_enabled
            with contextlib.nullcontext() if sync_gradients else self.accelerator.no_sync(model=model):
                loss = self.loss_of(
                    model,
                    self.on_device(micro),
                    num_targets=batch.num_targets[turn],
                    step_targets=batch.step_targets,
                )
                # DDP and DeepSpeed take the mean of the processes' gradients. `loss_of` has divided by the targets of
                # all of them already, so times their number the mean becomes the sum: however unevenly targets are
                # spread over processes and micro-batches, each weighs the same.
                loss = loss * self.args.world_size
                step_loss = step_loss + loss.detach()
                if final:
                    # DeepSpeed's backward also takes the optimizer's step, so this is the last moment to judge.
                    self.last_loss = float(step_loss)
                    self._check_loss(self.last_loss, batch)
                self._backward(model, loss, final)
        self.tokens_done += batch.tokens
        self.state.num_input_tokens_seen += batch.tokens
        return step_loss

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return a collated micro-batch on this process's device, single numbers as such.

        Labels of tokens stay where `LabelLogits` counts.
        """
        stays = {"labels"} if self.label_logits is not None else set()
        return {
            name: value
            if name in stays
            else value.to(self.args.device, non_blocking=True)
            if value.dim()
            else int(value)
            for name, value in inputs.items()
        }

    def loss_of(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], *, num_targets: int, step_targets: int
    ) -> torch.Tensor:
        """Return a micro-batch's part of the mean loss over all targets of a step.

        Args:
            model: wrapped for training, or not.
            inputs: one collated micro-batch; its labels are taken out.
            num_targets: labels (classifiers: questions) in it, 0 for one that only keeps a process busy.
            step_targets: labels (questions) in the step, over all micro-batches and processes.
        """
        with self.autocast():
            if self.label_logits is None:
                mean: torch.Tensor = cast(Classifier, self.family).loss(model, inputs)
                return mean * (num_targets / max(step_targets, 1))
            labels = inputs.pop("labels")
            summed = self.label_logits.loss(model, inputs, labels, self.criterion)
            # A spare question (`EncodedQuestions.__getitem__`) has labels of its own, which must weigh nothing.
            return summed * (min(num_targets, 1) / max(step_targets, 1))

    def _backward(self, model: Any, loss: torch.Tensor, final: bool) -> None:
        if not self.is_deepspeed_enabled:
            self.accelerator.backward(loss)
            return
        # accelerate would take the optimizer's step after every micro-batch.
        model.set_gradient_accumulation_boundary(final)
        model.backward(loss, scale_wrt_gas=False)
        if final:
            model.step()

    def _check_loss(self, loss: float, batch: StepBatch) -> None:
        """Judge a step before the optimizer uses its gradients."""
        # A process whose only micro-batch keeps it busy has a loss of exactly 0, which says nothing.
        if any(batch.num_targets) or not batch.step_targets:
            self.monitor.on_loss(loss, batch.step_targets)
        self.judge_step()

    # Evaluation

    def validation_metrics(self) -> dict[str, float]:
        """Return the loss on the validation questions and, where it decides something, the exam accuracy."""
        metrics = {"loss": self.validation_loss()}
        if "exam_accuracy" in str(self.args.metric_for_best_model):
            metrics["exam_accuracy"] = self.exam_accuracy()
        return metrics

    def validation_loss(self) -> float:
        """Return the mean loss over all labels (or, for classifiers, all questions) of the validation questions."""
        validation, args = self.data.validation, self.args
        assert validation is not None
        layout = self.data.evaluation_layout(args.per_device_eval_batch_size)
        # The whole file is one step, spread over the processes as a step of training is.
        mine = spread(range(len(validation)), validation.lengths, layout, args.world_size)[args.process_index]
        batch = validation[StepPlan(mine, sum(validation.num_targets))]
        summed = 0.0
        for micro, num_targets in zip(batch.micro, batch.num_targets, strict=True):
            inputs = self.on_device(micro)
            summed += float(
                self.loss_of(self.unwrapped_model, inputs, num_targets=num_targets, step_targets=batch.step_targets)
            )
        return processes.total((summed,), args.device)[0]

    def probe_logits(self) -> torch.Tensor:
        """Return the logits of the first training question: float32 [labels, vocabulary], of a classifier [1, options].

        Not under ZeRO-3, where one process cannot run a forward pass by itself.
        """
        batch = self.data.train[StepPlan((((0,),),), 1)]
        model, inputs = self.unwrapped_model.eval(), self.on_device(batch.micro[0])
        with torch.no_grad(), self.autocast():
            if self.label_logits is None:
                return cast(Classifier, self.family).scores(model, inputs).float()
            labels = inputs.pop("labels")
            scores, _ = self.label_logits(model, inputs, labels)
            return torch.as_tensor(scores).float()

    def padding(self) -> float:
        """Return the share of padding in an epoch's batches."""
        return self.data.sampler(0, self.args.world_size).padding()

    def out_of_memory(self, error: BaseException) -> str:
        """Return the message for a training that ran out of its card's memory: numbers, and what to change."""
        return estimate.out_of_memory(self.config, self.unwrapped_model, self.data, self.args.world_size, error)
