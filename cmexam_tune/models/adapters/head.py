"""A classification head on an encoder: both trained (the papers' BERT rows), or the head alone."""

import math
from typing import TYPE_CHECKING, Any

from pydantic.dataclasses import dataclass

from cmexam_tune.config.settings import STRICT
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models.adapters.full import Full
from cmexam_tune.models.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, config=STRICT)
class Settings:
    """Keys under `tuning`."""

    freeze_encoder: bool = False
    """Train only the head: fast, and weaker."""


class Head(Full):
    """What `full` saves, of a classifier whose encoder may be frozen."""

    Settings = Settings
    highest_learning_rate = math.inf  # a new head bears it

    def attach(self, model: "PreTrainedModel", family: Family, settings: Any) -> "PreTrainedModel":
        """Make the head, and the encoder unless it is frozen, trainable in float32.

        Raises:
            ConfigError: the family has no head.
        """
        if family.task != "classify":
            raise ConfigError(
                "tuning.method=head: only classifiers have a head (model.family=bert). Use lora or full here."
            )
        whole: Any = model.requires_grad_(True)
        whole.float()
        if settings.freeze_encoder:
            model.base_model.requires_grad_(False)
        return model
