"""What `generate` is given to write freely: settings, sampling that can be repeated, and what ends a row."""

import contextlib
import copy
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.config.settings import GenerationOptions
from cmexam_tune.core.errors import ConfigError, first_line
from cmexam_tune.evaluation.answer_parsing import HALF
from cmexam_tune.models.precision import check_numbers

LETTERS = 32
"""Tokens that an answer of letters and a few words around them needs at most, in any tokenizer."""
# In transformers' order, with the values that change nothing.
WARPERS = {
    "temperature": (TemperatureLogitsWarper, (1.0,)),
    "top_k": (TopKLogitsWarper, (0,)),
    "top_p": (TopPLogitsWarper, (1.0,)),
    "min_p": (MinPLogitsWarper, (0.0,)),
    "typical_p": (TypicalLogitsWarper, (1.0,)),
    "epsilon_cutoff": (EpsilonLogitsWarper, (0.0,)),
    "eta_cutoff": (EtaLogitsWarper, (0.0,)),
}


def generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Config) -> GenerationConfig:
    """Return greedy decoding with every EOS that model and tokenizer name, changed by `generation`'s own settings.

    Raises:
        ConfigError: settings that transformers refuses, or that ask for several answers.
    """
    settings = dict(config.generation.arguments)
    if settings.get("num_return_sequences", 1) != 1:
        raise ConfigError("generation.num_return_sequences: every question gets one answer. Leave it out.")
    defaults: dict[str, object] = {
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "max_new_tokens": default_max_new_tokens(config),
        "eos_token_id": sorted(named_ends(model.generation_config, tokenizer)),
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }
    library: Any = GenerationConfig
    if "max_length" in settings:
        # transformers would prefer our default to what the user asked for.
        del defaults["max_new_tokens"]
    try:
        chosen: GenerationConfig = library(**{**defaults, **settings, "return_dict_in_generate": False})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"generation: {error}") from None
    return chosen


def named_ends(of_model: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return every id that a model's own generation settings, if it has any, and its tokenizer name as EOS."""
    ids: Any = getattr(of_model, "eos_token_id", None)
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}


@contextlib.contextmanager
def rare_settings_blamed(config: Config) -> Iterator[None]:
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
        if not unusual:
            raise
        names = ", ".join(f"generation.{name}" for name in sorted(unusual))
        raise ConfigError(f"{names}: transformers cannot write with it ({first_line(error)}).") from error


def default_max_new_tokens(config: Config) -> int:
    """Return how many tokens an answer may have by default: as in training, and few where only letters are written."""
    fields = {name for _, name, _, _ in string.Formatter().parse(prompts.resolve_style(config.prompt).write) if name}
    most = config.prompt.max_target_length
    return min(most, LETTERS) if fields == {"letters"} else most


def split_sampling(chosen: GenerationConfig) -> tuple[GenerationConfig, LogitsProcessorList | None]:
    """Return settings that always take the best token, and what shapes the distribution, or None without sampling.

    Raises:
        ConfigError: sampling among beams, or a setting out of its range.
    """
    if not chosen.do_sample:
        return chosen, None
    if (chosen.num_beams or 1) > 1:
        raise ConfigError("generation.do_sample: samples are not drawn among beams. Set generation.num_beams=1.")
    greedy, shaping = copy.deepcopy(chosen), LogitsProcessorList()
    greedy.do_sample = False
    for name, (warper, neutral) in WARPERS.items():
        value = getattr(chosen, name)
        setattr(greedy, name, None)
        if value is None or value in neutral:
            continue
        try:
            shaping.append(warper(value))
        except ValueError as error:
            raise ConfigError(f"generation.{name}: {error}") from None
    return greedy, shaping


class SeededSampling(LogitsProcessor):
    """Draws each row's next token by the row's own random numbers and leaves no other."""

    def __init__(self, shaping: LogitsProcessorList, seeds: Sequence[str]) -> None:
        """Take what shapes the distribution and the seed of each row."""
        self.shaping = shaping
        self.generators = [random.Random(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, vocabulary] that are -inf but for the token that was drawn."""
        shaped: torch.Tensor = self.shaping(input_ids, scores.float())
        # Inverse of the cumulative distribution: one number for each row and token, the same on every device. Summed
        # in float64, where the tail of a large vocabulary keeps its small probabilities.
        sums = shaped.softmax(-1).double().cumsum(-1)
        # The sums end at 1 only up to rounding, so the numbers are scaled to where they end. `right=True` passes over
        # tokens of probability 0, which repeat the sum before them.
        numbers = torch.tensor([[generator.random()] for generator in self.generators], dtype=torch.float64)
        # The sums end at 1 only up to rounding, so the numbers are scaled to where they end. `right=True` passes over
        # tokens of probability 0, which repeat the sum before them.
        drawn = torch.searchsorted(sums, numbers.to(sums.device) * sums[:, -1:], right=True)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


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
    """Ends a row whose newest token completes a stop text; transformers' own needs a vocabulary with Latin letters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[Sequence[str]], width: int) -> None:
        """Take the stop texts of each prompt, some of which may have none, and the width of the prompts."""
        self.tokenizer, self.stops, self.width = tokenizer, stops, width
        # A token holds at least one byte, and two more may hold the ends of a character.
        self.tail = 2 + max(len(stop.encode()) for row in stops for stop in row)
        self._ends = {stop[-1] for row in stops for stop in row}
        # Also what stands in a row that has ended, where nothing has to be looked at any more.
        self._silent = set(tokenizer.all_special_ids)
        self._completing: dict[int, bool] = {}

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        beams = len(input_ids) // len(self.stops)
        rows = [
            row
            for row, token in enumerate(input_ids[:, -1].tolist())
            if self.stops[row // beams] and self._may_complete(token)
        ]
        ended = [False] * len(input_ids)
        if rows:
            new = input_ids[rows, self.width :][:, -self.tail :]
            texts = self.tokenizer.batch_decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for row, text in zip(rows, texts, strict=True):
                ended[row] = first_stop(text, self.stops[row // beams]) is not None
        return torch.tensor(ended, device=input_ids.device)

    def _may_complete(self, token: int) -> bool:
        """Return whether a token can hold the end of a stop text."""
        if token not in self._completing:
            piece = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            # Alone a token may lose its space, or be a part of a character.
            unclear = not piece or HALF in piece or any(end.isspace() for end in self._ends)
            self._completing[token] = token not in self._silent and (unclear or not self._ends.isdisjoint(piece))
        return self._completing[token]


class ThinkingBudget(StoppingCriteria):
    """Ends a row that has thought, or written after its thinking, for as long as it may."""

    def __init__(self, end: Sequence[int], thinking: int, writing: int, width: int) -> None:
        """Take the ids of `</think>`, the tokens for thinking and for what follows, and the width of the prompt."""
        self.end, self.width, self.thinking, self.writing = list(end), width, thinking, writing

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Return [batch] booleans for ids [batch, prompt + new]."""
        # All rows at once and where they are: copied to the host, long thinking would cost more than the model.
        new = input_ids[:, self.width :]
        count, size = new.shape[1], len(self.end)
        if count < size:
            return torch.full((len(new),), count >= self.thinking, device=new.device)
        ends = (new.unfold(1, size, 1) == torch.tensor(self.end, device=new.device)).all(-1)
        written = count - size - ends.int().argmax(1)  # since the first `</think>`
        return torch.where(ends.any(1), written >= self.writing, torch.full_like(written, count) >= self.thinking)


class RefuseNaN(LogitsProcessor):
    """Refuses a model that computes no numbers; looked at once, before the first token of a batch."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        if input_ids.shape[1] == self.width:
            check_numbers(scores)
        return scores
