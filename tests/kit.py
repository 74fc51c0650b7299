"""What the tests of models share: questions with awkward shapes, configs and tiny checkpoints, built once."""

import functools
import io
import subprocess
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cmexam_tune import __main__, config, prompts, tiny
from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.schema import Question, Turn
from cmexam_tune.prompts import PromptRequest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def question(number: int, stem: str = "", answer: str | None = "C", letters: str = "ABCDE", **more: Any) -> Question:
    stem = stem or f"患者，男，{20 + number % 60}岁，反复上腹痛{number % 9 + 1}年，餐后缓解，最可能的诊断是"
    options = {letter: f"选项{letter}{number}的内容" for letter in letters}
    return Question(f"q:{number}", stem, options, answer, more.pop("explanation", f"因为{number}，所以如此。"), **more)


def questions(count: int) -> list[Question]:
    """Questions of several lengths, option counts and answers."""
    made = []
    for i in range(count):
        letters = "ABCDEF"[: 4 + i % 3]
        answer = letters[i % len(letters)] if i % 3 else "AC"
        stem = f"关于疾病{i}的说法{'长' * (i * 7 % 40)}"
        made.append(question(i, stem, answer, letters, kind="single" if i % 3 else "multiple"))
    return made


@functools.cache
def checkpoint(family: str, **sizes: int) -> str:
    return str(tiny.build(family, Path(tempfile.mkdtemp(prefix="tiny_")) / family, **sizes))


def run_program(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Return what `cmexam-tune WORD...` in `folder` would print and exit with, computed in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        if folder is not None:
            patch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            cli.run(__main__.main, words)
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), err.getvalue())


def make_config(family: str = "llama", **changes: Any) -> Config:
    """A config for the tiny checkpoint; `section__key=value` changes one value."""
    values: dict[str, Any] = {
        "prompt": {"style": "answer", "max_source_length": 512, "max_target_length": 64},
        "model": {"family": family, "model_name_or_path": checkpoint(family)},
        "tuning": {"method": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0},
        "generation": {},
        "out": "unused",
    }
    if family == "bert":
        values["model"]["head"] = "choice"
    return config.parse_config(changed(values, changes))


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values with changes such as `training__max_steps=3`, or `tuning={...}` for a whole section."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return values


def with_examples(asked: list[Question], config: Config) -> list[PromptRequest]:
    """Two classes with two examples each, and two questions that share theirs with none."""
    pool = questions(60)[50:]
    made = []
    for place, one in enumerate(prompts.default_prompts(asked, config)):
        some = pool[2 * (place % 2) :][:2] if place < len(asked) - 2 else pool[place % 5 + 4 :][:2]
        made.append(replace(one, examples=tuple(
            Turn(e.prompt, e.completion) for e in (prompts.render(q, config.prompt.style) for q in some)
        )))  # fmt: skip
    return made
