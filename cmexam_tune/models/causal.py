"""What all decoders share: training rows and batches (padded or packed); a family brings its `Codec`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cmexam_tune.core.config import PromptConfig
from cmexam_tune.core.schema import Question
from cmexam_tune.models import Loaded, features
from cmexam_tune.models.features import IGNORE_INDEX, Encoded, Ids


@dataclass(frozen=True)
class Codec:
    """How a family writes prompts and completions as tokens."""

    source_ids: Callable[[PreTrainedTokenizerBase, list[str], PromptConfig], list[Ids]]
    """Prompts with every special token before the first token that carries a label."""
    target_ids: Callable[[PreTrainedTokenizerBase, list[str]], list[Ids]]
    """Completions as they are labelled: what the family puts in front (v1: sop), the text, EOS."""
    generation_prefix: Callable[[PreTrainedTokenizerBase], Ids]
    """The tokens of `target_ids` before its text: given at prediction, not generated."""


def encode(codec: Codec, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig) -> Encoded:
    """Return training rows with `question_id`, `input_ids` and `labels`, within the prompt's limits."""
    tokenizer = loaded.tokenizer
    return features.encode(
        questions,
        prompt.style,
        (prompt.max_source_length, prompt.max_target_length),
        lambda texts: codec.source_ids(tokenizer, texts, prompt),
        lambda texts: codec.target_ids(tokenizer, texts),
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
            labels[i, start] = IGNORE_INDEX
            mask[i, start:end] = 1
            positions[i, start:end] = torch.arange(end - start)
            start = end
        positions[i, start:] = torch.arange(width - start)
    extra = {"position_ids": positions} if packed else {"attention_mask": mask}
    return {"input_ids": ids, "labels": labels, **extra}
