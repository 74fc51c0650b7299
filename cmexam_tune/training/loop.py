"""`fit`: from a Config to a finished run folder."""

import contextlib
import math
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from cmexam_tune.config import Config
from cmexam_tune.core import cli, files
from cmexam_tune.core.errors import ConfigError, TrainingStopped, UserError, first_line
from cmexam_tune.models import checkpoint
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.training import arguments as arguments_of
from cmexam_tune.training import (
    callbacks,
    checkpoints,
    hf_trainer,
    monitor,
    precision_checks,
    processes,
    selfcheck,
)
from cmexam_tune.training.data import encoding
from cmexam_tune.training.data.datasets import Data, encoded_questions, mixture
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.exam_evaluation import ExamTrainer
from cmexam_tune.training.run_directory import loss_curve, starting
from cmexam_tune.training.run_directory import run as runs


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
        run: as `starting.prepare` returned it.
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
    args = arguments_of.build(run.config, run.path)
    _check_evaluation(args, run.config, validation)
    first = args.process_index == 0
    resume = _earlier(run, args, overwrite, trusted)
    if run.finished and not overwrite:
        return runs.open_values(run.path, run.config)
    family, method = runs.parts(run.config)
    loaded = _load(run.config, args, train, (family, method))
    data = _data(run, args, (family, loaded), train, validation)
    trainer = _trainer(run, args, (family, loaded), data)
    with contextlib.ExitStack() as held:
        if first:
            _announce(run.config, args, loaded.model, data)
            started = held.enter_context(
                starting.writing(run, overwrite, (arguments_of.device_name(), args.world_size))
            )
            checkpoints.clear_staging(run.path)
            trainer.add_callback(callbacks.FirstStep(started))
        processes.barrier()
        metrics = _steps(run, trainer, resume)
        return _finish(run, trainer, method, metrics)


def _earlier(run: runs.Run, args: TrainingArguments, overwrite: bool, trusted: bool) -> Path | None:
    """Return the checkpoint to go on from, once the run folder is known to be one for all processes."""
    processes.check_shared(run.path)
    if args.process_index == 0:
        starting.settle(run.path)
    processes.barrier()
    resume = None if overwrite else checkpoints.newest(run.path)
    if resume is not None:
        checkpoints.check_resumable(resume, bool(args.deepspeed), trusted)
        checkpoints.check_state(resume)
    return resume


def _load(config: Config, args: TrainingArguments, train: QuestionFiles, parts: tuple[Family, Method]) -> Loaded:
    """Return the base model with what is tuned in it."""
    family, method = parts
    set_seed(args.seed)
    zero3 = bool(args.deepspeed) and args.hf_deepspeed_config.is_zero3()
    with hf_trainer.whole_weights(args) if zero3 and config.model.adapter_name_or_path else contextlib.nullcontext():
        # Straight to the card, so that several processes do not hold a copy each in the host's memory first.
        loaded = family.load(config.model, train, "cpu" if zero3 else str(args.device))
    base: Any = loaded.model
    if args.gradient_checkpointing:
        base.enable_input_require_grads()
    model: Any = method.attach(base, family, config.tuning.settings)
    if zero3:
        precision_checks.align(model, bf16=args.bf16, fp16=args.fp16)
    return Loaded(model, loaded.tokenizer)


def _steps(run: runs.Run, trainer: ExamTrainer, resume: Path | None) -> dict[str, Any]:
    """Take the steps that are left; return the Trainer's metrics."""
    first = trainer.args.process_index == 0
    if resume is not None and first:
        cli.note(f"resuming from {resume}")
    with callbacks.signals(trainer), callbacks.Screen(trainer) as screen:
        trainer.add_callback(screen)
        try:
            result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        except checkpoint.LOADING as error:
            own = isinstance(error, TrainingStopped | torch.OutOfMemoryError)
            if own or resume is None or trainer.state.global_step > checkpoints.step_of(resume):
                raise
            raise UserError(
                f"{resume}: training cannot go on from it ({first_line(error)}). {checkpoints.OLDER}"
            ) from error
        if not trainer.interrupted and run.config.training.arguments.get("load_best_model_at_end"):
            trainer.load_best()
    if trainer.interrupted:
        if first:
            cli.note(f"a checkpoint was saved in {run.path}; start the same command again to go on")
        raise KeyboardInterrupt
    return dict(result.metrics)


def _check_evaluation(args: TrainingArguments, config: Config, validation: QuestionFiles) -> None:
    wants = [name for name, on in (("eval_strategy", args.eval_strategy != "no"), ("load_best_model_at_end",
             args.load_best_model_at_end)) if on]  # fmt: skip
    if config.training.early_stopping_patience is not None:
        wants.append("early_stopping_patience")
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ConfigError(
                "training.early_stopping_patience needs training.eval_strategy (steps or epoch) and "
                "training.metric_for_best_model (loss or exam_accuracy)."
            )
    if wants and not validation:
        raise ConfigError(f"training.{wants[0]}: needs validation questions. Set data.validation.")
    if args.metric_for_best_model not in (None, "loss", "eval_loss", "exam_accuracy", "eval_exam_accuracy"):
        raise ConfigError(
            f"training.metric_for_best_model={args.metric_for_best_model}: known are loss and exam_accuracy."
        )
    # The Trainer would look for its own files; `_steps` reads the best checkpoint.
    args.load_best_model_at_end = False


def _data(
    run: runs.Run,
    args: TrainingArguments,
    model: tuple[Family, Loaded],
    train: QuestionFiles,
    validation: QuestionFiles,
) -> Data:
    config, (family, loaded) = run.config, model
    cache = Path(config.data.cache_dir) if config.data.cache_dir else run.path / "cache"
    # The first process encodes and writes the cache, the others read it.
    with args.main_process_first(desc="encoding"):
        encoded = encoding.encode(config, family, loaded, train, cache)
        held_out = encoding.encode(config, family, loaded, validation, cache) if validation else None
    if family.task == "generate":
        empty = encoded.table.select([i for i, labels in enumerate(encoded.weights) if not labels])
        monitor.check_rows([(name, 0) for name in empty["question_id"]])
    if args.process_index == 0:
        cli.note(encoding.table(encoded.truncation, config))
    layout = arguments_of.layout(config, args.world_size)
    return Data(
        encoded_questions(family, loaded, encoded),
        layout,
        encoded_questions(family, loaded, held_out) if held_out else None,
        list(validation),
        mixture(encoded, config.data.mixture, layout.seed),
    )


def _announce(config: Config, args: TrainingArguments, model: Any, data: Data) -> None:
    tuned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    count = sum(int(getattr(p, "ds_numel", p.numel())) for p in tuned.values())
    total = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
    plan = data.sampler(0, args.world_size)
    cli.note(
        f"{count:,} of {total:,} parameters are trained ({100 * count / total:.3g}%); {plan.questions:,} questions, "
        f"{data.layout.global_batch} in each step on {args.world_size} process(es); padding {100 * plan.padding():.1f}%"
    )
    if data.mixture:
        shares = zip(data.mixture.counts(), config.data.train, strict=True)
        cli.note("each epoch: " + ", ".join(f"{count:,} of {path}" for count, path in shares))
    chosen = {"bf16": args.bf16, "fp16": args.fp16}
    for line in precision_checks.warnings(config, chosen, {name: p.dtype for name, p in tuned.items()}):
        cli.note(f"warning: {line}")


def _trainer(run: runs.Run, args: TrainingArguments, model: tuple[Family, Loaded], data: Data) -> ExamTrainer:
    family, loaded = model
    trained = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    arguments_of.size_buckets(args, trained)
    try:
        trainer = ExamTrainer(run.config, family, loaded, args, data, eval_dataset=data.validation)
        _try_optimizer(trainer)
    except checkpoint.LOADING as error:
        # What `report_to`, `optim`, `lr_scheduler_type` or `fsdp` ask for is not installed or cannot be.
        with contextlib.suppress(OSError):
            run.path.rmdir()
        raise ConfigError(f"training: {first_line(error)}") from None
    trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # another class in a notebook
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(callbacks.JsonlLog(run.path / runs.LOG))
    trainer.add_callback(callbacks.StopOnRequest(trainer))
    if run.config.training.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(run.config.training.early_stopping_patience))
    return trainer


def _try_optimizer(trainer: ExamTrainer) -> None:
    """Make the optimizer and its schedule for a single number: what they refuse, they refuse before the run starts."""
    args, model = trainer.args, cast(Any, trainer.loaded.model)
    kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
    if not {"params", "model", "optimizer_dict"} & set(options):
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
        steps = max(args.max_steps, len(trainer.get_train_dataloader()))
        get_scheduler(
            args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, cast(Any, args.lr_scheduler_kwargs)
        )


def _finish(run: runs.Run, trainer: ExamTrainer, method: Method, metrics: dict[str, Any]) -> runs.Run:
    """Write the adapter and the end of the story; the Trainer's state comes last and says that all is there."""
    weights = trainer.weights()
    args = trainer.args
    metrics["padding"] = trainer.data.sampler(0, args.world_size).padding()
    metrics["tokens_per_second"] = trainer.tokens_done / max(float(metrics.get("train_runtime", 0)), 1e-9)
    if trainer.state.best_metric is not None:
        metrics["best_metric"] = trainer.state.best_metric
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if args.process_index == 0:
        labels = trainer.loaded.model.config.id2label if trainer.family.task == "classify" else None
        facts = runs.card(run.config, checkpoint.tokenizer_hash(trainer.loaded.tokenizer), labels)
        selfcheck.save_and_verify(run, trainer, method, weights, facts)
        runs.write_json(run.path / runs.METRICS, metrics)
        trainer.state.save_to_json(str(run.path / f".{runs.STATE}"))
        with files.atomic_write(run.path / "loss.svg") as handle:
            handle.write(loss_curve.svg(run.log))
        (run.path / f".{runs.STATE}").replace(run.path / runs.STATE)
        if not args.disable_tqdm and not cli.in_notebook():
            cli.note(loss_curve.text(run.log))
    processes.barrier()
    return runs.Run(run.path, run.config, metrics)
