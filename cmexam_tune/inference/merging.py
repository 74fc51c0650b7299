"""LoRA merged into its base for prediction, where that changes next to nothing."""

import math
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel

from cmexam_tune.core import cli
from cmexam_tune.models import Loaded
from cmexam_tune.models.precision import inference

PROBE = (
    "问题: 患者，女，45岁，反复上腹痛3年，餐后加重，首选的检查是什么\n 选项: A 胃镜\nB 腹部平片\nC 血常规\n答案: A 胃镜"
)
"""Text whose next-token probabilities are compared."""
TOLERANCE = 0.01
"""Most probability that may move at any place of it: float32 moves 1e-6, rounding to half precision about 1e-3."""


def merged(loaded: Loaded) -> Loaded | None:
    """Return the model with its LoRA matrices merged; without any, or with 4-bit weights, it is unchanged.

    Beside every matrix the unmerged forward pass runs three more, and decoding waits for the host. In half precision
    small updates can get lost in the rounding of the sum: the probabilities of a probe are compared once, and where
    more than `TOLERANCE` moves (or the sum is not finite) the answer is None. The weights are of no use then: taking
    the update off again does not give the old ones back, and a copy of them would fill the host's memory.
    """
    model: Any = loaded.model
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        return loaded
    if getattr(model, "is_loaded_in_4bit", False):
        return loaded
    ids = torch.tensor([loaded.tokenizer(PROBE)["input_ids"]], device=model.device)
    apart = probabilities(model, ids)
    try:
        model.merge_adapter(safe_merge=True)
        # Half the summed difference is the probability that moves: the total variation distance.
        moved = float((probabilities(model, ids) - apart).abs().sum(-1).max() / 2)
    except ValueError:
        moved = math.inf
    if moved <= TOLERANCE:
        return Loaded(model.unload(), loaded.tokenizer)
    cli.note(f"LoRA stays apart from its base: in {str(model.dtype).removeprefix('torch.')} merging changes answers.")
    return None


def probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the next token, float32 [1, tokens, vocabulary], after each of ids [1, tokens]."""
    with inference(model):
        return torch.softmax(model(input_ids=ids).logits.float(), dim=-1)
