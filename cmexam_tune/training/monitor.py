"""What can go wrong silently while training, found at the step where it happens and explained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cmexam_tune.core.errors import TrainingStopped

CONVERGED = 1e-2
"""A loss below this may reach an exact 0 by learning; from above it, 0 means that the logits have degenerated."""
MOST_SKIPPED = 20
"""Steps in a row that loss scaling may skip; from 65536 to below 1 it needs 17."""


@dataclass
class Guards:
    """Judges each step; `problem` is what was found, None while all is well."""

    fp16: bool = False
    problem: str | None = None
    _last_loss: float = math.inf
    _skipped: int = 0
    ids: list[str] = field(default_factory=list)

    def begin(self, ids: Sequence[str]) -> None:
        """Remember the questions of the step that starts."""
        self.ids = list(ids)

    def loss(self, value: float, items: int) -> None:
        """Judge this process's loss of a step, before the optimizer has used its gradients."""
        if items == 0:
            self._found("no token in this batch carries a label", "Raise prompt.max_target_length.")
        elif not math.isfinite(value):
            self._found(
                f"the loss is {value}",
                "Usual causes: activations beyond float16 (65504), or a learning rate that is too high. "
                + ("Use bf16 where the card has it, or lower" if self.fp16 else "Lower")
                + " training.learning_rate and add training.warmup_steps.",
            )
        elif value == 0 and self._last_loss > CONVERGED:
            self._found(
                "the loss is exactly 0",
                "Usual cause: the logits have become NaN or constant after an overflow (P-tuning at 2e-2 in fp16 is "
                "known for it). Lower training.learning_rate, or use bf16.",
            )
        self._last_loss = value

    def gradient(self, norm: float | None, overflow: bool = False) -> None:
        """Judge the norm of all gradients of a step, before clipping; `overflow`: loss scaling has skipped the step."""
        if norm is None or self.problem or overflow:
            return
        if norm == 0:
            self._found(
                "all gradients are 0",
                "Usual causes: nothing trainable is connected to the loss (gradient checkpointing without input "
                "gradients, a frozen adapter), or float16 underflow.",
            )
        elif not math.isfinite(norm):
            self._found(f"the gradient norm is {norm}", "Lower training.learning_rate or training.max_grad_norm.")

    def scale(self, value: float | None, skipped: bool) -> None:
        """Judge float16 loss scaling after a step."""
        self._skipped = self._skipped + 1 if skipped else 0
        if value is not None and (value < 1 or self._skipped >= MOST_SKIPPED):
            self._found(
                f"the loss scale has collapsed to {value:g} ({self._skipped} steps in a row had infinite gradients)",
                "float16 cannot hold this model's gradients. Use bf16 where the card has it, or lower "
                "training.learning_rate; a base model that was trained in bfloat16 often overflows in float16.",
            )

    def _found(self, what: str, remedy: str) -> None:
        self.problem = self.problem or f"{what}.\n{remedy}"

    def stop(self, step: int, checkpoint: str | None) -> TrainingStopped:
        """Return the error that ends the run, naming step, questions, likely cause and remedy."""
        shown = ", ".join(self.ids[:8]) + (f" and {len(self.ids) - 8} more" if len(self.ids) > 8 else "")
        where = f"\nThe state before this step is in {checkpoint}." if checkpoint else ""
        what = self.problem or "another process has stopped (its message says why)."
        return TrainingStopped(f"step {step}, questions {shown}: {what}{where}")


def check_rows(rows: Sequence[tuple[str, int]]) -> None:
    """Refuse questions without a label before the first step.

    Args:
        rows: (question id, number of labels).
    """
    if empty := [name for name, labels in rows if labels == 0]:
        raise TrainingStopped(
            f"{len(empty)} questions carry no label, the first is {empty[0]}: they would be trained on without a loss. "
            "Raise prompt.max_target_length, or report this family's `encode`."
        )
