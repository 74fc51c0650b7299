"""`cmexam-tune serve`: an OpenAI-compatible endpoint for a model.

`transformers serve` loads neither the first ChatGLM models nor P-tuning prefixes, so this is a small application of its
own: /v1/chat/completions, /v1/completions, /v1/models and /health. Requests that wait at the same time are one batch.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune import chat
from cmexam_tune.config import Config
from cmexam_tune.core import cli, documents
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.inference.serving.openai_protocol import (
    FIELDS,
    IGNORED,
    MOST_CHOICES,
    NEUTRAL,
    Refused,
    Stream,
    check_key,
    completion,
    conversation,
    count_of_choices,
    event,
    number,
    seed,
    stop_texts,
    texts_to_continue,
    top_tokens,
    with_usage,
)
from cmexam_tune.prompts import Asked, style_of

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    from cmexam_tune.inference.serving.batcher import Together, Waiting
    from cmexam_tune.models.families import Loaded
    from cmexam_tune.models.generation.items import Written
    from cmexam_tune.models.generation.streaming import RowOptions

EPILOG = """needs: pip install 'cmexam_tune[serve]'

examples:
  cmexam-tune serve --run runs/lora_llama
  cmexam-tune serve --config zeroshot_qwen model.model_name_or_path=/models/Qwen2.5-7B-Instruct --api-key SECRET
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "lora_llama", "messages": [{"role": "user", "content": "..."}]}'"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY = "CMEXAM_TUNE_API_KEY"
MAX_PORT = 65_535


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may cost."""

    body: int = 1 << 20
    """Bytes."""
    prompt_tokens: int = 8192
    output_tokens: int = 2048
    seconds: float = 300.0
    """From the request to its answer, waiting included."""


def application(
    config: Config,
    loaded: "Loaded",
    name: str,
    limits: Limits | None = None,
    api_key: str | None = None,
    *,
    ask_as_trained: bool = False,
) -> "FastAPI":
    """Return the web application that answers with `loaded` under the model name `name`.

    Messages go to the model as they are. With `ask_as_trained` exam questions are put into the words of the config's
    style, and its system text stands before conversations without one.

    Raises:
        UserError: fastapi is not installed.
    """
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import StreamingResponse
    except ImportError:
        raise UserError("serve needs fastapi and uvicorn: pip install 'cmexam_tune[serve]'") from None
    from cmexam_tune.inference.serving.batcher import Together

    app = FastAPI(title="cmexam_tune", docs_url=None, redoc_url=None, openapi_url=None)
    together = Together(loaded, config.generation.batch_size)
    service = Service(config, loaded, name, limits or Limits(), api_key, together, ask_as_trained)

    _answer_errors(app)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    entry = {"id": name, "object": "model", "created": 0, "owned_by": "cmexam_tune"}

    @app.get("/v1/models")
    def models(request: Request) -> dict[str, Any]:
        check_key(api_key, request.headers)
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{wanted:path}")
    def model(request: Request, wanted: str) -> dict[str, Any]:
        check_key(api_key, request.headers)
        service.check_name(wanted)
        return entry

    async def answer(request: Request) -> Any:
        try:
            wanted = service.read(request.headers, await _body(request, service.limits.body))
            progress = service.follow(wanted, request)
            # A request that is refused gets its status before anything is sent.
            got: Any = await anext(progress)
        except Exception as error:  # noqa: BLE001 - the client gets an error object, whatever happened
            return _error_object(error)
        chatting = "messages" in wanted
        if wanted.get("stream"):
            stream = Stream(wanted, name, chatting)
            return StreamingResponse(_events(got, progress, stream), media_type="text/event-stream")
        return completion(got, wanted, name, chatting)

    for route in (models, model, answer):
        route.__annotations__["request"] = Request
    app.post("/v1/chat/completions", response_model=None)(answer)
    app.post("/v1/completions", response_model=None)(answer)
    return app


def _answer_errors(app: "FastAPI") -> None:
    """Let whatever is refused, routes that do not exist included, be answered with OpenAI's error object."""

    def no_route(status: int, why: str) -> None:
        def refuse(request: "Request", error: Exception) -> "JSONResponse":
            return _error_object(Refused(status, f"{request.method} {request.url.path}: {why}."))

        app.add_exception_handler(status, refuse)

    app.add_exception_handler(Refused, lambda _, error: _error_object(error))
    no_route(404, "there is no such route")
    no_route(405, "the route is not for this method")


def _error_object(error: Exception) -> "JSONResponse":
    from fastapi.responses import JSONResponse

    refused = _refused(error)
    return JSONResponse(refused.content(), refused.status)


async def _body(request: "Request", limit: int) -> str:
    received = b""
    async for part in request.stream():
        received += part
        if len(received) > limit:
            raise Refused(413, f"the request is larger than {limit:,} bytes.")
    try:
        return received.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(400, "the request is not UTF-8.") from None


def _refused(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    cli.note(f"error: {type(error).__name__}: {error}")
    return Refused(500, "the model failed; see the server's output.")


async def _events(first: Any, progress: AsyncIterator[Any], stream: Stream) -> AsyncIterator[str]:
    """Yield server-sent events for the texts so far and for what was written in the end."""
    got = first
    try:
        while isinstance(got, Progress):
            if sent := stream.more(got.index, got.text):
                yield sent
            got = await anext(progress)
        for sent in stream.end(got):
            yield sent
    except Exception as error:  # noqa: BLE001 - the client gets an error object, whatever happened
        yield event(_refused(error).content())


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a choice is."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True)
class Service:
    """What is the same for every request."""

    config: Config
    loaded: "Loaded"
    name: str
    limits: Limits
    api_key: str | None
    together: "Together"
    ask_as_trained: bool = False

    def read(self, headers: Mapping[str, str], body: str) -> dict[str, Any]:
        """Return a request as the protocol describes it, or refuse it."""
        check_key(self.api_key, headers)
        try:
            wanted = documents.parse_json(body, "request")
        except UserError as error:
            raise Refused(400, str(error)) from None
        if not isinstance(wanted, dict):
            raise Refused(400, f"request: an object is needed, found {type(wanted).__name__}.")
        # Clients send null for what they leave open; it stands for a field that is not there, also for one unknown.
        wanted = {field: value for field, value in wanted.items() if value is not None}
        for field, value in wanted.items():
            if field in NEUTRAL and value not in NEUTRAL[field]:
                raise Refused(400, f"{field}: only {NEUTRAL[field][0]!r} is possible here.", field)
            if field not in FIELDS | IGNORED | NEUTRAL.keys():
                raise Refused(400, f"{field[:100]}: is not supported here.", field[:100])
        self.check_name(wanted.get("model", self.name))
        return wanted

    def check_name(self, model: object) -> None:
        """Refuse another model's name."""
        if model != self.name:
            raise Refused(404, f"model {model!r} is not served here; the model is {self.name!r}.", "model")

    async def follow(self, wanted: Mapping[str, Any], request: "Request") -> "AsyncIterator[Progress | list[Written]]":
        """Yield a choice's text so far whenever a stream may go on, and at last all that was written.

        Work on it stops when the client has left or time is up.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        waiting: list[Waiting] = []
        news: asyncio.Queue[Progress | None] = asyncio.Queue()

        def tell(index: int, text: str) -> None:
            loop.call_soon_threadsafe(news.put_nowait, Progress(index, text))

        try:
            prompts, config = self._asked(wanted, self._decoding(wanted))
            options = self._options(wanted, len(prompts), tell)
            for prompt in prompts:
                await self._measure(prompt, config)
            for index, row in enumerate(options):
                waiting.append(self.together.submit(prompts[index // count_of_choices(wanted)], config, row))
            ready = asyncio.gather(*(asyncio.wrap_future(row.future) for row in waiting))
            ready.add_done_callback(lambda _: news.put_nowait(None))
            end = time.monotonic() + self.limits.seconds
            while not ready.done():
                with contextlib.suppress(asyncio.TimeoutError):
                    if (progress := await asyncio.wait_for(news.get(), 0.2)) is not None:
                        yield progress
                if not ready.done() and (await request.is_disconnected() or time.monotonic() > end):
                    raise Refused(504, f"no answer within {self.limits.seconds:g} seconds.")
            yield ready.result()
        except UserError as error:
            raise Refused(400, str(error)) from None
        finally:
            for answer in waiting:
                answer.abandon()

    def _options(self, wanted: Mapping[str, Any], prompts: int, tell: Callable[[int, str], None]) -> "list[RowOptions]":
        """Return what is wanted of each answer, `n` of them to each of so many prompts."""
        from cmexam_tune.models.generation.streaming import RowOptions

        n, stop, first, top = count_of_choices(wanted), tuple(stop_texts(wanted)), seed(wanted), top_tokens(wanted)
        if prompts * n > MOST_CHOICES:
            raise Refused(400, f"n: {prompts * n} answers to all prompts; {MOST_CHOICES} are possible.", "n")
        options = []
        for index in range(prompts * n):
            # The answers to one prompt differ and yet are the same each time; two prompts do not matter to each other.
            own = None if first is None else first + index % n
            options.append(RowOptions(stop, own, top, functools.partial(tell, index) if wanted.get("stream") else None))
        return options

    async def _measure(self, asked: Asked, config: Config) -> None:
        """Refuse a prompt that is too long."""
        import asyncio

        tokens = await asyncio.to_thread(self.together.prompt_tokens, asked, config)
        if tokens > self.limits.prompt_tokens:
            raise Refused(400, f"{tokens:,} tokens of prompt; {self.limits.prompt_tokens:,} are possible.", "messages")

    def _asked(self, wanted: Mapping[str, Any], config: Config) -> tuple[list[Asked], Config]:
        """Return the prompts of a request and the config with which they are asked."""
        if "messages" in wanted:
            asked, config = self._conversation(conversation(wanted["messages"]), config)
            return [asked], config
        texts = texts_to_continue(wanted.get("prompt"))
        nothing = Question("prompt", "?", {"A": "?", "B": "?"}, None)
        bare = dataclasses.replace(config.prompt, template="none", system=None)

        def as_it_is(text: str) -> Asked:
            return Asked(nothing, lambda question: text)

        return [as_it_is(text) for text in texts], dataclasses.replace(config, prompt=bare)

    def _conversation(self, messages: chat.Messages, config: Config) -> tuple[Asked, Config]:
        """Return a chat as the model is asked and the config with which it is."""
        if self.ask_as_trained:
            asked = chat.asked(messages, style_of(config.prompt))
        else:
            # The recipe's system text was not sent either: a client measures the prompt that it knows.
            asked = chat.asked(messages)
            config = dataclasses.replace(config, prompt=dataclasses.replace(config.prompt, system=None))
        if asked.history and not chat.remembers(config, self.loaded):
            raise Refused(400, "messages: this model's template has no form for earlier turns. Send one.", "messages")
        return asked, config

    def _decoding(self, wanted: Mapping[str, Any]) -> Config:
        """Return the config with the request's decoding: it samples only where a temperature above 0 is asked for."""
        from cmexam_tune.models.generation import sampling

        arguments: dict[str, Any] = dict(self.config.generation.arguments)
        limit = number(wanted, "max_completion_tokens" if "max_completion_tokens" in wanted else "max_tokens", 1, None)
        if limit is not None and (limit != int(limit) or limit > self.limits.output_tokens):
            raise Refused(400, f"max_tokens: a whole number, at most {self.limits.output_tokens:,}.", "max_tokens")
        if limit or "max_new_tokens" in arguments:
            arguments["max_new_tokens"] = min(int(limit or arguments["max_new_tokens"]), self.limits.output_tokens)
        temperature, top_p = number(wanted, "temperature", 0, 2), number(wanted, "top_p", 0, 1)
        if temperature:
            arguments |= {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0}
        else:
            # The recipe may sample; its settings for that mean nothing here.
            arguments = {key: value for key, value in arguments.items() if key not in sampling.WARPERS}
            arguments["do_sample"] = False
        with_usage(wanted)  # refuse what cannot be used
        if top_tokens(wanted) is not None and arguments.get("num_beams", 1) != 1:
            raise Refused(400, "logprobs: not with generation.num_beams.", "logprobs")
        generation = dataclasses.replace(self.config.generation, arguments=arguments)
        return dataclasses.replace(self.config, generation=generation)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UserError: no such address or port, or another program listens there.
    """
    if not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}: 0 (any free one) to {MAX_PORT:,} are possible.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}. Choose another.") from None


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and serve until interrupted."""
    parser = cli.Parser("serve", "Serve a model by the OpenAI protocol, on this machine only by default.", EPILOG)
    chat.add_source(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: 8000)")
    parser.add_argument("--name", help="the model's name in requests (default: the run folder's or recipe's)")
    parser.add_argument("--api-key", default=os.environ.get(KEY), help=f"what clients must send (default: ${KEY})")
    parser.add_argument(
        "--ask-as-trained",
        action="store_true",
        help="put messages with lines of options (A ...) into the prompt that the model was trained on, as chat does, "
        "with the recipe's system text (default: messages go to the model as they are)",
    )
    for limit in dataclasses.fields(Limits):
        flag, unit = f"--max-{limit.name.replace('_', '-')}", "bytes " if limit.name == "body" else ""
        parser.add_argument(
            flag, metavar="N", type=limit.type, default=limit.default, help=f"{unit}for each request (%(default)s)"
        )
    got = parser.parse_intermixed_args(list(argv))
    limits = Limits(got.max_body, got.max_prompt_tokens, got.max_output_tokens, got.max_seconds)
    if min(dataclasses.astuple(limits)) <= 0:
        raise UserError("--max-...: a limit must be above 0.")
    with listen(got.host, got.port) as opened:
        config, loaded = chat.load(got.run or got.config, got.overrides)
        name = got.name or Path(got.run or got.config).resolve().stem
        app = application(config, loaded, name, limits, got.api_key, ask_as_trained=got.ask_as_trained)
        import uvicorn

        if got.host not in LOOPBACK and not got.api_key:
            cli.note(f"warning: {got.host} can be reached from other machines, and nothing asks for a key (--api-key).")
        cli.say(f"{name}: http://{got.host}:{opened.getsockname()[1]}/v1")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[opened])
    return None


if __name__ == "__main__":
    cli.run(main)
