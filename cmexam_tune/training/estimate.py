"""`--dry-run`: parameters, memory of cards and hosts by ZeRO stage, steps and hours, before any weight is loaded."""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from cmexam_tune.config import Config
from cmexam_tune.models.families import Loaded
from cmexam_tune.training import arguments
from cmexam_tune.training.data import encoding
from cmexam_tune.training.data.datasets import Data, encoded_questions, mixture
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.run_directory import run

STAGES = {"none": "without ZeRO", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3, offloaded"}
"""`training.deepspeed` -> what it is called."""
GIB = 1024**3
TRAINED_BYTES = {"weights": 4, "gradients": 4, "adam": 8}
"""For each trained parameter, all in float32."""
FOUR_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, a scale of 8 bits for 64 of them, and one of 32 bits for 256 scales."""
MOST_LIVE = 1_000_000_000
"""Numbers: `stage3_max_live_parameters` of the shipped configs."""
EFFICIENCY = 0.4
"""Share of the measured matrix-multiply rate that training reaches; attention and norms cost the rest."""


@dataclass(frozen=True)
class Estimate:
    """What a run will need."""

    parameters: int
    trainable: int
    steps: int
    tokens: int
    """Over all epochs, without padding."""
    padding: float
    hours: float
    memory: dict[str, int]
    """`training.deepspeed` (or none) -> bytes on the device of each process."""
    host: dict[str, int]
    """The same -> bytes of a machine's own memory, for all of its processes; on a CPU what is in `memory` as well."""
    processes: int
    local: int
    """Processes on one machine."""
    truncation: str

    def __str__(self) -> str:
        where = "card" if arguments.Card.here().cuda else "process"
        stages = "\n".join(
            f"  {STAGES[stage]:<24}{need / GIB:>11.2f} GiB a {where}, {self.host[stage] / GIB:>9.2f} GiB of the host's"
            for stage, need in self.memory.items()
        )
        return (
            f"{self.truncation}\nparameters                {self.parameters:>11,}\n"
            f"  trained                 {self.trainable:>11,}  ({100 * self.trainable / self.parameters:.3g}%)\n"
            f"optimizer steps           {self.steps:>11,}  ({self.tokens:,} tokens, "
            f"padding {100 * self.padding:.1f}%)\n"
            f"memory on {self.processes} process(es), {self.local} of them on each host\n{stages}\n"
            f"hours on this machine     {self.hours:>11.2f}  (from its measured matrix-multiply rate)"
        )


def dry_run(config: Config, questions: QuestionFiles) -> Estimate:
    """Estimate what `train` will need; reads the model's config and tokenizer, never its weights.

    Raises:
        UserError: as `train` before its first step.
    """
    world = arguments.world_size()
    family, method = run.parts(config)
    # An adapter under the base adds no parameters once it is merged.
    loaded = family.load(dataclasses.replace(config.model, adapter_name_or_path=None), questions, device="meta")
    with torch.device("meta"):
        model: Any = method.attach(loaded.model, family, config.tuning.settings)
    with tempfile.TemporaryDirectory() as cache:
        samples = encoding.encode(config, family, loaded, questions, Path(cache))
    layout = arguments.layout(config.training, config.prompt, world)
    mixed = mixture(samples, config.data.mixture, layout.seed)
    data = Data(encoded_questions(family, Loaded(model, loaded.tokenizer), samples), layout, mixture=mixed)
    given = config.training.arguments
    epochs = float(given.get("num_train_epochs", 3))
    plan = data.sampler(0, world)
    planned = len(plan)
    steps = int(given.get("max_steps", -1))
    steps = steps if steps > 0 else math.ceil(planned * epochs)
    tokens = round(plan.tokens() * steps / planned)
    needed, local = memory(config, model, data, world), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        steps=steps,
        tokens=tokens,
        padding=plan.padding(),
        hours=seconds(config, model, tokens) / world / 3600,
        memory=needed,
        host=host(config, model, needed, (world, local)),
        processes=world,
        local=local,
        truncation=encoding.table(samples.truncation, config),
    )


def checkpointing(config: Config) -> bool:
    """Return whether activations are recomputed in the backward pass."""
    given = config.training.arguments
    return bool(given.get("activation_checkpointing") or given.get("gradient_checkpointing"))


def seconds(config: Config, model: Any, tokens: int) -> float:
    """Return the seconds that one process of this machine needs for `tokens` tokens."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings() if config.model.family != "bert" else None
    tables |= {id(head.weight)} if head is not None else set()
    # Embeddings are looked up, and logits are computed at few positions: neither is a matrix product for each token.
    dense = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) not in tables)
    passes = 4 + (2 if checkpointing(config) else 0)
    operations: int = tokens * (passes * dense + 2 * trained)
    return operations / (rate(int(model.config.hidden_size)) * EFFICIENCY)


def rate(hidden: int) -> float:
    """Return the operations per second of a matrix product of this width, measured here for a moment."""
    card = arguments.Card.here()
    device = torch.device("cuda" if card.cuda else "cpu")
    kind = torch.float32 if not card.cuda else torch.bfloat16 if card.bf16 else torch.float16
    left = torch.rand(1024, hidden, device=device, dtype=kind)
    right = torch.rand(hidden, 4 * hidden, device=device, dtype=kind)
    (left @ right).sum().item()
    started, turns = time.perf_counter(), 0
    while time.perf_counter() - started < 0.3:
        for _ in range(4):
            product = left @ right
        product[0, 0].item()
        turns += 4
    return turns * 2 * 1024 * hidden * 4 * hidden / (time.perf_counter() - started)


def memory(config: Config, model: Any, data: Data, world: int) -> dict[str, int]:
    """Return the bytes that each process needs on its device: weights, gradients, Adam, buffers and activations."""
    frozen = _frozen(config, model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights, gradients, adam = (trained * size for size in TRAINED_BYTES.values())
    working = activations(config, model, data)
    held = buffers(model, trained)
    return {
        "none": frozen + weights + gradients + adam + working,
        "zero2": frozen + weights + (gradients + adam) // world + held["zero2"] + working,
        "zero3": (frozen + weights + gradients + adam) // world + held["zero3"] + working,
        "zero3_offload": held["zero3"] + working,
    }


def host(config: Config, model: Any, needed: Mapping[str, int], processes: tuple[int, int]) -> dict[str, int]:
    """Return the bytes of a machine's own memory for `processes`, in all and on this machine.

    Each holds the program, as this one does now. Weights go from the checkpoint's files, which are mapped and not
    counted, straight to a card, one tensor after the other; the first process copies what was trained, to save it.
    Only an adapter that is merged before ZeRO-3 needs the whole model in every process, and what is offloaded stays.
    """
    world, local = processes
    program = psutil.Process().memory_info().rss
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = _frozen(config, model)
    saved = trained * TRAINED_BYTES["weights"]
    shared = (frozen + trained * sum(TRAINED_BYTES.values())) // world
    if not arguments.Card.here(bool(config.training.arguments.get("use_cpu"))).cuda:
        offloaded = {**dict.fromkeys(needed, 0), "zero3_offload": shared}
        return {stage: local * (program + size + offloaded[stage]) + saved for stage, size in needed.items()}
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    whole = frozen + saved if config.model.adapter_name_or_path else largest
    each = {"none": largest, "zero2": largest, "zero3": whole, "zero3_offload": max(whole, shared)}
    return {stage: local * (program + size) + saved for stage, size in each.items()}


def buffers(model: Any, trained: int) -> dict[str, int]:
    """Return the bytes that the shipped ZeRO-2 and ZeRO-3 add on each process, in the type of computation.

    ZeRO-2 fills one bucket with gradients while the other is summed. ZeRO-3 has one, of the square of the width, and
    keeps whole weights that are needed again soon, up to `stage3_max_live_parameters`.
    """
    bucket = int(model.config.hidden_size) ** 2
    live = min(sum(p.numel() for p in model.parameters()), MOST_LIVE)
    size = _number_bytes()
    return {"zero2": 2 * arguments.bucket_size(trained) * size, "zero3": (bucket + live) * size}


def _number_bytes() -> int:
    return 2 if arguments.Card.here().cuda else 4


def _frozen(config: Config, model: Any) -> int:
    """Return the bytes of the weights that are not trained."""
    if not config.model.load_in_4bit:
        return int(sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad))
    whole = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    whole |= {id(model.get_output_embeddings().weight)}
    # PEFT keeps embeddings, norms and the output layer in float32.
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            few = parameter.dim() == 2 and id(parameter) not in whole
            total += parameter.numel() * (FOUR_BITS if few else 4)
    return round(total)


def activations(config: Config, model: Any, data: Data) -> int:
    """Return the bytes of activations of the largest micro-batch.

    What autograd keeps of a block for each token, in the compute type: about 12 vectors of the hidden size (inputs of
    the norms in float32, queries, keys, values, attention output) and 4 of the intermediate size; with checkpointing
    one vector for each block, and one block whole.
    """
    shape = model.config
    hidden = int(shape.hidden_size)
    inner = int(getattr(shape, "intermediate_size", None) or getattr(shape, "ffn_hidden_size", None) or 4 * hidden)
    layout = data.layout
    widest = max(data.train.lengths) * min(layout.micro_batch, layout.global_batch)
    slots = max(max(data.train.lengths), min(widest, layout.max_tokens or widest))
    block = 12 * hidden + 4 * inner
    layers = int(shape.num_hidden_layers)
    kept = layers * hidden + block if checkpointing(config) else layers * block
    labels = max(data.train.num_targets) * min(layout.micro_batch, layout.global_batch)
    logits = 3 * 4 * labels * int(getattr(shape, "vocab_size", 0)) if config.model.family != "bert" else 0
    return slots * kept * _number_bytes() + logits
