"""What is learnt from: one file for each `training.objective`, which is its name.

In: a config and question files. Out: the trainer that takes the steps. Start reading with `Objective` below, then
`sft.py`. What differs between objectives is an attribute or a method of theirs: nobody asks for their names.

`tuning.method` says what is trained, the objective by what: any method that `learns_by_trl` and any objective go
together. Reading a config imports these files, so heavy imports stay inside functions.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from cmexam_tune.config import Config, installed_versions
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.variants import Variant
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family
from cmexam_tune.training.task import Task

if TYPE_CHECKING:
    from cmexam_tune.training.logits import Criterion
    from cmexam_tune.training.safe_trainer import SafeTrainer


class Objective(Variant):
    """What a model learns from. Objectives hold no state."""

    folder = "objectives"
    trl_config: ClassVar[str | None] = None
    """The class of TRL whose fields `training` may hold beside transformers'; None: TRL is not needed."""
    defaults: ClassVar[Mapping[str, object]] = {}
    """Arguments that are not the library's own where a recipe says nothing; the recipes say why."""
    has_validation_loss: ClassVar[bool] = False
    """Whether evaluation gives a loss, beside exam accuracy."""

    def check(self, config: Config, family: Family, method: Method) -> None:
        """Refuse what cannot be trained this way, before anything is loaded.

        Raises:
            ConfigError: there is such a setting.
        """
        if self.trl_config is None:
            return
        name, data, training = config.training.objective, config.data, config.training
        if not installed_versions.has_trl():
            raise ConfigError(
                f"training.objective={name}: TRL is not installed. pip install 'cmexam_tune[rl]' needs Python 3.11."
            )
        if not family.learns_by_trl:
            raise ConfigError(
                f"training.objective={name}: TRL trains decoders that transformers loads by itself (family llama), not "
                f"model.family={config.model.family}. Use objective sft."
            )
        if not method.learns_by_trl:
            raise ConfigError(
                f"training.objective={name}: cannot be trained with tuning.method={config.tuning.method}. Use lora or "
                "full."
            )
        unused = {
            "training.packing": training.packing,
            "training.max_tokens_per_batch": training.max_tokens_per_batch,
            "data.mixture": data.mixture,
        }
        if wrong := [key for key, value in unused.items() if value]:
            raise ConfigError(f"{wrong[0]}: has no effect with training.objective={name}. Leave it out.")
        if config.model.adapter_name_or_path and method.standalone:
            raise ConfigError(
                f"model.adapter_name_or_path: with tuning.method={config.tuning.method} TRL reads the reference model "
                "from model.model_name_or_path, which lacks the adapter. Merge it first (`export --merge`), or use "
                "tuning.method=lora."
            )

    def criterion(self, config: Config) -> "Criterion | None":
        """Return the loss of token labels; None: their cross-entropy, which never holds the logits of all at once."""
        return None

    def rows_per_question(self, config: Config) -> int:
        """Return how many rows of a batch a question takes."""
        return 1

    def foreseen(self, config: Config, shape: object, longest: int) -> list[str]:
        """Return lines of the dry run about what this objective adds.

        Args:
            config: what is to be trained.
            shape: the model's config.
            longest: tokens of the longest training question, with its completion.
        """
        return []

    @abstractmethod
    def trainer(self, task: Task) -> "SafeTrainer":
        """Return the trainer; everything that can be wrong with the data is found here.

        Raises:
            UserError: data or settings that cannot be trained with.
        """
