"""Supervised: the completions that a style writes for questions with known answers."""

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.models.adapters import Method
from cmexam_tune.models.families import Family
from cmexam_tune.training.objectives import Objective
from cmexam_tune.training.task import Task

if TYPE_CHECKING:
    from cmexam_tune.training.logits import Criterion
    from cmexam_tune.training.safe_trainer import SafeTrainer


class Supervised(Objective):
    """Learning from known answers; every label of a step weighs the same (`loss_of` in `training/trainer.py`)."""

    has_validation_loss: ClassVar[bool] = True

    def check(self, config: Config, family: Family, method: Method) -> None:
        """Refuse a loss of token labels for a model that has none."""
        super().check(config, family, method)
        if family.task == "classify" and self.criterion(config) is not None:
            key = "label_smoothing_factor" if config.training.arguments.get("label_smoothing_factor") else "objective"
            raise ConfigError(
                f"training.{key}: has no effect on family {config.model.family}, whose head has a loss of its own. "
                "Leave it out."
            )

    def criterion(self, config: Config) -> "Criterion | None":
        """Return the cross-entropy with smoothed labels, where they are to be smoothed."""
        from cmexam_tune.training.logits import token_loss

        smoothing = config.training.arguments.get("label_smoothing_factor")
        return partial(token_loss, smoothing=smoothing) if smoothing else None

    def trainer(self, task: Task) -> "SafeTrainer":
        """Return the trainer of encoded questions."""
        from cmexam_tune.training import arguments, monitor
        from cmexam_tune.training.data.batches import TrainingData
        from cmexam_tune.training.data.encoding import Encoder, truncation_table
        from cmexam_tune.training.trainer import ExamTrainer

        config, args = task.config, task.arguments
        encoder = Encoder(config.prompt, config.model, task.family, task.loaded, task.cache, config.data.num_workers)
        # The first process encodes and writes the cache, the others read it.
        with args.main_process_first(desc="encoding"):
            encoded = encoder.encode(task.train)
            held_out = encoder.encode(task.validation) if task.validation else None
        unlabelled = [i for i, num_targets in enumerate(encoded.num_targets) if num_targets == 0]
        monitor.refuse_unlabelled(encoded.table.select(unlabelled)["question_id"][:])
        if args.process_index == 0:
            cli.note(truncation_table(encoded.truncation, encoder.prompt))
        layout = arguments.layout(config.training, config.prompt, args.world_size)
        data = TrainingData(encoded, layout, held_out, task.train.mixture)
        return ExamTrainer(task, data, self.criterion(config))
