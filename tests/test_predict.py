"""predict: resumed without losing or doubling a question, refuses foreign outputs, touches nothing when it fails."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from modelkit import checkpoint, questions

from cmexam_tune import predict
from cmexam_tune.__main__ import main
from cmexam_tune.core import jsonl
from cmexam_tune.core.config import dump
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.questions.jsonl"
    jsonl.write(path, questions(30))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    from modelkit import make_config

    path = tmp_path / "zeroshot.yaml"
    config = make_config(prompt__max_target_length=6, generation={"batch_size": 4, "mode": "likelihood"})
    path.write_text(dump(config), encoding="utf-8")
    return path


def run(*arguments: object) -> int | None:
    return main(["predict", *map(str, arguments)])


def read(path: Path) -> list[Prediction]:
    return list(jsonl.read(path, Prediction))


def test_every_question_once_with_what_it_came_from(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "p.jsonl"
    run("--config", recipe, "generation.mode=constrained", "--questions", asked, "--out", out)
    assert sorted(p.question_id for p in read(out)) == sorted(q.id for q in jsonl.read(asked, Question))
    meta = json.loads(predict.meta_path(out).read_text(encoding="utf-8"))
    assert meta["mode"] == meta["config"]["generation"]["mode"] == "constrained"
    assert len(meta["questions_sha256"]) == 64 and "torch" in meta["versions"]


@pytest.mark.parametrize("tail", [b"", b'{"question_id": "q:9", "te', b"\xe7\xad"])
def test_goes_on_where_it_stopped(asked: Path, recipe: Path, tmp_path: Path, tail: bytes) -> None:
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    run("--config", recipe, "--questions", asked, "--out", whole)
    run("--config", recipe, "--questions", asked, "--out", part, "--limit", 11)
    before = part.read_bytes()
    assert before.count(b"\n") == 11
    part.write_bytes(before + tail)
    # Another batch size is the same experiment.
    run("--config", recipe, "generation.batch_size=7", "--questions", asked, "--out", part)
    assert part.read_bytes().startswith(before)
    assert sorted(read(part), key=str) == sorted(read(whole), key=str)
    finished = part.read_bytes()
    run("--config", recipe, "--questions", asked, "--out", part)
    assert part.read_bytes() == finished


def test_killed_at_any_moment_no_question_is_lost_or_doubled(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out, command = tmp_path / "p.jsonl", [sys.executable, "-m", "cmexam_tune.predict"]
    command += ["--config", str(recipe), "generation.mode=generate", "generation.batch_size=1"]
    command += ["--questions", str(asked), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    for lines in (1, 9):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if out.exists() and out.read_bytes().count(b"\n") >= lines:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lines <= out.read_bytes().count(b"\n") < 30
    run("--config", recipe, "generation.mode=generate", "generation.batch_size=1", "--questions", asked, "--out", out)
    assert sorted(p.question_id for p in read(out)) == sorted(q.id for q in jsonl.read(asked, Question))
    fresh = tmp_path / "fresh.jsonl"
    run("--config", recipe, "generation.mode=generate", "--questions", asked, "--out", fresh)
    assert sorted(read(fresh), key=str) == sorted(read(out), key=str)


WRONG: list[tuple[str, Callable[[Path], list[str]], str]] = [
    ("no questions", lambda d: ["--questions", str(d / "none.jsonl")], "no such"),
    ("empty questions", lambda d: ["--questions", str(d / "empty.jsonl")], "empty"),
    ("broken questions", lambda d: ["--questions", str(d / "broken.jsonl")], "broken.jsonl:2"),
    ("other mode", lambda d: ["generation.mode=constrained"], "generation.mode"),
    ("other style", lambda d: ["prompt.style=cmb_answer"], "prompt.style"),
    ("other questions", lambda d: ["--questions", str(d / "other.jsonl")], "questions_sha256"),
    ("no such model", lambda d: ["model.model_name_or_path=/none", "--overwrite"], "no such folder"),
    ("style without letters", lambda d: ["prompt.style=open", "--overwrite"], "letters"),
    ("run that is none", lambda d: ["--run", str(d)], "either --run"),
    ("unknown key", lambda d: ["generation.moode=generate"], "did you mean 'mode'"),
    ("limit", lambda d: ["--limit", "0"], "at least 1"),
]


@pytest.mark.parametrize(("arguments", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_mistakes_cost_nothing(
    asked: Path, recipe: Path, tmp_path: Path, arguments: Callable[[Path], list[str]], message: str
) -> None:
    out = tmp_path / "p.jsonl"
    run("--config", recipe, "--questions", asked, "--out", out, "--limit", 3)
    before = out.read_bytes(), predict.meta_path(out).read_bytes()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text(jsonl.dumps(questions(1)[0]) + "\n{broken\n", encoding="utf-8")
    jsonl.write(tmp_path / "other.jsonl", questions(4))
    with pytest.raises(UserError, match=message):
        run("--config", recipe, "--questions", asked, "--out", out, *arguments(tmp_path))
    assert (out.read_bytes(), predict.meta_path(out).read_bytes()) == before


def test_a_foreign_file_is_not_touched(asked: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("mine\n", encoding="utf-8")
    with pytest.raises(UserError, match="--overwrite"):
        run("--config", recipe, "--questions", asked, "--out", out)
    assert out.read_text(encoding="utf-8") == "mine\n"
    run("--config", recipe, "--questions", asked, "--out", out, "--overwrite", "--limit", 2)
    assert len(read(out)) == 2


def test_a_run_folder_answers_as_its_model_did(asked: Path, tmp_path: Path) -> None:
    from modelkit import make_config

    from cmexam_tune.runfolder import runs
    from cmexam_tune.train import train

    config = make_config(
        data={"train": [str(asked)]},
        training={"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "report_to": "none"},
        generation={"mode": "likelihood"},
        out=str(tmp_path / "run"),
    )
    assert Path(checkpoint("llama")).is_dir()
    trained = train(config)
    out = predict.predict(trained.path, asked, tmp_path / "p.jsonl")
    from cmexam_tune.families import llama

    _, loaded = runs.load(trained.path)
    again = list(llama.answer(loaded, list(jsonl.read(asked, Question)), config))
    assert sorted(read(out), key=str) == sorted(again, key=str)
