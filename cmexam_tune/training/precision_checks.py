"""Which number format a card computes in, and settings that are known to hurt on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models.prefix import MODULE


@dataclass(frozen=True)
class Card:
    """What matters about the device that this process trains on."""

    name: str
    cuda: bool
    bf16: bool

    @classmethod
    def here(cls, use_cpu: bool = False) -> "Card":
        """Return the card of this process; the CPU where there is none or `use_cpu` is set."""
        if use_cpu or not torch.cuda.is_available():
            return cls("CPU", cuda=False, bf16=True)
        # Emulated bfloat16 runs on V100, at a fraction of its speed.
        return cls(torch.cuda.get_device_name(), True, torch.cuda.is_bf16_supported(including_emulation=False))


def choose(arguments: Mapping[str, Any], card: Card, dtype: str = "auto") -> dict[str, bool]:
    """Return `bf16` and `fp16` for `TrainingArguments`: what the user set, else what suits the card.

    Args:
        arguments: of the config's `training`.
        card: what is trained on.
        dtype: of the frozen weights; on a CPU bfloat16 weights are trained in bfloat16.

    Raises:
        ConfigError: bf16 on a card without it, or both formats at once.
    """
    bf16, fp16 = arguments.get("bf16"), arguments.get("fp16")
    if bf16 and fp16:
        raise ConfigError("training.bf16 and training.fp16 are both true: keep one.")
    if bf16 and not card.bf16:
        raise ConfigError(f"training.bf16=true: {card.name} has no bfloat16. Set training.fp16=true or leave out both.")
    if fp16 and not card.cuda:
        raise ConfigError("training.fp16=true: float16 training needs a GPU. Leave it out on a CPU.")
    if bf16 is not None or fp16 is not None:
        return {"bf16": bool(bf16), "fp16": bool(fp16)}
    return {"bf16": card.bf16 if card.cuda else dtype == "bfloat16", "fp16": card.cuda and not card.bf16}


def align(model: torch.nn.Module, bf16: bool, fp16: bool) -> None:
    """Put what is trained into the type that ZeRO-3 computes in; its optimizer keeps float32 of its own.

    It casts nothing that is new in a model which it loaded itself. LoRA matrices and prefixes are cast where they are
    used and stay as they are; a head, a bias or an embedding in float32 would meet activations in half precision, and
    all that is trained has to be of one type.
    """
    tuned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if (bf16 or fp16) and any("lora_" not in name and MODULE not in name.split(".") for name in tuned):
        for parameter in tuned.values():
            parameter.data = parameter.data.to(torch.bfloat16 if bf16 else torch.float16)


def warnings(config: Config, precision: Mapping[str, bool], trainable: Mapping[str, torch.dtype]) -> list[str]:
    """Return one line for each setting that is known to end in loss 0, NaN or nothing learnt.

    Args:
        config: the experiment.
        precision: what `choose` returned.
        trainable: name -> dtype of the parameters that will be trained.
    """
    found = []
    rate = float(config.training.arguments.get("learning_rate", 5e-5))
    half = sorted(name for name, dtype in trainable.items() if dtype == torch.float16)
    if half and precision["fp16"]:
        found.append(f"{half[0]} is trained in float16: updates below 6e-8 are lost and loss scaling cannot work.")
    if config.tuning.method == "ptuning" and rate >= 1e-2 and precision["fp16"]:
        found.append(
            f"training.learning_rate={rate:g} with P-tuning in fp16 often ends in loss 0 or NaN. 5e-3, or "
            "tuning.prefix_projection=true, is steadier; the run stops by itself if it degenerates."
        )
    if config.tuning.method in ("lora", "full") and rate > 5e-3:
        found.append(f"training.learning_rate={rate:g} is far above what {config.tuning.method} uses (1e-5 to 1e-3).")
    if config.training.arguments.get("weight_decay") and config.tuning.method == "ptuning":
        found.append("training.weight_decay pulls the P-tuning prefix to zero; its authors use none.")
    return found
