"""In which precision a model computes where the trainer's own settings do not say it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cmexam_tune.core.errors import UserError
from cmexam_tune.models.prefix import MODULE


def mixed(model: nn.Module) -> torch.dtype | None:
    """Return the half precision that autocast has to compute in, None where all weights have one type.

    What is trained in float32 beside half-precision weights (a head, LoRA matrices, biases, embeddings) cannot be
    multiplied with them: then autocast computes in theirs. A prefix is cast where it meets the keys.
    """
    dtypes = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and MODULE not in name.split(".")
    }
    half = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), None)
    return half if len(dtypes) > 1 else None


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Compute without gradients, in the precision of the weights."""
    half = mixed(model)
    device = next(model.parameters()).device.type
    with torch.inference_mode(), torch.autocast(device, half, enabled=half is not None):
        yield


def check_numbers(logits: torch.Tensor) -> None:
    """Look at the first logits of a batch.

    Raises:
        UserError: they are not numbers; the most probable of them would be a constant answer.
    """
    if bool(logits.isnan().any()):
        raise UserError(
            "the model computes no numbers (NaN): its weights are damaged, or too large for their type. For float16 "
            "try model.dtype=bfloat16 or float32."
        )
