"""From a Config to `transformers.TrainingArguments` and the layout of the batches."""

import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_liger_kernel_available

from cmexam_tune.config import Config, recipe_folders
from cmexam_tune.core import cli, documents
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models import checkpoint
from cmexam_tune.training import hf_trainer, precision_checks
from cmexam_tune.training.data.sampler import Layout

MOST_BUCKET = 500_000_000
"""Numbers; DeepSpeed's own default, 1 to 2 GB."""
STAGES = ("zero2", "zero3", "zero3_offload")


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


def build(config: Config, out: Path) -> TrainingArguments:
    """Return the arguments of the Trainer, with what the card and this project decide filled in.

    A step of the Trainer is a whole optimizer step here (the micro-batches are run inside it), so its own
    accumulation is 1; `global_batch_size` is kept by the batches.

    Raises:
        ConfigError: values that transformers or the card refuses.
    """
    given = dict(config.training.arguments)
    _refuse(config)
    given.update(
        precision_checks.choose(given, precision_checks.Card.here(bool(given.get("use_cpu"))), config.model.dtype)
    )
    given.pop("gradient_accumulation_steps", None)
    # A checkpoint to fall back to must exist beside the last one; a hidden NaN would defeat the guards.
    given = {"logging_steps": 10, "save_total_limit": 3, "logging_nan_inf_filter": False, "report_to": "none", **given}
    if "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}:
        # What transformers 5.23 and later call it; recipes keep the name that everybody knows.
        given = {name.replace("gradient_checkpointing", "activation_checkpointing"): v for name, v in given.items()}
    if not torch.accelerator.is_available():
        # Without it transformers takes each of several processes for the first and only one.
        given.setdefault("use_cpu", True)
    # Every module takes part in every step; looking for those that do not costs a pass over the graph each time.
    given.setdefault("ddp_find_unused_parameters", False)
    # The Trainer would count the padding too, and only what the first process sees.
    given.pop("include_num_input_tokens_seen", None)
    if given.get("deepspeed"):
        given["deepspeed"] = str(deepspeed_path(str(given["deepspeed"])))
        _single_process_environment()
    if given.get("use_liger_kernel") and not is_liger_kernel_available():
        raise ConfigError("training.use_liger_kernel: Liger is not installed: pip install liger-kernel")
    try:
        arguments = TrainingArguments(output_dir=str(out), **given)
        if arguments.torch_compile_mode is not None:  # else looked at in the first step
            torch.compile(lambda: None, mode=arguments.torch_compile_mode)
    except checkpoint.LOADING as error:
        raise ConfigError(f"training: {error}") from None
    if arguments.world_size == 1 and arguments.n_gpu > 1:
        cli.note(
            f"note: one process uses one of the {arguments.n_gpu} cards. For all of them: "
            f"torchrun --nproc_per_node {arguments.n_gpu} -m cmexam_tune.train ..."
        )
        hf_trainer.one_card(arguments)
    if arguments.deepspeed:
        start_deepspeed()
    return arguments


def _refuse(config: Config) -> None:
    """Refuse what would only fail, or train something else than was asked for, once the weights are loaded."""
    given = config.training.arguments
    if config.model.load_in_4bit and config.tuning.method != "lora":
        raise ConfigError(
            f"model.load_in_4bit: weights of 4 bits are frozen and read by LoRA only, not by "
            f"tuning.method={config.tuning.method}. Set tuning.method=lora, or leave it out."
        )
    if config.model.load_in_4bit and "zero3" in str(given.get("deepspeed")):
        raise ConfigError(
            "model.load_in_4bit: ZeRO-3 cannot share out weights of 4 bits. Set training.deepspeed=zero2, or leave it "
            "out."
        )
    if given.get("fsdp"):
        raise ConfigError("training.fsdp: not supported here. To share out weights set training.deepspeed=zero3.")
    options = given.get("activation_checkpointing_kwargs") or given.get("gradient_checkpointing_kwargs") or {}
    if config.tuning.method == "ptuning" and isinstance(options, Mapping) and options.get("use_reentrant"):
        raise ConfigError(
            "training.gradient_checkpointing_kwargs.use_reentrant=true: gradients would not reach the prefix of "
            "P-tuning. Leave it out."
        )


def size_buckets(arguments: TrainingArguments, trained: int) -> None:
    """Set ZeRO-2's buckets that are `auto` to what is trained: for 4 million parameters 2 GB would be idle.

    Called before the Trainer is made; ZeRO-3's follow the model's width, as transformers does it.
    """
    if not arguments.deepspeed:
        return
    zero = arguments.hf_deepspeed_config.config.get("zero_optimization", {})
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get("stage") in (1, 2) and zero.get(name) == "auto":
            zero[name] = bucket(trained)


def bucket(trained: int) -> int:
    """Return the numbers in a bucket of ZeRO-2 for so many trained parameters; DeepSpeed refuses odd sizes."""
    return min(max(trained + trained % 2, 2**16), MOST_BUCKET)


def start_deepspeed() -> None:
    """Connect this process with the others.

    On CPUs accelerate starts torch's process group only, which ZeRO-3 finds too late for loading a model.
    """
    import deepspeed

    if not torch.accelerator.is_available():
        hf_trainer.skip_cpu_compilation()
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    deepspeed.init_distributed(dist_backend=backend or ("nccl" if torch.cuda.is_available() else "gloo"))


def _single_process_environment() -> None:
    """Give a run without a launcher the environment of one process, which DeepSpeed asks for."""
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def global_batch(config: Config, world: int) -> int:
    """Return the questions of an optimizer step: `global_batch_size`, else micro-batch x accumulation x processes.

    Raises:
        ConfigError: fewer questions than processes.
    """
    given: Mapping[str, Any] = config.training.arguments
    micro = int(given.get("per_device_train_batch_size", 8))
    accumulation = int(given.get("gradient_accumulation_steps", 1))
    size = config.training.global_batch_size
    if size is None:
        return micro * accumulation * world
    if size < world:
        raise ConfigError(
            f"training.global_batch_size={size} is smaller than the {world} processes: each needs a question in every "
            f"step. Start at most {size} processes, or set global_batch_size to {world} or more."
        )
    return size


def layout(config: Config, world: int) -> Layout:
    """Return how questions are grouped into steps and rows on `world` processes."""
    prompt = config.prompt
    limit = config.training.max_tokens_per_batch
    return Layout(
        global_batch=global_batch(config, world),
        micro_batch=int(config.training.arguments.get("per_device_train_batch_size", 8)),
        max_tokens=limit,
        pack_length=prompt.max_source_length + prompt.max_target_length if config.training.packing else None,
        seed=config.training.seed,
    )


def world_size() -> int:
    """Return the number of processes as the launcher set it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device_name() -> str:
    """Return the name of the device that this process trains on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
