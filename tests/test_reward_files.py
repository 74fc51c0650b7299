"""`export --rewards`: each file is called as its framework calls it, and gives the library's rewards."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kit import questions

from cmexam_tune import export, rewards
from cmexam_tune.config import RewardConfig
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.interop import reward_files

TEXTS = ["分析。所以答案是{}。", "分析。所以答案是A或B。", "选{}"]


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    jsonl.write(tmp_path / "some.questions.jsonl", questions(3))
    return tmp_path / "some.questions.jsonl"


def load(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exam_reward", folder / reward_files.FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(framework: str, asked: Path) -> tuple[Path, list[dict[str, Any]]]:
    out = asked.parent / framework
    assert not export.main(["--rewards", framework, "--questions", str(asked), "--out", str(out)])
    if framework == "verl":
        import pyarrow.parquet

        return out, pyarrow.parquet.read_table(out / "questions.parquet").to_pylist()
    return out, [value for _, value in jsonl.read_objects(out / "questions.jsonl")]


def expected(asked: Path) -> tuple[list[str], list[float]]:
    """Return a text for each question, and what it earns."""
    every = list(jsonl.read(asked, Question))
    texts = [text.format(question.answer) for text, question in zip(TEXTS, every, strict=True)]
    reward = rewards.Reward(RewardConfig(partial_steps=None))
    earned = [reward.of(question, [text])[0] for question, text in zip(every, texts, strict=True)]
    assert earned == [1.0, 0.0, 0.0]
    return texts, earned


def test_trl(asked: Path) -> None:
    folder, rows = exported("trl", asked)
    texts, earned = expected(asked)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"question_record": [row["question_record"] for row in rows]}
    # As GRPOTrainer._calculate_rewards calls it, with columns that it does not know.
    call = {"prompts": [row["prompt"] for row in rows], "completion_ids": [[1]] * 3, "trainer_state": None, **columns}
    assert load(folder).reward(completions=completions, **call) == earned
    assert rows[0]["prompt"][0]["role"] == "user"


def test_verl(asked: Path) -> None:
    folder, rows = exported("verl", asked)
    texts, earned = expected(asked)
    score = load(folder).compute_score
    for row, text, value in zip(rows, texts, earned, strict=True):
        truth = row["reward_model"]["ground_truth"]
        call = {"data_source": row["data_source"], "solution_str": text, "ground_truth": truth}
        assert score(**call, extra_info=row["extra_info"]) == value


@pytest.mark.parametrize("place", ["swift.rewards", "swift.plugin"])
def test_ms_swift(asked: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder, rows = exported("ms-swift", asked)
    texts, earned = expected(asked)
    plugin: Any = ModuleType(place)
    plugin.ORM, plugin.orms = type("ORM", (), {}), {}
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, place, plugin)
    load(folder)
    records = [row["question_record"] for row in rows]
    assert plugin.orms["exam"]()(texts, question_record=records, messages=[[]] * 3) == earned


def test_verifiers(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rows = exported("verifiers", asked)
    texts, earned = expected(asked)
    built: Any = ModuleType("verifiers")
    built.Rubric = lambda funcs, weights: (funcs, weights)
    built.SingleTurnEnv = lambda dataset, rubric, **options: (dataset, rubric, options)
    monkeypatch.setitem(sys.modules, "verifiers", built)
    dataset, (functions, weights), options = load(folder).load_environment(max_concurrent=2)
    assert weights == [1.0] and options == {"max_concurrent": 2} and len(dataset) == 3
    for row, text, value in zip(dataset, texts, earned, strict=True):
        completion = [{"role": "assistant", "content": text}]
        call = {"prompt": row["prompt"], "answer": row["answer"], "state": {}, "info": row["info"]}
        assert functions[0](completion=completion, **call) == value
    assert rows[0]["answer"] == next(jsonl.read(asked, Question)).answer


def test_flags_that_do_not_go_together(asked: Path) -> None:
    with pytest.raises(SystemExit):
        export.main(["--rewards", "trl", "--out", str(asked.parent / "out")])
