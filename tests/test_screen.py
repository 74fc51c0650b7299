"""A normal run shows its own lines and nothing of the libraries."""

import os
import subprocess
import sys

import pytest

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question


def _run(*words: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cmexam_tune", *words],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.stderr.splitlines()


@pytest.mark.parametrize("environment", [{}, pytest.param({"CMEXAM_TUNE_VERBOSE": "1"}, marks=pytest.mark.slow)])
def test_a_local_model_is_written_and_asked_without_lines_of_libraries(tmp_path, environment):
    model, questions = tmp_path / "model", tmp_path / "one.questions.jsonl"
    jsonl.write(questions, [Question("1", "感冒多由什么引起？", {"A": "病毒", "B": "细菌"}, "A")])
    written = _run("tiny", "--family", "llama", "--out", str(model), **environment)
    asked = _run(
        "predict", "--config", "zeroshot_llama", "--questions", str(questions), "--out", str(tmp_path / "p.jsonl"),
        f"model.model_name_or_path={model}", "generation.max_new_tokens=4", **environment,
    )  # fmt: skip
    if environment:
        assert any("Writing model shards" in line for line in written)
        assert any("Loading weights" in line for line in asked)
    else:
        assert written == []
        assert len(asked) == 1 and asked[0].startswith("1 predictions, 1 answered")
