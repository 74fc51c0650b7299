"""What `generate` is given: settings, stop strings, and the answers that are legal where only those may be written."""

import contextlib
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.config.settings import GenerationOptions
from cmexam_tune.core.errors import ConfigError, first_line
from cmexam_tune.models.generation.allowed_answers import Node, walk
from cmexam_tune.models.precision import check_numbers

LETTERS = 32
"""Tokens that an answer of letters and a few words around them needs at most, in any tokenizer."""


def settings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Config) -> GenerationConfig:
    """Return greedy decoding with every EOS that model and tokenizer name, changed by `generation`'s own settings.

    Raises:
        ConfigError: settings that transformers refuses, or that ask for several answers.
    """
    # Chat models (Llama 3, Qwen) list several tokens here that end an answer; the tokenizer names one of them.
    own: Any = getattr(model.generation_config, "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    arguments = dict(config.generation.arguments)
    if arguments.get("num_return_sequences", 1) != 1:
        raise ConfigError("generation.num_return_sequences: every question gets one answer. Leave it out.")
    defaults: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "max_new_tokens": room(config),
        "eos_token_id": sorted(ends),
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }
    library: Any = GenerationConfig
    if "max_length" in arguments:
        # transformers would prefer our default to what the user asked for.
        del defaults["max_new_tokens"]
    try:
        chosen: GenerationConfig = library(**{**defaults, **arguments, "return_dict_in_generate": False})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generation: {error}") from None
    return chosen


@contextlib.contextmanager
def explained(config: Config) -> Iterator[None]:
    """Blame what transformers' `generate` raises on its rarer settings, if it was given any.

    Raises:
        ConfigError: names them.
    """
    unusual = config.generation.arguments.keys() - {*GenerationOptions.__annotations__, "do_sample", "use_cache"}
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        if not unusual or config.generation.mode != "generate":
            raise
        names = ", ".join(f"generation.{name}" for name in sorted(unusual))
        raise ConfigError(f"{names}: transformers cannot write with it ({first_line(error)}).") from error


def room(config: Config) -> int:
    """Return how many tokens an answer may have by default: as in training, and few where only letters are written."""
    fields = {name for _, name, _, _ in string.Formatter().parse(prompts.resolve_style(config.prompt).write) if name}
    most = config.prompt.max_target_length
    return min(most, LETTERS) if fields == {"letters"} else most


def end_ids(chosen: GenerationConfig) -> set[int]:
    """Return the ids that end an answer."""
    ends = chosen.eos_token_id
    return {*ends} if isinstance(ends, list | tuple) else {ends} - {None}


def end_of(ids: Sequence[int], ends: set[int]) -> int | None:
    """Return the place of the first end, which counts also where padding behind it would be read as text."""
    return next((place for place, token in enumerate(ids) if token in ends), None)


def first_stop(text: str, stops: Iterable[str]) -> int | None:
    """Return where in a text its first stop text begins; None if there is none in it."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


class StopText(StoppingCriteria):
    """Ends a row whose last tokens hold a stop text; transformers' own needs a vocabulary with Latin letters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[Sequence[str]], width: int) -> None:
        """Take the stop texts of each prompt, some of which may have none, and the width of the prompts."""
        self.tokenizer, self.stops, self.width = tokenizer, stops, width
        # A token holds at least one byte, and two more may hold the ends of a character.
        self.tail = 2 + max(len(stop.encode()) for row in stops for stop in row)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        new = input_ids[:, self.width :][:, -self.tail :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        # The beams of a prompt stand together.
        beams = len(texts) // len(self.stops)
        ended = [first_stop(text, self.stops[row // beams]) is not None for row, text in enumerate(texts)]
        return torch.tensor(ended, device=input_ids.device)


class Budget(StoppingCriteria):
    """Ends a row that has thought, or written after its thinking, for as long as it may."""

    def __init__(self, end: Sequence[int], width: int, thinking: int, writing: int) -> None:
        """Take the ids of `</think>`, the width of the prompt, and the tokens for thinking and for what follows."""
        self.end, self.width, self.thinking, self.writing = list(end), width, thinking, writing

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        # All rows at once and where they are: copied to the host, long thinking would cost more than the model.
        new = input_ids[:, self.width :]
        count, size = new.shape[1], len(self.end)
        if count < size:
            return torch.full((len(new),), count >= self.thinking, device=new.device)
        ends = (new.unfold(1, size, 1) == torch.tensor(self.end, device=new.device)).all(-1)
        written = count - size - ends.int().argmax(1)  # since the first `</think>`
        return torch.where(ends.any(1), written >= self.writing, torch.full_like(written, count) >= self.thinking)


class Numbers(LogitsProcessor):
    """Refuses a model that computes no numbers; looked at once, before the first token of a batch."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        if input_ids.shape[1] == self.width:
            check_numbers(scores)
        return scores


class OnlyLegal(LogitsProcessor):
    """Lets each row write only what leads to one of its legal answers; a row that has one may go on as it likes."""

    def __init__(self, roots: Sequence[Node], width: int) -> None:
        self.roots, self.width = roots, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, vocabulary] that are -inf for illegal tokens."""
        illegal = torch.ones_like(scores, dtype=torch.bool)
        for row, (root, ids) in enumerate(zip(self.roots, input_ids[:, self.width :].tolist(), strict=True)):
            children = list(walk(root, ids).children)
            illegal[row, children or slice(None)] = False
        return scores.masked_fill(illegal, -torch.inf)


class AtLeaf(StoppingCriteria):
    """Ends a row that has written one of its legal answers."""

    def __init__(self, roots: Sequence[Node], width: int) -> None:
        self.roots, self.width = roots, width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        new = input_ids[:, self.width :].tolist()
        done = [not walk(root, ids).children for root, ids in zip(self.roots, new, strict=True)]
        return torch.tensor(done, device=input_ids.device)
