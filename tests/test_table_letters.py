"""A gold letter keeps pointing at the text it stood for: tables and cells that could be read wrongly without a word."""

import csv
import datetime
import json
import time
import zipfile

import openpyxl
import openpyxl.chart
import pytest

from cmexam_tune import preprocess
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import Cells, UnreadableRow

MAP = "stem=题干,options=选项A..E,answer=正确答案"
HEADER = ["题干", "选项A", "选项B", "选项C", "选项D", "正确答案"]
ROW = ["下列属于丁的是", "甲", "乙", "丙", "丁", "D"]


def read(folder, rows, columns=MAP, name="t.csv"):
    """Return the questions of a table, and its report."""
    path = folder / name
    if path.suffix == ".xlsx":
        book = openpyxl.Workbook()
        for row in rows:
            book.active.append(row)
        book.save(path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as handle:
            csv.writer(handle, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    (report,) = preprocess.preprocess("table", [path], folder / "out", columns=columns, overwrite=True)
    return list(jsonl.read(folder / "out" / f"{path.stem}.questions.jsonl", Question)), report


def chosen(question):
    return [question.options[letter] for letter in question.answer]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.xlsx"])
@pytest.mark.parametrize(
    ("place", "header"),
    [
        (1, "选项Ａ"),
        (1, " 选项 a"),
        (2, "选项Ｂ"),
        (3, "选项\u200bC"),
        (4, "选项_D "),
        (0, "\ufeff题干"),
        (5, "正确 答案"),
    ],
)
def test_a_header_typed_otherwise_is_the_same_column(tmp_path, name, place, header):
    columns = [*HEADER]
    columns[place] = header
    if header.endswith("a"):  # one option in another case than the rest may be no option
        with pytest.raises(DataError, match="differ in case"):
            read(tmp_path, [columns, ROW], name=name)
        return
    (question,), _ = read(tmp_path, [columns, ROW], name=name)
    assert dict(question.options) == dict(zip("ABCD", "甲乙丙丁", strict=True)) and question.answer == "D"


@pytest.mark.parametrize("options", ["选项Ａ..选项Ｅ", "选项A..选项E", "选项A..Ｅ", "选项a..E"])
def test_a_range_typed_otherwise_is_the_same_range(tmp_path, options):
    (question,), _ = read(tmp_path, [HEADER, ROW], f"stem=题干,options={options},answer=正确答案")
    assert "".join(question.options) == "ABCD" and chosen(question) == ["丁"]


@pytest.mark.parametrize("name", ["t.csv", "t.xlsx"])
@pytest.mark.parametrize(("absent", "place"), [("选项A", 1), ("选项B", 2), ("选项C", 3)])
def test_a_hole_among_the_option_columns_is_an_error(tmp_path, name, absent, place):
    header, row = [*HEADER], [*ROW]
    header[place] = "别的"
    message = rf"t\.\w+: no column for {absent} of 选项A\.\.E.*Found: {', '.join(header)}"
    with pytest.raises(DataError, match=message):
        read(tmp_path, [header, row], name=name)
    del header[place], row[place]
    with pytest.raises(DataError, match=rf"no column for {absent} of 选项A\.\.E"):
        read(tmp_path, [header, row], name=name)
    assert not (tmp_path / "out").exists()


def test_a_hole_in_a_later_sheet_is_an_error(tmp_path):
    book = openpyxl.Workbook()
    second = book.create_sheet("二")
    for sheet, cells in ((book.active, [0, 1, 2, 3, 4, 5]), (second, [0, 1, 3, 4, 5])):
        sheet.append([HEADER[i] for i in cells])
        sheet.append([ROW[i] for i in cells])
    book.save(tmp_path / "t.xlsx")
    with pytest.raises(DataError, match="no column for 选项B"):
        preprocess.preprocess("table", [tmp_path / "t.xlsx"], tmp_path / "out", columns=MAP)


def test_the_last_columns_of_a_range_may_be_absent_and_its_first_need_not_be_a(tmp_path):
    (question,), _ = read(tmp_path, [HEADER, ROW])
    assert "".join(question.options) == "ABCD"
    (question,), report = read(tmp_path, [HEADER, ROW], "stem=题干,options=选项B..D,answer=正确答案")
    assert dict(question.options) == {"B": "乙", "C": "丙", "D": "丁"} and chosen(question) == ["丁"]
    assert report["columns_unread"] == ["选项A"]


@pytest.mark.parametrize("name", ["t.csv", "t.xlsx", "t.jsonl"])
def test_an_empty_option_keeps_its_letter_for_itself(tmp_path, name):
    full = dict(zip(HEADER, ROW, strict=True))
    empty = [{**full, "选项C": ""}, {**full, "选项A": "", "正确答案": "C"}, {**full, "选项D": ""}]
    rows = empty if name == "t.jsonl" else [HEADER, *(list(row.values()) for row in empty)]
    if name == "t.jsonl":
        rows = [{key: text for key, text in row.items() if text} for row in rows]
    questions, report = read(tmp_path, rows, name=name)
    assert [chosen(q) for q in questions] == [["丁"], ["丙"]]
    assert ["".join(q.options) for q in questions] == ["ABD", "BCD"]
    assert report["repaired"] == {"empty option left out": 2}
    assert report["dropped"] == {"answer letter with no option": 1}


@pytest.mark.parametrize(
    ("header", "columns", "message"),
    [
        (["题干", "A", "Ａ ", "B", "a", "答案"], "stem=题干,options=A..B,answer=答案", None),
        (["题干", "a", "Ａ", "B", "C", "答案"], "stem=题干,options=A..C,answer=答案", "'A' may be any of .*'a', 'Ａ'"),
        (["题干", "B", "C", "D", "a", "x"], "stem=题干,options=A..D,answer=a", "a, B, C, D of A..D differ in case"),
        (
            ["题干", "A", "B", "C", "D", "E"],
            "stem=题干,options=A..E,answer=E",
            "'E' would be read as answer",
        ),
        (["题干", "A", "B", "C", "d", "答案"], "stem=题干,options=A..D,answer=答案", "differ in case"),
        (["题干", "A", "B", "C", "题干", "答案"], "stem=题干,options=A..C,answer=答案", "'题干' is there twice"),
        (["题干", "A", "B", "C", "答案 ", "答案"], "stem=题干,options=A..C,answer=答案", "'答案' is there twice"),
        (["ANSWER", "A", "B", "C", "Answer", "题干"], "stem=题干,options=A..C,answer=answer", "'answer' may be any of"),
    ],
)
def test_headers_that_could_be_two_columns(tmp_path, header, columns, message):
    rows = [header, ["问", "甲", "乙", "丙", "B", "B"]]
    if message:
        with pytest.raises(DataError, match=message):
            read(tmp_path, rows, columns)
    else:
        (question,), report = read(tmp_path, rows, columns)
        assert dict(question.options) == {"A": "甲", "B": "丙"} and report["columns_unread"] == ["Ａ", "a"]


def test_a_field_mapped_twice_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="answer is there twice"):
        read(tmp_path, [HEADER, ROW], f"{MAP},answer=题干")


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_row_whose_cells_may_have_moved_is_dropped(tmp_path, name):
    header = ["答案", "题干", "A", "B", "C", "D", "E"]
    rows = [
        ["B", "患者，男", "甲", "乙", "丙", "丁", ""],
        ["B", "患者", "男", "甲", "乙", "丙", "丁", ""],  # an unquoted comma
        ["B", "患者", "男", "甲", "乙", "丙", "丁", "戊"],
        ["C", "患者，男", "甲", "丙", "丁", "戊"],  # a cell lost
    ]
    (question,), report = read(tmp_path, [header, *rows], "stem=题干,options=A..E,answer=答案", name)
    assert chosen(question) == ["乙"]
    assert report["dropped"] == {"more cells than columns": 2, "fewer cells than columns": 1}
    (_,), report = read(tmp_path, [[*header, ""], [*rows[0], ""], rows[2]], "stem=题干,options=A..E,answer=答案", name)
    assert report["dropped"] == {"more cells than columns": 1}


@pytest.mark.parametrize("name", ["t.csv", "t.xlsx"])
def test_places_count_the_columns_that_have_no_name(tmp_path, name):
    header, row = ["", "#", "题干", "选项", "", "", "答案", ""], ["0", "1", "问", "甲", "乙", "丙", "B", ""]
    (question,), _ = read(tmp_path, [header, row], "stem=#3,options=#4..#6,answer=#-1", name)
    assert question.stem == "问" and dict(question.options) == {"A": "甲", "B": "乙", "C": "丙"}
    assert chosen(question) == ["乙"]


@pytest.mark.parametrize(
    ("answer_as", "answers", "wanted"),
    [
        ("number", ["1", "2.0", "４", "①、3", "[2, 4]"], ["A", "B", "D", "AC", "BD"]),
        ("index", ["0", "1", 3, "0,2", [1, 3]], ["A", "B", "D", "AC", "BD"]),
        ("number", ["1", "5", "-1", "1.5", "1-3", "99999", "1 1"], ["A"]),
        ("index", ["0", "4", "-1", "0.5", [0, 1, 0, 0], True], ["A"]),
        ("text", ["甲", "丁", "戊", "A", "1"], ["A", "D"]),
    ],
)
def test_answers_that_are_no_letters(tmp_path, answer_as, answers, wanted):
    rows = [{**dict(zip(HEADER, ROW, strict=True)), "正确答案": answer} for answer in answers]
    questions, report = read(tmp_path, rows, f"{MAP},answer_as={answer_as}", "t.jsonl")
    assert [q.answer for q in questions] == wanted
    assert report["rows"] == len(answers) and sum(report["dropped"].values()) == len(answers) - len(wanted)


@pytest.mark.parametrize(
    ("answer_as", "answers", "message"),
    [
        ("number", ["1", "2", "0", "3"], r"1 answers are 0, but answer_as=number counts from 1.*answer_as=index"),
        ("index", ["1", "2", "4", "3"], r"no answer is 0 and 1 are beyond.*answer_as=number"),
        ("letters", ["1", "2", "4", "3"], r"unreadable answer 4"),
    ],
)
def test_a_file_that_counts_from_elsewhere_is_an_error(tmp_path, answer_as, answers, message):
    rows = [[*ROW[:5], answer] for answer in answers]
    with pytest.raises(DataError, match=message):
        read(tmp_path, [HEADER, *rows], f"{MAP},answer_as={answer_as}")


def test_a_number_counts_options_that_are_empty_too(tmp_path):
    (question,), report = read(
        tmp_path,
        [HEADER, ["问", "甲", "", "丙", "丁", "3"], ["问", "甲", "", "丙", "丁", "2"]],
        f"{MAP},answer_as=number",
    )
    assert chosen(question) == ["丙"] and report["dropped"] == {"answer beyond the options": 1}
    with pytest.raises(UnreadableRow, match="out of order"):
        cells = Cells()
        cells.chosen("1", cells.options("B 乙\nA 甲"), "number")


def test_numbers_as_options_are_texts_or_places_as_the_map_says(tmp_path):
    rows = [HEADER, ["问", "4", "3", "2", "1", "1"]]
    assert chosen(read(tmp_path, rows, f"{MAP},answer_as=number")[0][0]) == ["4"]
    assert chosen(read(tmp_path, rows, f"{MAP},answer_as=text")[0][0]) == ["1"]


def test_a_text_that_several_options_have_is_no_answer(tmp_path):
    rows = [HEADER, ["问", "甲", "乙", "甲", "丁", "甲"], ["问", "甲", "乙", "甲", "丁", "乙"]]
    (question,), report = read(tmp_path, rows, f"{MAP},answer_as=text")
    assert question.answer == "B" and report["dropped"] == {"answer is the text of several options": 1}


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [("ｄ", "D"), (" d ", "D"), ("Ｂ，Ｄ", "BD"), ("A-B", "AB"), ("A-D", None), ("F", None), ("4", None), ("丁", None)],
)
def test_answer_letters_as_hands_write_them(tmp_path, answer, wanted):
    questions, report = read(tmp_path, [HEADER, ROW, [*ROW[:5], answer]])
    assert [q.answer for q in questions] == ["D", wanted][: len(questions)]
    assert sum(report["dropped"].values()) == (wanted is None)


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["A.甲", "B、乙", "（C）丙", "Ｄ：丁"], ["甲", "乙", "丙", "丁"]),
        (["A.甲", "乙", "丙", "D.丁"], ["甲", "乙", "丙", "丁"]),
        (["B.乙", "A.甲", "C.丙", "D.丁"], None),
        (["甲", "C.丙", "B.乙", "丁"], None),
        (["A.甲", "C.丙", "D.丁", ""], None),
        (["甲", "C.丙肝", "乙", "丁"], ["甲", "C.丙肝", "乙", "丁"]),
        (["S.aureus", "E.coli", "B.fragilis", "H.pylori"], ["S.aureus", "E.coli", "B.fragilis", "H.pylori"]),
        (["A型", "B型", "AB型", "O型"], ["A型", "B型", "AB型", "O型"]),
    ],
)
def test_letters_in_cells_must_be_those_of_their_columns(tmp_path, texts, wanted):
    questions, report = read(tmp_path, [HEADER, ["问", *texts, "A"], ROW])
    assert [list(q.options.values()) for q in questions[:-1]] == ([wanted] if wanted else [])
    assert report["dropped"] == ({} if wanted else {"option letters contradict their places": 1})


@pytest.mark.parametrize(
    "option", [datetime.datetime(2024, 3, 5), datetime.date(2024, 3, 5), datetime.time(3, 5), "#NAME?", "#REF!"]
)
def test_what_a_spreadsheet_made_of_an_option_is_no_option(tmp_path, option):
    (question,), report = read(tmp_path, [HEADER, ["问", "甲", option, "丙", "丁", "A"], ROW], name="t.xlsx")
    assert question.id == "t:2" and report["dropped"] == {"an option is a date or an error of the spreadsheet": 1}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        # lists: letters are theirs only if all have one
        (["维生素A", "C 反应蛋白", "B超", "D-二聚体"], ["维生素A", "C 反应蛋白", "B超", "D-二聚体"]),
        (["A型", "B型", "AB型", "O型"], ["A型", "B型", "AB型", "O型"]),
        (["A", "B", "AB", "O"], ["A", "B", "AB", "O"]),
        (["B 乙", "A 甲"], ["甲", "乙"]),
        (["A 甲", "", "C 丙"], {"A": "甲", "C": "丙"}),
        (["甲", None, "丙", float("nan")], {"A": "甲", "C": "丙"}),
        (["A 甲", "B 乙", "D 丁"], "skip one"),
        (["A.甲", "C.丙", "丁"], "contradict their places"),
        ([3, 0.5, True], ["3", "0.5", "True"]),
        # objects: the keys hold
        ({"b": "乙", "a": "甲"}, ["甲", "乙"]),
        ({"A": "甲", "B": "乙", "D": "丁"}, {"A": "甲", "B": "乙", "D": "丁"}),
        ({"A": "甲", "a": "乙"}, "two options with one letter"),
        ({"0": "甲", "1": "乙"}, "not one of A to Z"),
        ({"text": ["甲", "乙"], "label": ["A", "B"]}, "not one of A to Z"),
        ([{"label": "A", "text": "甲"}, {"label": "B", "text": "乙"}], "not one of A to Z"),
        ([{"key": "A", "value": "甲"}, "乙"], "not one of A to Z"),
        ('{"A": "甲", "A": "乙", "B": "丙"}', "options without letters|not one of A to Z"),
        # one cell
        ("A 甲\nB 乙\nD 丁", {"A": "甲", "B": "乙", "D": "丁"}),
        ("A 甲\nB 乙\n丙\nD 丁", "skip one"),
        ("A 甲\nB 乙\nG 蛋白\nC 丙", "skip one"),
        ("A 甲\nB 乙\nX 线检查\nC 丙", {"A": "甲", "B": "乙 X 线检查", "C": "丙"}),
        ("A 甲 B 乙 D 丁", "told apart"),
        ("A 维生素 B 缺乏 B 维生素 C 缺乏 C 丙", "told apart"),
        ("A.维生素 B 缺乏 B.维生素 C 缺乏 C.丙", ["维生素 B 缺乏", "维生素 C 缺乏", "丙"]),
        ("A 维生素 K 缺乏 B 乙 C 丙", ["维生素 K 缺乏", "乙", "丙"]),
        ("A.甲 B.乙 C、丙 D.丁", ["甲", "乙", "丙", "丁"]),
        ("可选：A 甲 B 乙", "options without letters"),
    ],
)
def test_options_of_one_cell(value, wanted):
    if isinstance(wanted, str):
        with pytest.raises(UnreadableRow, match=wanted):
            Cells().options(value)
    else:
        wanted = dict(zip("ABCDEF", wanted, strict=False)) if isinstance(wanted, list) else wanted
        assert Cells().options(value) == wanted


@pytest.mark.parametrize("cell", ["[" * 100_000, '{"a":' * 100_000, "[" + "-" * 100_000 + "1]", "{" + "9" * 5000 + "}"])
def test_cells_nested_without_end_are_dropped(tmp_path, cell):
    rows = [["q", "o", "a"], ["问", cell, "A"], ["问", "A 甲\nB 乙", "A"]]
    (question,), report = read(tmp_path, rows, "stem=q,options=o,answer=a")
    assert question.id == "t:2" and sum(report["dropped"].values()) == 1


def workbook(path, rows, *merged):
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    for cells in merged:
        book.active.merge_cells(cells)
    book.save(path)
    return book


@pytest.mark.parametrize("chart", [False, True])
def test_a_merged_cell_stands_in_each_of_its_rows(tmp_path, chart):
    rows = [["科室", *HEADER], *(["外科" if i % 2 else "内科", f"第{i}题", *ROW[1:]] for i in range(1, 7))]
    book = workbook(tmp_path / "t.xlsx", rows, "A2:A4", "A5:A6", "C6:F7", "B3:B4")
    if chart:
        book.create_chartsheet("图", 0).add_chart(openpyxl.chart.BarChart())
        book.active = 0
        book.save(tmp_path / "t.xlsx")
    (report,) = preprocess.preprocess(
        "table", [tmp_path / "t.xlsx"], tmp_path / "out", columns=f"{MAP},facet:科室=科室"
    )
    questions = list(jsonl.read(tmp_path / "out/t.questions.jsonl", Question))
    assert [(q.stem, q.facets["科室"]) for q in questions] == [("第1题", "外科"), ("第4题", "内科")]
    assert report["dropped"] == {
        "a question over several rows (merged cells)": 2,  # which cells belong to which row is anyone's guess
        "fewer than 2 options": 2,
    }


def repack(path, change):
    """Rewrite the first sheet of a workbook."""
    with zipfile.ZipFile(path) as packed:
        parts = {name: packed.read(name) for name in packed.namelist()}
    parts["xl/worksheets/sheet1.xml"] = change(parts["xl/worksheets/sheet1.xml"])
    with zipfile.ZipFile(path, "w") as packed:
        for name, data in parts.items():
            packed.writestr(name, data)


def test_a_sheet_is_read_as_far_as_it_goes_whatever_size_it_claims(tmp_path):
    workbook(tmp_path / "t.xlsx", [HEADER, ROW, ROW])
    repack(tmp_path / "t.xlsx", lambda text: text.replace(b'<dimension ref="A1:F3"', b'<dimension ref="A1:E2"'))
    (report,) = preprocess.preprocess("table", [tmp_path / "t.xlsx"], tmp_path / "out", columns=MAP)
    assert report["kept"] == 2


def test_one_cell_far_away_costs_no_time(tmp_path):
    book = workbook(tmp_path / "t.xlsx", [HEADER, ROW])
    book.active["XFD1048576"] = "x"
    book.save(tmp_path / "t.xlsx")
    start = time.process_time()
    (report,) = preprocess.preprocess("table", [tmp_path / "t.xlsx"], tmp_path / "out", columns=MAP)
    assert report["kept"] == 1 and report["dropped"] == {"more cells than columns": 1}
    assert time.process_time() - start < 10


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_zip_is_named(tmp_path, method):
    path = tmp_path / "t.zip"
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("t.csv", "题干,选项A\n" * 1000)
    data = bytearray(path.read_bytes())
    start = 30 + len("t.csv") + (10 if method == zipfile.ZIP_LZMA else 0)
    data[start : start + 12] = b"\xff" * 12
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"t\.zip: not a zip that can be read"):
        preprocess.preprocess("table", [path], tmp_path / "out", columns=MAP)


def test_damaged_parquet_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    row = [pyarrow.array([text]) for text in ROW]
    good = dict(zip(HEADER, row, strict=True))
    wrong = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff\xfe"]).buffers())
    far = pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("ms"))
    for name, values in (("选项B", wrong), ("日期", far)):
        parquet.write_table(pyarrow.table({**good, name: values}), path)
        with pytest.raises(DataError, match=r"t\.parquet: not a parquet file that can be read"):
            preprocess.preprocess("table", [path], tmp_path / "out", columns=MAP)
    parquet.write_table(pyarrow.Table.from_arrays([*row, row[0]], names=[*HEADER, "选项B"]), path)
    with pytest.raises(DataError, match="'选项B' is there twice"):
        preprocess.preprocess("table", [path], tmp_path / "out", columns=MAP)
