"""CMB-Clin: dialogues as CMB's own code writes them, judges that are read strictly, and their agreement."""

import json
import re
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import openpyxl
import pytest
import real_data
from fake_openai import Fault, Said, serving
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from cmexam_tune import tiny
from cmexam_tune.cmb_clin import explanations, human_scores, rubric
from cmexam_tune.cmb_clin.judgements import (
    Judged,
    Judgement,
    agreements,
    sensitivity,
)
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Case, Prediction, Question, Turn
from cmexam_tune.evaluation.significance import judge_agreement, kappa
from cmexam_tune.exams import cmb
from cmexam_tune.judge import judge
from cmexam_tune.judge import main as judge_main
from cmexam_tune.predict import predict
from cmexam_tune.preprocess import preprocess
from cmexam_tune.prompts import chat_template, dialogue, template

SAMPLE = Path(__file__).resolve().parents[1] / "cmexam_tune" / "sample" / "cmb" / "clin.json"
SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL, GOLDEN = real_data.find("CMB-Clin-qa.json"), SHARED / "golden" / "scorers" / "cmb_prompts.json"
GOOD = {"fluency": 5, "relevance": 4, "completeness": 3, "proficiency": 4}
CASES = [
    Case("0", "甲", "病史。", (Turn("诊断？", "阑尾炎。"), Turn("治疗？", "手术。"))),
    Case("1", "乙", "主诉{x}。", (Turn("鉴别？", "溃疡。"),)),
]


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    jsonl.write(tmp_path / "c.cases.jsonl", CASES)
    return tmp_path / "c.cases.jsonl"


def remote(url: str, *more: str) -> list[str]:
    return [
        "model.family=endpoint", "model.model_name_or_path=m", f"model.base_url={url}", "prompt.template=auto",
        "generation.max_retries=0", *more,
    ]  # fmt: skip


# --- dialogues ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not (REAL.is_file() and GOLDEN.is_file()), reason="CMB-Clin and CMB's prompts lie beside the project"
)
@pytest.mark.parametrize(
    ("worker", "name"),
    [
        ("baichuan-13b-chat", "baichuan"),
        ("chatglm3_6b", "cmb_chatglm"),
        ("bentsao", "bentsao"),
        ("medicalgpt", "medicalgpt"),
    ],
)
def test_real_cases_are_asked_as_cmbs_own_code_asks_them(worker: str, name: str) -> None:
    every = {case.id: case for case in cmb.read_clin(REAL)}
    assert len(every) == 74 and len(list(dialogue.keys(list(every.values())))) == 208
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["clin"]
    wrapper = template(chat_template.of_conversations(name))
    for one in golden:
        case = every[one["case_id"]]
        made = [
            wrapper.render(dialogue.request(case, n + 1, None, wrapper.case).dialogue()) for n in range(len(case.turns))
        ]
        # Our records and answers are stripped at both ends; theirs are not.
        assert [re.sub(r"\s", "", text) for text in made] == [re.sub(r"\s", "", t) for t in one["prompts"][worker]]
        assert len(made) == one["turns"]


def test_a_turn_by_hand() -> None:
    second = dialogue.request(CASES[0], 2)
    assert second.question.id == "0:2"
    assert second.dialogue().messages() == [
        {"role": "user", "content": "病史。诊断？"},
        {"role": "assistant", "content": "阑尾炎。"},
        {"role": "user", "content": "治疗？"},
    ]
    assert dialogue.request(CASES[0], 2, ["胃炎"]).history[1] == ("assistant", "胃炎")


def test_all_turns_by_an_endpoint_and_after_a_failure_only_the_missing(cases: Path, tmp_path: Path) -> None:
    broken = [True]

    def script(body: dict[str, Any], count: int) -> Any:
        last = body["messages"][-1]["content"]
        return Fault(400, "filtered") if broken[0] and last == "治疗？" else f"答{len(body['messages'])}"

    with serving(script) as server:
        out = predict("lora_llama", cases, tmp_path / "p.jsonl", remote(server.url))
        first = {p.question_id: p for p in jsonl.read(out, Prediction)}
        assert list(first) == ["0:1", "0:2", "1:1"] and first["0:2"].reason == "400: filtered"
        broken[0] = False
        predict("lora_llama", cases, out, remote(server.url))
    assert len(server.bodies) == 4
    assert [(p.question_id, p.text, p.finish) for p in jsonl.read(out, Prediction)] == [
        ("0:1", "答1", "stop"), ("0:2", "答3", "stop"), ("1:1", "答1", "stop"),
    ]  # fmt: skip
    note = json.loads(Path(f"{out}.meta.json").read_text())
    assert [start["requests"] for start in note["result"]["served"]] == [3, 1]
    assert note["result"]["served"][0]["models"] == ["m-0613"]


def test_its_own_answers_in_the_history(cases: Path, tmp_path: Path) -> None:
    with serving(lambda body, count: "我的" + body["messages"][-1]["content"]) as server:
        out = predict("lora_llama", cases, tmp_path / "p.jsonl", remote(server.url, "prompt.history=own"))
        lines = out.read_text().splitlines(keepends=True)
        out.write_text("".join(line for line in lines if '"0:2"' not in line))
        predict("lora_llama", cases, out, remote(server.url, "prompt.history=own"))
    assert len(server.bodies) == 4 and out.read_text().splitlines(keepends=True) == lines
    for body in (server.bodies[2], server.bodies[3]):
        assert [m["content"] for m in body["messages"]] == ["病史。诊断？", "我的病史。诊断？", "治疗？"]


def test_a_local_model_answers_cases(tmp_path: Path) -> None:
    model = tiny.build("llama", tmp_path / "llama", hidden=32)
    preprocess("cmb", [SAMPLE], tmp_path / "data")
    words = [f"model.model_name_or_path={model}", "prompt.template=baichuan", "prompt.max_source_length=512"]
    words += ["generation.max_new_tokens=3"]
    out = predict("lora_llama", tmp_path / "data" / "clin.cases.jsonl", tmp_path / "p.jsonl", words)
    turns = list(dialogue.keys(list(jsonl.read(tmp_path / "data" / "clin.cases.jsonl", Case))))
    assert [p.question_id for p in jsonl.read(out, Prediction)] == turns and len(turns) >= 4


# --- the rubric --------------------------------------------------------------------------------------------------


def test_what_a_judge_reads() -> None:
    shipped = rubric.read()
    first, second = (shipped.request(CASES[0], n, "我{y}答") for n in (1, 2))
    words = second.dialogue().prompt_text
    for part in ("病史。", "问：诊断？\n答：阑尾炎。", "治疗？", "手术。", "我{y}答", "fluency", "5 分"):
        assert part in words
    assert "此前的对话" not in first.dialogue().prompt_text
    assert "手术" not in shipped.request(CASES[0], 2, "x", "no_reference").dialogue().prompt_text
    reversed_ = shipped.request(CASES[0], 2, "x", "reversed").dialogue().prompt_text
    assert reversed_.index("proficiency") < reversed_.index("fluency") and words.index("fluency") < words.index("prof")
    assert "主诉{x}" in shipped.request(CASES[1], 1, "a").dialogue().prompt_text


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (json.dumps(GOOD), True),
        (f"```json\n{json.dumps(GOOD)}\n```", True),
        (f"<think>5 分？{{}}</think>\n{json.dumps(GOOD)}", True),
        (f"评分如下：{json.dumps(GOOD)}", False),
        (json.dumps({**GOOD, "fluency": 6}), False),
        (json.dumps({**GOOD, "fluency": 4.5}), False),
        (json.dumps({**GOOD, "fluency": True}), False),
        (json.dumps({**GOOD, "fluency": "4"}), False),
        (json.dumps({"fluency": 4}), False),
        (json.dumps({**GOOD, "style": 4}), False),
        ("[5, 4, 3, 4]", False),
        ("", False),
        ("[" * 100_000, False),
    ],
)
def test_only_the_scores_themselves_are_read(text: str, read: bool) -> None:
    assert rubric.read().parse(text) == (GOOD if read else None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{reference}\n  【待评回答】", "【待评回答】"), "prompt: the fields"),
        (("    name: 相关性\n", ""), "axes.relevance.name: required key is missing"),
        (("      5: 要点齐全\n", ""), "levels: 1 to 5 are needed"),
        (("again: |-", "agian: |-"), "did you mean 'again'"),
    ],
)
def test_another_rubric_is_checked(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = rubric.SHIPPED.read_text(encoding="utf-8")
    assert change[0] in text
    (tmp_path / "r.yaml").write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        rubric.read(tmp_path / "r.yaml")


# --- judging -----------------------------------------------------------------------------------------------------


def answered(tmp_path: Path, name: str, texts: tuple[str, ...] = ("甲答", "乙答", "丙答")) -> Path:
    records = [Prediction(key, text) for key, text in zip(dialogue.keys(CASES), texts, strict=False)]
    jsonl.write(tmp_path / f"{name}.jsonl", records)
    return tmp_path / f"{name}.jsonl"


def recipe(tmp_path: Path, name: str, url: str) -> Path:
    text = f"""extends: lora_llama.yaml
prompt: {{template: auto, max_source_length: 8192}}
model: {{family: endpoint, model_name_or_path: {name}, base_url: '{url}'}}
generation: {{max_retries: 0}}
"""
    (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / f"{name}.yaml"


def test_two_judges_two_models_and_nothing_is_invented(cases: Path, tmp_path: Path) -> None:
    def script(body: dict[str, Any], count: int) -> Any:
        words = body["messages"][-1]["content"]
        if "无法读取" in words:
            return json.dumps(GOOD) if "甲答" in body["messages"][-3]["content"] else "还是不会"
        if body["model"] == "strange" and ("甲答" in words or "丙答" in words):
            return "我给满分"
        return json.dumps({**GOOD, "fluency": 2 if "戊答" in words else 5})

    files = [answered(tmp_path, "one"), answered(tmp_path, "two", ("丁答", "戊答"))]
    with serving(script) as server:
        judges = [recipe(tmp_path, name, server.url) for name in ("good", "strange")]
        found = judge(files, cases, judges, tmp_path / "out")
        asked = len(server.bodies)
        judge(files, cases, judges, tmp_path / "out")
        assert len(server.bodies) == asked == 2 * 5 + 2
    one = found["models"]["one"]["judges"]["strange"]
    assert (one["n"], one["unread"]) == (2, 1)
    assert found["models"]["two"]["judges"]["good"]["fluency"] == 3.5
    assert found["models"]["two"]["answered"] == 2 and found["models"]["two"]["turns"] == 3
    assert found["models"]["one"]["over_judges"]["average"] == {"mean": 4.0, "std": 0.0}
    fluency = next(line for line in found["agreement"] if line["axis"] == "fluency")
    assert fluency["n"] == 4 and fluency["spearman"] == pytest.approx(1.0)
    lines = [json.loads(line) for line in (tmp_path / "out/judgements/strange/one.jsonl").read_text().splitlines()]
    assert [(line["scores"], line["asked"]) for line in lines] == [(GOOD, 2), ({**GOOD, "fluency": 5}, 1), (None, 2)]
    page = (tmp_path / "out" / "judge.md").read_text()
    assert "HuatuoGPT-II-34B" in page and "4.60" in page and "CMB Table 8" in page
    assert json.loads((tmp_path / "out" / "judge.json").read_text())["models"] == found["models"]
    # Each answer with every judge's scores and words, in two languages; nothing of a model acts in the page.
    page = (tmp_path / "out" / "judge.html").read_text()
    cards = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert len(cards) == 3 and page.count("<tr>") > 10
    assert all(f"<pre>{text}</pre>" in page for text in ("甲答", "戊答", "还是不会"))
    for words in (
        '<span class="zh">流畅性</span>',
        '<span class="zh">无法读取</span>',
        "三位专家，CMB 表 8",
        "评委原文",
    ):
        assert words in page, words
    first = cards[0]
    assert re.search(r"good</td><td>5</td><td>\d</td><td>\d</td><td>\d</td><td>[\d.]+</td>", first), first
    assert 'data-apart="' in first and re.search(r"<td>strange</td>", first)
    with serving(script) as other, pytest.raises(UserError, match="another experiment"):
        answered(tmp_path / "out", "one", ("别的",))
        judge([tmp_path / "out" / "one.jsonl"], cases, [recipe(tmp_path, "good", other.url)], tmp_path / "out")


def test_the_order_of_models_at_two_temperatures(cases: Path, tmp_path: Path) -> None:
    """Three models, of which the first two change places: Spearman 0.5 by hand (1 - 6 * 2 / (3 * 8))."""
    said = {"a": "甲答", "b": "乙答", "c": "丙答"}
    fluency = {"甲答": 5, "乙答": 4, "丙答": 2}
    files = []
    for temperature, order in ((0.0, "abc"), (0.6, "bac")):
        for model, text in zip(order, said.values(), strict=True):
            files.append(answered(tmp_path, f"{model}{temperature:g}", (text,) * 3))
            config = {"model": {"model_name_or_path": model}, "generation": {}}
            config["generation"] = {"do_sample": True, "temperature": temperature} if temperature else {}  # type: ignore[dict-item]
            Path(f"{files[-1]}.meta.json").write_text(json.dumps({"config": config}))

    def script(body: dict[str, Any], count: int) -> Any:
        words = body["messages"][-1]["content"]
        return json.dumps({**GOOD, "fluency": min(score for text, score in fluency.items() if text in words)})

    with serving(script) as server:
        found = judge(files, cases, [recipe(tmp_path, "good", server.url)], tmp_path / "out")
    expected = {"judge": "good", "first": 0.0, "second": 0.6, "n": 3, "spearman": pytest.approx(0.5)}
    assert found["temperatures"] == [expected]
    page = (tmp_path / "out" / "judge.md").read_text()
    assert "| 0 / 0.6 | good | 3 | 0.50 |" in page
    assert "| 0 / 0.2 | ChatGPT, CMB Table 7 |  | 0.95 |" in page


def test_variants_and_a_failed_request_is_asked_again(cases: Path, tmp_path: Path) -> None:
    down = [True]

    def script(body: dict[str, Any], count: int) -> Any:
        words = body["messages"][-1]["content"]
        if "丙答" in words and down[0]:
            return Fault(400, "no")
        scores = {**GOOD, "fluency": 3} if words.index("proficiency") < words.index("fluency") else GOOD
        return Said(json.dumps(scores))

    file = answered(tmp_path, "one")
    with serving(script) as server:
        panel = recipe(tmp_path, "j", server.url)
        first = judge([file], cases, [panel], tmp_path / "out", also=("reversed",))
        down[0] = False
        found = judge([file], cases, [panel], tmp_path / "out", also=("reversed",))
    assert first["models"]["one"]["judges"]["j"]["failed"] == 1 and found["models"]["one"]["judges"]["j"]["n"] == 3
    moved = {line["axis"]: (line["moved"], line["by"], line["shift"]) for line in found["moves"]}
    assert moved["fluency"] == (1.0, 2.0, -2.0) and moved["relevance"] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--out names the folder"),
        (["--out", "o"], "nothing was judged"),
        (["--export", "s.xlsx", "--sample", "0"], "--sample 0"),
        (["--out", "o", "--rubric", "none.yaml"], "no such rubric"),
    ],
)
def test_wrong_commands(argv: list[str], message: str, cases: Path, tmp_path: Path) -> None:
    common = ["--predictions", str(answered(tmp_path, "one")), "--cases", str(cases)]
    with pytest.raises(UserError, match=message):
        judge_main([*common, *(str(tmp_path / word) if word == "o" else word for word in argv)])
    with pytest.raises(UserError, match=r"'9:9' is no turn of"):
        jsonl.write(tmp_path / "strange.jsonl", [Prediction("9:9", "x")])
        judge([tmp_path / "strange.jsonl"], cases, [], tmp_path / "o")
    with pytest.raises(UserError, match="every answer in --predictions is empty"):
        judge([answered(tmp_path, "mute", (" ",))], cases, [], tmp_path / "o")


@pytest.mark.parametrize("name", ["judge.md", "judge.html", "judge.tex", "judge.json"])
def test_reports_of_others_are_not_replaced(name: str, cases: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", answered(tmp_path, "one")
    with serving(lambda body, count: json.dumps(GOOD)) as server:
        panel = recipe(tmp_path, "j", server.url)
        out.mkdir()
        (out / name).write_text("my notes")
        with pytest.raises(UserError, match=rf"{name}: exists and was not written by judge.*--overwrite"):
            judge([file], cases, [panel], out)
        assert not server.bodies and (out / name).read_text() == "my notes"
        command = ["--predictions", str(file), "--cases", str(cases), "--config", str(panel), "--out", str(out)]
        judge_main([*command, "--overwrite"])
        judge_main(command)
        with (out / name).open("a") as handle:
            handle.write("my notes")
        with pytest.raises(UserError, match="or was changed since"):
            judge_main(command)
        assert (out / name).read_text().endswith("my notes") and len(server.bodies) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0].replace('"fluency": 5', '"fluency": 99'), *lines[1:]], "one.jsonl:1: fluency is 99"),
        (lambda lines: [*lines[:2], lines[2].replace("fluency", "style")], "one.jsonl:3: the axes are style, rel"),
        (lambda lines: [*lines, lines[1]], "one.jsonl:4: '0:2' is judged on line 2 already"),
        (lambda lines: [lines[0].replace("0:1", "7:1"), *lines[1:]], "one.jsonl:1: '7:1' is no answer"),
        (lambda lines: ["[]\n", *lines[1:]], "one.jsonl:1: a JSON object"),
    ],
)
def test_judgements_that_were_changed_are_refused(change: Any, message: str, cases: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", answered(tmp_path, "one")
    with serving(lambda body, count: json.dumps(GOOD)) as server:
        judge([file], cases, [recipe(tmp_path, "j", server.url)], out)
        path = out / "judgements" / "j" / "one.jsonl"
        before = path.read_text()
        path.write_text("".join(change(before.replace('\\"', "'").splitlines(keepends=True))))
        for panel in ([], [recipe(tmp_path, "another", server.url)]):
            with pytest.raises(DataError, match=message):
                judge([file], cases, panel, out)
        assert len(server.bodies) == 3
        path.write_text(before + '{"question_id": "0:')  # half a line, of a run that was killed
        assert judge([file], cases, [], out)["models"]["one"]["judges"]["j"]["n"] == 3


def test_judgements_of_other_answers_are_not_counted(cases: Path, tmp_path: Path) -> None:
    with serving(lambda body, count: json.dumps(GOOD)) as server:
        judge([answered(tmp_path, "one")], cases, [recipe(tmp_path, "j", server.url)], tmp_path / "out")
        again = answered(tmp_path / "out", "one", ("别的", "乙答", "丙答"))
        with pytest.raises(UserError, match=r"j/one.jsonl: holds judgements of another experiment"):
            judge([again], cases, [recipe(tmp_path, "k", server.url)], tmp_path / "out")


def test_names_stay_inside_the_folder(cases: Path, tmp_path: Path) -> None:
    file = answered(tmp_path, "one")
    (tmp_path / "...yaml").write_text("extends: zeroshot_vllm.yaml\n")
    for panel in (tmp_path / "...yaml", tmp_path / ".yaml", Path(), Path("..")):
        with pytest.raises(UserError, match="a judge goes by its name"):
            judge([file], cases, [panel], tmp_path / "out")
    with pytest.raises(UserError, match="with --also"):  # else it would share a file with one.jsonl judged in reverse
        judge([answered(tmp_path, "one.reversed")], cases, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- people ------------------------------------------------------------------------------------------------------


def test_a_sheet_is_blind_and_comes_back(cases: Path, tmp_path: Path) -> None:
    files = [answered(tmp_path, "first_model", ("=1+1", "乙答")), answered(tmp_path, "second_model")]
    common = ["--predictions", *map(str, files), "--cases", str(cases)]
    sheet = tmp_path / "sheet.xlsx"
    assert judge_main([*common, "--export", str(sheet)]) is None
    with pytest.raises(UserError, match="exists"):
        judge_main([*common, "--export", str(sheet)])
    book = openpyxl.load_workbook(sheet)
    rows = list(book.active.iter_rows(min_row=2, values_only=True))
    assert len(rows) == 5 and "model" not in str(rows) and "=1+1" in [row[5] for row in rows]
    key = {place["row"]: place for place in json.loads(human_scores.key_path(sheet).read_text())}
    for line in range(2, 6):  # one row stays empty
        for column, score in enumerate((5, 4, 3, 2), 7):
            book.active.cell(line, column).value = score
    book.save(tmp_path / "sheet_expert.xlsx")
    found = judge(files, cases, [], tmp_path / "out", imported=[tmp_path / "sheet_expert.xlsx"])
    judged = {model: values["judges"].get("sheet_expert") for model, values in found["models"].items()}
    counts = {model: sum(place["model"] == model for row, place in key.items() if row < 6) for model in judged}
    assert {model: means["n"] for model, means in judged.items() if means} == {m: n for m, n in counts.items() if n}
    assert all(means["proficiency"] == 2 for means in judged.values() if means)
    book.active.cell(2, 7).value = 7
    book.save(tmp_path / "sheet_bad.xlsx")
    with pytest.raises(DataError, match=r"row 2: fluency is 7, an integer from 1 to 5"):
        human_scores.read(
            tmp_path / "sheet_bad.xlsx",
            rubric.read(),
            {"first_model": {"0:1", "0:2"}, "second_model": set(dialogue.keys(CASES))},
        )


def test_a_sample_is_drawn_evenly(tmp_path: Path) -> None:
    answers = {name: [Prediction(key, name) for key in dialogue.keys(CASES)] for name in "abc"}
    assert human_scores.export(tmp_path / "s.xlsx", CASES, answers, rubric.read(), sample=6, seed=1) == 6
    models = [place["model"] for place in json.loads(human_scores.key_path(tmp_path / "s.xlsx").read_text())]
    assert sorted(models) == ["a", "a", "b", "b", "c", "c"]


def filled_sheet(cases: Path, tmp_path: Path) -> tuple[Path, list[Path]]:
    """Export a sheet of one model's three answers, and fill it in."""
    files = [answered(tmp_path, "one")]
    sheet = tmp_path / "sheet.xlsx"
    judge_main(["--predictions", str(files[0]), "--cases", str(cases), "--export", str(sheet)])
    book = openpyxl.load_workbook(sheet)
    for row in book.active.iter_rows(min_row=2, min_col=7):
        for cell in row:
            cell.value = 4
    book.save(sheet)
    return sheet, files


def test_one_cell_far_away_costs_no_time(cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    book = openpyxl.load_workbook(sheet)
    book.active["XFD1048576"] = "x"
    book.save(sheet)
    start = time.process_time()
    judge(files, cases, [], tmp_path / "out", imported=[sheet])
    assert (tmp_path / "out" / "judge.json").is_file() and time.process_time() - start < 20


def test_a_sheet_with_a_number_twice_is_refused(cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    book = openpyxl.load_workbook(sheet)
    book.active.cell(4, 1).value = 1
    book.save(sheet)
    with pytest.raises(DataError, match=r"sheet.xlsx: row 4: no. 1 is on row 2 already"):
        judge(files, cases, [], tmp_path / "out", imported=[sheet])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "two"}, r"key.json: row 3: '.*' of 'two' is in no file of --predictions"),
        ({"question_id": "9:9"}, r"key.json: row 3: '9:9' of 'one' is in no file"),
        ({"row": 2}, r"key.json: row 2: the row or its answer stands twice"),
    ],
)
def test_a_key_of_something_else_is_refused(change: dict[str, Any], message: str, cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    key = human_scores.key_path(sheet)
    places = json.loads(key.read_text())
    places[1] |= change
    key.write_text(json.dumps(places))
    with pytest.raises(DataError, match=message):
        judge(files, cases, [], tmp_path / "out", imported=[sheet])


def test_judges_of_one_name_are_told_apart(cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    with pytest.raises(UserError, match="two sheets are called sheet"):
        judge(files, cases, [], tmp_path / "out", imported=[sheet, sheet])
    with serving(lambda body, count: json.dumps(GOOD)) as server:
        judge(files, cases, [recipe(tmp_path, "sheet", server.url)], tmp_path / "out")
    with pytest.raises(UserError, match="also the name of a judge"):
        judge(files, cases, [], tmp_path / "out", imported=[sheet])


def damaged(sheet: Path, part: str, text: bytes) -> None:
    """Replace one part of a workbook."""
    with zipfile.ZipFile(sheet) as packed:
        parts = {name: packed.read(name) for name in packed.namelist()}
    assert part in parts
    with zipfile.ZipFile(sheet, "w") as packed:
        for name, content in parts.items():
            packed.writestr(name, text if name == part else content)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("xl/workbook.xml", b"no XML"),
        ("xl/worksheets/sheet1.xml", b"<worksheet><sheetData><row>"),
        ("[Content_Types].xml", b""),
    ],
)
def test_a_damaged_sheet_is_one_message(part: str, text: bytes, cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    damaged(sheet, part, text)
    with pytest.raises(DataError, match=r"sheet.xlsx: not an .xlsx workbook that can be read"):
        judge(files, cases, [], tmp_path / "out", imported=[sheet])


def test_a_sheet_that_is_a_chart_is_one_message(cases: Path, tmp_path: Path) -> None:
    sheet, files = filled_sheet(cases, tmp_path)
    book = openpyxl.Workbook()
    book.create_chartsheet("chart").add_chart(openpyxl.chart.BarChart())
    del book["Sheet"]
    book.save(sheet)
    with pytest.raises(DataError, match=r"sheet.xlsx: (not an .xlsx workbook|no sheet has cells)"):
        judge(files, cases, [], tmp_path / "out", imported=[sheet])


# --- agreement, witnessed by scipy and scikit-learn ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_measures_are_scipys_and_scikit_learns(seed: int) -> None:
    import random

    dice = random.Random(seed)
    first = [dice.randint(1, 5) for _ in range(120)]
    second = [min(5, max(1, one + dice.choice((-1, 0, 0, 1)))) for one in first]
    measures = judge_agreement(first, second)
    assert measures["pearson"] == pytest.approx(stats.pearsonr(first, second).statistic)
    assert measures["spearman"] == pytest.approx(stats.spearmanr(first, second).statistic)
    assert measures["kendall"] == pytest.approx(stats.kendalltau(first, second).statistic)
    assert kappa(first, second) == pytest.approx(cohen_kappa_score(first, second))
    weighted = cohen_kappa_score(first, second, weights="quadratic")
    assert measures["weighted_kappa"] == pytest.approx(weighted)


def test_measures_of_nothing() -> None:
    for scores in ([], [3], [3, 3]):
        assert set(judge_agreement(scores, scores).values()) == {None}


def test_ranking_of_models_by_hand() -> None:
    def judged(who: str, model: str, score: int) -> Judged:
        return Judged(who, model, (Judgement("0:1", "", dict.fromkeys(GOOD, score)),))

    found = [judged("a", model, score) for model, score in zip("xyz", (1, 2, 3), strict=True)]
    found += [judged("b", model, score) for model, score in zip("xyz", (1, 3, 2), strict=True)]
    ranking = next(line for line in agreements(found, list(GOOD)) if line["axis"] == "ranking")
    assert ranking["n"] == 3 and ranking["spearman"] == pytest.approx(0.5)
    assert sensitivity(found, list(GOOD)) == []


def test_explanations_of_an_exam_are_judged_and_a_person_agrees_or_not(tmp_path: Path) -> None:
    """The same machinery: judged once each, agreement with a person's sheet; the paper's rows are of other axes."""
    exam = [
        Question(f"q:{i}", f"第{i}题的题干", {"A": "青霉素", "B": "手术"}, "A", None if i == 3 else f"参考解析{i}")
        for i in range(6)
    ]
    jsonl.write(tmp_path / "test.questions.jsonl", exam)
    explained = [f"模型解析{i}" + "很长" * i for i in range(6)]
    lines = [Prediction(q.id, f"答案: A\n解释: {explained[i]}" if i else "答案: A", "A") for i, q in enumerate(exam)]
    jsonl.write(tmp_path / "model.jsonl", lines)
    scores = {"correctness": 4, "argument": 3, "coverage": 2, "clarity": 5}

    def script(body: dict[str, Any], count: int) -> Any:
        words = body["messages"][-1]["content"]
        assert "【标准答案与解析】" in words and "A 青霉素\nB 手术" in words and "逐项分析" in words
        return json.dumps({**scores, "coverage": 1 + int(words.split("模型解析")[1][0]) % 3})

    questions, predictions = tmp_path / "test.questions.jsonl", tmp_path / "model.jsonl"
    with serving(script) as server:
        judge([predictions], questions, [recipe(tmp_path, "gpt", server.url)], tmp_path / "out")
        # Question 0 has no explanation of the model, question 3 none of the exam.
        assert len(server.bodies) == 4
    rules = rubric.read(explanations.RUBRIC)
    asked = explanations.cases(exam)
    human_scores.export(tmp_path / "doctor.xlsx", asked, {"model": explanations.answers(lines, asked)}, rules)
    book = openpyxl.load_workbook(tmp_path / "doctor.xlsx")
    heads = [cell.value for cell in book.active[1]]
    for row in book.active.iter_rows(min_row=2):
        number = int(str(row[heads.index("answer")].value).split("模型解析")[1][:1])
        for axis, value in {**scores, "coverage": 1 + number % 3}.items():
            row[heads.index(axis)].value = value
    book.save(tmp_path / "doctor.xlsx")
    found = judge([predictions], questions, [], tmp_path / "out", imported=[tmp_path / "doctor.xlsx"])
    coverage = next(line for line in found["agreement"] if line["axis"] == "coverage")
    assert coverage["n"] == 4 and coverage["spearman"] == pytest.approx(1.0)
    lengths = {(row["judge"], row["axis"]): row["spearman"] for row in found["length"]}
    expected = stats.spearmanr([len(explained[i]) for i in (1, 2, 4, 5)], [1 + i % 3 for i in (1, 2, 4, 5)]).statistic
    assert lengths["gpt", "coverage"] == lengths["doctor", "coverage"] == pytest.approx(expected)
    assert lengths["gpt", "clarity"] is None, "one score for all"
    assert "HuatuoGPT" not in (tmp_path / "out" / "judge.md").read_text(encoding="utf-8")
    jsonl.write(questions, [replace(question, explanation=None) for question in exam], overwrite=True)
    with pytest.raises(UserError, match=r"holds no cases .* and no questions with explanations"):
        judge([predictions], questions, [], tmp_path / "out")
