"""The server: what every protocol has in common; `openai_protocol.py` is one protocol, `app.py` the application.

A protocol is a file with a `ProtocolRequest` for each of its routes. These say what is wanted of the model as a
`GenerationRequest`, and put what the model wrote into the protocol's words. `app.ROUTES` names them.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from cmexam_tune.inference.conversation import Messages
    from cmexam_tune.models.completion import Completion


Prompt: TypeAlias = "Messages | str | TokenIds"
"""A conversation; or a text or token ids that go to the model as they are, without its template."""


@dataclass(frozen=True)
class TokenIds:
    """A prompt as the model reads it."""

    ids: tuple[int, ...]


class Refused(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        """Name the HTTP status, what is wrong and the field of the request that it is about."""
        super().__init__(message)
        self.status, self.field = status, field


@dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    body: int = 1 << 20
    """Bytes."""
    prompt_tokens: int = 8192
    output_tokens: int = 2048
    seconds: float = 300.0
    """From the request to its answer, waiting included."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for text, in the form that all protocols share."""

    prompts: "Sequence[Prompt]"
    n: int = 1
    """Completions of each prompt."""
    max_tokens: int | None = None
    """Of each completion; None: what the recipe says."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    """How many of the most probable tokens are wanted at each place; None: no log-probabilities."""
    echo: bool = False
    """Whether the prompt's tokens are wanted as well, with their log-probabilities."""
    continues: bool = False
    """Whether the model goes on with the last message of each conversation, its own, instead of answering it."""
    choices: Sequence[str] = ()
    """The only texts that may be written; none: any."""


class EventStream(Protocol):
    """The completions of one request as server-sent events."""

    def progress(self, index: int, text: str) -> str:
        """Return the event for what is new in the text of a completion so far; empty if nothing is."""

    def end(self, completions: "Sequence[Completion]") -> Iterator[str]:
        """Yield what is missing of the texts, and what closes the stream."""


class ProtocolRequest(BaseModel):
    """A request of one route. Its fields are those of the protocol; any other is refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    stream: bool = False

    @staticmethod
    @abstractmethod
    def key(headers: Mapping[str, str]) -> str:
        """Return the API key that a client sent, empty if none."""

    @staticmethod
    @abstractmethod
    def error(refused: Refused) -> dict[str, object]:
        """Return the body of an answer that says why there is none."""

    @abstractmethod
    def generation(self) -> GenerationRequest:
        """Return what is wanted of the model.

        Raises:
            Refused: fields that do not go together.
        """

    @abstractmethod
    def answer(self, completions: "Sequence[Completion]", name: str) -> dict[str, object]:
        """Return what the model called `name` wrote, `n` completions of each prompt in the order of the prompts."""

    @abstractmethod
    def events(self, name: str) -> EventStream:
        """Return the stream of an answer by the model called `name`.

        Raises:
            Refused: a protocol without streams.
        """


def event(content: Mapping[str, object]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
