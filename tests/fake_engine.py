"""A server that `model.engine_command` can start: as slow, and as easily killed, as the test says.

`python fake_engine.py FOLDER --port N ...`: FOLDER/pids gets the ids of the server and of a worker that it starts,
FOLDER/asked every question, and no question is answered that would be more than FOLDER/most says; while FOLDER/broken
is there, it ends at once.
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOCK = threading.Lock()


def asked() -> int:
    return (FOLDER / "asked").read_text().count("\n") if (FOLDER / "asked").exists() else 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply({"version": "0.0.fake"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self.reply({})
            return
        with LOCK:
            while (most := FOLDER / "most").exists() and asked() >= int(most.read_text()):
                time.sleep(0.02)
            with (FOLDER / "asked").open("a") as file:
                file.write(f"{sum(body['prompt'])}\n")
        choice = {"index": 0, "text": "A", "finish_reason": "stop"}
        self.reply({"choices": [choice], "model": body["model"], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    def reply(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if (FOLDER / "broken").exists():
        sys.exit("no cards here: " + " ".join(sys.argv[2:]))
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (FOLDER / "pids").write_text(f"{os.getpid()} {worker.pid}")
    (FOLDER / "command").write_text(json.dumps(sys.argv[2:]))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever(poll_interval=0.02)
