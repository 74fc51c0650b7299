"""Full tuning: every weight of the model is trained and saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.dataclasses import dataclass

from cmexam_tune.config.settings import STRICT
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, config=STRICT)
class Settings:
    """Full tuning has no settings of its own."""


class Full(Method):
    """Everything is trained and saved."""

    Settings: ClassVar[type[Any]] = Settings
    standalone = True
    learns_by_trl = True
    highest_learning_rate = 5e-3

    def attach(self, model: "PreTrainedModel", family: Family, settings: object) -> "PreTrainedModel":
        """Make every weight trainable, in float32."""
        whole: Any = model.requires_grad_(True)
        result: PreTrainedModel = whole.float()
        return result

    def save(
        self, model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None
    ) -> None:
        """Write the whole model in transformers' format."""
        model.save_pretrained(folder, state_dict=None if state_dict is None else dict(state_dict))

    def load(self, model: "PreTrainedModel", folder: Path) -> None:
        """Read what `save` wrote into a model of the same shape.

        Raises:
            UserError: the folder holds no model, or one of another shape.
        """
        import torch

        from cmexam_tune.models import checkpoint

        kind: Any = type(model)
        try:
            # Not "auto", which code that a checkpoint brings need not know.
            stored, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
            if info["missing_keys"]:
                raise ValueError(f"{len(info['missing_keys'])} weights are missing")
            model.load_state_dict(stored.state_dict())
        except checkpoint.LOADING as error:
            raise UserError(f"{folder}: holds no weights for this model ({first_line(error)}).") from None
