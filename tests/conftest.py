"""What holds for every test: no network, one thread for each worker, slow tests only when asked for."""

import ast
import gc
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state_")  # the user's own secret stays untouched
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled")

LONG_FILES = (
    "test_types", "test_endpoint", "test_deepspeed", "test_recipes", "test_decode", "test_half", "test_resume",
    "test_released_runs", "test_serve", "test_simulated_card", "test_engines", "test_predict", "test_notebooks",
    "test_guides", "test_train", "test_export", "test_layers", "test_chatglm_golden", "test_device", "test_reproduce",
    "test_gguf", "test_bert", "test_chatglm", "test_estimate", "test_objectives", "test_released_golden",
    "test_families", "test_memorise", "test_released_tokenizers", "test_screen", "test_hostile", "test_clinic",
)  # fmt: skip
"""Files of eight seconds and more, the longest first: one that began last would leave the other core idle."""
LAST_RELEASE = ("0.1.0", 17_095)
"""Code lines of the package then, as `count_lines` counts."""


def count_lines(package: Path) -> tuple[int, int]:
    """Return lines that hold code (no blank line, comment or docstring) and lines that hold a comment only."""
    code = comments = 0
    for path in package.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        in_strings, in_docstrings = set[int](), set[int]()
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                in_docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
            elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
                in_strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        for number, line in enumerate(map(str.strip, source.splitlines()), 1):
            if number in in_strings and number not in in_docstrings:
                code += 1
            elif number not in in_docstrings:
                comments += line.startswith("#")
                code += bool(line) and not line.startswith("#")
    return code, comments


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
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
