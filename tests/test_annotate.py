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
    words = annotations.request(QUESTIONS[0], "Medical Competency").dialogue().prompt_text
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


def said(body: dict[str, Any], count: int) -> str:
    """Answer every facet with its first category, but `two`, which names none."""
    facets = {28: 0, 36: 1, 7: 2, 4: 3, 5: 4}
    number = next(n for n in facets if f"共有{n}个" in body["messages"][-1]["content"])
    return "?" if body["model"] == "two" else annotations.categories(annotations.FACETS[facets[number]])[0]


def edited(path: Path, change: Any) -> None:
    book = openpyxl.load_workbook(path)
    change(book)
    book.save(path)


def sheet(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (question, facet) -> heading -> cell."""
    head, *rows = openpyxl.load_workbook(path).worksheets[0].iter_rows(values_only=True)
    return {(row[0], row[3]): dict(zip(head, row, strict=True)) for row in rows}


def test_a_review_is_kept(questions: Path, tmp_path: Path) -> None:
    def fill(book: Any) -> None:
        page = book.active
        page["H2"], page["H7"], page["K1"], page["K3"] = "肿瘤", "药学", "by", "李"
        page.move_range("A3:K3", rows=30)  # people sort, and leave notes below
        page["B40"] = "done until here"
        book.create_sheet("notes")["A1"] = "mine"

    out = tmp_path / "o.jsonl"
    review = Path(f"{out}.review.xlsx")
    with serving(said) as server:
        panel = [recipe(tmp_path, "one", server.url)]
        annotate(questions, panel, out)
        edited(review, fill)
        before = review.read_bytes()
        annotate(questions, panel, out)
        assert review.read_bytes() == before
        annotate(questions, panel, out, overwrite=True)
        assert review.read_bytes() == before and len(server.bodies) == 15
        annotate(questions, [*panel, recipe(tmp_path, "two", server.url)], out)
    book, rows = openpyxl.load_workbook(review), sheet(review)
    facets = annotations.FACETS
    assert rows["q1", facets[0]]["review"] == "肿瘤" and rows["q2", facets[0]]["review"] == "药学"
    assert rows["q1", facets[1]]["by"] == "李" and book["notes"]["A1"].value == "mine"
    assert book.worksheets[0]["B40"].value == "done until here" and "two" in rows["q1", facets[0]]
    assert rows["q1", facets[0]]["options"] == "A =甲\nB 乙" and {row.get("changed") for row in rows.values()} == {None}


def test_a_row_that_changed_since_its_review_is_flagged(questions: Path, tmp_path: Path, capsys: Any) -> None:
    def fill(book: Any) -> None:
        for row in range(2, 17):
            book.active.cell(row, 8).value = f"review {row}"

    out = tmp_path / "o.jsonl"
    review = Path(f"{out}.review.xlsx")
    discipline = annotations.FACETS[2]
    with serving(said) as server:
        annotate(questions, [recipe(tmp_path, "one", server.url)], out)
        edited(review, fill)
        old, new = QUESTIONS[0], Question("q1", "心绞痛", OPTIONS, "A", facets={discipline: "药学"})
        jsonl.write(questions, [new, QUESTIONS[1]], overwrite=True)
        again = tmp_path / "again"
        again.mkdir()
        annotate(questions, [recipe(tmp_path, "one", server.url)], again / "o.jsonl")
        (again / "o.jsonl.review.xlsx").write_bytes(review.read_bytes())
        for _ in range(2):
            annotate(questions, [recipe(tmp_path, "one", server.url)], again / "o.jsonl")
    assert capsys.readouterr().err.count("10 rows are not what they were") == 1
    rows = sheet(again / "o.jsonl.review.xlsx")
    assert [row["review"] for row in rows.values()] == [f"review {row}" for row in range(2, 17)]
    assert rows["q1", discipline]["stem"] == new.stem and rows["q1", discipline]["before"] == "药学"
    assert rows["q1", discipline]["changed"] == f"stem was {old.stem}\nbefore was 临床医学"
    assert "do not hold this one any more" in rows["q3", discipline]["changed"]
    assert {row["changed"] for (name, _), row in rows.items() if name == "q2"} == {None}


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.report.json", "o.jsonl.review.xlsx", "o.jsonl.meta.json"])
def test_files_of_others_are_not_replaced(name: str, questions: Path, tmp_path: Path) -> None:
    path, out = tmp_path / name, tmp_path / "o.jsonl"
    path.write_text("my own")
    with serving(said) as server:
        panel = recipe(tmp_path, "one", server.url)
        with pytest.raises(UserError, match=rf"{name}: (exists and was not written|not an .xlsx).*--overwrite"):
            annotate(questions, [panel], out)
        assert path.read_text() == "my own" and not server.bodies
        command = ["--questions", str(questions), "--config", str(panel), "--out", str(out)]
        annotate_main([*command, "--overwrite"])
        annotate_main(command)
    assert len(list(jsonl.read(out, Question))) == 3 and len(sheet(Path(f"{out}.review.xlsx"))) == 15


def test_another_workbook_is_not_replaced(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    openpyxl.Workbook().save(f"{out}.review.xlsx")
    with pytest.raises(UserError, match="no sheet has the columns question_id, facet, vote and review"):
        annotate(questions, ["zeroshot_vllm"], out)


def test_a_cell_far_away_is_named(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    book = openpyxl.Workbook()
    book.active["XFD1048576"] = "x"
    book.save(f"{out}.review.xlsx")
    with pytest.raises(UserError, match="a cell in row 1,048,576, column 16,384"):
        annotate(questions, ["zeroshot_vllm"], out)


def test_annotations_changed_by_hand_stay(questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    with serving(said) as server:
        panel = [recipe(tmp_path, "one", server.url)]
        annotate(questions, panel, out)
        mine = out.read_text().replace("临床医学", "药学")
        out.write_text(mine)
        with pytest.raises(UserError, match="or was changed since"):
            annotate(questions, panel, out)
    assert out.read_text() == mine


def test_wrong_commands(questions: Path, tmp_path: Path) -> None:
    common = ["--questions", str(questions), "--config", "zeroshot_vllm.yaml"]
    with pytest.raises(UserError, match="would replace its own input"):
        annotate_main([*common, "--out", str(questions)])
    (tmp_path / "mine.jsonl").write_text("x")
    with pytest.raises(UserError, match="was not written by annotate"):
        annotate_main([*common, "--out", str(tmp_path / "mine.jsonl")])
    with pytest.raises(UserError, match="two models are called zeroshot_vllm"):
        annotate_main([*common, "zeroshot_vllm", "--out", str(tmp_path / "o.jsonl")])
    (tmp_path / "vote.yaml").write_text("extends: zeroshot_vllm.yaml\n")
    with pytest.raises(UserError, match="a model cannot be called 'vote'"):
        annotate(questions, [tmp_path / "vote.yaml"], tmp_path / "o.jsonl")
    assert re.fullmatch("x", (tmp_path / "mine.jsonl").read_text())
