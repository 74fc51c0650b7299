"""Tuning methods, one file each: the file's name is the config's `tuning.method`.

In: a loaded model. Out: the same with something to train, and its adapter on disk. Start reading with `Method` below,
then `lora.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Method(Protocol):
    """What a module in this folder provides. Heavy imports stay inside functions: reading a config needs no torch."""

    @property
    def Settings(self) -> type[Any]:
        """Frozen dataclass of the method's keys under `tuning`; ranges stand in the types."""

    @property
    def standalone(self) -> bool:
        """Whether `save` writes a whole model (head, full), or an adapter that needs its base (lora, ptuning)."""

    def attach(self, model: "PreTrainedModel", family: Family, settings: Any) -> "PreTrainedModel":
        """Freeze what is not tuned, add what is, and return the model to train.

        Trainable parameters are float32 also where the base is float16 or bfloat16.
        """

    def save(
        self, model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None
    ) -> None:
        """Write what was tuned to `folder`; `state_dict` holds gathered weights under ZeRO-3."""

    def load(self, model: "PreTrainedModel", folder: Path) -> None:
        """Read what `save` wrote into a model that `attach` returned."""
