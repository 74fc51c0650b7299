"""Tuning methods, one file each: the file's name is the config's `tuning.method`.

In: a loaded model. Out: the same with something to train, and its adapter on disk. Start reading with `Method` below,
then `lora.py`.

Whatever differs between methods is an attribute or a method of theirs: nobody outside a method's file asks for its
name, so that a user's own method gets the right behaviour everywhere.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cmexam_tune.core.variants import Variant
from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Method(Variant):
    """What is trained, and what is written of it. Heavy imports stay inside functions: reading a config needs no torch.

    Methods hold no state: settings come with the calls that need them.
    """

    folder = "tuning"
    Settings: ClassVar[type[Any]]
    """Frozen dataclass of the method's keys under `tuning`; ranges stand in the types."""
    standalone: ClassVar[bool]
    """Whether `save` writes a whole model (head, full), or an adapter that needs its base (lora, ptuning)."""
    merges: ClassVar[bool] = False
    """Whether an adapter can be put into the weights of its base."""
    averages: ClassVar[bool] = False
    """Whether the mean of several adapters is again one."""
    is_prefix: ClassVar[bool] = False
    """Whether what is trained stands in front of the keys and values of each layer."""
    trains_beside_4bit: ClassVar[bool] = False
    """Whether the base may lie in weights of 4 bits."""
    learns_by_trl: ClassVar[bool] = False
    """Whether TRL's trainers can train it (`training.objective` grpo and dpo)."""
    highest_learning_rate: ClassVar[float] = math.inf
    """Above it a training is warned: methods that change the model's own weights use 1e-5 to 1e-3."""

    @abstractmethod
    def attach(self, model: "PreTrainedModel", family: Family, settings: object) -> "PreTrainedModel":
        """Freeze what is not tuned, add what is, and return the model to train.

        Trainable parameters are float32 also where the base is float16 or bfloat16.

        Raises:
            UserError: settings that do not fit this model.
        """

    @abstractmethod
    def save(
        self, model: "PreTrainedModel", folder: Path, state_dict: "Mapping[str, torch.Tensor] | None" = None
    ) -> None:
        """Write what was tuned to `folder`; `state_dict` holds gathered weights under ZeRO-3."""

    @abstractmethod
    def load(self, model: "PreTrainedModel", folder: Path) -> None:
        """Read what `save` wrote into a model that `attach` returned."""

    def check(self, training: Mapping[str, object]) -> None:
        """Refuse arguments of the training (the section `training`) that this method cannot be trained with.

        Raises:
            ConfigError: there is one.
        """

    def warnings(self, training: Mapping[str, object], *, learning_rate: float, fp16: bool) -> list[str]:
        """Return one line for each argument of the training that is known to end in loss 0, NaN or nothing learnt."""
        if learning_rate <= self.highest_learning_rate:
            return []
        method = type(self).__name__
        return [f"training.learning_rate={learning_rate:g} is far above what {method} uses (1e-5 to 1e-3)."]

    def in_peft(self, family: Family) -> bool:
        """Whether PEFT alone opens what `save` writes for a model of this family."""
        return False

    def open_in_peft(self, model: "PreTrainedModel", base: "Callable[[], PreTrainedModel]", folder: Path) -> Any:
        """Return the adapter in `folder` as PEFT opens it, where `in_peft`.

        Args:
            model: one that `attach` returned; it may be taken apart.
            base: loads the base model again.
            folder: what `save` wrote.
        """
        raise NotImplementedError
