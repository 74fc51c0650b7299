"""A small OpenAI-compatible server on the loopback address that fails in every way that a real one does."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

KEY = "sk-Very-Secret-123"


@dataclass(frozen=True)
class Fault:
    """An answer that is none: a status, or a broken connection."""

    status: int = 0
    """0: the connection is closed without a word."""
    message: str = "made to fail"
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent as the body, whatever it is."""
    wire: Callable[[], Iterable[bytes]] | None = None
    """Sent in place of everything: status line, headers and body."""


@dataclass(frozen=True)
class Said:
    """A completion."""

    text: str | None
    finish: str = "stop"
    logprobs: list[dict[str, float]] | None = None
    """For each token its most probable tokens, the chosen one first."""
    thought: str | None = None
    prompt_tokens: int = 7
    token_ids: list[int] | None = None


Answer = str | Said | Fault
Script = Callable[[dict[str, Any], int], Answer]
"""(body of the request, how many requests were before) -> what comes back."""


Model = Callable[[str, Sequence[str]], Mapping[str, float]]
"""(rendered prompt, tokens written so far) -> log-probability of each next token; `END` ends the text."""
END = "<end>"
MARKS = re.compile(r"<\w+>|.", re.DOTALL)


def vllm(model: Model, *, continues: bool = True, choices: bool = True) -> Script:
    """Return a script that answers as vLLM documents it, with a chat template of its own and greedy decoding.

    Args:
        model: what the next token may be.
        continues: whether it knows `continue_final_message`; else the field is ignored, as most servers do.
        choices: whether it knows `structured_outputs`; else this field is ignored.
    """

    def script(body: dict[str, Any], count: int) -> Answer:
        going_on = continues and body.get("continue_final_message", False)
        opening = body.get("add_generation_prompt", True) if continues else True
        if going_on and opening:
            return Fault(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        prompt = body.get("prompt", "")
        for message in body.get("messages", []):
            prompt += f"<{message['role']}>{message['content']}{END}"
        if "messages" in body:
            prompt = prompt.removesuffix(END) if going_on else prompt
            prompt += "<assistant>" if opening else ""
        allowed = body.get("structured_outputs", {}).get("choice") if choices else None
        tokens, tops = _written(model, prompt, body["max_tokens"], allowed)
        wanted = body.get("top_logprobs", body.get("logprobs"))
        shown = [dict(sorted(top.items(), key=lambda pair: -pair[1])[:wanted]) for top in tops] if wanted else None
        return Said("".join(tokens), logprobs=shown, prompt_tokens=len(MARKS.findall(prompt)))

    return script


def _written(
    model: Model, prompt: str, limit: int, allowed: Sequence[str] | None
) -> tuple[list[str], list[Mapping[str, float]]]:
    """Return the tokens of the most probable text, and what each could have been; `allowed` is a grammar."""
    tokens: list[str] = []
    tops: list[Mapping[str, float]] = []
    while len(tokens) < limit:
        top = model(prompt, tokens)
        said = "".join(tokens)
        if allowed is not None:
            top = {token: log for token, log in top.items() if any(text.startswith(said + token) for text in allowed)}
        token = max(top, key=top.__getitem__, default=END)
        if token == END:
            break
        tokens.append(token)
        tops.append(top)
    return tokens, tops


class Server:
    """What was asked, and where."""

    def __init__(self, script: Script, delay: float = 0.0) -> None:
        self.script, self.delay = script, delay
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.busy = self.busiest = 0
        self.lock = threading.Lock()
        self.url = ""
        self.tokens: Callable[[dict[str, Any]], list[int]] = lambda body: []

    def texts(self) -> list[str]:
        """Return the last thing that was said in each request."""
        return [body["messages"][-1]["content"] if "messages" in body else body["prompt"] for body in self.bodies]


def completion(said: Said, chat: bool, name: str) -> dict[str, Any]:
    logs = said.logprobs
    choice: dict[str, Any] = {"index": 0, "finish_reason": said.finish, "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": said.text}
        if said.thought is not None:
            choice["message"]["reasoning_content"] = said.thought
        if logs is not None:
            tokens = [[{"token": t, "logprob": p, "bytes": None} for t, p in tops.items()] for tops in logs]
            choice["logprobs"] = {"content": [{**tops[0], "top_logprobs": tops} for tops in tokens]}
    else:
        choice["text"] = said.text
        choice["token_ids"] = said.token_ids
        if logs is not None:
            own = [next(iter(tops.items())) for tops in logs]
            choice["logprobs"] = {
                "tokens": [t for t, _ in own], "token_logprobs": [p for _, p in own], "top_logprobs": logs,
                "text_offset": [0] * len(logs),
            }  # fmt: skip
    return {
        "id": "x", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": f"{name}-0613",
        "system_fingerprint": "fp_1", "choices": [choice],
        "usage": {
            "prompt_tokens": said.prompt_tokens, "completion_tokens": 3, "total_tokens": said.prompt_tokens + 3,
        },
    }  # fmt: skip


class Replying(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        told = {"/health": {}, "/version": {"version": "0.0.fake"}}.get(self.path)
        self.reply(404 if told is None else 200, json.dumps(told).encode(), {})

    def reply(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(Replying):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                self.reply(200, json.dumps({"tokens": server.tokens(body)}).encode(), {})
                return
            with server.lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.paths.append(self.path)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                server.times.append(time.monotonic())
                server.busy += 1
                server.busiest = max(server.busiest, server.busy)
            try:
                answer = server.script(body, number)
                time.sleep(server.delay)
            finally:
                with server.lock:
                    server.busy -= 1
            if isinstance(answer, Fault):
                self.fail(answer)
                return
            said = Said(answer) if isinstance(answer, str) else answer
            chat = self.path.endswith("/chat/completions")
            self.reply(200, json.dumps(completion(said, chat, body["model"])).encode(), {})

        def fail(self, fault: Fault) -> None:
            if fault.wire:
                self.close_connection = True
                with contextlib.suppress(OSError):  # the client has left
                    for part in fault.wire():
                        self.wfile.write(part)
                        self.wfile.flush()
                return
            if not fault.status:
                self.close_connection = True
                return
            error = {"error": {"message": fault.message, "type": "made", "param": None, "code": None}}
            self.reply(fault.status, json.dumps(error).encode() if fault.raw is None else fault.raw, fault.headers)

    return Handler


class Listener(ThreadingHTTPServer):
    """Takes as many connections at once as a client may open."""

    request_queue_size = 1024
    daemon_threads = True


@contextmanager
def serving(script: Script, delay: float = 0.0) -> Iterator[Server]:
    """Serve `script` on a free port of the loopback address while the block runs."""
    server = Server(script, delay)
    http = Listener(("127.0.0.1", 0), handler(server))
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            # Clients of a server without TLS need no certificates, which take longer to read than the answers.
            environment.delenv("SSL_CERT_FILE", raising=False)
            environment.setenv("SSL_CERT_DIR", os.devnull)
            yield server
    finally:
        http.shutdown()
        http.server_close()
