"""The web application: it reads requests within limits, lets the model answer, and stops when nobody waits any more."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from cmexam_tune.config import Config
from cmexam_tune.core import cli, documents
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.inference import conversation
from cmexam_tune.inference.serving import (
    EventStream,
    GenerationRequest,
    Limits,
    Prompt,
    ProtocolRequest,
    Refused,
    TokenIds,
    event,
    openai_protocol,
)
from cmexam_tune.inference.serving.batcher import DynamicBatcher, Pending
from cmexam_tune.models.completion import Completion
from cmexam_tune.models.families import Loaded
from cmexam_tune.models.generation import sampling
from cmexam_tune.models.generation.streaming import RowOptions
from cmexam_tune.prompts import PromptRequest, resolve_style

ROUTES: Mapping[str, type[ProtocolRequest]] = {**openai_protocol.ROUTES}
"""Path -> what is read there. Another protocol is a file with its requests, and an entry here."""
MAX_MESSAGE = 200
"""Characters: what is wrong may be the name of a field, and a client may send any."""
POLL = 0.2
"""Seconds between two looks at whether the client is still there."""


def application(
    config: Config,
    loaded: Loaded,
    name: str,
    limits: Limits | None = None,
    api_key: str | None = None,
    *,
    ask_as_trained: bool = False,
) -> FastAPI:
    """Return the web application that answers with `loaded` under the model name `name`.

    Messages go to the model as they are. With `ask_as_trained` exam questions are put into the words of the config's
    style, and its system text stands before conversations without one.
    """
    app = FastAPI(title="cmexam_tune", docs_url=None, redoc_url=None, openapi_url=None)
    batcher = DynamicBatcher(loaded, config.generation.prompts_at_once)
    service = Service(config, loaded, name, limits or Limits(), api_key, batcher, ask_as_trained)
    # What belongs to no route of a protocol is answered in OpenAI's words.
    error_of = openai_protocol.OpenAIRequest.error

    @app.exception_handler(Refused)
    def refuse(request: Request, refused: Refused) -> JSONResponse:
        return JSONResponse(error_of(refused), refused.status)

    @app.exception_handler(404)
    def no_route(request: Request, error: Exception) -> JSONResponse:
        return refuse(request, Refused(404, f"{request.method} {request.url.path}: there is no such route."))

    @app.exception_handler(405)
    def no_method(request: Request, error: Exception) -> JSONResponse:
        return refuse(request, Refused(405, f"{request.method} {request.url.path}: the route is not for this method."))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models(request: Request) -> dict[str, Any]:
        service.check_key(openai_protocol.OpenAIRequest.key(request.headers))
        return {"object": "list", "data": [openai_protocol.model_object(name)]}

    @app.get("/v1/models/{model:path}")
    def model(request: Request, model: str) -> dict[str, Any]:
        service.check_key(openai_protocol.OpenAIRequest.key(request.headers))
        service.check_name(model)
        return openai_protocol.model_object(name)

    for path, kind in ROUTES.items():
        app.add_route(path, _answers(service, kind), methods=["POST"])
    return app


def _answers(service: "Service", kind: type[ProtocolRequest]) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers the requests of one route."""

    async def answer(http: Request) -> Response:
        try:
            service.check_key(kind.key(http.headers))
            request = read(kind, await _body(http, service.limits))
            service.check_name(request.model or service.name)
            stream = request.events(service.name) if request.stream else None
            news = service.generate(request.generation(), http, request.stream)
            # A request that is refused gets its status before anything is sent.
            first = await anext(news)
        except Exception as error:  # noqa: BLE001 - the client gets an error object, whatever happened
            refused = _refused(error)
            return JSONResponse(kind.error(refused), refused.status)
        if stream is not None:
            return StreamingResponse(_events(first, news, stream, kind), media_type="text/event-stream")
        assert not isinstance(first, PartialText), "only streams are told of progress"
        return JSONResponse(request.answer(first, service.name))

    return answer


async def _body(http: Request, limits: Limits) -> str:
    received = b""

    async def receive() -> None:
        nonlocal received
        async for part in http.stream():
            received += part
            if len(received) > limits.body:
                raise Refused(413, f"the request is larger than {limits.body:,} bytes.")

    try:
        await asyncio.wait_for(receive(), limits.seconds)
        return received.decode("utf-8")
    except asyncio.TimeoutError:
        raise Refused(408, f"no whole request within {limits.seconds:g} seconds.") from None
    except UnicodeDecodeError:
        raise Refused(400, "the request is not UTF-8.") from None


def read(kind: type[ProtocolRequest], body: str) -> ProtocolRequest:
    """Return the request that a body of JSON holds.

    Raises:
        Refused: no JSON, or not what the protocol describes; names the first field that is wrong.
    """
    try:
        values = documents.parse_json(body, "request")
    except UserError as error:
        raise Refused(400, str(error)) from None
    if not isinstance(values, dict):
        raise Refused(400, f"request: an object is needed, found {type(values).__name__}.")
    # Clients send null for what they leave open; it stands for a field that is not there, also for one unknown.
    problems = Problems()
    request: ProtocolRequest | None = build(
        kind, {field: value for field, value in values.items() if value is not None}, "", problems
    )
    if request is None:
        field, _, _ = problems[0].partition(": ")
        raise Refused(400, f"{problems[0][:MAX_MESSAGE]}.", field.partition(".")[0][:MAX_MESSAGE])
    return request


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, UserError):
        return Refused(400, str(error))
    cli.note(f"error: {type(error).__name__}: {error}")
    return Refused(500, "the model failed; see the server's output.")


@dataclass(frozen=True)
class PartialText:
    """How far a completion is."""

    index: int
    text: str


News = PartialText | list[Completion]
"""A completion's text so far; at last all completions."""


async def _events(
    first: News, news: AsyncIterator[News], stream: EventStream, kind: type[ProtocolRequest]
) -> AsyncIterator[str]:
    """Yield server-sent events for the texts so far and for what was written in the end."""
    latest = first
    try:
        while isinstance(latest, PartialText):
            if sent := stream.progress(latest.index, latest.text):
                yield sent
            latest = await anext(news)
        for sent in stream.end(latest):
            yield sent
    except Exception as error:  # noqa: BLE001 - the client gets an error object, whatever happened
        yield event(kind.error(_refused(error)))


@dataclass(frozen=True)
class Service:
    """What is the same for every request."""

    config: Config
    loaded: Loaded
    name: str
    limits: Limits
    api_key: str | None
    batcher: DynamicBatcher
    ask_as_trained: bool = False

    def check_key(self, key: str) -> None:
        """Refuse a request without the key, if there is one."""
        # The time of an ordinary comparison tells how much of a guessed key is right. Bytes, because
        # `compare_digest` refuses text beyond ASCII.
        if self.api_key is not None and not hmac.compare_digest(key.encode(), self.api_key.encode()):
            raise Refused(401, "the API key is missing or wrong (Authorization: Bearer KEY).")

    def check_name(self, model: str) -> None:
        """Refuse another model's name."""
        if model != self.name:
            raise Refused(404, f"model {model!r} is not served here; the model is {self.name!r}.", "model")

    async def generate(self, wanted: GenerationRequest, http: Request, stream: bool) -> AsyncIterator[News]:
        """Yield a completion's text so far whenever a stream may go on, and at last all completions.

        Work on them stops when the client has left or time is up.

        Raises:
            Refused: see `_sampled` and `_prompt`; or no answer in time.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[PartialText | None] = asyncio.Queue()
        pending: list[Pending] = []

        def tell(index: int, text: str) -> None:
            # Called by the thread that generates.
            loop.call_soon_threadsafe(news.put_nowait, PartialText(index, text))

        try:
            config = self._sampled(wanted)
            prompts = [await self._prompt(prompt, config, continues=wanted.continues) for prompt in wanted.prompts]
            for index in range(len(prompts) * wanted.n):
                request, row_config = prompts[index // wanted.n]
                pending.append(
                    self.batcher.submit(
                        request,
                        row_config,
                        RowOptions(
                            tuple(wanted.stop),
                            # Completions of one prompt differ and yet are the same each time; prompts do not matter
                            # to each other.
                            None if wanted.seed is None else wanted.seed + index % wanted.n,
                            wanted.top_logprobs,
                            wanted.echo,
                            tuple(wanted.choices),
                            functools.partial(tell, index) if stream else None,
                        ),
                    )
                )
            ready = asyncio.gather(*(asyncio.wrap_future(row.future) for row in pending))
            # Wakes the loop below, which would otherwise sleep out its POLL.
            ready.add_done_callback(lambda _: news.put_nowait(None))
            end = time.monotonic() + self.limits.seconds
            while not ready.done():
                with contextlib.suppress(asyncio.TimeoutError):
                    if (progress := await asyncio.wait_for(news.get(), POLL)) is not None:
                        yield progress
                if not ready.done() and (await http.is_disconnected() or time.monotonic() > end):
                    raise Refused(504, f"no answer within {self.limits.seconds:g} seconds.")
            yield ready.result()
        finally:
            for row in pending:
                row.abandon()

    def _sampled(self, wanted: GenerationRequest) -> Config:
        """Return the config with the request's decoding: it samples only where a temperature above 0 is asked for."""
        arguments: dict[str, Any] = dict(self.config.generation.arguments)
        most = self.limits.output_tokens
        if wanted.max_tokens is not None and wanted.max_tokens > most:
            raise Refused(400, f"max_tokens: a whole number, at most {most:,}.", "max_tokens")
        if wanted.max_tokens is not None or "max_new_tokens" in arguments:
            arguments["max_new_tokens"] = min(wanted.max_tokens or arguments["max_new_tokens"], most)
        if wanted.temperature:
            arguments |= {"do_sample": True, "temperature": wanted.temperature, "top_p": wanted.top_p}
        else:
            # The recipe may sample; its settings for that mean nothing here.
            arguments = {key: value for key, value in arguments.items() if key not in sampling.WARPERS}
            arguments["do_sample"] = False
        if arguments.get("num_beams", 1) != 1:
            if wanted.top_logprobs is not None:
                raise Refused(400, "logprobs: not with generation.num_beams.", "logprobs")
            if wanted.choices:
                raise Refused(400, "structured_outputs: not with generation.num_beams.", "structured_outputs")
        generation = dataclasses.replace(self.config.generation, arguments=arguments)
        return dataclasses.replace(self.config, generation=generation)

    async def _prompt(self, prompt: Prompt, config: Config, *, continues: bool) -> tuple[PromptRequest, Config]:
        """Return a prompt as the model is asked, and the config with which it is.

        Raises:
            Refused: it is too long, or the model's template has no form for it.
        """
        if isinstance(prompt, str):
            request = PromptRequest(conversation.NOTHING, lambda question: prompt)
            section = dataclasses.replace(config.prompt, template="none", system=None)
        elif isinstance(prompt, TokenIds):
            self._check_ids(prompt.ids)
            request, section = PromptRequest(conversation.NOTHING, lambda question: "", ids=prompt.ids), config.prompt
        elif self.ask_as_trained:
            style = resolve_style(config.prompt)
            request, section = conversation.to_request(prompt, style, continues=continues), config.prompt
        else:
            # The recipe's system text was not sent either: a client measures the prompt that it knows.
            request = conversation.to_request(prompt, continues=continues)
            section = dataclasses.replace(config.prompt, system=None)
        config = dataclasses.replace(config, prompt=section)
        if (request.history or request.since) and not conversation.remembers(config, self.loaded):
            raise Refused(400, "messages: this model's template has no form for earlier turns. Send one.", "messages")
        tokens = await asyncio.to_thread(self.batcher.prompt_tokens, request, config)
        if tokens > self.limits.prompt_tokens:
            raise Refused(400, f"{tokens:,} tokens of prompt; {self.limits.prompt_tokens:,} are possible.", "messages")
        return request, config

    def _check_ids(self, ids: Sequence[int]) -> None:
        embeddings: Any = self.loaded.model.get_input_embeddings()
        if any(token >= embeddings.num_embeddings for token in ids):
            most = embeddings.num_embeddings - 1
            raise Refused(400, f"prompt: ids to {most:,} are possible, found {max(ids):,}.", "prompt")
