"""What all decoders share: training rows and batches (padded or packed); a family brings its `Codec`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from cmexam_tune.config import PromptConfig
from cmexam_tune.core.schema import Question
from cmexam_tune.models import Loaded, features
from cmexam_tune.models.features import IGNORE_INDEX, Encoded, Ids
from cmexam_tune.prompts import ChatTemplate, Dialogue, resolve_style


@dataclass(frozen=True)
class Codec:
    """How a model writes prompts and completions as tokens: `prompt.template` resolved by the model's family."""

    sources: Callable[[Sequence[Dialogue]], list[Ids]]
    """Prompts with every special token before the first token that carries a label."""
    targets: Callable[[Sequence[str]], list[Ids]]
    """Completions as they are labelled: `lead`, the text, EOS."""
    lead: Ids = field(default_factory=list)
    """What stands in front of a completion (v1: sop): given at prediction, not generated."""
    stop: tuple[str, ...] = ()
    """Strings that open a turn of the user: a model that writes one has ended its answer."""
    thinks: bool = False
    """Whether the prompt ends with an open `<think>`: it belongs to what the model writes."""
    remembers: bool = True
    """Whether a prompt can hold earlier turns."""
    template: ChatTemplate | None = None
    """What makes the text behind `sources`; None: there is no such text."""


def encode(codec: Codec, questions: Sequence[Question], prompt: PromptConfig) -> Encoded:
    """Return training rows with `question_id`, `input_ids` and `labels`, within the prompt's limits."""
    return features.encode(
        questions,
        resolve_style(prompt),
        lambda texts: codec.sources([Dialogue(text, (), prompt.system) for text in texts]),
        codec.targets,
        max_source_length=prompt.max_source_length,
        max_target_length=prompt.max_target_length,
    )


def collate(loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return one right-padded batch; each group becomes one row.

    Groups of one row give `input_ids`, `attention_mask` and `labels` [b, s]. If any group has several rows they are
    packed: `position_ids` [b, s] start again at 0 with every question, there is no `attention_mask` and padding is a
    segment of its own. The first token of a question has no label, so no question is predicted from another.
    """
    packed = any(len(group) > 1 for group in groups)
    width = max(sum(len(row["input_ids"]) for row in group) for group in groups)
    pad = int(loaded.tokenizer.pad_token_id or 0)
    ids = torch.full((len(groups), width), pad, dtype=torch.long)
    labels = torch.full((len(groups), width), IGNORE_INDEX, dtype=torch.long)
    mask = torch.zeros((len(groups), width), dtype=torch.long)
    positions = torch.zeros((len(groups), width), dtype=torch.long)
    for i, group in enumerate(groups):
        start = 0
        for row in group:
            end = start + len(row["input_ids"])
            ids[i, start:end] = torch.tensor(row["input_ids"])
            labels[i, start:end] = torch.tensor(row["labels"])
            # Packed: the last token of the question before must not be trained to predict this one.
            labels[i, start] = IGNORE_INDEX
            mask[i, start:end] = 1
            positions[i, start:end] = torch.arange(end - start)
            start = end
        positions[i, start:] = torch.arange(width - start)
    extra = {"position_ids": positions} if packed else {"attention_mask": mask}
    return {"input_ids": ids, "labels": labels, **extra}


def bounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return what tells FlashAttention where the questions of one packed row are: transformers' `FlashAttentionKwargs`.

    `cu_seq_lens_q` and `_k`, int32 [questions + 1], hold the place where each begins, and the end; `max_length_q` and
    `_k`, single numbers that stay on the host, the most tokens of one.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    places = functional.pad(lengths.cumsum(0), (1, 0)).int()
    return {f"{name}_{side}": value for name, value in (("cu_seq_lens", places), ("max_length", lengths.max()))
            for side in "qk"}  # fmt: skip


def left_padded(
    rows: Sequence[Ids], pad: int, device: torch.device, front: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, both int64 [rows, longest], of prompts that end in the same column.

    The first `front` tokens of each are put at the left edge, with the padding between them and the rest of the prompt.
    """
    width = max(len(row) for row in rows)
    ids = [[*row[:front], *[pad] * (width - len(row)), *row[front:]] for row in rows]
    mask = [[1] * front + [0] * (width - len(row)) + [1] * (len(row) - front) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
