"""`fit`: from a Config to a finished run folder."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, PrinterCallback, TrainingArguments, set_seed
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from cmexam_tune.config import ModelConfig
from cmexam_tune.core import cli, files
from cmexam_tune.core.errors import ConfigError, TrainingStopped, UserError, first_line
from cmexam_tune.models import checkpoint
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.training import arguments as arguments_of
from cmexam_tune.training import callbacks, checkpoints, objectives, processes, selfcheck
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.run_directory import log, starting
from cmexam_tune.training.run_directory import run as runs
from cmexam_tune.training.safe_trainer import SafeTrainer
from cmexam_tune.training.task import Task


def fit(
    run: runs.Run,
    train: QuestionFiles,
    validation: QuestionFiles,
    *,
    overwrite: bool = False,
    trusted: bool = False,
) -> runs.Run:
    """Train the experiment of a run folder, from its newest whole checkpoint where there is one.

    Everything is checked, loaded and encoded before the run folder is touched.

    Args:
        run: as `starting.resolve_run` returned it.
        train: questions to learn from.
        validation: questions for the loss and exam accuracy while training; may be empty.
        overwrite: replace the run that is there, once the first step is done.
        trusted: read a DeepSpeed checkpoint that somebody else wrote.

    Returns:
        The run with its final metrics.

    Raises:
        UserError: a config or data that cannot be trained with.
        TrainingStopped: training degenerated; a checkpoint from before is kept.
        KeyboardInterrupt: a signal asked for it; a checkpoint is kept.
    """
    config = run.config
    family, method = runs.parts(config)
    objective = Objective.named(config.training.objective)
    arguments_of.check_supported(config, family, method, objective)
    args = arguments_of.build(config, objective, run.path)
    first, device = args.process_index == 0, arguments_of.Card.here(args.use_cpu).name

    processes.check_shared(run.path)
    if first:
        starting.restore_backup(run.path)
    # All processes have to look at the same run when they decide whether to resume it.
    processes.barrier()
    if run.finished and not overwrite:
        return run
    deepspeed = bool(args.deepspeed)
    resume = None if overwrite else checkpoints.find_resumable(run.path, deepspeed=deepspeed, trusted=trusted)

    # Before loading: a new head, LoRA matrices and prefixes are drawn from the global random state.
    set_seed(args.seed)
    base = load_base(family, config.model, train, args)
    model = method.attach(base.model, family, config.tuning.settings)
    arguments_of.check_kernels(config.training, model)
    arguments_of.fit_deepspeed(args, model)
    if first:
        for line in arguments_of.harmful_settings(config.training, method, args, model):
            cli.note(f"warning: {line}")
    loaded = Loaded(model, base.tokenizer)

    cache = Path(config.data.cache_dir) if config.data.cache_dir else run.path / starting.CACHE
    trainer = _make_trainer(objective, Task(config, family, method, loaded, args, train, validation, cache))
    with contextlib.ExitStack() as stack:
        if first:
            cli.note(trainer.summary())
            release_backup = stack.enter_context(
                starting.acquire_run(run, overwrite=overwrite, device=device, processes=args.world_size)
            )
            checkpoints.clear_staging(run.path)
            trainer.add_callback(callbacks.FirstStep(release_backup))
        # `acquire_run` may have renamed the folder that was there; only now may others write into it.
        processes.barrier()
        metrics = _take_steps(trainer, resume)
        _finish(run, trainer, metrics)
    return run


def load_base(family: Family, model: ModelConfig, questions: QuestionFiles, args: TrainingArguments) -> Loaded:
    """Return model and tokenizer of the checkpoint, where training wants them.

    Straight to the card, so that several processes do not hold a copy each in the host's memory first. Under ZeRO-3
    transformers shares the weights out among the processes while it loads.
    """
    zero3 = bool(args.deepspeed) and args.hf_deepspeed_config.is_zero3()
    with _unpartitioned(args) if zero3 and model.adapter_name_or_path else contextlib.nullcontext():
        loaded = family.load(model, questions, "cpu" if zero3 else str(args.device))
    if args.gradient_checkpointing:
        # Frozen embeddings give activations without gradients, and recomputed blocks would have none either.
        base: Any = loaded.model
        base.enable_input_require_grads()
    return loaded


@contextlib.contextmanager
def _unpartitioned(args: TrainingArguments) -> Iterator[None]:
    """Load models whole under ZeRO-3, which gets the weights afterwards; each process holds all of them.

    For what has to change weights before training: an adapter that is merged into its base.
    """
    untyped: Any = hf_deepspeed
    untyped.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        untyped.set_hf_deepspeed_config(args.hf_deepspeed_config)


def _make_trainer(objective: objectives.Objective, task: Task) -> SafeTrainer:
    try:
        trainer = objective.trainer(task)
        trainer.try_optimizer()
    except torch.OutOfMemoryError as error:
        raise checkpoint.unloadable(task.config.model.model_name_or_path, error) from None
    except (UserError, TrainingStopped):
        raise
    except checkpoint.LOADING as error:
        # What `report_to`, `optim`, `lr_scheduler_type` or `fsdp` ask for is not installed or cannot be. The Trainer
        # has made its folder.
        with contextlib.suppress(OSError):
            Path(str(task.arguments.output_dir)).rmdir()
        raise ConfigError(f"training: {first_line(error)}") from None
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # another class in a notebook
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callbacks.JsonlLog(trainer.run_folder / log.LOG))
    trainer.add_callback(callbacks.StopOnRequest(trainer))
    if task.config.training.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(task.config.training.early_stopping_patience))
    return trainer


def _take_steps(trainer: SafeTrainer, resume: Path | None) -> dict[str, float]:
    """Take the steps that are left; return the Trainer's metrics.

    Raises:
        UserError: the checkpoint cannot be gone on from, or the card's memory is too small.
        KeyboardInterrupt: a signal asked for it; a checkpoint is kept.
    """
    first = trainer.args.process_index == 0
    if resume is not None and first:
        cli.note(f"resuming from {resume}")
    with callbacks.signals(trainer), callbacks.Screen(trainer) as screen:
        trainer.add_callback(screen)
        try:
            result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        except torch.OutOfMemoryError as error:
            raise UserError(trainer.out_of_memory(error)) from error
        except checkpoint.LOADING as error:
            # Only before its first step can a failure be the checkpoint's.
            if (
                isinstance(error, TrainingStopped)
                or resume is None
                or trainer.state.global_step > checkpoints.step_of(resume)
            ):
                raise
            raise UserError(
                f"{resume}: training cannot go on from it ({first_line(error)}). {checkpoints.GO_BACK}"
            ) from error
        if not trainer.interrupted and trainer.config.training.arguments.get("load_best_model_at_end"):
            trainer.load_best()
    if trainer.interrupted:
        if first:
            cli.note(f"a checkpoint was saved in {trainer.run_folder}; start the same command again to go on")
        raise KeyboardInterrupt
    return dict(result.metrics)


def _finish(run: runs.Run, trainer: SafeTrainer, metrics: dict[str, float]) -> None:
    """Write what training leaves, the Trainer's state last: its presence says that all is there."""
    state_dict = trainer.state_dict_on_rank0()
    args = trainer.args
    metrics["padding"] = trainer.padding()
    metrics["tokens_per_second"] = trainer.tokens_done / max(float(metrics.get("train_runtime", 0)), 1e-9)
    if trainer.state.best_metric is not None:
        metrics["best_metric"] = trainer.state.best_metric
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if args.process_index == 0:
        labels = trainer.loaded.model.config.id2label if trainer.family.task == "classify" else None
        card = runs.AdapterCard.of(run.config, checkpoint.tokenizer_hash(trainer.loaded.tokenizer), labels)
        selfcheck.save_and_verify(run.adapter, trainer, state_dict, card)
        files.write_json(run.path / runs.METRICS, metrics)
        trainer.state.save_to_json(str(run.path / f".{runs.STATE}"))
        with files.atomic_write(run.path / "loss.svg") as handle:
            handle.write(log.svg_plot(run.log))
        (run.path / f".{runs.STATE}").replace(run.path / runs.STATE)
        if not args.disable_tqdm and not cli.in_notebook():
            cli.note(log.terminal_plot(run.log))
    processes.barrier()
