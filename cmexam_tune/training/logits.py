"""Logits only where there is a label, and a loss that is the mean over all labels of an optimizer step."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cmexam_tune.features import IGNORE_INDEX


class LabelLogits:
    """Selects the label positions before the output embeddings, so that no other logits are ever computed.

    With 1% of the positions labelled and a vocabulary of 32,000 or more this is most of the memory, and a good part
    of the time, of a small model's step. The positions are chosen by a forward pre-hook on the module that the model
    names as its output embeddings, which works for every decoder, wrapped by PEFT or by DeepSpeed.
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise TypeError(f"{type(model).__name__} names no output embeddings.")
        self._positions: torch.Tensor | None = None
        self._handle = head.register_forward_pre_hook(self._select)

    def _select(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden = arguments[0]
        return (hidden.reshape(-1, hidden.shape[-1])[self._positions].unsqueeze(0), *arguments[1:])

    def __call__(self, model: nn.Module, inputs: dict[str, Any], labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Run the model and return (logits [n, vocabulary], targets [n]) of the n labels.

        Position i of a row predicts `labels[:, i + 1]` (labels: [rows, tokens], -100 = none). Without any label one
        position is kept, with target -100, so that every process still runs the same modules.
        """
        shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
        positions = (shifted != IGNORE_INDEX).nonzero().squeeze(1)
        if not len(positions):
            positions = torch.zeros(1, dtype=torch.long, device=labels.device)
        self._positions = positions
        try:
            outputs = model(**inputs)
        finally:
            self._positions = None
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        return logits.squeeze(0), shifted[positions]

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()


def token_loss(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the sum of the cross-entropy over the labels, computed in float32."""
    return functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
    )
