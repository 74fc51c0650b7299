"""A model behind an OpenAI-compatible address: vLLM, SGLang, `cmexam-tune serve`, a hosted service.

Nothing is loaded and nothing can be trained; torch is never imported. Start reading with `Remote` in `remote.py`, what
is asked; `client.py` sends it, and `replies.py` is what is made of the server's bytes.
"""

from collections.abc import Iterable

from cmexam_tune.config import Config, ModelConfig
from cmexam_tune.core.schema import Question
from cmexam_tune.models.families import Loaded, Writer
from cmexam_tune.models.families.endpoint.remote import Remote

__all__ = ["Endpoint", "Remote"]


class Endpoint(Writer):
    """A model that somebody else runs."""

    only_answers = True

    def open(self, model: ModelConfig, questions: Iterable[Question] | None, device: str) -> Loaded:
        """Return nothing: the model stays where it is."""
        return Loaded.nothing()

    def engine(self, loaded: Loaded, config: Config) -> Remote:
        """Return what answers and writes; see `Remote`."""
        return Remote(config)
