"""What holds for every test: no network, one thread for each worker, slow tests only when asked for."""

import os
import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state_")  # the user's own secret stays untouched
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let connections leave for this machine only."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost", socket.gethostname())
        if not local:
            raise AssertionError(f"a test wants the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield
