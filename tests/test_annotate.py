"""Annotations: the published words, only listed categories, votes, and agreement with what a file has."""

import json
import re
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from fake_openai import Fault, serving

from cmexam_tune.annotate import annotate
from cmexam_tune.annotate import main as annotate_main
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.inference import annotations

OPTIONS = {"A": "=甲", "B": "乙"}
QUESTIONS = [
    Question("q1", "心肌梗死", OPTIONS, "A", facets={"Medical Discipline": "临床医学", "Difficulty level": "2"}),
    Question("q2", "牙周炎", OPTIONS, "B", facets={"Medical Discipline": "口腔医学"}),
    Question("q3", "问", OPTIONS, "B"),
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    jsonl.write(tmp_path / "q.jsonl", QUESTIONS)
    return tmp_path / "q.jsonl"


def recipe(folder: Path, name: str, url: str) -> Path:
    text = f"extends: zeroshot_vllm.yaml\nmodel: {{model_name_or_path: {name}, base_url: '{url}'}}\n"
    (folder / f"{name}.yaml").write_text(text + "generation: {max_retries: 0}\n")
    return folder / f"{name}.yaml"


def test_the_published_words() -> None:
    words = annotations.asked(QUESTIONS[0], "Medical Competency").dialogue().words
    assert words == (
        "返回格式限制为某个具体类目的名称即可。共有4个类别：医学基础知识、疾病诊断和鉴别诊断、疾病治疗、公卫法律伦理。"
        '假设你是一位医疗行业专家，请判断下面这个题目属于哪个类别，若都不符合，则只返回"不符合"这个标签.'
        '题目信息为"心肌梗死：A =甲\nB 乙"。'
        "注意，不需要回答问题本身，只需要返回这个题目与上述4个类目中的哪个类目最相关，返回4个类目中的一个，不需要其他文字。"
    )
    assert [len(annotations.categories(facet)) for facet in annotations.FACETS] == [28, 36, 7, 4, 5]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("药学", "药学"), ("“药学”。", "药学"), ("<think>中药学</think>\n药学", "药学"), ("不符合", "不符合"),
        ("属于药学", None), ("药学、中药学", None), ("", None), ("西药", None),
    ],
)  # fmt: skip
def test_only_listed_categories_are_accepted(text: str, name: str | None) -> None:
    assert annotations.parse(text, "Medical Discipline") == name


def test_models_vote_and_what_is_there_stays(questions: Path, tmp_path: Path) -> None:
    broken = [True]

    def script(body: dict[str, Any], count: int) -> Any:
        words = body["messages"][-1]["content"]
        if broken[0] and body["model"] == "one" and "牙周炎" in words and "共有4个" in words:
            return Fault(400, "no")
        if "共有7个" in words:
            return {"one": "临床医学", "two": "药学" if "牙周炎" in words else "临床医学"}[body["model"]]
        return "中等" if "共有5个" in words else "我不知道" if body["model"] == "two" else "不符合"

    out = tmp_path / "o.jsonl"
    with serving(script) as server:
        models = [recipe(tmp_path, name, server.url) for name in ("one", "two")]
        annotate(questions, models, out)
        assert len(server.bodies) == 2 * 3 * 5
        broken[0] = False
        found = annotate(questions, models, out)
        assert len(server.bodies) == 2 * 3 * 5 + 1
    first, second, third = jsonl.read(out, Question)
    assert first.facets["Difficulty level"] == "2" and second.facets["Medical Discipline"] == "口腔医学"
    assert third.facets == {
        "Disease Group": "不符合", "Clinical Department": "不符合", "Medical Discipline": "临床医学",
        "Medical Competency": "不符合", "Difficulty level": "3",
    }  # fmt: skip
    discipline = found["Medical Discipline"]
    assert discipline["agreement"]["one"] == {"n": 2, "accuracy": 0.5, "kappa": 0.0}
    assert found["Disease Group"]["refused"] == {"one": 0, "two": 3} and found["Disease Group"]["none_fits"] == 3
    rows = list(openpyxl.load_workbook(f"{out}.review.xlsx").active.iter_rows(values_only=True))
    assert len(rows) == 1 + 15 and rows[0][5:8] == ("one", "two", "vote") and rows[3][4:8] == (
        "临床医学", "临床医学", "临床医学", "临床医学",
    )  # fmt: skip
    assert json.loads(Path(f"{out}.report.json").read_text()) == found


def test_wrong_commands(questions: Path, tmp_path: Path) -> None:
    common = ["--questions", str(questions), "--config", "zeroshot_vllm.yaml"]
    with pytest.raises(UserError, match="would replace its own input"):
        annotate_main([*common, "--out", str(questions)])
    (tmp_path / "mine.jsonl").write_text("x")
    with pytest.raises(UserError, match="was not written by annotate"):
        annotate_main([*common, "--out", str(tmp_path / "mine.jsonl")])
    with pytest.raises(UserError, match="two models are called zeroshot_vllm"):
        annotate_main([*common, "zeroshot_vllm", "--out", str(tmp_path / "o.jsonl")])
    assert re.fullmatch("x", (tmp_path / "mine.jsonl").read_text())
