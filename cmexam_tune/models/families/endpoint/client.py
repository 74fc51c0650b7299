"""The client of one address: many requests at once, counted, and safe from any reply.

The `openai` library sends, repeats (at most `generation.max_retries` times) after 429, 5xx and broken connections with
growing pauses, and waits as long as the server's Retry-After asks (up to two minutes in openai 3; beyond that the
request fails). Here is what it leaves to its users: how many at once and how many a minute, when to stop, limits of
time and size for a reply, and that nothing a server says can show the key or end the program.
"""

import asyncio
import functools
import importlib
import itertools
import json
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from cmexam_tune.config import GenerationConfig, ModelConfig
from cmexam_tune.core.errors import ConfigError, TrainingStopped, UserError
from cmexam_tune.models.completion import Completion, Usage
from cmexam_tune.models.families.endpoint import replies
from cmexam_tune.models.families.endpoint.replies import WHOLE, Secret
from cmexam_tune.prompts import PromptRequest

INSTALL = "family endpoint needs the OpenAI client: pip install 'cmexam_tune[endpoint]'"
FIRST_TRIES = 3
"""So many requests may fail before any has succeeded."""
LARGEST = 8 << 20
"""Bytes of a reply, decompressed: a text of 100,000 tokens needs a twentieth of it."""
NO_KEY = "EMPTY"
"""What is sent where no key is named: never a key in the environment for another address."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

T = TypeVar("T")
Body = Mapping[str, Any]
"""What is sent, beside the model's name."""


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
        self.address = _address(model)
        self._secret = _secret(model, generation)
        self._generation = generation
        self._proven = False
        self._library = openai
        try:
            http = _http_client(generation, follow_redirects=model.follow_redirects)
            self._openai = openai.AsyncOpenAI(
                base_url=self.address,
                api_key=self._secret.key,
                timeout=generation.timeout,
                max_retries=generation.max_retries,
                http_client=http,
            )
        except Exception as error:  # noqa: BLE001 - the library's own exceptions differ by its version
            raise ConfigError(
                f"model.base_url: {self.address[:100]} cannot be used, or a proxy that the environment names "
                f"({self._secret.line(str(error))})."
            ) from None
        # An address where nobody has answered yet is not asked for minutes.
        self._impatient = self._openai.with_options(max_retries=min(2, generation.max_retries))
        weakref.finalize(self, lambda openai: _in_background(openai.close()), self._openai).atexit = False

    def send(self, requests: Iterable[tuple[PromptRequest, Body]]) -> Iterator[Completion]:
        """Yield the completions as they come; `concurrency` requests are under way.

        Until one has succeeded, they are sent one at a time.

        Raises:
            UserError: wrong key, model or address, or the first requests all fail.
            TrainingStopped: the server had answered, and then fails every time.
        """
        remaining = iter(requests)
        yield from self._first(remaining)
        failures = 0
        for completion in self._parallel(remaining):
            failures = failures + 1 if completion.finish == "error" else 0
            yield completion
            if failures >= 2 * self._generation.concurrency:
                raise TrainingStopped(
                    f"{self.address}: the last {failures} requests failed, the last one with: {completion.reason} "
                    "What was answered is kept; start again to ask the rest."
                )

    def _first(self, remaining: Iterator[tuple[PromptRequest, Body]]) -> list[Completion]:
        """Return the completions up to the first that succeeds: a wrong address fails before anything is written."""
        completions: list[Completion] = []
        while not self._proven and (request := next(remaining, None)) is not None:
            completions.append(self.ask(*request))
            if len(completions) == FIRST_TRIES and not self._proven:
                reason = completions[-1].reason
                raise UserError(f"{self.address}: the first {FIRST_TRIES} requests failed: {reason}")
        return completions

    def _parallel(self, requests: Iterator[tuple[PromptRequest, Body]]) -> Iterator[Completion]:
        done: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
        under_way: set[Future[Completion]] = set()

        def start(count: int) -> None:
            for request, body in itertools.islice(requests, count):
                future = _in_background(self._ask(request, body))
                under_way.add(future)
                future.add_done_callback(done.put)

        try:
            start(self._generation.concurrency)
            while under_way:
                future = done.get()
                under_way.remove(future)
                start(1)  # before the caller works on the completion
                self.usage.count(completion := future.result())
                yield completion
        finally:
            for future in under_way:
                future.cancel()

    def ask(self, request: PromptRequest, body: Body) -> Completion:
        """Send one request and wait for its completion; after the last failed attempt its `finish` is `error`.

        Raises:
            UserError: wrong key, model or address.
        """
        self.usage.count(completion := _in_background(self._ask(request, body)).result())
        return completion

    async def _ask(self, request: PromptRequest, body: Body) -> Completion:
        client = self._openai if self._proven else self._impatient
        chat = "messages" in body
        create: Any = (client.chat.completions if chat else client.completions).with_raw_response.create
        try:
            # Raw: the library's own objects have whatever types the server sent.
            answer = await create(model=self.name, **body)
            completion = replies.read(request, answer.http_response.content, self._secret, chat)
        except (self._library.OpenAIError, replies.Unreadable) as error:
            return Completion(request, "", "error", reason=self._reason(error))
        self._proven = self._proven or completion.finish != "error"
        return completion

    def _reason(self, error: Exception) -> str:
        """Return why a request failed for good.

        Raises:
            UserError: no other request could succeed either.
        """
        library = self._library
        response = error.response if isinstance(error, library.APIStatusError) else None
        if response is not None:
            words = replies.complaint(response.content, self._secret)
        else:  # the library hides what broke the connection: the cause says it
            words = self._secret.line(str(error.__cause__ or error))
        if isinstance(error, library.AuthenticationError | library.PermissionDeniedError):
            raise UserError(
                f"{self.address}: the key is refused ({words}). Put a valid one into the environment variable that "
                "model.api_key_env names."
            )
        if isinstance(error, library.NotFoundError):
            raise UserError(
                f"{self.address}: no model {self.name!r} there, or no OpenAI API ({words}). "
                "model.model_name_or_path is its name at the address; model.base_url mostly ends in /v1."
            )
        if response is not None and response.is_redirect:
            target = self._secret.line(response.headers.get("location", ""))
            raise UserError(
                f"{self.address}: sends its clients on to {target}. Put that address into model.base_url if you "
                "trust it, or set model.follow_redirects=true."
            )
        if isinstance(error, library.APITimeoutError):
            return f"no answer within generation.timeout={self._generation.timeout:g} s."
        if isinstance(error, library.APIConnectionError) and not self._proven:
            raise UserError(f"{self.address}: cannot be reached ({words}). Is the server running? See model.base_url.")
        return f"{response.status_code}: {words}" if response is not None else words


def _address(model: ModelConfig) -> str:
    """Return `model.base_url`.

    Raises:
        ConfigError: there is none, it is no address, or it holds a key.
    """
    url = model.base_url
    if not url:
        raise ConfigError("model.base_url: family endpoint needs the server's address, e.g. http://127.0.0.1:8000/v1.")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        raise ConfigError("model.base_url: is no address. An example: http://127.0.0.1:8000/v1.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "model.base_url: must start with http:// or https:// and a host, e.g. http://127.0.0.1:8000/v1."
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "model.base_url: holds a user, a password, a query or a fragment (#), and would be written to every run. "
            "Put the key into an environment variable and its name into model.api_key_env."
        )
    return url


def _secret(model: ModelConfig, generation: GenerationConfig) -> Secret:
    """Return the key in the environment variable that `model.api_key_env` names, or `NO_KEY` where it names none.

    Raises:
        ConfigError: no such variable, something that is no name of one (it is not repeated: it may be the key), or the
            key stands in another setting, and would be written to every run.
    """
    name = model.api_key_env
    if name is None:
        return Secret(NO_KEY, shared=True)
    if not _NAME.fullmatch(name):
        raise ConfigError("model.api_key_env: must be the name of an environment variable, not the key itself.")
    shown = name if name.isupper() else "that it names"
    if not (value := os.environ.get(name, "").strip()):
        raise ConfigError(f"model.api_key_env: the environment variable {shown} is not set. Export it first.")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"model.api_key_env: the environment variable {shown} holds no key: only ASCII.")
    settings = {
        "model.base_url": unquote(str(model.base_url)),
        "model.model_name_or_path": model.model_name_or_path,
        "generation.extra_body": json.dumps(dict(generation.extra_body), ensure_ascii=False),
    }
    for setting, text in settings.items():
        if len(value) >= WHOLE and value in text:
            raise ConfigError(f"{setting}: holds the key, and would be written to every run. Leave it out there.")
    return Secret(value)


def _http_client(generation: GenerationConfig, *, follow_redirects: bool) -> Any:
    """Return the openai library's HTTP client, with a pace, and a limit of time and size for whole replies."""
    import openai

    base: Any = openai.DefaultAsyncHttpxClient
    # httpx2 since openai 3, httpx before.
    httpx: Any = importlib.import_module(base.__base__.__module__.partition(".")[0])
    gap = 60.0 / generation.requests_per_minute if generation.requests_per_minute else 0.0

    class BoundedClient(base):  # type: ignore[misc]
        """Every byte of every reply passes here: errors, redirects and repeated requests included."""

        next_turn = 0.0

        async def send(self, request: object, *, stream: bool = False, **options: object) -> Any:
            turn = max(time.monotonic(), self.next_turn)
            self.next_turn = turn + gap
            await asyncio.sleep(turn - time.monotonic())
            try:
                # The library's own timeout starts anew with every byte.
                return await asyncio.wait_for(self.receive(request, options), generation.timeout)
            except asyncio.TimeoutError:
                raise httpx.ReadTimeout("the reply did not end in time", request=request) from None

        async def receive(self, request: object, options: Mapping[str, object]) -> Any:
            response = await super().send(request, stream=True, **options)
            try:
                if "," in response.headers.get("content-encoding", ""):
                    raise openai.OpenAIError("the reply is compressed more than once.")
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > LARGEST:
                        raise openai.OpenAIError(f"the reply is larger than {LARGEST >> 20} MiB.")
            finally:
                await response.aclose()
            decoded = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(name, value) for name, value in response.headers.multi_items() if name not in decoded]
            return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)

    return BoundedClient(follow_redirects=follow_redirects, headers={"Accept-Encoding": "identity"})


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Start the event loop of all clients: in a thread, so that it also runs in a notebook and between answers."""
    loop = asyncio.new_event_loop()
    # A daemon: an interrupted program does not wait for requests that are under way.
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _in_background(work: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(work, _loop())
