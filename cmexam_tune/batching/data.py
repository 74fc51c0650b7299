"""The questions of a run, encoded, and how they become steps."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cmexam_tune.batching.batches import Layout, Rows, StepSampler, label_count, length
from cmexam_tune.core.schema import Question
from cmexam_tune.families import Family, Loaded
from cmexam_tune.models.features import Encoded


@dataclass
class Data:
    """Training rows, validation rows and questions, and the layout of the steps."""

    train: Rows
    layout: Layout
    validation: Rows | None = None
    validation_questions: Sequence[Question] = ()

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Tokens of each training row."""
        return [length(row) for row in self.train.rows]

    def sampler(self, rank: int, world: int) -> StepSampler:
        """Return the plan of one process."""
        return StepSampler(self.lengths, self.train.weights, self.layout, rank, world)

    def evaluation_layout(self, micro_batch: int) -> Layout:
        """Return the layout of one pass over the validation rows, never packed."""
        assert self.validation is not None
        return replace(self.layout, global_batch=len(self.validation), micro_batch=micro_batch, pack_length=None)


def rows(family: Family, loaded: Loaded, encoded: Encoded) -> Rows:
    """Return encoded questions with their weights: labels for decoders, 1 for classifiers."""
    weights = [label_count(row) if family.task == "generate" else 1 for row in encoded.rows]
    return Rows(encoded.rows, weights, functools.partial(family.collate, loaded))
