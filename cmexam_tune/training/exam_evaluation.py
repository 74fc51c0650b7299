"""Loss and exam accuracy on the validation questions, on any number of processes."""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from cmexam_tune.core.progress import Progress
from cmexam_tune.training import processes
from cmexam_tune.training.data.sampler import Plan, spread
from cmexam_tune.training.trainer import StepTrainer


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random state as it was, so that evaluating changes nothing in the training that follows."""
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class ExamTrainer(StepTrainer):
    """The Trainer that runs: it evaluates the loss on validation questions and how many it answers right."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss on the validation questions and, where it decides something, the exam accuracy."""
        started = time.monotonic()
        self.tuned.eval()
        with random_state_kept(), torch.no_grad():
            metrics = {f"{metric_key_prefix}_loss": self.validation_loss()}
            if "exam_accuracy" in str(self.args.metric_for_best_model):
                metrics[f"{metric_key_prefix}_exam_accuracy"] = self.exam_accuracy()
        metrics[f"{metric_key_prefix}_runtime"] = round(time.monotonic() - started, 3)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def validation_loss(self) -> float:
        """Return the mean loss over all labels (or, for classifiers, all questions) of the validation questions."""
        held_out, args = self.data.validation, self.args
        assert held_out is not None
        whole = self.data.evaluation_layout(args.per_device_eval_batch_size)
        mine = spread(range(len(held_out)), held_out.lengths, whole, args.world_size)[args.process_index]
        batch = held_out[Plan(mine, sum(held_out.weights))]
        summed = 0.0
        for micro, weight in zip(batch.micro, batch.weights, strict=True):
            summed += float(self.loss_of(self.tuned, self.on_device(micro), (weight, batch.items)))
        return processes.total((summed,), args.device)[0]

    def exam_accuracy(self) -> float:
        """Return the percentage of validation questions answered exactly right, with the config's decoding.

        The questions are shared out among the processes; under ZeRO-3, where every forward pass needs all of them, each
        answers everything.
        """
        args, questions = self.args, self.data.validation_questions
        mine = questions if self.zero3 else questions[args.process_index :: args.world_size]
        right = {question.id: question.answer for question in mine}
        answers = self.family.answer(self.loaded, mine, self.config) if mine else iter(())
        answers = Progress("exam accuracy", "questions", len(mine), patience=5).each(answers)
        hits = sum(prediction.answer == right[prediction.question_id] for prediction in answers)
        if not self.zero3:
            hits = int(processes.total((float(hits),), args.device)[0])
        return 100 * hits / len(questions)
