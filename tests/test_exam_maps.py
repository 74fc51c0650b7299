"""Maps of columns: each exam's layout read and written back with rows of our own; bad maps."""

import csv
import json

import openpyxl
import pytest
from openpyxl.chart import BarChart

from cmexam_tune import exams, preprocess
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Question

STEM, FIVE = "下列维生素中缺乏会引起夜盲的是", ["维生素A", "维生素B", "维生素C", "维生素D", "维生素E"]
LETTERS = dict(zip("ABCDE", FIVE, strict=True))
FOUR = dict(list(LETTERS.items())[:4])


def table(path, *rows):
    with path.open("w", encoding="utf-8", newline="") as handle:
        csv.writer(handle).writerows(rows)


def objects(path, *items):
    path.write_text("\n".join(json.dumps(item, ensure_ascii=False) for item in items), encoding="utf-8")


def array(path, *items):
    path.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")


def medqa(path):
    objects(path, {"question": STEM, "options": LETTERS, "answer": FIVE[0], "meta_info": "卷一", "answer_idx": "A"})


def mlec(path):
    array(path, {"qid": "7f", "qtype": "A1型题", "qtext": STEM, "options": LETTERS, "answer": "A"})


def cmmlu(path):
    table(path, ["", "Question", "A", "B", "C", "D", "Answer"], ["0", STEM, *FIVE[:4], "A"])


def ceval(path):
    table(path, ["id", "question", "A", "B", "C", "D", "answer", "explanation"], ["0", STEM, *FIVE[:4], "A", "理由"])


def mmcu(path):
    book = openpyxl.Workbook()
    for number, title in enumerate(("内科学", "外科学")):
        sheet = book.active if number == 0 else book.create_sheet(title)
        sheet.title = title
        sheet.append(["题目", "选项1", "选项2", "选项3", "选项4", "答案"])
        sheet.append([STEM, *(f"{x}、{text}" for x, text in FOUR.items()), "Ａ" if number == 0 else "Ｃ Ａ"])
    book.create_sheet("空")
    book.create_chartsheet("图").add_chart(BarChart())
    book.save(path)


def nlpec(path):
    item = {"questionType": "配伍选择题", "questionId": 11, "questionText": STEM, "option": FIVE, "answer": ["1"]}
    objects(path, {**item, "subject": "药学", "time": "2020", "context": ["x"] * 5, "optionImg": [], "audiourl": ""})


def ladder(path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {"question": STEM, **FOUR, "E": None, "answer": "AC", "category": "方剂学", "type": "Multiple", "lang": "zh"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)


def pharmacist(path):
    objects(path, {"question": STEM, **LETTERS, "answer": "AC", "question_type": "Multiple Choice"})


NLPEC = {"subject": "药学", "year": "2020"}
LAYOUTS = {
    "medqa-mainland": (medqa, "t.jsonl", [Question("t:1", STEM, LETTERS, "A", facets={"meta_info": "卷一"})]),
    "mlec-qa": (
        mlec,
        "TCM_test.json",
        [Question("7f", STEM, LETTERS, "A", None, "single", {"subset": "TCM_test", "question_type": "A1型题"})],
    ),
    "cmmlu": (cmmlu, "anatomy.csv", [Question("anatomy:1", STEM, FOUR, "A", facets={"subject": "anatomy"})]),
    "c-eval": (ceval, "p.csv", [Question("p:1", STEM, FOUR, "A", "理由", None, {"subject": "p"})]),
    "mmcu": (
        mmcu,
        "医疗.xlsx",
        [
            Question("医疗:1", STEM, FOUR, "A", facets={"subject": "内科学"}),
            Question("医疗:2", STEM, FOUR, "AC", facets={"subject": "外科学"}),
        ],
    ),
    "nlpec": (
        nlpec,
        "dev.json",
        [
            Question("11", STEM, LETTERS, "A", None, "single", {**NLPEC, "question_type": "配伍选择题"}),
        ],
    ),
    "tcm-ladder": (
        ladder,
        "multiChoice.parquet",
        [
            Question(
                *("multiChoice:1", STEM, FOUR, "AC", None, "multiple"),
                {"category": "方剂学", "lang": "zh", "question_type": "Multiple"},
            )
        ],
    ),
    "pharmacist-2023": (
        pharmacist,
        "T.jsonl",
        [Question("T:1", STEM, LETTERS, "AC", None, "multiple", {"track": "T", "question_type": "Multiple Choice"})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("exam", LAYOUTS)
def test_each_layout_is_read_and_written_back(tmp_path, exam):
    write, name, wanted = LAYOUTS[exam]
    write(tmp_path / name)
    (report,) = preprocess.preprocess(exam, [tmp_path / name], tmp_path / "out")
    written = list(jsonl.read(tmp_path / "out" / f"{(tmp_path / name).stem}.questions.jsonl", Question))
    assert [(q, dict(q.facets)) for q in written] == [(q, dict(q.facets)) for q in wanted]
    assert report["columns_unread"] == [] and report["dropped"] == {}


def test_every_yaml_names_its_source_and_licence_and_is_tested():
    from cmexam_tune.core import variants

    maps = [name for name in variants.names("exams") if name not in ("cmexam", "cmb", "table")]
    assert set(maps) == set(LAYOUTS)
    for name in maps:
        _, fields = exams.load(name)
        assert fields and fields.source.startswith("https://") and fields.licence


@pytest.mark.parametrize(
    ("form", "answer"),
    [("letters", "CA"), ("number", "1、3"), ("number", [1, 3]), ("index", "0 2"), ("text", ["维生素C", "维生素A"])],
)
def test_forms_of_an_answer(tmp_path, form, answer):
    objects(tmp_path / "t.jsonl", {"题干": STEM, "选项A": "维生素A", "选项B": "B", "选项C": "维生素C", "答案": answer})
    columns = f"stem=题目|题干,options=选项A..选项F,answer=答案,answer_as={form}"
    preprocess.preprocess("table", [tmp_path / "t.jsonl"], tmp_path / "out", columns=columns)
    (question,) = jsonl.read(tmp_path / "out/t.questions.jsonl", Question)
    assert question.answer == "AC" and list(question.options) == ["A", "B", "C"]


def test_a_shared_case_stands_before_the_stem_and_makes_a_group(tmp_path):
    rows = [{"c": "男，45岁，腹痛。", "q": f"问{i}", "o": ["甲", "乙"], "a": "A"} for i in (1, 2)]
    array(tmp_path / "t.json", *rows, {"c": "", "q": "问3", "o": "A 甲\nB 乙", "a": "B"})
    preprocess.preprocess("table", [tmp_path / "t.json"], tmp_path / "out", columns="stem=q,options=o,answer=a,case=c")
    one, two, three = jsonl.read(tmp_path / "out/t.questions.jsonl", Question)
    assert one.stem == "男，45岁，腹痛。\n问1" and one.facets == two.facets and "group" in one.facets
    assert three.stem == "问3" and three.facets == {}


def test_a_yaml_of_the_users_own_is_an_exam(tmp_path):
    table(tmp_path / "t.tsv", ["q\toptions\tkey"], ["问\tA 甲 B 乙\tb"])
    (tmp_path / "my.yaml").write_text("stem: q\noptions: options\nanswer: key\n", encoding="utf-8")
    preprocess.preprocess(str(tmp_path / "my.yaml"), [tmp_path / "t.tsv"], tmp_path / "out")
    assert next(jsonl.read(tmp_path / "out/t.questions.jsonl", Question)).answer == "B"


@pytest.mark.parametrize(
    ("exam", "columns", "message"),
    [
        ("table", None, "--map is needed"),
        ("table", "stem=q", "--map: options: required key is missing; answer: required key is missing"),
        ("table", "stem=q,options=o,answer=a,steam=x", "steam: unknown key, did you mean 'stem'"),
        ("table", "stem", "'stem' is no field=column"),
        ("table", "stem=q,options=o,answer=a,answer_as=word", "'word' is not a choice"),
        ("table", "stem=x,options=o,answer=z", r"no column for stem \(x\); answer \(z\). Found: q, o, a"),
        ("cmexam", "facet:x=y", "no column for stem"),
    ],
)
def test_bad_maps_get_one_message(tmp_path, exam, columns, message):
    objects(tmp_path / "t.jsonl", {"q": "问", "o": ["甲", "乙"], "a": "A"})
    with pytest.raises(UserError, match=message):
        preprocess.preprocess(exam, [tmp_path / "t.jsonl"], tmp_path / "out", columns=columns)
    assert not (tmp_path / "out").exists()


def test_a_column_named_by_hand_must_be_there(tmp_path):
    table(tmp_path / "t.csv", ["Question", "Options", "Answer"], [STEM, "A 甲\nB 乙", "A"])
    with pytest.raises(DataError, match=r"no column for facet:科室 \(科室\). Found: Question, Options, Answer"):
        preprocess.preprocess("cmexam", [tmp_path / "t.csv"], tmp_path / "out", columns="facet:科室=科室")


def test_bad_yaml(tmp_path):
    for text in ("stem: [", "- a", "stem: q\nx: y"):
        (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
        with pytest.raises((ConfigError, DataError), match=r"my\.yaml"):
            exams.load(str(tmp_path / "my.yaml"))
    with pytest.raises(UserError, match=r"none\.yaml"):
        exams.load(str(tmp_path / "none.yaml"))


def test_another_exams_file_is_named(tmp_path):
    item = {"question": "问", "option": {"A": "甲", "B": "乙"}, "answer": "A", "exam_type": "x", "question_type": "y"}
    array(tmp_path / "cmb.json", item)
    with pytest.raises(DataError, match=r"has exam_type, which are columns of CMB\. Read it with `preprocess cmb`"):
        list(exams.load("cmexam")[0].read([tmp_path / "cmb.json"]))
    table(tmp_path / "cmexam.csv", ["Question", "Options", "Answer"], ["问", "A 甲\nB 乙", "A"])
    with pytest.raises(DataError, match="looks like cmexam: try `preprocess cmexam`"):
        list(exams.load("cmb")[0].read([tmp_path / "cmexam.csv"]))


@pytest.mark.parametrize(
    "option",
    [
        {"A": "甲", "B": "乙", "C": None, "D": None},
        "{'A': '甲', 'B': '乙', 'C': None}",
        '{"A": "甲", "B": "乙"}',
        [{"key": "A", "value": "甲"}, {"key": "B", "value": "乙"}],
    ],
)
def test_cmb_as_the_hub_gives_it(tmp_path, option):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {"exam_type": "x", "question": "问", "option": option, "answer": "B", "question_type": "单项选择题"}
    array(tmp_path / "a.json", row)
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "b.parquet")
    for name in ("a.json", "b.parquet"):
        (question,) = exams.load("cmb")[0].read([tmp_path / name])
        assert (dict(question.options), question.answer, question.kind) == ({"A": "甲", "B": "乙"}, "B", "single")


def test_workbooks_that_cannot_be_read(tmp_path):
    cmexam, _ = exams.load("cmexam")
    mmcu(tmp_path / "whole.xlsx")
    data = (tmp_path / "whole.xlsx").read_bytes()
    (tmp_path / "cut.xlsx").write_bytes(data[: len(data) // 2])
    book = openpyxl.Workbook()
    book.remove(book.active)
    book.create_chartsheet("图").add_chart(BarChart())
    book.save(tmp_path / "chart.xlsx")
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>'
    for name, part, change in [
        ("sheet.xlsx", "xl/worksheets/sheet1.xml", lambda text: text[: len(text) // 2]),
        ("book.xlsx", "xl/workbook.xml", lambda text: b"<a>"),
        ("bomb.xlsx", "xl/worksheets/sheet1.xml", lambda text: text.replace(b"<worksheet", bomb + b"<worksheet", 1)),
    ]:
        _repack(tmp_path / "whole.xlsx", tmp_path / name, part, change)
    for name in ("cut.xlsx", "chart.xlsx", "sheet.xlsx", "book.xlsx", "bomb.xlsx"):
        with pytest.raises(DataError, match=rf"{name}: (not an \.xlsx workbook|no sheet holds a row)"):
            list(cmexam.read([tmp_path / name]))


def _repack(whole, path, part, change):
    import zipfile

    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for one in source.namelist():
            data = source.read(one)
            target.writestr(one, change(data) if one == part else data)
