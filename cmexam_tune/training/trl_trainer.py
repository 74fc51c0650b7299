"""What our trainers on top of TRL's share: nothing is sent or written that was not asked for, every step is judged.

TRL's trainers take their own steps: the Trainer's accumulation is theirs, unlike in `trainer.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cmexam_tune import prompts
from cmexam_tune.core.errors import first_line
from cmexam_tune.core.schema import Question
from cmexam_tune.models.generation.decoder import Decoder
from cmexam_tune.prompts import PromptRequest
from cmexam_tune.training.safe_trainer import SafeTrainer
from cmexam_tune.training.task import Task


class TRLTrainer(SafeTrainer):
    """Stands in front of a trainer of TRL: `class PolicyTrainer(TRLTrainer, GRPOTrainer)`."""

    def __init__(self, task: Task, questions: Sequence[Question], **options: object) -> None:
        """Take what is trained, and the questions that it is trained on; `options` go to TRL's trainer."""
        self.questions = questions
        decoder = task.family.engine(task.loaded, task.config)
        assert isinstance(decoder, Decoder)
        self.decoder = decoder
        super().__init__(task, processing_class=task.loaded.tokenizer, **options)
        # A fresh adapter is zero: its reference is the base itself. TRL would keep a copy, and PEFT would save it.
        if "ref" in getattr(self.unwrapped_model, "peft_config", {}):
            self.unwrapped_model.delete_adapter("ref")
        self._step_loss = 0.0

    def _send_telemetry(self) -> None:
        """Send nothing: what is trained here is nobody else's business."""

    def create_model_card(self, *arguments: object, **options: object) -> None:
        """Write none: TRL's would lie in the folder that checkpoints are staged in, under TRL's names for things."""

    def requests(self, questions: Sequence[Question]) -> list[PromptRequest]:
        """Return the questions as the config's prompt puts them."""
        return prompts.default_prompts(questions, self.config)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch forward and backward, and judge the step."""
        with self.autocast():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        # The Trainer divides what it returns by nothing: micro-batches add up to the step.
        self._step_loss += float(loss)
        if self.accelerator.sync_gradients:
            self.last_loss, self._step_loss = self._step_loss, 0.0
            self.monitor.on_loss(self.last_loss, 1)
        self.judge_step()
        return loss

    def probe_logits(self) -> torch.Tensor:
        """Return the logits at the end of the first training question's prompt: float32 [vocabulary]."""
        model = self.unwrapped_model.eval()
        (item,) = self.decoder.ask(self.requests(self.questions[:1]))
        ids = torch.tensor([item.ids], device=self.args.device)
        with torch.no_grad(), self.autocast():
            return torch.as_tensor(model(input_ids=ids).logits[0, -1]).float()

    def out_of_memory(self, error: BaseException) -> str:
        """Return the message for a training that ran out of its card's memory."""
        return (
            f"the card's memory ran out ({first_line(error)}). Lower training.per_device_train_batch_size (and raise "
            "gradient_accumulation_steps), generation.batch_size, training.max_completion_length or "
            "prompt.max_source_length, or set training.gradient_checkpointing=true."
        )
