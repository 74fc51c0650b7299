"""LoRA merged into its base for prediction, where that changes next to nothing."""

import math
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer, LoraModel

from cmexam_tune.core import cli
from cmexam_tune.models import Loaded
from cmexam_tune.models.precision import inference

PROBE = (
    "问题: 患者，女，45岁，反复上腹痛3年，餐后加重，首选的检查是什么\n 选项: A 胃镜\nB 腹部平片\nC 血常规\n答案: A 胃镜"
)
"""Text whose next-token probabilities are compared."""
TOLERANCE = 0.01
"""Most probability that may move at any place of it: float32 moves 1e-6, rounding to half precision about 1e-3."""


def merged(loaded: Loaded) -> Loaded:
    """Return the model with its LoRA matrices added to the weights, or as it is where it has none or they do not fit.

    Beside every matrix the unmerged forward pass runs three more, and decoding waits for the host. In half precision
    small updates can get lost in the rounding of the sum: the probabilities of a probe are compared once, and where
    more than `TOLERANCE` moves (or the sum is not finite) the matrices stay apart.
    """
    model: Any = loaded.model
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        return loaded
    if getattr(model, "is_loaded_in_4bit", False):
        return loaded
    ids = torch.tensor([loaded.tokenizer(PROBE)["input_ids"]], device=model.device)
    apart = _probabilities(model, ids)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # In half precision taking the update off again does not give the old weights back.
    before = [layer.get_base_layer().weight.detach().to("cpu", copy=True) for layer in layers]
    try:
        model.merge_adapter(safe_merge=True)
        moved = float((_probabilities(model, ids) - apart).abs().sum(-1).max() / 2)
    except ValueError:
        moved = math.inf
    if moved <= TOLERANCE:
        return Loaded(model.unload(), loaded.tokenizer)
    with torch.no_grad():
        for layer, weight in zip(layers, before, strict=True):
            if layer.merged:
                layer.unmerge()
            layer.get_base_layer().weight.copy_(weight)
    cli.note(f"LoRA stays apart from its base: in {str(model.dtype).removeprefix('torch.')} merging changes answers.")
    return loaded


def _probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with inference(model):
        return torch.softmax(model(input_ids=ids).logits.float(), dim=-1)
