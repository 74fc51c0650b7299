"""LoRA through PEFT: low-rank updates beside frozen matrices (Hu et al. 2021, arXiv:2106.09685)."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from cmexam_tune.config.settings import (
    STRICT,
    Rank,
    Share,
    Strings,
)
from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True, config=STRICT)
class Settings:
    """The keys of `peft.LoraConfig` that recipes set, under PEFT's names and with its defaults."""

    r: Rank = 8
    """Rank of the updates."""
    lora_alpha: Annotated[int, Field(ge=1)] = 8
    """The updates are scaled by `lora_alpha / r`."""
    lora_dropout: Share = 0.0
    """Dropout in front of the updates."""
    target_modules: tuple[str, ...] | str | None = None
    """Layers to tune, by the end of their name, the checkpoint's or transformers'; default: the family's.
    `all-linear` is PEFT's shortcut."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""
    modules_to_save: Strings = ()
    """Modules that are trained whole and saved with the adapter, for example `embed_tokens`."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)`."""
    use_dora: bool = False
    """Train the length of each row apart from its direction (DoRA)."""


def _check_whole(tuned: "PreTrainedModel") -> None:
    """Refuse a module trained whole inside another one: PEFT could not save the two, at the end of the training."""
    from peft.utils import ModulesToSaveWrapper

    whole = [name for name, module in tuned.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    if inner := next((name for name in whole if any(name.startswith(f"{other}.") for other in whole)), None):
        raise UserError(
            f"tuning.modules_to_save: {inner} lies inside another module that is trained whole (a classifier's head "
            "always is). Give a longer ending of the name that means others only."
        )


def _lists(values: Mapping[str, object]) -> dict[str, Any]:
    """Return PEFT's arguments with lists for tuples, which its JSON does not have."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


class LoRA(Method):
    """Low-rank updates beside frozen matrices, by PEFT."""

    Settings = Settings
    standalone = False
    merges = True
    averages = True
    trains_beside_4bit = True
    learns_by_trl = True
    highest_learning_rate = 5e-3

    def attach(self, model: "PreTrainedModel", family: Family, settings: Any) -> "PreTrainedModel":
        """Return a `PeftModel` with fresh LoRA layers (float32 whatever the base) around the frozen model.

        Raises:
            UserError: `target_modules` names no layer of this model, `modules_to_save` no module or one inside another.
        """
        import torch
        from peft import LoraConfig, TaskType, prepare_model_for_kbit_training

        from cmexam_tune.models import layouts

        chosen = {
            **dataclasses.asdict(settings),
            "target_modules": settings.target_modules or layouts.default_targets(model, family.lora_targets),
            "modules_to_save": settings.modules_to_save or None,
        }
        if getattr(model, "is_loaded_in_4bit", False):
            prepare: Any = prepare_model_for_kbit_training
            model = prepare(model, use_gradient_checkpointing=False)
        task = TaskType.SEQ_CLS if family.task == "classify" else TaskType.CAUSAL_LM
        try:
            named = settings.modules_to_save
            if missing := [name for name in named if not (name and layouts.has_module(model, name))]:
                raise UserError(f"tuning.modules_to_save: this model has no module called {missing[0]!r}.")
            tuned: Any = layouts.add_lora(model, LoraConfig(task_type=task, **_lists(chosen)))
        except re.error as error:  # PEFT reads a text as a pattern
            raise UserError(f"tuning.target_modules: {settings.target_modules!r} is no pattern ({error}).") from None
        except ValueError as error:
            raise UserError(f"tuning: LoRA cannot be put on this model: {error}") from None
        _check_whole(tuned)
        for module in tuned.modules():
            parameters = list(module.parameters(recurse=False))
            # A norm computes with one type: where its bias is trained, its frozen weight is float32 too.
            norm = isinstance(module, torch.nn.LayerNorm) and any(parameter.requires_grad for parameter in parameters)
            for parameter in parameters:
                if parameter.requires_grad or norm:
                    parameter.data = parameter.data.float()
        result: PreTrainedModel = tuned
        return result

    def save(
        self, model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None
    ) -> None:
        """Write the adapter as PEFT does, under the names of the checkpoint that it was trained on."""
        from cmexam_tune.models import layouts

        peft_model: Any = model
        layouts.write_lora(peft_model, folder, state_dict)

    def load(self, model: "PreTrainedModel", folder: Path) -> None:
        """Read what `save` wrote into a model that `attach` returned.

        Raises:
            UserError: the folder holds no adapter, or one with other layers or ranks.
        """
        from safetensors import SafetensorError

        from cmexam_tune.models import layouts

        peft_model: Any = model
        try:
            layouts.read_lora(peft_model, str(folder))
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{folder}: holds no LoRA adapter for this model ({first_line(error)}).") from None

    def in_peft(self, family: Family) -> bool:
        """Whether PEFT alone opens the adapter: always."""
        return True

    def open_in_peft(self, model: "PreTrainedModel", base: "Callable[[], PreTrainedModel]", folder: Path) -> Any:
        """Return the adapter on its base, as PEFT opens it; the base is what is left of `model`."""
        from cmexam_tune.models import layouts

        tuned: Any = model
        return layouts.open_lora(tuned.unload(), str(folder))
