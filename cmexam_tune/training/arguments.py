"""From a Config to `transformers.TrainingArguments`: number formats, DeepSpeed, and the layout of the batches."""

import dataclasses
import importlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments, integrations
from transformers.utils.import_utils import is_liger_kernel_available

from cmexam_tune.config import Config, PromptConfig, TrainingConfig, recipe_folders
from cmexam_tune.core import cli, documents
from cmexam_tune.core.errors import ConfigError, first_line
from cmexam_tune.core.variants import suggest
from cmexam_tune.models import checkpoint, device
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family
from cmexam_tune.models.prefix import MODULE
from cmexam_tune.training import objectives
from cmexam_tune.training.data.sampler import StepLayout

MAX_BUCKET = 500_000_000
"""Numbers; DeepSpeed's own default, 1 to 2 GB."""
STAGES = ("zero2", "zero3", "zero3_offload")


def build(config: Config, objective: objectives.Objective, output_dir: Path) -> TrainingArguments:
    """Return the arguments of the Trainer, with what the card and this project decide filled in.

    Args:
        config: the experiment.
        objective: what it learns from.
        output_dir: the run folder.

    Raises:
        ConfigError: values that the library or the card refuses.
    """
    values = _values(config, objective, Card.here(bool(config.training.arguments.get("use_cpu"))))
    if values.get("deepspeed"):
        values["deepspeed"] = str(deepspeed_path(str(values["deepspeed"])))
        _single_process_environment()
    arguments = _construct(objective, output_dir, values)
    # It has chosen what is compared and how often. At the end the Trainer would look for files that it writes itself;
    # `SafeTrainer.load_best` reads ours.
    arguments.load_best_model_at_end = False
    if arguments.world_size == 1 and arguments.n_gpu > 1:
        cli.note(
            f"note: one process uses one of the {arguments.n_gpu} cards. For all of them: "
            f"torchrun --nproc_per_node {arguments.n_gpu} -m cmexam_tune.train ..."
        )
        # Else a single process spreads its batches over all cards by itself (DataParallel).
        arguments._n_gpu = 1
    if arguments.deepspeed:
        _start_deepspeed()
    return arguments


def _values(config: Config, objective: objectives.Objective, card: "Card") -> dict[str, object]:
    """Return the keyword arguments of `TrainingArguments`: the recipe's, with what the card and this project decide."""
    values = {**objective.defaults, **config.training.arguments}
    values |= choose_precision(values, card, config.model.dtype)
    values["gradient_accumulation_steps"] = accumulation(config, objective)
    if values["fp16"]:
        # A fused optimizer looks for infinite gradients by itself: nobody would know that it has skipped a step, and
        # the learning rate would go on without it.
        values.setdefault("optim", "adamw_torch")
    # A checkpoint to fall back to must exist beside the last one; a hidden NaN would defeat the monitor.
    values = {
        "logging_steps": 10,
        "save_total_limit": 3,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        **values,
    }
    if "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}:
        # What transformers 5.23 and later call it; recipes keep the name that everybody knows.
        values = {name.replace("gradient_checkpointing", "activation_checkpointing"): v for name, v in values.items()}
    if not torch.accelerator.is_available():
        # Without it transformers takes each of several processes for the first and only one.
        values.setdefault("use_cpu", True)
    # Every module takes part in every step; looking for those that do not costs a pass over the graph each time.
    values.setdefault("ddp_find_unused_parameters", False)
    # The Trainer would count the padding too, and only what the first process sees.
    values.pop("include_num_input_tokens_seen", None)
    if values.get("use_liger_kernel") and not is_liger_kernel_available():
        raise ConfigError("training.use_liger_kernel: Liger is not installed: pip install liger-kernel")
    return values


def accumulation(config: Config, objective: objectives.Objective) -> int:
    """Return over how many micro-batches the Trainer is to sum gradients.

    A step of our own trainer is a whole optimizer step (the micro-batches are run inside it); TRL's count by
    themselves, and `global_batch_size` has to come out even.

    Raises:
        ConfigError: it does not.
    """
    if objective.trl_config is None:
        return 1
    values, questions = config.training.arguments, config.training.global_batch_size
    if questions is None:
        return int(values.get("gradient_accumulation_steps", 1))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    micro, rows = int(values.get("per_device_train_batch_size", 8)), questions * objective.rows_per_question(config)
    if rows % (micro * world):
        raise ConfigError(
            f"training.global_batch_size={questions}: a step has {rows} rows (outputs, pairs), which is no multiple of "
            f"training.per_device_train_batch_size={micro} x {world} processes. Change one of them."
        )
    return rows // (micro * world)


def _construct(objective: objectives.Objective, output_dir: Path, values: Mapping[str, object]) -> TrainingArguments:
    try:
        arguments = _class_of(objective)(output_dir=str(output_dir), **values)
        if arguments.torch_compile_mode is not None:  # else looked at in the first step
            torch.compile(lambda: None, mode=arguments.torch_compile_mode)
        untyped: Any = integrations
        for callback in untyped.get_reporting_integration_callbacks(arguments.report_to):
            callback()  # which looks for its library
    except checkpoint.LOADING as error:
        raise ConfigError(f"training: {first_line(error)}") from None
    return arguments


def _class_of(objective: objectives.Objective) -> Callable[..., TrainingArguments]:
    if objective.trl_config is None:
        return TrainingArguments
    import trl

    trl_class: Callable[..., TrainingArguments] = getattr(trl, objective.trl_config)
    return trl_class


def check(config: Config, objective: objectives.Objective, card: "Card", model: PreTrainedModel) -> None:
    """Refuse what `fit` refuses before its first step, for a card that need not be here; nothing is started.

    Args:
        config: what is to be trained, which `check_supported` has let through.
        objective: what it learns from.
        card: what on.
        model: with what is tuned in it, which may be on the device `meta`.

    Raises:
        ConfigError: values that transformers, the tuning method or the card refuses.
    """
    if config.model.load_in_4bit and not card.computes_4bit:
        raise device.no_4bit(card.name)
    values = _values(config, objective, card)
    check_kernels(config.training, model)
    if values.get("deepspeed"):
        deepspeed_path(str(values.pop("deepspeed")))
    # transformers would wait for the other processes that a launcher starts, and look for the card.
    alone = {name: os.environ.pop(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in os.environ}
    try:
        arguments = _construct(objective, Path(config.out), values | {"use_cpu": True, "bf16": False, "fp16": False})
        Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except checkpoint.LOADING as error:
        raise ConfigError(f"training: {first_line(error)}") from None
    finally:
        os.environ.update(alone)


def check_kernels(training: TrainingConfig, model: PreTrainedModel) -> None:
    """Refuse Liger for a model type that it has no kernels for: it would do nothing, and say so in its log only.

    Raises:
        ConfigError: such a model.
    """
    if training.arguments.get("use_liger_kernel"):
        supported = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
        if (kind := model.config.model_type) not in supported:
            raise ConfigError(
                f"training.use_liger_kernel: Liger {metadata.version('liger-kernel')} has no kernels for models of "
                f"type {kind}. Leave it out."
            )


def check_supported(config: Config, family: Family, method: Method, objective: objectives.Objective) -> None:
    """Refuse what would only fail, or train something else than was asked for, once the weights are loaded.

    Raises:
        ConfigError: settings that family, tuning method, objective or this project have no way to train.
    """
    values = config.training.arguments
    if config.model.load_in_4bit and not method.trains_beside_4bit:
        raise ConfigError(
            f"model.load_in_4bit: weights of 4 bits are frozen and read by LoRA only, not by "
            f"tuning.method={config.tuning.method}. Set tuning.method=lora, or leave it out."
        )
    if config.model.load_in_4bit and "zero3" in str(values.get("deepspeed")):
        raise ConfigError(
            "model.load_in_4bit: ZeRO-3 cannot share out weights of 4 bits. Set training.deepspeed=zero2, or leave it "
            "out."
        )
    if values.get("fsdp"):
        raise ConfigError("training.fsdp: not supported here. To share out weights set training.deepspeed=zero3.")
    method.check(values)
    objective.check(config, family, method)


# Number formats

CARDS = {
    "V100-16GB": 15.77, "V100-32GB": 31.74, "3090": 23.69, "4090": 23.64, "A100-40GB": 39.39, "A100-80GB": 79.15,
    "A800-40GB": 39.39, "A800-80GB": 79.15, "H100": 79.10, "H200": 139.81, "910B": 60.97,
}  # fmt: skip
"""Name -> GiB as torch reports them, which is less than what is printed on the box."""
WITHOUT_4BIT = ("910B",)


@dataclass(frozen=True)
class Card:
    """What matters about the device that this process trains on."""

    name: str
    accelerated: bool
    """False: it is the CPU."""
    bf16: bool
    memory: int | None = None
    """Bytes, where they are known."""
    computes_4bit: bool = True
    """Whether bitsandbytes has kernels for it."""

    @classmethod
    def here(cls, use_cpu: bool = False) -> "Card":
        """Return the card of this process; the CPU where there is none or `use_cpu` is set."""
        if use_cpu or not device.is_accelerated():
            return cls("CPU", accelerated=False, bf16=True)
        return cls(device.name(), True, device.has_bf16(), device.total_memory(), device.computes_4bit())

    @classmethod
    def named(cls, name: str) -> "Card":
        """Return a card of `CARDS`, which need not be in this machine.

        Raises:
            ConfigError: it is not known.
        """
        key_of = {key.lower(): key for key in CARDS}
        if name.lower() not in key_of:
            raise ConfigError(f"--card {name} is not known{suggest(name, CARDS)} (known: {', '.join(CARDS)}).")
        key = key_of[name.lower()]
        memory = round(CARDS[key] * 1024**3)
        return cls(key, True, not key.startswith("V100"), memory, key not in WITHOUT_4BIT)


def choose_precision(values: Mapping[str, object], card: Card, weights_dtype: str = "auto") -> dict[str, bool]:
    """Return `bf16` and `fp16` for `TrainingArguments`: what the user set, else what suits the card.

    Args:
        values: arguments of the config's `training`.
        card: what is trained on.
        weights_dtype: of the frozen weights; on a CPU bfloat16 weights are trained in bfloat16.

    Raises:
        ConfigError: bf16 on a card without it, or both formats at once.
    """
    bf16, fp16 = values.get("bf16"), values.get("fp16")
    if bf16 and fp16:
        raise ConfigError("training.bf16 and training.fp16 are both true: keep one.")
    if bf16 and not card.bf16:
        raise ConfigError(f"training.bf16=true: {card.name} has no bfloat16. Set training.fp16=true or leave out both.")
    if fp16 and not card.accelerated:
        raise ConfigError("training.fp16=true: float16 training needs a GPU. Leave it out on a CPU.")
    if bf16 is not None or fp16 is not None:
        return {"bf16": bool(bf16), "fp16": bool(fp16)}
    if not card.accelerated:
        return {"bf16": weights_dtype == "bfloat16", "fp16": False}
    return {"bf16": card.bf16, "fp16": not card.bf16}


def harmful_settings(
    training: TrainingConfig, method: Method, arguments: TrainingArguments, model: torch.nn.Module
) -> list[str]:
    """Return one line for each setting that is known to end in loss 0, NaN or nothing learnt.

    Args:
        training: the config's section.
        method: the tuning method.
        arguments: as `build` returned them.
        model: with what is trained in it.
    """
    fp16 = arguments.fp16
    lines = []
    rate = float(training.arguments.get("learning_rate", 5e-5))
    half = sorted(name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16)
    if half and fp16:
        lines.append(f"{half[0]} is trained in float16: updates below 6e-8 are lost and loss scaling cannot work.")
    return lines + method.warnings(training.arguments, learning_rate=rate, fp16=fp16)


# DeepSpeed


def deepspeed_path(value: str) -> Path:
    """Return the DeepSpeed config called `value`: zero2, zero3 or zero3_offload as shipped, else a path.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = Path(value)
    if value in STAGES:
        shipped = [folder / "deepspeed" / f"{value}.json" for folder in recipe_folders()]
        path = next((file for file in shipped if file.is_file()), path)
    if not path.is_file():
        raise ConfigError(
            f"training.deepspeed={value}: no such file. Known by name: {', '.join(STAGES)}; "
            f"relative paths start at {Path.cwd()}."
        )
    documents.read_json(path, "DeepSpeed config")
    return path


def _single_process_environment() -> None:
    """Give a run without a launcher the environment of one process, which DeepSpeed asks for."""
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as probe:
        # Port 0 lets the system choose a free one, so that runs on one machine do not meet.
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _start_deepspeed() -> None:
    """Connect this process with the others.

    On CPUs accelerate starts torch's process group only, which ZeRO-3 finds too late for loading a model.
    """
    import deepspeed

    if not torch.accelerator.is_available():
        # DeepSpeed's fast path for CPUs would be compiled first. That takes minutes, processes race for it, and one
        # killed meanwhile leaves a lock on which every later run waits.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    deepspeed.init_distributed(dist_backend=backend or device.backend())


def fit_deepspeed(arguments: TrainingArguments, model: torch.nn.Module) -> None:
    """Fit model and DeepSpeed's configuration to each other, before the Trainer is made.

    ZeRO-2's buckets that are `auto` get the size of what is trained: for 4 million parameters 2 GB would be idle.
    ZeRO-3's follow the model's width, as transformers does it.

    Under ZeRO-3 what is trained is put into the type that it computes in; its optimizer keeps float32 of its own. It
    casts nothing that is new in a model which it loaded itself. LoRA matrices and prefixes are cast where they are used
    and stay as they are; a head, a bias or an embedding in float32 would meet activations in half precision, and all
    that is trained has to be of one type.
    """
    if not arguments.deepspeed:
        return
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    zero = arguments.hf_deepspeed_config.config.get("zero_optimization", {})
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get("stage") in (1, 2) and zero.get(name) == "auto":
            zero[name] = bucket_size(sum(parameter.numel() for parameter in trained.values()))
    if not arguments.hf_deepspeed_config.is_zero3() or not (arguments.bf16 or arguments.fp16):
        return
    if any("lora_" not in name and MODULE not in name.split(".") for name in trained):
        for parameter in trained.values():
            parameter.data = parameter.data.to(torch.bfloat16 if arguments.bf16 else torch.float16)


def bucket_size(trained: int) -> int:
    """Return the size of a ZeRO-2 bucket, in numbers, for `trained` parameters; DeepSpeed refuses odd sizes."""
    return min(max(trained + trained % 2, 2**16), MAX_BUCKET)


# Batches


def layout(training: TrainingConfig, prompt: PromptConfig, world: int) -> StepLayout:
    """Return how questions are grouped into steps and rows on `world` processes.

    An optimizer step has `global_batch_size` questions, else micro-batch x accumulation x processes.

    Raises:
        ConfigError: fewer questions than processes.
    """
    size = training.global_batch_size
    if size is None:
        size = training.micro_batch * training.accumulation * world
    if size < world:
        raise ConfigError(
            f"training.global_batch_size={size} is smaller than the {world} processes: each needs a question in every "
            f"step. Start at most {size} processes, or set global_batch_size to {world} or more."
        )
    return StepLayout(
        global_batch=size,
        micro_batch=training.micro_batch,
        max_tokens=training.max_tokens_per_batch,
        pack_length=prompt.max_source_length + prompt.max_target_length if training.packing else None,
        seed=training.seed,
    )
