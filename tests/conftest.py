"""What holds for every test: no network, one thread for each worker, slow tests only when asked for."""

import ast
import gc
import io
import os
import socket
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state_")  # the user's own secret stays untouched
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

LAST_RELEASE = ("0.1.0", 17_095)
"""Code lines of the package then, as `count_lines` counts."""


def count_lines(package: Path) -> tuple[int, int]:
    """Return lines that hold code (no blank line, comment or docstring) and lines that hold a comment only."""
    code = comments = 0
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        held = {n for t in tokens if t.type not in layout for n in range(t.start[0], t.end[0] + 1)}
        comments += len({t.start[0] for t in tokens if t.type == tokenize.COMMENT} - held)
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                held -= set(range(node.lineno, (node.end_lineno or 0) + 1))
        code += len(held)
    return code, comments


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))


modules_at_last_freeze = 0


def pytest_runtest_setup() -> None:
    """Let garbage collections leave out the million objects that imported libraries hold for good.

    The trainer asks for one before each training: a third of the time of a tiny model's.
    """
    global modules_at_last_freeze
    if len(sys.modules) > modules_at_last_freeze + 200:
        modules_at_last_freeze = len(sys.modules)
        gc.collect()
        gc.freeze()


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


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how much code there is beside the last release's: a trend to look at, no limit."""
    if hasattr(config, "workerinput"):
        return
    lines, comments = count_lines(Path(__file__).resolve().parents[1] / "cmexam_tune")
    name, then = LAST_RELEASE
    terminalreporter.write_line(
        f"code lines of the package: {lines:,} ({name}: {then:,}), lines of comment: {comments:,}"
    )
