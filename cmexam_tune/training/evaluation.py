"""Loss and exam accuracy on the validation questions, on any number of processes."""

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy
import torch

from cmexam_tune.batching.batches import Plan, length, spread
from cmexam_tune.training import processes

if TYPE_CHECKING:
    from cmexam_tune.training.trainer import ExamTrainer


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


@torch.no_grad()
def loss(trainer: "ExamTrainer") -> float:
    """Return the mean loss over all labels (or, for classifiers, all questions) of the validation rows."""
    rows, args = trainer.data.validation, trainer.args
    assert rows is not None
    lengths = [length(row) for row in rows.rows]
    whole = trainer.data.evaluation_layout(args.per_device_eval_batch_size)
    mine = spread(range(len(rows)), lengths, whole, args.world_size)[args.process_index]
    batch = rows[Plan(mine, sum(rows.weights))]
    summed = 0.0
    for micro, weight in zip(batch.micro, batch.weights, strict=True):
        part = trainer.loss_of(trainer.tuned, trainer._prepare_inputs(micro), (weight, batch.items))
        summed += float(part)
    return processes.total((summed,), args.device)[0]


@torch.no_grad()
def exam_accuracy(trainer: "ExamTrainer") -> float:
    """Return the percentage of validation questions answered exactly right, with the config's decoding.

    The questions are shared out among the processes; under ZeRO-3, where every forward pass needs all of them, each
    answers everything.
    """
    args, questions = trainer.args, trainer.data.validation_questions
    mine = questions if trainer.zero3 else questions[args.process_index :: args.world_size]
    right = {question.id: question.answer for question in mine}
    answers = trainer.family.answer(trainer.loaded, mine, trainer.config) if mine else iter(())
    hits = sum(prediction.answer == right[prediction.question_id] for prediction in answers)
    if not trainer.zero3:
        hits = int(processes.total((float(hits),), args.device)[0])
    return 100 * hits / len(questions)
