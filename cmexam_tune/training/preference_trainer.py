"""`PreferenceTrainer`: TRL's DPO on pairs of outputs, with our prompts and checkpoints that survive a kill."""

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from trl import DPOTrainer

from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.training import processes
from cmexam_tune.training.task import Task
from cmexam_tune.training.trl_trainer import TRLTrainer

Preference = tuple[Question, str, str]
"""A question, the output that is preferred, and the other one."""


class PreferenceTrainer(TRLTrainer, DPOTrainer):  # type: ignore[misc]
    """DPO on outputs for exam questions; tokens are ours, so that prompts are what `predict` asks."""

    def __init__(self, task: Task, pairs: Sequence[Preference]) -> None:
        """Take what is trained, and the pairs."""
        self.pairs = pairs
        placeholder = Dataset.from_list([{"prompt": "", "chosen": "", "rejected": ""}])
        super().__init__(
            task, [question for question, _, _ in pairs], train_dataset=placeholder, eval_dataset=placeholder
        )

    def _prepare_dataset(self, dataset: object, processing_class: object, args: Any, dataset_name: str) -> Dataset:
        """Return the pairs as tokens: prompts as they are asked, completions as they are learnt, with EOS.

        Raises:
            ConfigError: a limit of TRL leaves nothing of an output.
        """
        codec, rows = self.decoder.codec, []
        items = self.decoder.ask(self.requests(self.questions))
        for item, (question, chosen, rejected) in zip(items, self.pairs, strict=True):
            right, wrong = codec.targets([chosen, rejected])
            if args.max_length is not None and len(item.ids) + max(len(right), len(wrong)) > args.max_length:
                raise ConfigError(
                    f"training.max_length={args.max_length}: question {question.id} and its outputs have "
                    f"{len(item.ids) + max(len(right), len(wrong))} tokens, and TRL would cut what is to be learnt. "
                    "Raise it, or leave longer pairs out."
                )
            rows.append({"prompt_ids": item.ids, "chosen_ids": right, "rejected_ids": wrong})
        return Dataset.from_list(rows)

    def summary(self) -> str:
        """Return what is trained, on what."""
        args = self.args
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return f"{self.trained_share()}; {len(self.pairs):,} pairs, {size} in each step"

    def shown(self) -> str:
        """Return the loss of the last step, and how often the preferred output had the greater reward since the log."""
        accuracies = self._metrics["train"]["rewards/accuracies"]
        share = f", preferred {sum(accuracies) / len(accuracies):.2f}" if accuracies else ""
        return f"{super().shown()}{share}"

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: object = None) -> torch.Tensor:
        """Count the tokens of a micro-batch, and run it."""
        self.tokens_done += int(processes.total((float(inputs["attention_mask"].sum()),), self.args.device)[0])
        return super().training_step(model, inputs, num_items_in_batch)
