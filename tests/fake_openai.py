"""A small OpenAI-compatible server on the loopback address that fails in every way that a real one does."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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


@dataclass(frozen=True)
class Said:
    """A completion."""

    text: str | None
    finish: str = "stop"
    logprobs: list[dict[str, float]] | None = None
    """For each token its most probable tokens, the chosen one first."""
    thought: str | None = None


Answer = str | Said | Fault
Script = Callable[[dict[str, Any], int], Answer]
"""(body of the request, how many requests were before) -> what comes back."""


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
        if logs is not None:
            own = [next(iter(tops.items())) for tops in logs]
            choice["logprobs"] = {
                "tokens": [t for t, _ in own], "token_logprobs": [p for _, p in own], "top_logprobs": logs,
                "text_offset": [0] * len(logs),
            }  # fmt: skip
    return {
        "id": "x", "object": "chat.completion" if chat else "text_completion", "created": 1, "model": f"{name}-0613",
        "system_fingerprint": "fp_1", "choices": [choice],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }  # fmt: skip


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16
        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
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
            if not fault.status:
                self.close_connection = True
                return
            error = {"error": {"message": fault.message, "type": "made", "param": None, "code": None}}
            self.reply(fault.status, fault.raw or json.dumps(error).encode(), fault.headers)

        def reply(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@contextmanager
def serving(script: Script, delay: float = 0.0) -> Iterator[Server]:
    """Serve `script` on a free port of the loopback address while the block runs."""
    server = Server(script, delay)
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
