"""`cmexam-tune serve`: an OpenAI-compatible endpoint for a trained model.

`transformers serve` loads neither the first ChatGLM models nor P-tuning prefixes, so this is a small application of its
own: /v1/models and /v1/chat/completions, with or without streaming, one request at a time.
"""

import dataclasses
import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cmexam_tune import chat
from cmexam_tune.core import cli
from cmexam_tune.core.config import Config
from cmexam_tune.core.errors import UserError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from cmexam_tune.families import Loaded

EPILOG = """needs: pip install 'cmexam_tune[serve]'

example:
  cmexam-tune serve --run runs/lora_llama
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "lora_llama", "messages": [{"role": "user", "content": "..."}]}'"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def application(config: Config, loaded: "Loaded", name: str) -> "FastAPI":
    """Return the web application that answers with `loaded` under the model name `name`.

    Raises:
        UserError: fastapi is not installed.
    """
    try:
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse, StreamingResponse
    except ImportError:
        raise UserError("serve needs fastapi and uvicorn: pip install 'cmexam_tune[serve]'") from None
    app = FastAPI(title="cmexam_tune")
    busy = threading.Lock()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "cmexam_tune"}
        return {"object": "list", "data": [entry]}

    def answer(request: dict[str, Any]) -> Any:
        try:
            with busy:
                said = chat.reply(_config(config, request), loaded, _messages(request, name))
        except UserError as error:
            kind = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": kind}, status_code=400)
        if request.get("stream"):
            return StreamingResponse(_events(said, name), media_type="text/event-stream")
        return _completion(said, name)

    app.post("/v1/chat/completions", response_model=None)(answer)
    return app


def _messages(request: Mapping[str, Any], name: str) -> list[dict[str, str]]:
    if request.get("model", name) != name:
        raise UserError(f"model {request['model']!r} is not served here; the model is {name!r}.")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError("messages: a list with at least one message is needed.")
    found = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        if not isinstance(content, str) or message.get("role") not in ("system", "user", "assistant"):
            raise UserError(f"messages[{number}]: a role (system, user, assistant) and a content of text are needed.")
        found.append({"role": str(message["role"]), "content": content})
    return found


def _config(config: Config, request: Mapping[str, Any]) -> Config:
    """Return the run's config with the request's decoding: it samples only where a temperature above 0 is asked for."""
    changes: dict[str, Any] = {}
    if limit := request.get("max_completion_tokens") or request.get("max_tokens"):
        changes["max_new_tokens"] = limit
    if request.get("temperature"):
        changes |= {"do_sample": True, "temperature": request["temperature"], "top_p": request.get("top_p") or 1.0}
    if request.get("n", 1) != 1:
        raise UserError("n: one completion for each request.")
    for key, value in changes.items():
        if key != "do_sample" and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise UserError(f"{key}: a number above 0 is needed, got {value!r}.")
    generation = dataclasses.replace(config.generation, arguments={**config.generation.arguments, **changes})
    return dataclasses.replace(config, generation=generation)


def _completion(said: chat.Reply, name: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": said.text}, "finish_reason": "stop"}
    usage = {
        "prompt_tokens": said.prompt_tokens,
        "completion_tokens": said.completion_tokens,
        "total_tokens": said.prompt_tokens + said.completion_tokens,
    }
    return {**_envelope("chat.completion", name), "choices": [choice], "usage": usage}


def _events(said: chat.Reply, name: str) -> Iterator[str]:
    head = _envelope("chat.completion.chunk", name)
    for delta, end in (({"role": "assistant", "content": said.text}, None), ({}, "stop")):
        chunk = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


def _envelope(kind: str, name: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and serve until interrupted."""
    parser = cli.Parser(
        "serve", "Serve a trained model by the OpenAI protocol, on this machine only by default.", EPILOG
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="a run folder of cmexam-tune train")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--name", help="the model's name in requests (default: the run folder's)")
    cli.add_overrides(parser)
    got = parser.parse_intermixed_args(list(argv))
    config, loaded = chat.load(got.run, got.overrides)
    app = application(config, loaded, got.name or Path(got.run).resolve().name)
    import uvicorn

    if got.host not in LOOPBACK:
        cli.note(f"warning: {got.host} can be reached from other machines, and nothing asks for a password.")
    uvicorn.run(app, host=got.host, port=got.port, log_level="warning")
    return None


if __name__ == "__main__":
    cli.run(main)
