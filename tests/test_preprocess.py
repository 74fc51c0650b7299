"""The preprocess program: what it writes, what it reports, and that a bad file leaves nothing behind."""

import csv
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cmexam_tune import preprocess, prompts
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Case, Question, Turn
from cmexam_tune.quality import duplicates

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the released files are not here")
HEADER = ["Question", "Options", "Answer", "Explanation"]
OPTIONS = "A 甲\nB 1 mg/kg\nC 丙\nD 丁"
ROWS = [
    ["第一题", OPTIONS, "B", "理由"],
    ["第二题", OPTIONS, "da", ""],
    ["第三题", OPTIONS, "", "没有答案"],
    ["第四题", OPTIONS, "F", ""],
]
CMB = {
    "question": "第一题",
    "option": {"A": "甲", "B": "1 mg/kg", "C": "丙", "D": "丁", "E": ""},
    "answer": "C",
    "question_type": "单项选择题",
}


def table(path, rows, encoding="utf-8"):
    with path.open("w", encoding=encoding, newline="") as handle:
        csv.writer(handle).writerows(rows)
    return str(path)


def array(path, items):
    path.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    return str(path)


@pytest.fixture
def val(tmp_path):
    return table(tmp_path / "val.csv", [HEADER, *ROWS])


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def call(*argv):
    with pytest.raises(SystemExit) as stop:
        cli.run(preprocess.main, list(map(str, argv)))
    return stop.value.code


def test_what_is_written_and_reported(val, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert call("cmexam", "--input", val, "--out", out, "--styles", "1,answer_explain") == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "val.1.jsonl",
        "val.answer_explain.jsonl",
        "val.questions.jsonl",
        "val.report.json",
    ]
    questions = list(jsonl.read(out / "val.questions.jsonl", Question))
    assert [(q.id, q.answer, q.explanation) for q in questions] == [("val:1", "B", "理由"), ("val:2", "AD", None)]
    report = json.loads((out / "val.report.json").read_text(encoding="utf-8"))
    assert {key: report[key] for key in ("rows", "kept", "dropped", "repaired", "rows_dropped")} == {
        "rows": 4,
        "kept": 2,
        "dropped": {"no answer": 1, "answer letter with no option": 1},
        "repaired": {"answer letters normalized": 1, "answer letters sorted": 1},
        "rows_dropped": [{"row": 3, "reason": "no answer"}, {"row": 4, "reason": "answer letter with no option"}],
    }
    assert {entry["row"] for entry in report["rows_repaired"]} == {2}
    assert report["styles"] == {
        "1": {"written": 2, "skipped": {}},
        "answer_explain": {"written": 1, "skipped": {"no explanation": 1}},
    }
    printed = capsys.readouterr().out
    assert "kept 2 of 4 rows" in printed and "dropped: no answer: 1" in printed
    assert "skipped 1 (no explanation)" in printed


def test_own_words_and_questions_without_explanation(val, tmp_path):
    own, out = tmp_path / "mine.yaml", tmp_path / "out"
    own.write_text('ask: "{question}？\\n{options}"\nwrite: "选{letters}"\n', encoding="utf-8")
    assert call("cmexam", "--input", val, "--out", out, "--styles", f"zeroshot,{own}") == 0
    assert [row["completion"] for row in lines(out / "val.mine.jsonl")] == ["选B", "选AD"]
    assert lines(out / "val.mine.jsonl")[0]["prompt"].startswith("第一题？\nA 甲\nB ")
    assert [row["completion"] for row in lines(out / "val.zeroshot.jsonl")] == ["答案：B\n解释：理由", "答案：AD"]
    own.write_text("ask: {{options}}\n", encoding="utf-8")
    assert call("cmexam", "--input", val, "--out", out, "--styles", own, "--overwrite") == 2
    own.write_text('ask: "{options}"\n', encoding="utf-8")
    assert call("cmexam", "--input", val, "--out", out, "--styles", own, "--overwrite") == 2


@pytest.mark.parametrize("form", list(preprocess.FORMATS))
def test_formats_hold_what_render_gives(val, tmp_path, form):
    preprocess.preprocess("cmexam", [val], tmp_path / "out", styles=["4"], format=form)
    question = next(jsonl.read(tmp_path / "out/val.questions.jsonl", Question))
    example = prompts.render(question, "4")
    (row,) = lines(tmp_path / "out/val.4.jsonl")
    asked, written = {
        "prompt": lambda r: (r["prompt"], r["completion"]),
        "alpaca": lambda r: (r["instruction"] + r["input"], r["output"]),
        "sharegpt": lambda r: tuple(t["value"] for t in r["conversations"]),
        "messages": lambda r: tuple(t["content"] for t in r["messages"]),
    }[form](row)
    assert (asked, written) == (example.prompt, example.completion)
    assert row.get("id", row.get("question_id")) == "val:1"


def test_cmb_with_answers_and_cases(tmp_path):
    items = [{**{k: v for k, v in CMB.items() if k != "answer"}, "id": number} for number in (1, 2)]
    test = array(tmp_path / "test.json", items)
    answers = array(tmp_path / "answers.json", [{"id": 1, "answer": "B"}, {"id": 2, "answer": "A"}])
    (report,) = preprocess.preprocess("cmb", [test], tmp_path / "a", answers=answers, styles=["cmb_answer"])
    assert report["kept"] == 2 and report["styles"]["cmb_answer"]["written"] == 2
    assert [q["answer"] for q in lines(tmp_path / "a/test.questions.jsonl")] == ["B", "A"]
    (report,) = preprocess.preprocess("cmb", [test], tmp_path / "beside")
    assert report["answers"] == answers and [q["answer"] for q in lines(tmp_path / "beside/test.questions.jsonl")] == [
        "B",
        "A",
    ]
    Path(answers).rename(tmp_path / "elsewhere.json")
    (report,) = preprocess.preprocess("cmb", [test], tmp_path / "b", styles=["cmb_answer"])
    assert [q["answer"] for q in lines(tmp_path / "b/test.questions.jsonl")] == [None, None]
    assert report["styles"]["cmb_answer"] == {"written": 0, "skipped": {"no published answer": 2}}
    case = {"id": "0", "title": "t", "description": "d", "QA_pairs": [{"question": "q", "solution": "s"}] * 3}
    clin = array(tmp_path / "clin.json", [case])
    (report,) = preprocess.preprocess("cmb", [clin], tmp_path / "c")
    assert (report["kept"], report["questions"]) == (1, 3) and "1 of 1 cases, 3 questions" in preprocess.summary(report)
    (written,) = jsonl.read(tmp_path / "c/clin.cases.jsonl", Case)
    assert written == Case("0", "t", "d", (Turn("q", "s"),) * 3)
    assert list(lines(tmp_path / "c/clin.cases.jsonl")[0]) == ["id", "title", "record", "turns"]
    for change, message in [
        ({"turns": [{"question": "q"}]}, r"clin.cases.jsonl:1: not a Case: turns\[0\].answer: required"),
        ({"turns": ["q"]}, r"turns\[0\]: should be an object"),
        ({"turns": []}, "case '0': id, record and turns must not be empty"),
    ]:
        array(tmp_path / "c/clin.cases.jsonl", {"id": "0", "title": "", "record": "r", **change})
        with pytest.raises(DataError, match=message):
            list(jsonl.read(tmp_path / "c/clin.cases.jsonl", Case))


def test_duplicates_inside_and_between_files(tmp_path):
    train = table(tmp_path / "train.csv", [HEADER, ROWS[0], ROWS[1], [" 第一 题", OPTIONS, "C", ""]])
    other = table(tmp_path / "val.csv", [HEADER, ROWS[1], ["只此一题", OPTIONS, "A", ""]])
    reports = preprocess.preprocess("cmexam", [train, other], tmp_path / "out")
    assert reports[0]["duplicates"] == [
        {"ids": ["train:1", "train:3"], "files": ["train"], "conflicting_answers": True},
        {"ids": ["train:2", "val:1"], "files": ["train", "val"], "conflicting_answers": False},
    ]
    assert reports[1]["duplicates"] == reports[0]["duplicates"][1:]
    assert [report["kept"] for report in reports] == [3, 2]


def test_the_same_question_has_the_same_texts_whatever_their_signs_and_the_order_of_the_options():
    seen = duplicates.Repeated()
    seen.add("f", Question("a", "ＤＮＡ 是", {"A": "甲", "B": "乙"}, "A"))
    seen.add("f", Question("b", "dna是。", {"A": "乙 ", "B": "甲"}, "B"))
    seen.add("f", Question("c", "DNA是", {"A": "甲", "B": "丙"}, "A"))
    assert seen.groups() == [{"ids": ["a", "b"], "files": ["f"], "conflicting_answers": False}]
    seen.add("f", Question("d", "DNA是", {"A": "甲", "B": "乙"}, "B"))
    assert [(group["ids"], group["conflicting_answers"]) for group in seen.groups()] == [(["a", "b", "d"], True)]


BAD = {
    "missing": (None, "no such exam file"),
    "empty": (b"", "is empty"),
    "gbk": ("Question,Options,Answer\n题,A 甲,A".encode("gbk"), "bad.csv:2: not UTF-8"),
    "columns": (b"a,b\n1,2\n", "Found: a, b"),
    "quote": (b'Question,Options,Answer\n"q,x,A\n', "broken CSV"),
    "nothing": (b"Question,Options,Answer\nq,A 1,A\n", "no question can be read"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_leaves_nothing_behind(kind, val, tmp_path, capsys):
    content, message = BAD[kind]
    bad = tmp_path / "bad.csv"
    if content is not None:
        bad.write_bytes(content)
    out = tmp_path / "new" / "out"
    assert call("cmexam", "--input", val, bad, "--out", out, "--styles", "1") == 2
    error = capsys.readouterr().err
    assert message in error and "bad.csv" in error and "Traceback" not in error and error.startswith("error: ")
    assert not (tmp_path / "new").exists()
    out.mkdir(parents=True)
    assert call("cmexam", "--input", val, bad, "--out", out) == 2
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cmexan", "--input", "x", "--out", "y"], "did you mean 'cmexam'"),
        (["cmexam", "--out", "y"], "--input"),
        (["cmexam", "--input", "VAL", "--out", "OUT", "--styles", "1,answr"], "did you mean 'answer'"),
        (["cmexam", "--input", "VAL", "--out", "OUT", "--format", "x"], "invalid choice: 'x'"),
        (["cmexam", "--input", "VAL", "VAL", "--out", "OUT"], "2 files are called 'val'"),
        (["cmexam", "--input", "VAL", "--out", "VAL"], "val.csv is a file"),
        (["cmexam", "--input", "VAL", "--out", "OUT", "--answers", "VAL"], "--answers is for cmb"),
        (["cmexam", "--input", "VAL", "--out", "OUT", "--answers", "none"], "no such file of answers"),
    ],
)
def test_wrong_calls(argv, message, val, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(*[{"VAL": val, "OUT": str(out)}.get(word, word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not out.exists()


def test_overwrite_has_to_be_asked_for(val, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "val.questions.jsonl").write_text("mine", encoding="utf-8")
    assert call("cmexam", "--input", val, "--out", out) == 2
    assert "val.questions.jsonl: exists. Add --overwrite" in capsys.readouterr().err
    assert [(p.name, p.read_text(encoding="utf-8")) for p in out.iterdir()] == [("val.questions.jsonl", "mine")]
    assert call("cmexam", "--input", val, "--out", out, "--overwrite") == 0
    assert len(lines(out / "val.questions.jsonl")) == 2


def test_the_function_raises_what_the_program_prints(val, tmp_path):
    with pytest.raises(ConfigError, match="exams: 'cmexan' is unknown, did you mean 'cmexam'"):
        preprocess.preprocess("cmexan", [val], tmp_path / "out")
    with pytest.raises(UserError, match="no such exam file"):
        preprocess.preprocess("cmexam", [tmp_path / "none.csv"], tmp_path / "out")


def test_starts_without_heavy_libraries_in_under_a_second():
    code = (
        "import sys; from cmexam_tune import preprocess, stats\n"
        "heavy = {'torch', 'transformers', 'pandas', 'numpy', 'openpyxl', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time: the clock also counts what else a machine does.
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 1


@needs_data
def test_the_released_files(tmp_path):
    inputs = [DATA / "cmexam" / "val.csv", DATA / "cmexam" / "val_literal_newlines_300.csv"]
    reports = preprocess.preprocess("cmexam", inputs, tmp_path, styles=["4"])
    assert (reports[0]["rows"], reports[0]["kept"]) == (6811, 6810)
    assert reports[0]["rows_dropped"] == [{"row": 5357, "reason": "no answer"}]
    assert reports[0]["styles"]["4"] == {"written": 5771, "skipped": {"no explanation": 1039}}
    whole, part = lines(tmp_path / "val.questions.jsonl"), lines(tmp_path / f"{inputs[1].stem}.questions.jsonl")
    assert sum("group" in q["facets"] for q in whole) > 20
    assert [{**q, "id": "", "facets": {}} for q in whole[:300]] == [{**q, "id": "", "facets": {}} for q in part]
    (report,) = preprocess.preprocess("cmb", [DATA / "cmb" / "cmb_single90.json"], tmp_path)
    assert report["kept"] == 90
    (report,) = preprocess.preprocess("cmb", [DATA / "cmb" / "CMB-Clin-qa.json"], tmp_path)
    assert (report["kept"], report["questions"]) == (74, 208)


def test_a_run_killed_while_renaming_is_finished_and_may_be_repeated(val, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from cmexam_tune import preprocess\n"
        "replace = Path.replace\n"
        "def killed(path, target):\n"
        "    replace(path, target)\n"
        "    if target.parent == Path(sys.argv[2]):\n"
        "        os.kill(os.getpid(), 9)\n"
        "Path.replace = killed\n"
        "preprocess.preprocess('cmexam', [sys.argv[1]], sys.argv[2])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, val, str(out)], check=False)
    assert done.returncode == -9 and len(list(out.iterdir())) == 2
    early = out / ".preprocess.01234567.cmexam-part"
    early.mkdir()
    (early / "half.jsonl").touch()
    own = out / ".preprocess.mine"
    own.mkdir()
    preprocess.preprocess("cmexam", [val], out)
    assert sorted(p.name for p in out.iterdir()) == [".preprocess.mine", "val.questions.jsonl", "val.report.json"]
    with pytest.raises(UserError, match="Add --overwrite"):
        preprocess.preprocess("cmexam", [val], out)


def test_output_never_lands_on_its_input(tmp_path, capsys):
    path = tmp_path / "val.questions.jsonl"
    path.write_text(json.dumps({"Question": "q", "Options": ["a", "b"], "Answer": "A"}), encoding="utf-8")
    copy = tmp_path / "val.jsonl"
    copy.write_bytes(path.read_bytes())
    before = path.read_bytes()
    assert call("cmexam", "--input", copy, path, "--out", tmp_path, "--overwrite") == 2
    assert "would replace its own input" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_parts_keep_cases_whole_and_share_a_facet(tmp_path):
    case = "患者，男，45岁。反复上腹痛一年，进食后呕吐一个月，呕吐物含有宿食，查体可见胃型。"
    rows = [[f"第{i}题", OPTIONS, "B", "", "内科" if i % 4 else "外科"] for i in range(200)]
    rows += [[f"{case}第{i}问是什么", OPTIONS, "A", "", "内科"] for i in range(20)]
    raw = table(tmp_path / "all.csv", [[*HEADER, "Clinical Department"], *rows])
    wanted = ["--split", "train=0.8,val=0.1,test=0.1", "--stratify", "Clinical Department", "--seed", "3"]
    for out in ("a", "b"):
        assert call("cmexam", "--input", raw, "--out", tmp_path / out, *wanted) == 0
    parts = {part: lines(tmp_path / f"a/all.{part}.questions.jsonl") for part in ("train", "val", "test")}
    assert {part: len(found) for part, found in parts.items()} == {"train": 176, "val": 22, "test": 22}
    assert {sum("外科" in q["facets"].values() for q in found) / 50 for found in parts.values()} == {0.8, 0.1}
    assert sum(any("group" in q["facets"] for q in found) for found in parts.values()) == 1
    for part in parts:
        name = f"all.{part}.questions.jsonl"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(q["id"] for found in parts.values() for q in found) == sorted(f"all:{i + 1}" for i in range(220))


def test_a_folder_and_a_zip_as_they_were_downloaded(tmp_path, capsys):
    root = tmp_path / "CMB"
    for part in ("CMB-train", "CMB-test", "CMB-Clin", "__MACOSX"):
        (root / part).mkdir(parents=True)
    item = {k: v for k, v in CMB.items() if k != "answer"}
    array(root / "CMB-train/train.json", [CMB])
    array(root / "CMB-test/questions.json", [{**item, "id": 1}])
    array(root / "CMB-test/test-answer.json", [{"id": 1, "answer": "D"}])
    array(
        root / "CMB-Clin/clin.json",
        [{"title": "t", "description": "d", "QA_pairs": [{"question": "q", "answer": "s"}]}],
    )
    array(root / "__MACOSX/train.json", [CMB])
    array(root / "infos.json", {"version": "1"})
    packed = shutil.make_archive(str(tmp_path / "CMB"), "zip", tmp_path, "CMB")
    for given, out in ((root, "folder"), (packed, "zip")):
        assert call("cmb", "--input", given, "--out", tmp_path / out) == 0
        printed = capsys.readouterr().out
        assert "infos.json" in printed and "test-answer.json" in printed
        assert sorted(p.name for p in (tmp_path / out).glob("*.jsonl")) == [
            *("clin.cases.jsonl", "questions.questions.jsonl", "train.questions.jsonl"),
        ]
        assert lines(tmp_path / out / "questions.questions.jsonl")[0]["answer"] == "D"
    with pytest.raises(UserError, match=r"none of .* has this exam's columns"):
        preprocess.preprocess("mlec-qa", [root], tmp_path / "none")
    (tmp_path / "bad.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="not a zip that can be read"):
        preprocess.preprocess("cmb", [tmp_path / "bad.zip"], tmp_path / "none")


def test_a_data_set_on_the_hub_is_pinned_to_a_revision(tmp_path, monkeypatch):
    import huggingface_hub

    array(tmp_path / "train.json", [CMB])
    asked = []

    def download(repository, **options):
        asked.append((repository, options["repo_type"], options["revision"]))
        return str(tmp_path)

    info = SimpleNamespace(sha="935fbc0")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, revision=None: info)
    (report,) = preprocess.preprocess("cmb", ["hf://FreedomIntelligence/CMB"], tmp_path / "out")
    assert asked == [("FreedomIntelligence/CMB", "dataset", "935fbc0")]
    assert report["input"] == "hf://FreedomIntelligence/CMB@935fbc0/train.json" and report["kept"] == 1

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"cannot be fetched \(no network\).*HF_ENDPOINT"):
        preprocess.preprocess("cmb", ["hf://FreedomIntelligence/CMB"], tmp_path / "out2")
    with pytest.raises(UserError, match="hf://OWNER/NAME"):
        preprocess.preprocess("cmb", ["hf://CMB"], tmp_path / "out2")


def test_a_data_set_on_modelscope_is_read_alike(tmp_path, monkeypatch):
    array(tmp_path / "train.json", [CMB])
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "modelscope", None)
        with pytest.raises(UserError, match=r"pip install 'cmexam_tune\[modelscope\]'"):
            preprocess.preprocess("cmb", ["ms://FreedomIntelligence/CMB"], tmp_path / "out")
    asked = []

    class HubError(Exception):
        pass

    def download(dataset_id, revision=None, allow_patterns=None):
        asked.append((dataset_id, revision, "*.json" in allow_patterns))
        if revision == "gone":
            raise HubError("no such revision")
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "modelscope", SimpleNamespace(dataset_snapshot_download=download))
    monkeypatch.setitem(sys.modules, "modelscope_hub", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "modelscope_hub.errors", SimpleNamespace(HubError=HubError))
    (report,) = preprocess.preprocess("cmb", ["ms://FreedomIntelligence/CMB"], tmp_path / "out")
    assert asked == [("FreedomIntelligence/CMB", "master", True)]
    assert report["input"] == "ms://FreedomIntelligence/CMB@master/train.json" and len(report["input_sha256"]) == 64
    (report,) = preprocess.preprocess("cmb", ["ms://FreedomIntelligence/CMB@v1"], tmp_path / "tagged")
    assert asked[-1][1] == "v1" and report["input"] == "ms://FreedomIntelligence/CMB@v1/train.json"
    with pytest.raises(UserError, match=r"cannot be fetched \(no such revision\)"):
        preprocess.preprocess("cmb", ["ms://FreedomIntelligence/CMB@gone"], tmp_path / "none")
    with pytest.raises(UserError, match="ms://OWNER/NAME"):
        preprocess.preprocess("cmb", ["ms://CMB"], tmp_path / "none")


def test_columns_that_nothing_reads_are_named_and_can_be_kept(tmp_path):
    raw = table(tmp_path / "t.csv", [[*HEADER, "年份"], [*ROWS[0], "2021"]])
    (report,) = preprocess.preprocess("cmexam", [raw], tmp_path / "a")
    assert report["columns_unread"] == ["年份"] and "--map facet:年份=年份" in preprocess.summary(report)
    (report,) = preprocess.preprocess("cmexam", [raw], tmp_path / "b", columns="facet:年份=年份")
    assert report["columns_unread"] == []
    assert lines(tmp_path / "b/t.questions.jsonl")[0]["facets"] == {"年份": "2021"}
