"""A model behind an OpenAI-compatible address: vLLM, SGLang, `cmexam-tune serve`, a hosted service.

Nothing is loaded and nothing can be trained; torch is never imported. Start reading with `Remote` in `decoder.py`, what
is asked; `client.py` sends it, and `replies.py` is what is made of the server's bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cmexam_tune.config import Config, ModelConfig, PromptConfig
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Question
from cmexam_tune.models.families import Loaded, Writer
from cmexam_tune.models.families.endpoint.decoder import Remote, Written
from cmexam_tune.models.features import Encoded

if TYPE_CHECKING:
    import torch

__all__ = ["Endpoint", "Remote", "Written"]

ONLY_ANSWERS = "family endpoint only answers: its model cannot be trained or exported. Use predict, judge or annotate."


class Endpoint(Writer):
    """A model that somebody else runs."""

    def load(self, model: ModelConfig, questions: Iterable[Question] | None = None, device: str = "cpu") -> Loaded:
        """Return nothing: the model stays where it is.

        Raises:
            ConfigError: training is asked for.
        """
        if questions is not None:
            raise ConfigError(f"model.family: {ONLY_ANSWERS}")
        return Loaded.nothing()

    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Return nothing; see `load`."""
        return Loaded.nothing()

    def decoder(self, loaded: Loaded, config: Config) -> Remote:
        """Return what answers and writes; see `Remote`."""
        return Remote(config)

    def encode(
        self, loaded: Loaded, questions: Sequence[Question], prompt: PromptConfig, model: ModelConfig
    ) -> Encoded:
        """Refuse: nothing is trained here."""
        raise ConfigError(f"model.family: {ONLY_ANSWERS}")

    def collate(self, loaded: Loaded, groups: Sequence[Sequence[Mapping[str, Any]]]) -> "dict[str, torch.Tensor]":
        """Refuse: nothing is trained here."""
        raise ConfigError(f"model.family: {ONLY_ANSWERS}")
