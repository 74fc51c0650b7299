"""`select`: a funnel known by construction, and files that `train` and `check` take as they are."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from kit import question

from cmexam_tune import check, prompts, rewards, select
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.inference.answering import majority

RIGHT, WRONG, UNREADABLE = "因为丙对。所以答案是C。", "因为丁对。所以答案是D。", "选C吧"
META = {
    "config": {
        "model": {"model_name_or_path": "Qwen/x", "revision": "main"},
        "prompt": {"style": "cmb_cot"},
        "generation": {"seed": 7, "temperature": 1.0},
    },
    "run": "runs/base",
}


def asked() -> list[Question]:
    made = [
        question(
            i,
            f"第{i}种疾病的首选药物和它的作用机制是什么，各举一例说明{'特' * i}",
            facets={"科": "内" if i < 4 else "外"},
        )
        for i in range(8)
    ]
    made[6] = dataclasses.replace(made[6], explanation="综上所述，本题正确答案为A。故选A。")  # the key is doubtful
    return made


OUTPUTS = {
    "q:0": [RIGHT, RIGHT, "因为丙确实对。所以答案是C。", WRONG],  # kept: 3 right, one of them twice
    "q:1": [WRONG, WRONG, UNREADABLE, "因为"],  # none right; the last was cut off
    "q:2": [RIGHT, RIGHT, RIGHT, RIGHT],  # too easy, no wrong one
    "q:3": ["综合分析，故选B。所以答案是C。", WRONG, UNREADABLE, "所以答案是C。"],  # argues otherwise; no explanation
    "q:4": [RIGHT, "因为丁对，" + "理由很长" * 9 + "。所以答案是D。", UNREADABLE, UNREADABLE],  # lengths too different
    "q:5": [RIGHT, WRONG, WRONG, WRONG],  # held out
    "q:6": [RIGHT, WRONG, WRONG, WRONG],
    "q:7": [RIGHT, WRONG, WRONG, WRONG],
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    jsonl.write(tmp_path / "train.questions.jsonl", asked())
    test = dataclasses.replace(asked()[5], id="t:1")
    jsonl.write(tmp_path / "test.questions.jsonl", [test])
    lines = [
        Prediction(name, texts[0], votes=tuple(texts), votes_cut=(3,) if name == "q:1" else ())
        for name, texts in OUTPUTS.items()
    ]
    jsonl.write(tmp_path / "votes.jsonl", lines)
    (tmp_path / "votes.jsonl.meta.json").write_text(json.dumps(META), encoding="utf-8")
    return tmp_path


def run(files: Path, make: Any, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    out = files / f"out_{make}"
    select.select(
        files / "votes.jsonl",
        files / "train.questions.jsonl",
        make,
        out,
        [files / "test.questions.jsonl"],
        overwrite=True,
        **options,
    )
    rows = [value for _, value in jsonl.read_objects(out / f"{make}.questions.jsonl")]
    funnel = json.loads((out / "funnel.json").read_text("utf-8"))
    assert len(rows) == funnel["rows"]
    assert "<html" in (out / "funnel.html").read_text("utf-8")
    return funnel, rows


REFUSED = {"held-out": 1, "explanation-contradicts": 1}


def test_supervised(files: Path) -> None:
    funnel, rows = run(files, "sft", per_question=2)
    assert funnel["questions"] == {"kept": 4, "none-right": 2, **REFUSED}
    assert funnel["outputs"] == {
        "kept": 5, "repeated": 4, "wrong": 8, "unreadable": 4, "unfinished": 1, "argues-otherwise": 1,
        "no-explanation": 1, "held-out": 4, "explanation-contradicts": 4,
    }  # fmt: skip
    assert sum(funnel["outputs"].values()) == 32 and funnel["outputs_right"] == 9
    assert [row["id"] for row in rows] == ["q:0", "q:0#2", "q:2", "q:4", "q:7"]
    assert rows[0]["explanation"] == "因为丙对。"
    source = rows[1]["source"]
    assert (source["model"], source["revision"], source["seed"], source["samples"]) == ("Qwen/x", "main", 7, [2])
    assert source["run"] == "runs/base" and len(source["prompt_sha256"]) == 64


def test_what_was_selected_trains_as_it_is(files: Path) -> None:
    """The style writes each selected output again, to the letter."""
    _, rows = run(files, "sft", per_question=2)
    for row, selected in zip(rows, jsonl.read(files / "out_sft" / "sft.questions.jsonl", Question), strict=True):
        completion = prompts.render(selected, "cmb_cot").completion
        assert completion == OUTPUTS[row["id"].partition("#")[0]][row["source"]["samples"][0]]
        assert rewards.read_strictly(completion, selected) == selected.answer
    assert check.check([files / "out_sft" / "sft.questions.jsonl"]).questions == {"sft": 5}


def test_pairs(files: Path) -> None:
    funnel, rows = run(files, "pairs", per_question=2)
    assert funnel["questions"] == {"kept": 2, "none-right": 2, "none-wrong": 1, "no-partner": 1, **REFUSED}
    assert [(row["id"], row["chosen"], row["rejected"]) for row in rows] == [
        ("q:0", RIGHT, WRONG),
        ("q:7", RIGHT, WRONG),
    ]
    assert rows[1]["source"]["samples"] == [0, 1]
    _, rows = run(files, "pairs", length_ratio=10.0)
    assert [row["id"] for row in rows] == ["q:0", "q:4", "q:7"]


def test_pool(files: Path) -> None:
    funnel, rows = run(files, "pool", pass_rate=("0.2", "0.9"), easy_first=True)
    assert funnel["questions"] == {"kept": 3, "too-hard": 2, "too-easy": 1, **REFUSED}
    assert [(row["id"], row["pass_rate"]) for row in rows] == [("q:0", 0.75), ("q:4", 0.25), ("q:7", 0.25)]
    assert rows[0]["explanation"] == asked()[0].explanation
    assert funnel["by_facet"]["科"]["内"] == {"questions": 4, "outputs": 16, "right": 7, "kept": 1}


def test_most_diverse(files: Path) -> None:
    texts = ["因为丙对。所以答案是C。", "因为丙确对。所以答案是C。", "临床上此药起效最快，副作用少。所以答案是C。"]
    jsonl.write(files / "votes.jsonl", [Prediction("q:0", texts[0], votes=tuple(texts))], overwrite=True)
    _, shortest = run(files, "sft", per_question=2)
    _, diverse = run(files, "sft", per_question=2, prefer="diverse")
    assert [row["source"]["samples"] for row in shortest] == [[0], [1]]
    assert [row["source"]["samples"] for row in diverse] == [[0], [2]]


def test_single_outputs_and_unfinished_votes_are_read(files: Path) -> None:
    lines = [Prediction("q:0#1", RIGHT, finish="stop"), Prediction("q:0#4", RIGHT + "。", finish="length")]
    jsonl.write(files / "votes.jsonl", [*lines, Prediction("q:7", RIGHT)], overwrite=True)
    funnel, rows = run(files, "sft")
    assert [row["id"] for row in rows] == ["q:0", "q:7"]
    assert rows[0]["source"]["samples"] == [1] and funnel["outputs"] == {"kept": 2, "unfinished": 1}


def test_predict_says_which_votes_were_cut() -> None:
    outputs = [Prediction("q#0", "A", "A", finish="stop"), Prediction("q#1", "A", "A", finish="length")]
    line = majority([None] * 2, outputs)
    assert line.votes_cut == (1,)
    assert '"votes_cut": [1]' in jsonl.dumps(line)
    assert "votes_cut" not in jsonl.dumps(majority([None], outputs[:1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pass_rate": ("0.9", "0.1")}, "--pass-rate 0.9,0.1"),
        ({"pass_rate": ("x",)}, "--pass-rate x"),
        ({"per_question": 0}, "--per-question 0"),
        ({"length_ratio": 0.5}, "--length-ratio 0.5"),
        ({"pass_rate": ("1", "1")}, "nothing can be selected"),
    ],
)
def test_mistakes(files: Path, options: dict[str, Any], message: str) -> None:
    lines = [Prediction("q:0", RIGHT, votes=(RIGHT, WRONG))]
    jsonl.write(files / "votes.jsonl", lines, overwrite=True)
    with pytest.raises(UserError, match=message):
        run(files, "pool", **options)
    assert not (files / "out_pool").exists()


def test_outputs_of_other_questions_are_a_mistake(files: Path) -> None:
    jsonl.write(files / "votes.jsonl", [Prediction("other:1", RIGHT)], overwrite=True)
    with pytest.raises(UserError, match="'other:1' is no question"):
        run(files, "sft")


def test_command_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--votes", str(files / "votes.jsonl"), "--questions", str(files / "train.questions.jsonl")]
    command = [*words, "--make", "pool", "--out", str(files / "pool"), "--pass-rate", "0.2,0.8"]
    assert not select.main(command)
    shown = capsys.readouterr().out
    assert "its share of right outputs is above --pass-rate" in shown and "rows written to" in shown
    with pytest.raises(UserError, match="exists"):
        select.main(command)
