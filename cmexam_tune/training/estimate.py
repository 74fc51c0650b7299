"""`--dry-run`: parameters, memory of cards and hosts by ZeRO stage, steps and hours, before any weight is loaded."""

import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedConfig

from cmexam_tune.config import Config
from cmexam_tune.core.errors import first_line
from cmexam_tune.models import checkpoint, device
from cmexam_tune.training import arguments
from cmexam_tune.training.data.batches import TrainingData
from cmexam_tune.training.data.encoding import Encoder, truncation_table
from cmexam_tune.training.data.questions import QuestionFiles
from cmexam_tune.training.data.sampler import MicroBatch, StepPlan, slots
from cmexam_tune.training.logits import CHUNK, can_fuse
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.run_directory import run

STAGES = {"none": "without ZeRO", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "zero3_offload": "ZeRO-3, offloaded"}
"""`training.deepspeed` -> what it is called."""
GIB = 1024**3
WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8
"""For each trained parameter, all in float32."""
FOUR_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, a scale of 8 bits for 64 of them, and one of 32 bits for 256 scales."""
MAX_LIVE = 1_000_000_000
"""Numbers: `stage3_max_live_parameters` of the shipped configs."""
CONTEXT = GIB // 2
"""Of a card's memory for CUDA itself and the kernels."""
MASKED, UNMASKED = {"attention_mask", "position_ids"}, "cu_seq_lens_q"
"""Inputs with which rows have a mask of all pairs of tokens, and the one that stands for it where rows are packed."""
EXAMPLES = ("V100-32GB", "A800-80GB")
"""Cards that a message names."""
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
    hours: float | None
    """On this machine; None where the estimate is for another card."""
    memory: dict[str, int]
    """`training.deepspeed` (or none) -> bytes on the device of each process."""
    host: dict[str, int]
    """The same -> bytes of a machine's own memory, for all of its processes; on a CPU what is in `memory` as well."""
    processes: int
    local: int
    """Processes on one machine."""
    truncation: str
    card: arguments.Card
    """What it is for."""
    dtype: str
    """Of the frozen weights."""
    verdict: str
    """Whether it fits the card, where that is known, and what would make it fit."""

    def __str__(self) -> str:
        plural = "" if self.processes == 1 else "es"
        where = "card" if self.card.accelerated else "process"
        hours = (
            "hours                     not known for a card that is not here; recipes/README.md has estimates"
            if self.hours is None
            else f"hours on this machine     {self.hours:>11.2f}  (from its measured matrix-multiply rate)"
        )
        stages = "\n".join(
            f"  {STAGES[stage]:<24}{need / GIB:>11.2f} GiB a {where}, host RAM {self.host[stage] / GIB:.2f} GiB"
            for stage, need in self.memory.items()
        )
        return (
            f"{self.truncation}\nparameters                {self.parameters:>11,}\n"
            f"  trained                 {self.trainable:>11,}  ({100 * self.trainable / self.parameters:.3g}%)\n"
            f"optimizer steps           {self.steps:>11,}  ({self.tokens:,} tokens, "
            f"padding {100 * self.padding:.1f}%)\n"
            f"memory on {self.processes} process{plural}, {self.local} per host, {self.card.name}, weights in "
            f"{self.dtype}\n{stages}\n{self.verdict}{hours}"
        )


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides how much memory it takes."""

    parameters: int
    trained: int
    """Parameters."""
    dense: int
    """Parameters that are multiplied with every token: neither embeddings, which are looked up, nor the output layer,
    whose logits are computed at few positions."""
    dense_trained: int
    frozen_bytes: int
    largest_bytes: int
    """Of one tensor."""
    hidden: int

    @classmethod
    def of(cls, model: Any, *, generates: bool, load_in_4bit: bool = False) -> "ModelSize":
        """Measure a model, which may be on the device `meta`.

        Args:
            model: with what is tuned in it.
            generates: whether it has an output layer over the vocabulary.
            load_in_4bit: whether its frozen matrices will be in 4 bits.
        """
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        if generates:
            tables.add(id(model.get_output_embeddings().weight))

        def frozen_bytes(parameter: torch.nn.Parameter) -> float:
            if not load_in_4bit:
                return parameter.numel() * parameter.element_size()
            # PEFT keeps embeddings, norms and the output layer in float32.
            in_4bit = parameter.dim() == 2 and id(parameter) not in tables
            return parameter.numel() * (FOUR_BITS if in_4bit else 4)

        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        return cls(
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in trained),
            dense=sum(p.numel() for p in parameters if id(p) not in tables),
            dense_trained=sum(p.numel() for p in trained if id(p) not in tables),
            frozen_bytes=round(sum(frozen_bytes(p) for p in parameters if not p.requires_grad)),
            largest_bytes=max(p.numel() * p.element_size() for p in parameters),
            hidden=int(model.config.hidden_size),
        )


def dry_run(config: Config, questions: QuestionFiles, card_name: str | None = None) -> Estimate:
    """Estimate what `train` will need; reads the model's config and tokenizer, never its weights.

    Args:
        config: what is to be trained.
        questions: what on.
        card_name: for one of `arguments.CARDS`, whatever this machine has.

    Raises:
        UserError: as `train` before its first step.
    """
    values = config.training.arguments
    card = arguments.Card.named(card_name) if card_name else arguments.Card.here(bool(values.get("use_cpu")))
    if card_name and config.model.dtype == "auto":
        # What `auto` comes to on that card, and not on this machine.
        half: Literal["bfloat16", "float16"] = "bfloat16" if card.bf16 else "float16"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=half))
    # As the launcher set them.
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))

    family, method = run.parts(config)
    objective = Objective.named(config.training.objective)
    arguments.check_supported(config, family, method, objective)
    # An adapter under the base adds no parameters once it is merged.
    loaded = family.load(dataclasses.replace(config.model, adapter_name_or_path=None), questions, device="meta")
    with torch.device("meta"):
        model = method.attach(loaded.model, family, config.tuning.settings)
    arguments.check(config, objective, card, model)

    with tempfile.TemporaryDirectory() as cache:
        encoder = Encoder(config.prompt, config.model, family, loaded, Path(cache), config.data.num_workers)
        encoded = encoder.encode(questions)
    layout = arguments.layout(config.training, config.prompt, world)
    data = TrainingData(encoded, layout, file_weights=questions.mixture)
    plan = data.sampler(0, world)
    steps = _steps(values, len(plan))
    tokens = round(plan.tokens() * steps / len(plan))

    size, needed = needs(config, model, data, world, card)
    host = host_memory(
        size,
        needed,
        world=world,
        local=local,
        on_card=card.accelerated,
        merges_adapter=config.model.adapter_name_or_path is not None,
        reads_whole=method.standalone,
    )
    objective_lines = objective.foreseen(config, model.config, max(encoded.lengths))
    return Estimate(
        parameters=size.parameters,
        trainable=size.trained,
        steps=steps,
        tokens=tokens,
        padding=plan.padding(),
        hours=None if card_name else seconds(size, tokens, checkpointing=recomputes(config)) / world / 3600,
        memory=needed,
        host=host,
        processes=world,
        local=local,
        truncation="\n".join([truncation_table(encoded.truncation, config.prompt), *objective_lines]),
        card=card,
        dtype="4 bits" if config.model.load_in_4bit else str(checkpoint.dtype(config.model)).removeprefix("torch."),
        verdict=verdict(config, needed, card),
    )


def _steps(values: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Return the optimizer steps of a training: what `max_steps` says, else those of its epochs, as transformers."""
    steps = int(values.get("max_steps", -1))
    return steps if steps > 0 else math.ceil(steps_per_epoch * float(values.get("num_train_epochs", 3)))


def recomputes(config: Config) -> bool:
    """Return whether activations are computed again in the backward pass."""
    values = config.training.arguments
    return bool(values.get("activation_checkpointing") or values.get("gradient_checkpointing"))


def needs(
    config: Config, model: Any, data: TrainingData, world: int, card: arguments.Card
) -> tuple[ModelSize, dict[str, int]]:
    """Return the size of a model, with what is tuned in it, and the bytes on each card by stage."""
    generates = run.parts(config)[0].task == "generate"
    size = ModelSize.of(model, generates=generates, load_in_4bit=config.model.load_in_4bit)
    plain = Objective.named(config.training.objective).criterion(config) is None
    fused = plain and generates and can_fuse(model.get_output_embeddings())
    working = activations(
        model.config, data, checkpointing=recomputes(config), generates=generates, fused=fused, card=card
    )
    return size, memory(size, working, world, card)


def stage_of(config: Config) -> str:
    """Return the key of `STAGES` that the recipe names, or the path of a DeepSpeed config of the user's own."""
    return str(config.training.arguments.get("deepspeed") or "none")


def verdict(config: Config, needed: Mapping[str, int], card: arguments.Card) -> str:
    """Return a line on whether the run fits the card, and the keys to change if not; empty for an unknown card."""
    stage = stage_of(config)
    if not card.accelerated:
        return f"there is no card here; --card {', --card '.join(EXAMPLES)}, ... plans for one, in its number format\n"
    if card.memory is None or stage not in needed:
        return ""
    room, need = (card.memory - CONTEXT) / GIB, needed[stage] / GIB
    if need <= room:
        return f"fits {card.name}: needs {need:.2f} of {room:.2f} GiB\n"
    return f"does not fit {card.name}: needs {need:.2f} of {room:.2f} GiB; change {remedies(config, card)}\n"


def remedies(config: Config, card: arguments.Card) -> str:
    """Return the settings that would lower the memory of a training and are not set yet."""
    training, stage = config.training, stage_of(config)
    micro, each = training.micro_batch, training.micro_batch * training.accumulation
    smaller = next((size for size in range(micro // 2, 0, -1) if each % size == 0), 1)
    batch = f"training.per_device_train_batch_size={smaller}"
    if training.global_batch_size is None:
        # A step keeps its questions, as a run that goes on needs it.
        batch += f" with training.gradient_accumulation_steps={each // smaller}"
    family, method = run.parts(config)
    may_quantise = method.trains_beside_4bit and family.loads_in_4bit and card.computes_4bit
    settings = {
        "training.gradient_checkpointing=true": not recomputes(config),
        batch: micro > 1,
        "model.load_in_4bit=true": may_quantise and not config.model.load_in_4bit,
        "training.deepspeed=zero3 on several cards": "zero3" not in stage and not config.model.load_in_4bit,
        "training.deepspeed=zero3_offload": stage == "zero3",
        "a smaller prompt.max_source_length": True,
    }
    return ", ".join(setting for setting, applies in settings.items() if applies)


def out_of_memory(config: Config, model: object, data: TrainingData, world: int, error: BaseException) -> str:
    """Return the message for a training that ran out of its card's memory: numbers, and what to change."""
    card, stage = arguments.Card.here(), stage_of(config)
    foreseen = ""
    # Of weights that are in 4 bits, or shared out, only a part can be counted here.
    if card.memory is not None and stage in ("none", "zero2") and not config.model.load_in_4bit:
        need = needs(config, model, data, world, card)[1][stage]
        foreseen = f" --dry-run foresees {need / GIB:.2f} GiB; {card.name} has {card.memory / GIB:.2f}."
    return (
        f"the card's memory ran out ({first_line(error)}).{foreseen} Change {remedies(config, card)}. With another "
        "batch size or gradient checkpointing the run goes on from its last checkpoint."
    )


def seconds(size: ModelSize, tokens: int, *, checkpointing: bool) -> float:
    """Return the seconds that one process of this machine needs for `tokens` tokens."""
    # 2 operations for each weight and token forward, 2 backward for the activations, 2 more for what is trained;
    # checkpointing runs the forward pass twice.
    operations: int = tokens * ((6 if checkpointing else 4) * size.dense + 2 * size.dense_trained)
    return operations / (measured_rate(size.hidden) * EFFICIENCY)


@functools.cache
def measured_rate(hidden: int) -> float:
    """Return the operations per second of a matrix product of this width, measured here for a moment, once."""
    place, dtype = device.place(), device.half_precision() or torch.float32
    # As wide as the model's own products; few rows fill a CPU, which would need seconds for as many as a card.
    rows = 1024 if device.is_accelerated() else 64
    left = torch.rand(rows, hidden, device=place, dtype=dtype)
    right = torch.rand(hidden, 4 * hidden, device=place, dtype=dtype)
    (left @ right).sum().item()  # the first product of a process also loads its kernels
    started, turns = time.perf_counter(), 0
    while time.perf_counter() - started < 0.3:
        for _ in range(4):
            product = left @ right
        product[0, 0].item()  # waits for the card
        turns += 4
    return turns * 2 * rows * hidden * 4 * hidden / (time.perf_counter() - started)


def memory(size: ModelSize, working: int, world: int, card: arguments.Card | None = None) -> dict[str, int]:
    """Return the bytes that each process needs on its device, by stage.

    Args:
        size: of the model: weights, and with them gradients and Adam's two moments.
        working: bytes of activations.
        world: processes that ZeRO shares them out to.
        card: what is trained on; None: what is here.
    """
    weights, gradients, adam = (size.trained * number for number in (WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES))
    buffer_bytes = buffers(size, card)
    return {
        "none": size.frozen_bytes + weights + gradients + adam + working,
        "zero2": size.frozen_bytes + weights + (gradients + adam) // world + buffer_bytes["zero2"] + working,
        "zero3": (size.frozen_bytes + weights + gradients + adam) // world + buffer_bytes["zero3"] + working,
        "zero3_offload": buffer_bytes["zero3"] + working,
    }


def host_memory(
    size: ModelSize,
    needed: Mapping[str, int],
    *,
    world: int,
    local: int,
    on_card: bool,
    merges_adapter: bool,
    reads_whole: bool = False,
) -> dict[str, int]:
    """Return the bytes of a machine's own memory, by stage.

    Each process holds the program, as this one does now. Weights go from the checkpoint's files, which are mapped and
    not counted, straight to a card, one tensor after the other; the first process copies what was trained, to save it.
    Only an adapter that is merged before ZeRO-3 needs the whole model in every process, and what is offloaded stays.

    Args:
        size: of the model.
        needed: bytes on each process's device, which is the machine's own memory where there is no card.
        world: processes in all.
        local: processes on this machine.
        on_card: whether there are cards, which are used.
        merges_adapter: whether `model.adapter_name_or_path` is set.
        reads_whole: whether what was written at the end is a whole model, which the first process reads back beside
            its copy to compare them (`selfcheck.py`), but not under ZeRO-3. On a CPU gradients and activations, which
            are gone by then, need no less.
    """
    program = psutil.Process().memory_info().rss
    saved = size.trained * WEIGHT_BYTES
    offloaded = (size.frozen_bytes + size.trained * (WEIGHT_BYTES + GRADIENT_BYTES + ADAM_BYTES)) // world
    if on_card:
        loading = size.frozen_bytes + saved if merges_adapter else size.largest_bytes
        each = {
            "none": size.largest_bytes,
            "zero2": size.largest_bytes,
            "zero3": loading,
            "zero3_offload": max(loading, offloaded),
        }
    else:
        each = {stage: needs + (offloaded if stage == "zero3_offload" else 0) for stage, needs in needed.items()}
    read = {stage: saved if on_card and reads_whole and "zero3" not in stage else 0 for stage in each}
    return {stage: local * (program + needs) + saved + read[stage] for stage, needs in each.items()}


def buffers(size: ModelSize, card: arguments.Card | None = None) -> dict[str, int]:
    """Return the bytes that the shipped ZeRO-2 and ZeRO-3 add on each process, in the type of computation.

    ZeRO-2 fills one bucket with gradients while the other is summed. ZeRO-3 has one, of the square of the width, and
    keeps whole weights that are needed again soon, up to `stage3_max_live_parameters`.
    """
    zero3 = size.hidden**2 + min(size.parameters, MAX_LIVE)
    width = _number_bytes(card)
    return {"zero2": 2 * arguments.bucket_size(size.trained) * width, "zero3": zero3 * width}


def activations(
    shape: PreTrainedConfig,
    data: TrainingData,
    *,
    checkpointing: bool,
    generates: bool,
    fused: bool = False,
    card: arguments.Card | None = None,
) -> int:
    """Return the bytes of activations of the largest micro-batch.

    What autograd keeps of a block for each token, in the compute type: about 12 vectors of the hidden size (inputs of
    the norms in float32, queries, keys, values, attention output) and 4 of the intermediate size; with checkpointing
    one vector for each block, and one block whole.

    Args:
        shape: the model's config.
        data: what is trained on.
        checkpointing: whether activations are recomputed in the backward pass.
        generates: whether there are logits over the vocabulary: those of all labels in the compute type and 3 times in
            float32 (a copy, log-softmax, its gradient).
        fused: whether their loss is computed chunk by chunk (`logits.can_fuse`).
        card: what is trained on; None: what is here.
    """
    hidden = int(shape.hidden_size)
    inner = int(getattr(shape, "intermediate_size", None) or getattr(shape, "ffn_hidden_size", None) or 4 * hidden)
    layout = data.layout
    rows = min(layout.micro_batch, layout.global_batch)
    longest = max(data.train.lengths)
    # One question alone may exceed the limit of tokens.
    slots = max(longest, min(longest * rows, layout.max_tokens or longest * rows))
    block = 12 * hidden + 4 * inner
    layers = int(shape.num_hidden_layers)
    numbers_per_token = layers * hidden + block if checkpointing else layers * block
    width = _number_bytes(card)
    labels = max(data.train.num_targets) * rows if generates else 0
    # In a chunk: logits and their shares in float32, and both in the compute type.
    per_label = 2 * (4 + width) if fused else 3 * 4 + width
    logits = (min(labels, CHUNK) if fused else labels) * per_label * int(getattr(shape, "vocab_size", 0))
    return slots * numbers_per_token * width + mask_numbers(data) * width + logits


def mask_numbers(data: TrainingData) -> int:
    """Return the numbers in the largest attention mask of an epoch, one for all layers.

    Padding on the right of a causal model needs none, nor does FlashAttention.
    """
    lengths = data.train.lengths

    def size(micro: MicroBatch) -> tuple[bool, int]:
        packed = any(len(row) > 1 for row in micro)
        return packed, slots(micro, lengths) * max(sum(lengths[i] for i in row) for row in micro)

    largest = max((micro for (plan,) in data.sampler(0, 1) for micro in plan.micro), key=size)
    batch = data.train[StepPlan((largest,), 0)].micro[0]
    if MASKED.isdisjoint(batch) or UNMASKED in batch:
        return 0
    rows, length = batch["input_ids"].shape
    return int(rows * length * length)


def _number_bytes(card: arguments.Card | None) -> int:
    return 2 if (card or arguments.Card.here()).accelerated else 4
