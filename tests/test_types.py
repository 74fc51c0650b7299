"""mypy --strict over the package: a test, so that a minute of it runs beside the others."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")


def test_types() -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
