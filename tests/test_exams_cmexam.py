"""CMExam files: formats, column names, annotations, every row accounted for, streaming, bad files."""

import csv
import dataclasses
import json
import tracemalloc
from pathlib import Path

import openpyxl
import pytest

from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import cmexam

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "cmexam"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the released files are not here")
ENGLISH = ["Question", "Options", "Answer", "Explanation"]
CHINESE = ["标题", "选项", "答案", "答案解析"]
ROWS = [
    ["第一题，\n分两行", "A 甲\nB 1 mg/kg\nC 丙\nD 丁\nE 戊", "B", "因为“乙”对"],
    ["第二题", "A 甲\nB 乙\nC 丙\nD 丁", "DA", ""],
    ["第三题", "A 甲\nB 乙", "", "没有答案"],
    ["第四题", "A 甲\nB 乙", "C", ""],
]
QUESTIONS = [
    Question(
        "t:1", "第一题，\n分两行", {"A": "甲", "B": "1 mg/kg", "C": "丙", "D": "丁", "E": "戊"}, "B", "因为“乙”对"
    ),
    Question("t:2", "第二题", dict(zip("ABCD", "甲乙丙丁", strict=True)), "AD"),
]


def write(path, rows, encoding="utf-8"):
    with path.open("w", encoding=encoding, newline="") as handle:
        csv.writer(handle).writerows(rows)
    return path


def read(path):
    told = []
    return list(cmexam.read([path], None, told.append)), told


def as_csv(folder, header, encoding="utf-8"):
    return write(folder / "t.csv", [header, *ROWS], encoding)


def as_xlsx(folder, header):
    book = openpyxl.Workbook()
    for row in [header, *ROWS]:
        book.active.append([cell or None for cell in row])
    book.save(folder / "t.xlsx")
    return folder / "t.xlsx"


def as_json(folder, header):
    rows = [dict(zip(header, row, strict=True)) for row in ROWS]
    (folder / "t.json").write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf-8")
    return folder / "t.json"


def as_jsonl(folder, header):
    lines = [json.dumps(dict(zip(header, row, strict=True))) for row in ROWS]
    (folder / "t.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder / "t.jsonl"


@pytest.mark.parametrize("header", [ENGLISH, CHINESE])
@pytest.mark.parametrize("make", [as_csv, as_xlsx, as_json, as_jsonl])
def test_every_format_and_both_headers(tmp_path, make, header):
    questions, told = read(make(tmp_path, header))
    assert questions == QUESTIONS
    assert [(t.row, t.action, t.reason) for t in told] == [
        (2, "repaired", "answer letters sorted"),
        (3, "dropped", "no answer"),
        (4, "dropped", "answer letter with no option"),
    ]
    assert told[1].item == {"stem": "第三题", "answer": "", "explanation": "没有答案"}


def test_byte_order_mark_and_missing_explanation_column(tmp_path):
    assert read(as_csv(tmp_path, ENGLISH, "utf-8-sig"))[0] == QUESTIONS
    path = write(tmp_path / "t.csv", [row[:3] for row in [ENGLISH, *ROWS]])
    assert read(path)[0] == [dataclasses.replace(q, explanation=None) for q in QUESTIONS]


@pytest.mark.parametrize(
    "header",
    [
        ["Disease Group", "Clinical Department", "Medical Discipline", "Medical Competency", "Difficulty level"],
        ["ICD-11", "Subject", "一级标签", "Ability", "Difficulty"],
        ["disease_group", "clinical_department", "Medical Disciplines", "Area of Competency", "difficulty_level"],
    ],
)
def test_annotations_become_facets_under_their_released_names(tmp_path, header):
    path = write(tmp_path / "t.csv", [ENGLISH + header, ROWS[0] + ["肺病", "内科", "临床", "诊断", "3"]])
    assert read(path)[0][0].facets == {
        "Disease Group": "肺病",
        "Clinical Department": "内科",
        "Medical Discipline": "临床",
        "Medical Competency": "诊断",
        "Difficulty level": "3",
    }


def test_share_of_right_answers_becomes_five_bins_of_its_range(tmp_path):
    pandas = pytest.importorskip("pandas")
    rates = [20, 31.9, 32, 32.1, 44, 50, 56, 60, 68, 79.5, 80]
    path = write(tmp_path / "t.csv", [[*CHINESE, "正确率"], *([*ROWS[0], f"{rate}%"] for rate in rates)])
    levels = [int(q.facets["Difficulty level"]) for q in read(path)[0]]
    assert levels == [5 - b for b in pandas.cut(pandas.Series(rates), 5, labels=False)]
    assert levels[0] == 5 and levels[-1] == 1


def test_identical_rows_are_kept_with_ids_of_their_own(tmp_path):
    path = write(tmp_path / "t.csv", [ENGLISH, ROWS[0], [], ROWS[0]])
    questions, told = read(path)
    assert [q.id for q in questions] == ["t:1", "t:2"] and not told


def test_a_row_with_too_many_or_too_few_cells_is_dropped(tmp_path):
    rows = [ROWS[0], [*ROWS[1], "", "x"], [*ROWS[1], ""], ["", "", "A", ""], ROWS[1][:3], ROWS[1]]
    questions, told = read(write(tmp_path / "t.csv", [ENGLISH, *rows]))
    assert [q.id for q in questions] == ["t:1", "t:6"]
    assert [(t.row, t.reason) for t in told if t.action == "dropped"] == [
        (2, "more cells than columns"),
        (3, "more cells than columns"),
        (4, "no question text"),
        (5, "fewer cells than columns"),
    ]


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(count):
        path = write(tmp_path / "t.csv", [ENGLISH, *([ROWS[0][0], ROWS[0][1], "B", "释" * 500] for _ in range(count))])
        tracemalloc.start()
        assert sum(1 for _ in cmexam.read([path])) == count
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(10)
    assert peak(4000) < peak(400) + 200_000


def test_a_very_long_cell(tmp_path):
    path = write(tmp_path / "t.csv", [ENGLISH, [*ROWS[0][:3], "长" * 300_000]])
    assert len(read(path)[0][0].explanation) == 300_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            "题目文本,B\n1,2\n".encode(),
            r"no column for .*answer \(Answer or 答案\).*Found: 题目文本, B.*--map stem=COLUMN",
        ),
        ("t.csv", "标题,选项,答案\n题,A 甲,B\n".encode("gbk"), r"t\.csv:1: not UTF-8, byte 0xb1 at offset 0.*GB18030"),
        (
            "t.csv",
            b"Question,Options,Answer\nq,A 1,B\n\xc4\xe3,A 1,B\n",
            r"t\.csv:3: not UTF-8, byte 0xc4 at offset 32",
        ),
        ("t.csv", b'Question,Options,Answer\n"q,A 1,B\n', r"broken CSV.*quote"),
        ("t.csv", b"Question,Answer,Answer,Options\n", "'Answer' is there twice"),
        ("t.csv", b"Question,Options,Answer\n", "no question can be read .it has no rows"),
        ("t.csv", b"Question,Options,Answer\nq,A 1,\nr,A 1,\n", r"no question can be read \(no answer 2\)"),
        ("t.csv", b"\n\n", "only blank lines"),
        ("t.xlsx", b"Question,Options\n", r"not an \.xlsx workbook"),
        ("t.xls", b"x", r"suffix '\.xls' is unknown"),
        (
            "t.jsonl",
            b'{"Question": "q"}\n{"Question": \n',
            r"no column for options \(Options.*; answer",
        ),
        ("t.json", b'[{"Question": "q", "Options": ["a", "b"], "Answer": "A"},\n\n{"Question" 1}]', r":3: broken JSON"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="no such exam file"):
        read(tmp_path / "none.csv")
    (tmp_path / "t.csv").touch()
    with pytest.raises(UserError, match="is empty"):
        read(tmp_path / "t.csv")
    with pytest.raises(DataError, match="--answers is for cmb"):
        list(cmexam.read([tmp_path / "t.csv"], tmp_path / "a.json"))


@needs_data
def test_the_released_validation_split():
    questions, told = read(DATA / "val.csv")
    assert len(questions) == 6810
    assert [(t.row, t.action, t.reason) for t in told] == [(5357, "dropped", "no answer")]
    assert sum(q.explanation is None for q in questions) == 1039
    assert sum(len(q.answer or "") > 1 for q in questions) == 210
    assert sum(len(q.options) == 4 for q in questions) == 205
    again, _ = read(DATA / "val_literal_newlines_300.csv")
    assert again == [
        dataclasses.replace(q, id=f"val_literal_newlines_300:{i}") for i, q in enumerate(questions[:300], 1)
    ]
    assert len(read(DATA / "dev98.csv")[0]) == 98
