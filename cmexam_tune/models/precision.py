"""In which precision a model computes outside training; decided here and nowhere else."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from cmexam_tune.models.prefix import MODULE


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Compute without gradients, in the precision of the weights.

    What was trained in float32 beside half-precision weights (a head, LoRA matrices, biases, embeddings) cannot be
    multiplied with them: then autocast computes in theirs, as training did. A prefix is cast where it meets the keys.
    """
    found = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and MODULE not in name.split(".")
    }
    half = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in found), None)
    device = next(model.parameters()).device.type
    mixed = half is not None and len(found) > 1
    with torch.inference_mode(), torch.autocast(device, half, enabled=mixed):
        yield
