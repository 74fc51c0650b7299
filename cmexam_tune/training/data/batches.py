"""Encoded questions, and the batches that training and evaluation draw from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import datasets
import torch
from torch.utils.data import DataLoader, Dataset

from cmexam_tune.models.features import Truncation
from cmexam_tune.training.data.sampler import Mixture, StepLayout, StepPlan, StepSampler

Sample = Mapping[str, Any]
"""One encoded question: `question_id`, `input_ids`, `labels` and what else its family's `collate` reads."""


class StepBatch(NamedTuple):
    """One process's share of an optimizer step."""

    micro: list[dict[str, torch.Tensor]]
    """Collated micro-batches, run one after the other before the optimizer steps; int64 [rows, tokens] for decoders."""
    ids: list[list[str]]
    """Question ids of each micro-batch."""
    num_targets: list[int]
    """Labels (generation) or questions (classification) in each micro-batch."""
    step_targets: int
    """The same, over the whole step and all processes: what the loss is divided by."""
    tokens: int
    """Tokens without padding, over the whole step and all processes."""


@dataclass(eq=False)
class EncodedQuestions(Dataset[StepBatch]):
    """Questions as token rows in files that are mapped into memory; indexed with a `StepPlan`, a `StepBatch`.

    Attributes:
        table: one `Sample` for each question.
        lengths: tokens of each; a question with several sequences (multiple choice) counts its longest.
        num_targets: labels of each; 1 for classifiers.
        sources: number of the file that each is from.
        truncation: what the length limits did.
        collate: groups of samples into one padded micro-batch; each group becomes one row (packed if it has several).
    """

    table: datasets.Dataset
    lengths: Sequence[int]
    num_targets: Sequence[int]
    sources: Sequence[int]
    truncation: Truncation
    collate: Callable[[Sequence[Sequence[Sample]]], dict[str, torch.Tensor]]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, plan: StepPlan) -> StepBatch:
        samples = self._read([i for micro in plan.micro for row in micro for i in row])
        micros = [[[samples[i] for i in row] for row in micro] for micro in plan.micro]
        # A process that has no question left in the last step runs one all the same, whose loss weighs nothing: under
        # DDP and ZeRO every process must take part in every forward and backward pass.
        spare = [] if all(micros) else [[self._read([0])[0]]]
        return StepBatch(
            [self.collate(rows or spare) for rows in micros],
            [[str(sample["question_id"]) for row in rows for sample in row] for rows in micros],
            [sum(self.num_targets[i] for row in micro for i in row) for micro in plan.micro],
            plan.step_targets,
            plan.tokens,
        )

    def _read(self, indices: Sequence[int]) -> dict[int, Sample]:
        """Return index -> sample, read from the disk all at once."""
        if not indices:
            return {}
        columns = self.table[list(indices)]
        rows = zip(*columns.values(), strict=True)
        return {i: dict(zip(columns, row, strict=True)) for i, row in zip(indices, rows, strict=True)}


class StepLoader(DataLoader[StepBatch]):
    """DataLoader of whole steps that hands the epoch on to its sampler.

    Its own generator keeps the workers' seeds from drawing on the global random state, which resuming restores.
    """

    def __init__(self, questions: EncodedQuestions, sampler: StepSampler, **options: Any) -> None:
        super().__init__(
            questions, batch_sampler=sampler, collate_fn=_only, generator=torch.Generator().manual_seed(0), **options
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of an epoch."""
        sampler = self.batch_sampler
        assert isinstance(sampler, StepSampler)
        sampler.set_epoch(epoch)


def _only(batches: list[StepBatch]) -> StepBatch:
    # DataLoader wants lists from a batch sampler; ours hold one `StepPlan` each, which the dataset has collated.
    return batches[0]


@dataclass
class TrainingData:
    """Training and validation questions, and the layout of the steps."""

    train: EncodedQuestions
    layout: StepLayout
    validation: EncodedQuestions | None = None
    file_weights: Sequence[float] = ()
    """How often an epoch shows each training file; empty: each question once."""

    @property
    def mixture(self) -> Mixture | None:
        """Which questions an epoch shows where training files have weights."""
        return Mixture(self.train.sources, self.file_weights, self.layout.seed) if self.file_weights else None

    def sampler(self, rank: int, world: int) -> StepSampler:
        """Return the plan of one process."""
        return StepSampler(
            self.train.lengths, self.train.num_targets, self.layout, rank=rank, world=world, mixture=self.mixture
        )

    def evaluation_layout(self, micro_batch: int) -> StepLayout:
        """Return the layout of one pass over the validation questions, never packed."""
        assert self.validation is not None
        return replace(self.layout, global_batch=len(self.validation), micro_batch=micro_batch, pack_length=None)
