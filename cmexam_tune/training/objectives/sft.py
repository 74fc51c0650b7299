"""Supervised: the completions that a style writes for questions with known answers."""

from typing import TYPE_CHECKING, ClassVar

from cmexam_tune.core import cli
from cmexam_tune.training.objectives import Objective, Task

if TYPE_CHECKING:
    from cmexam_tune.training.safe_trainer import SafeTrainer


class Supervised(Objective):
    """Every label of a step weighs the same."""

    has_validation_loss: ClassVar[bool] = True

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
        data = TrainingData(encoded, layout, held_out, list(task.validation), task.train.mixture)
        return ExamTrainer(config, task.family, task.loaded, args, data)
