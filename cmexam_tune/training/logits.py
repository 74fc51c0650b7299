"""Logits only where there is a label, and the cross-entropy summed over those labels.

`trainer.ExamTrainer.loss_of` divides the sum by the labels of the whole optimizer step.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from cmexam_tune.models.features import IGNORE_INDEX

Criterion: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes logits [n, vocabulary] and targets [n] (int64, -100 = none) and returns the sum of their losses, a float32."""
CHUNK = 256
"""Labels whose logits exist at once: 32 MB for a vocabulary of 32,000."""


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
        self._head = head
        self._positions: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._only_first = self._checked = self._scaled = False
        head.register_forward_pre_hook(self._select)

    def _select(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden = arguments[0]
        chosen = hidden.reshape(-1, hidden.shape[-1])[self._positions.to(hidden.device, non_blocking=True)]
        self._hidden = chosen if self._only_first else None
        return (chosen[: 1 if self._only_first else None].unsqueeze(0), *arguments[1:])

    def __call__(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """Run the model and return (logits [n, vocabulary], targets [n]) of the n labels.

        Position i of a row predicts `labels[:, i + 1]` (labels: [rows, tokens], -100 = none). Without any label one
        position is kept, with target -100, so that every process still runs the same modules. Labels may stay on the
        host: on a card their number would have to be waited for.
        """
        shifted = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)
        positions = (shifted != IGNORE_INDEX).nonzero().squeeze(1)
        if not len(positions):
            positions = torch.zeros(1, dtype=torch.long, device=labels.device)
        targets = shifted[positions]
        self._positions = positions
        try:
            outputs = model(**inputs)
        finally:
            self._positions = None
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        return logits.squeeze(0), targets.to(logits.device, non_blocking=True)

    def loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        labels: torch.Tensor,
        criterion: Criterion | None = None,
    ) -> torch.Tensor:
        """Run the model and return the sum of the criterion, or else of the cross-entropy, over the labels.

        Over a frozen linear head the cross-entropy and its gradient are computed together, chunk by chunk, so that the
        logits of all labels never exist at once. The model itself computes one position's logits; if they are not what
        the head alone gives (models that scale or cap them), or with a criterion or ZeRO-3, all go through it.
        """
        weight, bias = (self._head._parameters.get(name) for name in ("weight", "bias"))
        labelled = bool((labels[:, 1:] != IGNORE_INDEX).any())
        if criterion or self._scaled or not labelled or not can_fuse(self._head):
            return (criterion or token_loss)(*self(model, inputs, labels))
        self._only_first = True
        try:
            first, targets = self(model, inputs, labels)
        finally:
            self._only_first = False
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        assert weight is not None
        if not self._checked:
            expected = functional.linear(hidden[:1].detach().to(weight.dtype), weight, bias)
            # As loose as bfloat16, which rounds to 2^-8, needs it.
            self._scaled = not torch.allclose(first.detach().float(), expected.float(), rtol=1e-2, atol=1e-3)
            self._checked = True
            if self._scaled:
                return token_loss(*self(model, inputs, labels))
        summed: Any = _HeadLoss.apply
        return torch.as_tensor(summed(hidden, weight, bias, targets))


def can_fuse(head: nn.Module) -> bool:
    """Return whether a head's loss can be computed chunk by chunk: a frozen matrix, whole on this process."""
    # A subclass, such as bitsandbytes' Linear4bit, computes something else with its weight.
    weight = head.weight if type(head) is nn.Linear else None
    return (
        weight is not None
        and not weight.requires_grad
        and weight.dim() == 2
        # Under ZeRO-3 the weight is empty outside of its module's forward pass.
        and weight.numel() > 0
    )


class _HeadLoss(torch.autograd.Function):
    """Sum of the cross-entropy of `hidden @ weight.T + bias`, with the gradient of `hidden` computed on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        """Args: hidden [n, width], weight [vocabulary, width], bias [vocabulary] or None, targets [n]."""
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        # One buffer for all chunks: fresh memory of this size is mapped, and zeroed, anew every time.
        shares = torch.empty(min(CHUNK, len(hidden)), len(weight), device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            scores = functional.linear(hidden[part].to(weight.dtype), weight, bias).float()
            labels = targets[part]
            right, top = scores.gather(1, labels[:, None]), scores.amax(1)
            softmax = torch.softmax(scores, 1, out=shares[: len(scores)])
            # The largest share is exp(top) / norm and at least 1 / vocabulary: its logarithm loses nothing.
            total += (top - softmax.amax(1).log() - right.squeeze(1)).sum()
            # (softmax - one-hot) @ weight, without another pass over the logits.
            pulled = (softmax.to(weight.dtype) @ weight).float() - weight[labels].float()
            gradient[part] = pulled.to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradient that `forward` has computed; in float32, as loss scaling can exceed float16's 65504."""
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * outer[0]).to(gradient.dtype), None, None, None


def token_loss(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the summed cross-entropy, a float32 scalar, of logits [n, vocabulary] for targets [n] (int64)."""
    return functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
    )
