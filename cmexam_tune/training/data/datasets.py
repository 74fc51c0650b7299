"""The questions of a run, encoded, and how they become steps."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cmexam_tune.core.schema import Question
from cmexam_tune.models.families import Family, Loaded
from cmexam_tune.training.data.encoding import Samples
from cmexam_tune.training.data.mixture import Mixture
from cmexam_tune.training.data.sampler import EncodedQuestions, Layout, StepSampler


@dataclass
class Data:
    """Training and validation questions, and the layout of the steps."""

    train: EncodedQuestions
    layout: Layout
    validation: EncodedQuestions | None = None
    validation_questions: Sequence[Question] = ()
    mixture: Mixture | None = None
    """Weights of the training files; None: an epoch shows each question once."""

    def sampler(self, rank: int, world: int) -> StepSampler:
        """Return the plan of one process."""
        return StepSampler(self.train.lengths, self.train.num_targets, self.layout, rank, world, self.mixture)

    def evaluation_layout(self, micro_batch: int) -> Layout:
        """Return the layout of one pass over the validation questions, never packed."""
        assert self.validation is not None
        return replace(self.layout, global_batch=len(self.validation), micro_batch=micro_batch, pack_length=None)


def encoded_questions(family: Family, loaded: Loaded, samples: Samples) -> EncodedQuestions:
    """Return samples with the family's way to make batches of them."""
    collate = functools.partial(family.collate, loaded)
    return EncodedQuestions(samples.table, samples.lengths, samples.num_targets, collate)


def mixture(samples: Samples, weights: Sequence[float], seed: int) -> Mixture | None:
    """Return the mixture of samples that are from files with these weights; None without weights."""
    return Mixture(samples.sources, weights, seed) if weights else None
