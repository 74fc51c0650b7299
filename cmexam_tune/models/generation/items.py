"""What passes through a decoder: questions with their prompts, batches of them, texts and readings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cmexam_tune.core.schema import Question
from cmexam_tune.models.features import Ids
from cmexam_tune.models.generation import allowed_answers
from cmexam_tune.models.generation.prefill import Reader, Start, shared
from cmexam_tune.models.precision import inference
from cmexam_tune.prompts import PromptRequest


@dataclass(frozen=True)
class Item:
    """What is asked, and its prompt as ids."""

    request: PromptRequest
    ids: Ids

    @property
    def question(self) -> Question:
        """The question, whole, however much of it the prompt holds."""
        return self.request.question


class Batch(NamedTuple):
    """Questions that are answered together, and what their prompts begin with if that was read already."""

    items: list[Item]
    start: Start | None


@dataclass(frozen=True)
class Reading:
    """A batch that was read up to where the legal answers of each row part."""

    items: list[Item]
    reader: Reader
    roots: list[allowed_answers.Node]
    """Of each row, the tree of the rest of its legal answers."""
    after: torch.Tensor
    """Log-probabilities [b, v] at the roots."""
    lead: list[float]
    """Of each row, the summed log-probability of what all its answers start with; 0 where that was not asked for."""


FEW = 4
"""Questions from which on it is worth to read apart what their prompts begin with."""


def batches(
    model: Any, items: Sequence[Item], pad: int, size: int, key: Callable[[Item], Any] = lambda item: 0
) -> Iterator[Batch]:
    """Yield batches of `size` of similar length, the longest first so that memory runs out at once or never.

    Questions with the same examples stand together: their beginning is read once. Those of equal `key` do too.
    """
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault((item.request.system, item.request.examples), []).append(item)
    ungrouped = [item for group in groups.values() if len(group) < FEW for item in group]
    together = [group for group in groups.values() if len(group) >= FEW] + [ungrouped] * bool(ungrouped)
    for group in sorted(together, key=lambda group: -max(len(item.ids) for item in group)):
        with inference(model):
            start = shared(model, [item.ids for item in group], pad) if group is not ungrouped else None
        order = sorted(group, key=lambda item: (key(item), -len(item.ids)))
        for first in range(0, len(order), size):
            yield Batch(order[first : first + size], start)
