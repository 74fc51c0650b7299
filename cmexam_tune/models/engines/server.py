"""A server of our own: started as a child, waited for, asked who it is, and ended with this program."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cmexam_tune.core import cli
from cmexam_tune.core.errors import TrainingStopped, UserError
from cmexam_tune.core.progress import Progress
from cmexam_tune.models.engines import watch
from cmexam_tune.models.engines.launchers import Launcher, Served

HOST = "127.0.0.1"
LAST_LINES = 15
"""Of the log, that a message repeats."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells its processes, and a server would take for its own."""


class EngineServer:
    """One server for one model; nothing is started before `start`."""

    def __init__(self, launcher: Launcher, served: Served, log: Path) -> None:
        """Choose a port and make the command.

        Raises:
            UserError: the engine is not installed.
        """
        self.launcher, self.served, self.log = launcher, served, log
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = int(free.getsockname()[1])
        self.command = launcher.command(served, self.port)
        self.model_name = launcher.model_name(served)
        self._process: subprocess.Popen[bytes] | None = None
        self.version: str | None = None

    @property
    def name(self) -> str:
        """What people call it: the engine and its version."""
        return f"{self.served.model.engine} {self.version or ''}".strip()

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, if that was not done yet, and wait until it answers.

        Raises:
            UserError: it ends instead.
        """
        if self._process is not None:
            return
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
        environment.setdefault("VLLM_NO_USAGE_STATS", "1")
        if self.command[0] != sys.executable:
            environment.pop("PYTHONPATH", None)
        cli.note(f"{self.served.model.engine} starts; what it says is in {self.log}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write((" ".join(self.command) + "\n").encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", watch.__file__, *self.command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # an interrupt at the terminal is for this program, which then ends it
                )
            except OSError as error:
                raise UserError(f"{self.command[0]}: cannot be started ({error}).") from None
        weakref.finalize(self, _stop, self._process)
        self._wait()
        self.version = self._version()

    def _wait(self) -> None:
        shown = time.monotonic()
        with Progress(f"{self.served.model.engine} loads the model", "lines of its log") as progress:
            while not self._healthy():
                if not self.running:
                    raise UserError(f"{self.served.model.engine} could not start. {self.last_words()}")
                time.sleep(0.1)
                if time.monotonic() - shown >= 1:
                    shown = time.monotonic()
                    lines = self._lines()
                    progress.move(len(lines) - progress.done, lines[-1])

    def _healthy(self) -> bool:
        return self.get("/health") is not None

    def get(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Return what the server says there as JSON, {} for no JSON; None if it does not answer or refuses."""
        try:
            content = ask(self.url + path, body, timeout=30)
        except (OSError, ValueError):
            return None
        try:
            return json.loads(content)
        except ValueError:
            return {}

    def _version(self) -> str | None:
        info = self.get(self.launcher.version_path)
        version = info.get("version") if isinstance(info, dict) else None
        return version if isinstance(version, str) else None

    def provenance(self) -> dict[str, object]:
        """Return what an answer depends on beside the model and the question."""
        switch = self.launcher.batch_invariant
        return {
            "engine": self.served.model.engine,
            "engine_version": self.version,
            "dtype": self.served.dtype,
            "batch_invariant": switch is not None and os.environ.get(switch) == "1",
            "lora_merged": self.served.adapter is None,
        }

    def check(self) -> None:
        """Stop this program if the server has ended.

        Raises:
            TrainingStopped: with its last words.
        """
        if not self.running:
            raise TrainingStopped(
                f"{self.name} has ended. What was answered is kept; start again to ask the rest. {self.last_words()}"
            )

    def last_words(self) -> str:
        """Return the end of the log."""
        end = "\n".join(self._lines()[-LAST_LINES:])
        return f"The end of {self.log}:\n{end}"

    def _lines(self) -> list[str]:
        """Return the lines of the log, the command first."""
        return [line[:200] for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()]

    def stop(self) -> None:
        """End the server and all that it has started."""
        if self._process is not None:
            _stop(self._process)


def ask(url: str, body: Mapping[str, object] | None, timeout: float) -> bytes:
    """Return the reply of a server that shares this program's files: one that it started, or that reads its adapters.

    Args:
        url: address with the path.
        body: what is posted as JSON; None: nothing, it is a GET.
        timeout: seconds.

    Raises:
        OSError: no reply, or one with a status of failure (`urllib.error.HTTPError`).
        ValueError: the address is none.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # A proxy that the environment names leads out of the machines that share a disk, and mostly cannot lead back.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as reply:
        return bytes(reply.read())


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a watched server: its watcher sees the pipe end."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
