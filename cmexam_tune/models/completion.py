"""What answers, and what it returns: one `Completion` for each request, whoever wrote it.

An engine is a local decoder, a classifier or an address. `to_prediction` is the only place where a completion becomes
a line of a predictions file. Nothing here needs torch: an address is asked without it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from cmexam_tune.core.schema import Prediction
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.prompts import PromptRequest

T = TypeVar("T")
LEAST = -9999.0
"""Stands for the log-probability of what cannot come, as in OpenAI's protocol."""
BATCHES_PER_WINDOW = 64
"""Batches that are sorted by length together; see `windows`."""


@dataclass(frozen=True)
class Token:
    """A token that was written; log-probabilities are the model's own, before temperature, top_k and top_p."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]
    """The most probable tokens at this place and their log-probabilities, best first."""
    start: int
    """Characters of text before it."""


@dataclass(frozen=True)
class Completion:
    """What came back for one request, before an exam answer is read out of it."""

    request: PromptRequest
    text: str
    finish: Literal["stop", "length", "error"] | None
    """`stop`: ended by the model or a stop text; `length`: cut off by a limit; `error`: the request failed for good.
    None: nothing was written, the model chose `letters`."""
    letters: str | None = None
    """The chosen answer, where `finish` is None; None there: no answer could be chosen."""
    reason: str | None = None
    """Why a request failed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens written, the one that ended the text included."""
    probabilities: Mapping[str, float] | None = None
    """Probability of each allowed answer, together 1, where the model chose the most probable one."""
    logprobs: tuple[Token, ...] = ()
    """The tokens of the text, where log-probabilities were asked for."""
    prompt_text: str = ""
    """The prompt, where it was asked for."""
    prompt_logprobs: tuple[Token, ...] = ()
    """Its tokens, where log-probabilities were asked for too. Nothing says how probable the first one was."""
    token_ids: tuple[int, ...] = ()
    """Ids of the tokens written, where a server was asked for them."""
    model: str | None = None
    """A server's name for the model that wrote it."""
    fingerprint: str | None = None
    """A server's `system_fingerprint`."""


def to_prediction(completion: Completion, *, parse: bool = True) -> Prediction:
    """Return the line of a predictions file for a completion.

    Args:
        completion: what came back.
        parse: read an exam answer and its explanation out of a written text; without it the text stands for itself.
    """
    question, text = completion.request.question, completion.text
    answer, explanation = completion.letters, None
    if parse and completion.finish in ("stop", "length"):
        answer, explanation = answer_parsing.parse(text, question), answer_parsing.split_explanation(text)
    return Prediction(
        question.id,
        text,
        answer,
        explanation,
        finish=completion.finish,
        reason=completion.reason,
        probabilities=completion.probabilities,
    )


def normalised(scores: Mapping[str, float]) -> dict[str, float]:
    """Return answer -> probability among these answers alone, of their log-probabilities, to four digits."""
    most = max(scores.values())
    weights = {letters: math.exp(score - most) for letters, score in scores.items()}
    total = sum(weights.values())
    return {letters: float(f"{weight / total:.4g}") for letters, weight in weights.items()}


@dataclass
class Usage:
    """What a server was really sent and sent back."""

    mode: str | None = None
    """How answers were read, where the server lacks what `generation.mode` means for local models."""
    unseen: int = 0
    """Questions of whose letters none was among the most probable tokens that the server sends: not answered."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    models: set[str] = field(default_factory=set)
    """Names that the server gave for the model."""
    fingerprints: set[str] = field(default_factory=set)
    """`system_fingerprint`: changes with the server's own configuration."""
    errors: Counter[str] = field(default_factory=Counter)

    def count(self, completion: Completion) -> None:
        """Add what came back for a request."""
        self.requests += 1
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        self.finish[str(completion.finish)] += 1
        if completion.reason:
            self.errors[completion.reason] += 1
        if completion.model:
            self.models.add(completion.model)
        if completion.fingerprint:
            self.fingerprints.add(completion.fingerprint)

    def plain(self) -> dict[str, object]:
        """Return the counts as JSON holds them."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish": dict(sorted(self.finish.items())),
            "letters_unseen": self.unseen,
            "models": sorted(self.models),
            "system_fingerprints": sorted(self.fingerprints),
            "errors": dict(self.errors.most_common(20)),
        }


class Engine(Protocol):
    """A model bound to a configuration: what a family's `engine` returns."""

    @property
    def usage(self) -> Usage | None:
        """What was sent and received so far; None for a model in this process."""

    def effective_generation_config(self) -> dict[str, object]:
        """Return the decoding settings that apply, as JSON values for the note beside the predictions."""

    def answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield one completion for each request in the way that `generation.mode` names, in an order of its choice.

        Ids of the requests' questions are distinct.
        """


class TextEngine(Engine, Protocol):
    """An engine that can write: what a family whose task is `generate` returns."""

    def generate(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield free text for each request, whatever `generation.mode` says."""


def windows(requests: Sequence[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Yield the requests in windows of many batches.

    Within a window an engine sorts by length, so that a batch holds little padding; from window to window the order of
    the file is kept, so that a killed run has answered a beginning of it and not only the longest questions.
    """
    size = BATCHES_PER_WINDOW * batch_size
    for start in range(0, len(requests), size):
        yield requests[start : start + size]
