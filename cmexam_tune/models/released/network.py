"""What the networks of these releases share: they are transformers' own under other names, and can be handed over."""

# transformers annotates its base classes only in part.
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch
from transformers import PreTrainedModel

OF_A_CLASS = ("model_type", "architectures", "transformers_version", "_name_or_path")
"""Keys of a config.json that another class has for itself."""


class Release:
    """Mixin in front of a class of transformers: its config.json and its weights are those of a release."""

    config: Any

    @staticmethod
    def only_released(config: object) -> bool:
        """Return whether no class of transformers computes what a model with this config does."""
        return False

    def in_transformers(self) -> Any:
        """Return the model as transformers' own class, with the same tensors; it can be saved and not be run.

        Raises:
            ValueError: there is no such class, see `only_released`.
        """
        if self.only_released(self.config):
            raise ValueError(f"no class of transformers computes what this {self.config.model_type} model does")
        model: Any = self
        network: Any = type(model).__mro__[2]
        keys = network.config_class().to_dict().keys() - OF_A_CLASS
        values = {key: getattr(self.config, key) for key in keys}
        with torch.device("meta"):  # nothing is allocated: the tensors are this model's
            plain: PreTrainedModel = network(network.config_class(**values))
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.generation_config = model.generation_config
        return plain
