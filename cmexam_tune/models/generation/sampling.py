"""Sampling that can be repeated: every row draws from its own seed, whatever batch, process or restart it is in."""

import copy
import random
from collections.abc import Sequence

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from cmexam_tune.core.errors import ConfigError

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


def split(chosen: GenerationConfig) -> tuple[GenerationConfig, LogitsProcessorList | None]:
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


class Draw(LogitsProcessor):
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
        numbers = torch.tensor([[generator.random()] for generator in self.generators], dtype=torch.float64)
        # The sums end at 1 only up to rounding, so the numbers are scaled to where they end. `right=True` passes over
        # tokens of probability 0, which repeat the sum before them.
        drawn = torch.searchsorted(sums, numbers.to(sums.device) * sums[:, -1:], right=True)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)
