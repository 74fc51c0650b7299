"""`ExamTrainer`: transformers' Trainer with whole optimizer steps, exact loss weighting, guards, exam accuracy.

In `loss_of` every label of a step weighs the same, whichever process and micro-batch holds it.

Four private methods of the Trainer are overridden; `tests/test_canaries.py` names them, and what else training relies
on inside of transformers, accelerate and DeepSpeed, and fails when a new version changes one.
"""

import contextlib
import functools
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import SaveStrategy

from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.progress import Progress
from cmexam_tune.models import checkpoint, device
from cmexam_tune.models import precision as model_precision
from cmexam_tune.models.families import Classifier, Family, Loaded
from cmexam_tune.training import checkpoints, logits, monitor, processes
from cmexam_tune.training.data.batches import Batch, StepLoader, TrainingData
from cmexam_tune.training.data.sampler import Plan, spread


class ExamTrainer(Trainer):
    """The Trainer of every family and method.

    One item of its data loader is a whole optimizer step (`Batch`): its micro-batches are run inside `training_step`,
    so their number may change from step to step while a step keeps its questions. Its checkpoint folders are whole or
    not there, with and without DeepSpeed.
    """

    def __init__(
        self, config: Config, family: Family, loaded: Loaded, arguments: TrainingArguments, data: TrainingData
    ) -> None:
        self.config, self.family, self.loaded, self.data = config, family, loaded, data
        self.run_folder = Path(str(arguments.output_dir))
        self.monitor = monitor.TrainingMonitor(fp16=arguments.fp16)
        self.stop_asked = False
        """Set by a signal on this process."""
        self.stop_agreed = False
        """Whether any process was asked to stop; the same on all of them."""
        self.interrupted = False
        """Whether training has ended because of that."""
        self.tokens_done = 0
        """Tokens without padding since this command started, over all processes."""
        self.last_loss = math.nan
        """Mean loss of the last step on this process, weighted as `training_step` says."""
        self._autocast_dtype = model_precision.mixed(cast(Any, loaded.model))
        super().__init__(
            model=loaded.model, args=arguments, train_dataset=data.train, eval_dataset=cast(Any, data.validation)
        )
        self.label_logits = logits.LabelLogits(loaded.model) if family.task == "generate" else None
        # 2 operations for each weight and token forward, 4 backward.
        self._flos_per_token = 6 * count_parameters(loaded.model)

    @property
    def unwrapped_model(self) -> Any:
        """The model without what DDP or DeepSpeed put around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def zero3(self) -> bool:
        """Whether parameters are partitioned over the processes."""
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        return plugin is not None and plugin.zero_stage == 3

    def summary(self, paths: Sequence[str]) -> str:
        """Return what is trained, on what; `paths` are the training files."""
        trained, total = count_parameters(self.loaded.model, trained_only=True), count_parameters(self.loaded.model)
        plan = self.data.sampler(0, self.args.world_size)
        plural = "" if self.args.world_size == 1 else "es"
        text = (
            f"{trained:,} of {total:,} parameters are trained ({100 * trained / total:.3g}%); "
            f"{plan.questions:,} questions, {self.data.layout.global_batch} in each step on "
            f"{self.args.world_size} process{plural}; padding {100 * plan.padding():.1f}%"
        )
        if self.data.mixture is None:
            return text
        shares = zip(self.data.mixture.counts(), paths, strict=True)
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

    # One optimizer step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward over the micro-batches of a step.

        Returns:
            A float32 scalar: this process's part of the mean loss of the step, times the number of processes.
        """
        batch: Batch = inputs
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

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a collated micro-batch on this process's device; labels of tokens stay where `LabelLogits` counts."""
        stays = {"labels"} if self.label_logits is not None else set()
        return {
            name: value if name in stays else value.to(self.args.device, non_blocking=True)
            for name, value in inputs.items()
        }

    def loss_of(self, model: nn.Module, inputs: dict[str, Any], *, num_targets: int, step_targets: int) -> torch.Tensor:
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
            summed = self.label_logits.loss(model, inputs, labels, self.args.label_smoothing_factor)
            # A spare question (`EncodedQuestions.__getitem__`) has labels of its own, which must weigh nothing.
            return summed * (min(num_targets, 1) / max(step_targets, 1))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every forward pass: what `bf16` and `fp16` say, else what the weights need."""
        if self.args.bf16 or self.args.fp16 or self.is_deepspeed_enabled:
            return self.compute_loss_context_manager()
        return torch.autocast(self.args.device.type, self._autocast_dtype, enabled=self._autocast_dtype is not None)

    def _backward(self, model: Any, loss: torch.Tensor, final: bool) -> None:
        if not self.is_deepspeed_enabled:
            self.accelerator.backward(loss)
            return
        # accelerate would take the optimizer's step after every micro-batch.
        model.set_gradient_accumulation_boundary(final)
        model.backward(loss, scale_wrt_gas=False)
        if final:
            model.step()

    # Guards

    def _check_loss(self, loss: float, batch: Batch) -> None:
        """Judge a step before the optimizer uses its gradients; all processes learn here what any of them has met."""
        # A process whose only micro-batch keeps it busy has a loss of exactly 0, which says nothing.
        if any(batch.num_targets) or not batch.step_targets:
            self.monitor.on_loss(loss, batch.step_targets)
        # One all-reduce for both flags, where every process passes in every step: a collective that only some of them
        # reach would wait for ever.
        flags = (self.monitor.problem is not None, self.stop_asked)
        degenerated, self.stop_agreed = processes.any_true(flags, self.args.device)
        if degenerated:
            self._stop_training()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
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
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss on the validation questions and, where it decides something, the exam accuracy."""
        started = time.monotonic()
        # `training_step` goes back to training mode.
        self.unwrapped_model.eval()
        with preserved_rng_state(), torch.no_grad():
            metrics = {f"{metric_key_prefix}_loss": self.validation_loss()}
            if "exam_accuracy" in str(self.args.metric_for_best_model):
                metrics[f"{metric_key_prefix}_exam_accuracy"] = self.exam_accuracy()
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - started, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def validation_loss(self) -> float:
        """Return the mean loss over all labels (or, for classifiers, all questions) of the validation questions."""
        validation, args = self.data.validation, self.args
        assert validation is not None
        layout = self.data.evaluation_layout(args.per_device_eval_batch_size)
        # The whole file is one step, spread over the processes as a step of training is.
        mine = spread(range(len(validation)), validation.lengths, layout, args.world_size)[args.process_index]
        batch = validation[Plan(mine, sum(validation.num_targets))]
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
        batch = self.data.train[Plan((((0,),),), 1)]
        model, inputs = self.unwrapped_model.eval(), self.on_device(batch.micro[0])
        with torch.no_grad(), self.autocast():
            if self.label_logits is None:
                return cast(Classifier, self.family).scores(model, inputs).float()
            labels = inputs.pop("labels")
            scores, _ = self.label_logits(model, inputs, labels)
            return torch.as_tensor(scores).float()

    def exam_accuracy(self) -> float:
        """Return the percentage of validation questions answered exactly right, with the config's decoding.

        The questions are shared out among the processes; under ZeRO-3, where every forward pass needs all of them, each
        answers everything.
        """
        args, questions = self.args, self.data.validation_questions
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

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let the Trainer write into a staging folder, then rename it: a kill leaves a whole checkpoint or none."""
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

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
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
