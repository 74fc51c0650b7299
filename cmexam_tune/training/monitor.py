"""What can go wrong silently while training, noticed at the step where it happens and explained."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cmexam_tune.core.errors import TrainingStopped

CONVERGED = 1e-2
"""A loss below this may reach an exact 0 by learning; from above it, 0 means that the logits have degenerated."""
MAX_SKIPPED = 20
"""Steps in a row that loss scaling may skip; from 65536 to below 1 it needs 17."""
NAMED = 8
"""Questions of a step that the message names."""


@dataclass
class TrainingMonitor:
    """Judges each step; `problem` is the first thing that went wrong and its remedy, None while all is well."""

    fp16: bool = False
    problem: str | None = None
    ids: list[str] = field(default_factory=list)
    """Questions of the step that is running."""
    skipped: int = 0
    """Steps that loss scaling has skipped."""
    _last_loss: float = math.inf
    _skipped_in_a_row: int = 0

    def on_step_begin(self, ids: Sequence[str]) -> None:
        """Remember the questions of the step that starts."""
        self.ids = list(ids)

    def on_loss(self, loss: float, step_targets: int) -> None:
        """Judge this process's loss of a step, before the optimizer has used its gradients."""
        if step_targets == 0:
            self._report("no token in this batch carries a label", "Raise prompt.max_target_length.")
        elif not math.isfinite(loss):
            self._report(
                f"the loss is {loss}",
                "Usual causes: activations beyond float16 (65504), or a learning rate that is too high. "
                + ("Use bf16 where the card has it, or lower" if self.fp16 else "Lower")
                + " training.learning_rate and add training.warmup_steps.",
            )
        elif loss == 0 and self._last_loss > CONVERGED:
            self._report(
                "the loss is exactly 0",
                "Usual cause: the logits have become NaN or constant after an overflow (P-tuning at 2e-2 in fp16 is "
                "known for it). Lower training.learning_rate, or use bf16.",
            )
        self._last_loss = loss

    def on_grad_norm(self, norm: float | None, skipped: bool = False) -> None:
        """Judge the norm of all gradients of a step, before clipping; `skipped`: loss scaling has skipped the step."""
        if norm is None or self.problem or skipped:
            return
        if norm == 0:
            self._report(
                "all gradients are 0",
                "Usual causes: nothing trainable is connected to the loss (gradient checkpointing without input "
                "gradients, a frozen adapter), or float16 underflow.",
            )
        elif not math.isfinite(norm):
            self._report(f"the gradient norm is {norm}", "Lower training.learning_rate or training.max_grad_norm.")

    def on_loss_scale(self, scale: float | None, skipped: bool) -> None:
        """Judge float16 loss scaling after a step; `scale` is None where nothing is scaled."""
        self.skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if scale is not None and (scale < 1 or self._skipped_in_a_row >= MAX_SKIPPED):
            steps = f"{self._skipped_in_a_row} steps in a row had infinite gradients"
            self._report(
                f"the loss scale has collapsed to {scale:g} ({steps})",
                "float16 cannot hold this model's gradients. Use bf16 where the card has it, or lower "
                "training.learning_rate; a base model that was trained in bfloat16 often overflows in float16.",
            )

    def _report(self, what: str, remedy: str) -> None:
        # What comes later in the same step follows from the first.
        self.problem = self.problem or f"{what}.\n{remedy}"

    def error(self, step: int, checkpoint: str | None) -> TrainingStopped:
        """Return the error that ends the run, naming step, questions, likely cause and remedy."""
        ids = ", ".join(self.ids[:NAMED]) + (f" and {len(self.ids) - NAMED} more" if len(self.ids) > NAMED else "")
        saved = f"\nThe state before this step is in {checkpoint}." if checkpoint else ""
        problem = self.problem or "another process has stopped (its message says why)."
        return TrainingStopped(f"step {step}, questions {ids}: {problem}{saved}")


RECENT = 20
"""Generations over which groups without signal are looked at."""
FEW_TEACH = 0.8
"""Share of groups without signal above which the user is told."""


@dataclass
class PolicyMonitor(TrainingMonitor):
    """Judges steps on sampled outputs. On policy the loss is 0 whatever is learnt: rewards say whether anything is."""

    tell: Callable[[str], None] = print
    seen: dict[str, float] = field(default_factory=dict)
    """Of the last generation, for the screen."""
    _silent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Share of groups without signal in the last generations."""
    _told: bool = False

    def on_groups(self, seen: dict[str, float], silent: float) -> None:
        """Judge the groups of a generation; `silent` is the share of those whose outputs are all right or all wrong."""
        self.seen = {**seen, "no signal": silent}
        self._silent.append(silent)
        share = sum(self._silent) / len(self._silent)
        if len(self._silent) < RECENT:
            return
        if share == 1:
            self._report(
                f"in {RECENT} generations no question had both right and wrong outputs, so nothing is learnt",
                "Choose questions that are sometimes answered right (`cmexam-tune select --make pool`), raise "
                "training.num_generations or training.temperature, or check that prompt.style is the one that the "
                "model answers in.",
            )
        elif share > FEW_TEACH and not self._told:
            self._told = True
            self.tell(
                f"warning: in the last {RECENT} generations {100 * share:.0f}% of the questions had only right or only "
                "wrong outputs and taught nothing; `cmexam-tune select --make pool` finds questions that do."
            )

    def on_loss(self, loss: float, step_targets: int) -> None:
        """Judge the loss of a step: only whether it is a number."""
        if not math.isfinite(loss):
            super().on_loss(loss, step_targets)

    def on_grad_norm(self, norm: float | None, skipped: bool = False) -> None:
        """Judge the norm of all gradients: 0 is right where no group had a signal."""
        if norm or (self._silent and self._silent[-1] < 1):
            super().on_grad_norm(norm, skipped)


def refuse_unlabelled(ids: Sequence[str]) -> None:
    """Refuse questions without a label (their `ids`), before the first step.

    Raises:
        TrainingStopped: there is one.
    """
    if ids:
        raise TrainingStopped(
            f"{len(ids)} questions carry no label, the first is {ids[0]}: they would be trained on without a loss. "
            "Raise prompt.max_target_length, or report this family's `encode`."
        )
