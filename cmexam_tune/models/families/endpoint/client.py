"""The client of one address: many requests at once, repeated where that helps, and counted.

The `openai` library sends, repeats after 429, 5xx and broken connections with growing pauses, and keeps the server's
Retry-After. Here is what it leaves to its users: how many at once, how many a minute, when to stop, and that the key
appears in no message.
"""

import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cmexam_tune.config import GenerationConfig, ModelConfig
from cmexam_tune.core.errors import TrainingStopped, UserError, first_line
from cmexam_tune.models.families.endpoint import address

INSTALL = "family endpoint needs the OpenAI client: pip install 'cmexam_tune[endpoint]'"
FIRST_TRIES = 3
"""So many requests may fail before any has succeeded."""


class Request(NamedTuple):
    """One thing to ask: its key, and the fields of the body beside the model's name."""

    key: str
    body: Mapping[str, Any]


class Reply(NamedTuple):
    """What came back for a request."""

    key: str
    text: str
    finish: Literal["stop", "length", "error"]
    reason: str | None = None
    """Why there is no text, where `finish` is `error`."""
    logprobs: tuple[Mapping[str, float], ...] = ()
    """For each token of the text, the log-probabilities of the most probable tokens, its own first."""


@dataclass
class Usage:
    """What was really sent and received."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: Counter[str] = field(default_factory=Counter)
    models: set[str] = field(default_factory=set)
    """Names that the server gave for the model."""
    fingerprints: set[str] = field(default_factory=set)
    """`system_fingerprint`: changes with the server's own configuration."""
    errors: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        """Return the counts as JSON holds them."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish": dict(sorted(self.finish.items())),
            "models": sorted(self.models),
            "system_fingerprints": sorted(self.fingerprints),
            "errors": dict(self.errors.most_common(20)),
        }


class Client:
    """Sends requests to one address. `usage` counts what has come back."""

    def __init__(self, model: ModelConfig, generation: GenerationConfig) -> None:
        """Check address and key; nothing is sent yet.

        Raises:
            UserError: no address, an address with a key in it, an unset variable, or the openai library is missing.
        """
        try:
            import openai
        except ImportError:
            raise UserError(INSTALL) from None
        self.usage = Usage()
        self.name = model.model_name_or_path
        self.address = address.address(model)
        self._key = address.key(model)
        self._generation = generation
        self._proven = False
        self._counting = threading.Lock()
        pace = _Pace(generation.requests_per_minute)
        self._library = openai
        self._openai = openai.OpenAI(
            base_url=self.address,
            api_key=self._key,
            timeout=generation.timeout,
            max_retries=generation.max_retries,
            http_client=openai.DefaultHttpxClient(event_hooks={"request": [pace]}),
        )

    def send(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Yield the replies as they come. Until one has succeeded, requests are sent one at a time.

        Raises:
            UserError: wrong key, model or address, or the first requests all fail.
            TrainingStopped: the server had answered, and then fails every time.
        """
        rest = iter(requests)
        yield from self._first(rest)
        failures = 0
        for reply in self._parallel(rest):
            failures = failures + 1 if reply.finish == "error" else 0
            yield reply
            if failures >= 2 * self._generation.concurrency:
                raise TrainingStopped(
                    f"{self.address}: the last {failures} requests failed, the last one with: {reply.reason} "
                    "What was answered is kept; start again to ask the rest."
                )

    def _first(self, rest: Iterator[Request]) -> list[Reply]:
        replies: list[Reply] = []
        while not self._proven and (request := next(rest, None)) is not None:
            reply = self.ask(request, retries=min(2, self._generation.max_retries))
            replies.append(reply)
            self._proven = reply.finish != "error"
            if len(replies) == FIRST_TRIES and not self._proven:
                raise UserError(f"{self.address}: the first {FIRST_TRIES} requests failed: {reply.reason}")
        return replies

    def _parallel(self, requests: Iterator[Request]) -> Iterator[Reply]:
        """Keep `concurrency` requests under way and as many waiting, so that no thread waits for the caller."""
        waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        many = self._generation.concurrency
        # Daemons: an interrupted program does not wait for requests that are under way.
        threads = [threading.Thread(target=self._work, args=(waiting, done), daemon=True) for _ in range(many)]
        for thread in threads:
            thread.start()
        open_ = 0
        try:
            for request in itertools.islice(requests, 2 * many):
                waiting.put(request)
                open_ += 1
            while open_:
                reply = done.get()
                if isinstance(reply, BaseException):
                    raise reply
                open_ -= 1
                if (request_ := next(requests, None)) is not None:
                    waiting.put(request_)
                    open_ += 1
                yield reply
        finally:
            while not waiting.empty():
                waiting.get()
            for _ in threads:
                waiting.put(None)

    def _work(self, waiting: "queue.SimpleQueue[Request | None]", done: "queue.SimpleQueue[Any]") -> None:
        while (request := waiting.get()) is not None:
            try:
                done.put(self.ask(request))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever reads the queue
                done.put(error)

    def ask(self, request: Request, retries: int | None = None) -> Reply:
        """Send one request and wait for its reply; one that fails for good has `finish` error.

        Raises:
            UserError: wrong key, model or address.
        """
        client = self._openai if retries is None else self._openai.with_options(max_retries=retries)
        try:
            create: Any = client.chat.completions.create if "messages" in request.body else client.completions.create
            reply = self._read(request.key, create(model=self.name, **request.body))
        except (self._library.OpenAIError, ValueError) as error:  # ValueError: a body that is no JSON
            reply = Reply(request.key, "", "error", self._reason(error))
        with self._counting:
            self.usage.requests += 1
            self.usage.finish[reply.finish] += 1
            if reply.reason:
                self.usage.errors[reply.reason] += 1
        return reply

    def _read(self, key: str, answer: Any) -> Reply:
        choices = getattr(answer, "choices", None)
        if not choices:
            return Reply(key, "", "error", "the server sent no completion; is this the address of an OpenAI API?")
        if (usage := answer.usage) is not None:
            with self._counting:
                self.usage.prompt_tokens += usage.prompt_tokens or 0
                self.usage.completion_tokens += usage.completion_tokens or 0
        with self._counting:
            self.usage.models |= {answer.model} - {None}
            self.usage.fingerprints |= {answer.system_fingerprint} - {None}
        choice = choices[0]
        if choice.finish_reason == "content_filter":
            return Reply(key, "", "error", "the server's content filter held the answer back.")
        message = getattr(choice, "message", None)  # a chat has one, a plain text has not
        text = choice.text if message is None else _spoken(message)
        return Reply(key, text or "", "length" if choice.finish_reason == "length" else "stop", None, _tops(choice))

    def _reason(self, error: Exception) -> str:
        """Return why a request failed for good.

        Raises:
            UserError: no other request could succeed either.
        """
        words = self.hide(_said(error))
        known = self._library
        if isinstance(error, known.AuthenticationError | known.PermissionDeniedError):
            raise UserError(
                f"{self.address}: the key is refused ({words}). Put a valid one into the environment variable that "
                "model.api_key_env names."
            )
        if isinstance(error, known.NotFoundError):
            raise UserError(
                f"{self.address}: no model {self.name!r} there, or no OpenAI API ({words}). "
                "model.model_name_or_path is its name at the address; model.base_url mostly ends in /v1."
            )
        if isinstance(error, known.APITimeoutError):
            return f"no answer within generation.timeout={self._generation.timeout:g} s."
        if isinstance(error, known.APIConnectionError) and not self._proven:
            raise UserError(f"{self.address}: cannot be reached ({words}). Is the server running? See model.base_url.")
        status = getattr(error, "status_code", None)
        return f"{status}: {words}" if status else words

    def hide(self, text: str) -> str:
        """Return a text in which the key is replaced by stars."""
        return text if self._key == address.NO_KEY else text.replace(self._key, "***")


class _Pace:
    """Called before each request is sent, repeated ones too: waits until it may go."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._clock, self._lock, self._next = clock, threading.Lock(), 0.0

    def __call__(self, request: object) -> None:
        """Wait for this request's turn."""
        if not self._gap:
            return
        with self._lock:
            turn = max(self._clock(), self._next)
            self._next = turn + self._gap
        time.sleep(max(0.0, turn - self._clock()))


def _said(error: Exception) -> str:
    """Return the server's own words for an error, in one line."""
    body = getattr(error, "body", None)
    if isinstance(body, Mapping) and isinstance(body.get("message"), str):
        return " ".join(body["message"].split())[:300]
    cause = error.__cause__
    return first_line(cause if cause is not None and not getattr(error, "status_code", None) else error)


def _spoken(message: Any) -> str:
    """Return a message's text with what the model thought before it, as local models write it."""
    thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    text = message.content or ""
    return f"<think>\n{thought}\n</think>\n\n{text}" if isinstance(thought, str) and thought else text


def _tops(choice: Any) -> tuple[Mapping[str, float], ...]:
    logs = getattr(choice, "logprobs", None)
    if logs is None:
        return ()
    if getattr(logs, "content", None):
        return tuple(
            {token.token: token.logprob, **{top.token: top.logprob for top in token.top_logprobs}}
            for token in logs.content
        )
    if tops := getattr(logs, "top_logprobs", None):
        own = zip(logs.tokens, logs.token_logprobs, strict=True)
        return tuple({token: log, **(top or {})} for (token, log), top in zip(own, tops, strict=True))
    return ()
