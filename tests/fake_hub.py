"""A model hub on the loopback address, as far as huggingface_hub's uploads speak with it; it remembers what it got."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import yaml


@dataclass
class Hub:
    """What was asked of the hub, and what lies on it."""

    url: str = ""
    token: str = "hf_secret"
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Checksum -> content, in the store of large files (Git LFS)."""
    refuses: int = 0
    """A status for every commit; 0: it takes them."""
    large: int = 1 << 16
    """Bytes from which files go to that store."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: ClassVar[Hub]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def reply(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        self.reply({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def do_PUT(self) -> None:
        content = self.body()
        self.hub.stored[hashlib.sha256(content).hexdigest()] = content
        self.reply({})

    def do_POST(self) -> None:
        content = self.body()
        routes = {
            "/api/validate-yaml": self.validate,
            "/api/repos/create": self.create,
            "/preupload/": self.preupload,
            "/info/lfs/objects/batch": self.store,
            "/commit/": self.commit,
        }
        route = next(name for name in routes if name in self.path)
        if route != "/api/validate-yaml" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.reply({"error": "Invalid credentials"}, 401)
        else:
            routes[route](content)

    def validate(self, content: bytes) -> None:
        metadata = yaml.safe_load(json.loads(content)["content"].split("---")[1])
        wrong = "/" not in metadata["base_model"]
        self.reply({"errors": [{"message": '"base_model" is no id'}] if wrong else []}, 400 if wrong else 200)

    def create(self, content: bytes) -> None:
        asked = json.loads(content)
        self.hub.private.setdefault(asked["name"], asked.get("private") or asked.get("visibility") == "private")
        self.reply({"url": f"{self.hub.url}/me/{asked['name']}", "id": f"me/{asked['name']}"})

    def preupload(self, content: bytes) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= self.hub.large else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(content)["files"]
        ]
        self.reply({"files": modes})

    def store(self, content: bytes) -> None:
        objects = [
            {**asked, "actions": {"upload": {"href": f"{self.hub.url}/store/{asked['oid']}", "header": {}}}}
            for asked in json.loads(content)["objects"]
        ]
        self.reply({"transfer": "basic", "objects": objects})

    def commit(self, content: bytes) -> None:
        if self.hub.refuses:
            self.reply({"error": "made to fail"}, self.hub.refuses)
            return
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.stored[value["oid"]]
        self.reply({"commitUrl": f"{self.hub.url}/me/model/commit/1", "commitOid": "1" * 40, "success": True})


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HandlerOfHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
