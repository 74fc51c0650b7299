"""A model behind an OpenAI-compatible address: vLLM, SGLang, `cmexam-tune serve`, a hosted service.

Nothing is loaded and nothing can be trained; torch is never imported. Start reading with `Remote` in `decoder.py`, what
is asked; `client.py` sends it, and `replies.py` is what is made of the server's bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.families.endpoint.decoder import Remote, Written
from cmexam_tune.models.features import Encoded
from cmexam_tune.prompts import plainly

if TYPE_CHECKING:
    import torch

__all__ = ["Remote", "Written"]

task: Literal["generate"] = "generate"
lora_targets: tuple[str, ...] = ()
prefix_shifts_positions = False
ONLY_ANSWERS = "family endpoint only answers: its model cannot be trained or exported. Use predict, judge or annotate."


def load(model: ModelConfig, questions: Sequence[Question] | None = None, device: str = "cpu") -> Loaded:
    """Return nothing: the model stays where it is.

    Raises:
        ConfigError: training is asked for.
    """
    if questions is not None:
        raise ConfigError(f"model.family: {ONLY_ANSWERS}")
    return Loaded.nothing()


def decoder(loaded: Loaded, config: Config) -> Remote:
    """Return what answers and writes; see `Remote`."""
    return Remote(config)


def answer(loaded: Loaded, questions: Sequence[Question], config: Config) -> Iterator[Prediction]:
    """Yield one prediction for each question; see `Remote.answer`."""
    return decoder(loaded, config).answer(plainly(questions, config))


def encode(loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig) -> Encoded:
    """Refuse.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"model.family: {ONLY_ANSWERS}")


def collate(loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> "dict[str, torch.Tensor]":
    """Refuse.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(f"model.family: {ONLY_ANSWERS}")
