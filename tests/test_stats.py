"""Table 2 of the paper: the released numbers to the digit, and numpy as the witness for quartiles."""

import csv
import json
import random
from collections import Counter

import pytest
import real_data

from cmexam_tune import stats
from cmexam_tune.core import cli, jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.preprocess import preprocess

VAL = real_data.find("val.csv")
needs_data = pytest.mark.skipif(not VAL.is_file(), reason="the released files are not here")
OPTIONS = {"A": "甲", "B": "乙"}
DEV = """\
                                    val
Question                          6,811
Vocab                             3,620
Max Q tokens                        500
Max A tokens                          5
Max E tokens                      2,678
Avg Q tokens                      30.07
Avg A tokens                       1.07
Avg E tokens                     188.95
Median (Q1, Q3) Q tokens    18 (12, 32)
Median (Q1, Q3) A tokens       1 (1, 1)
Median (Q1, Q3) E tokens  143 (65, 247)
"""


def put(path, *questions):
    jsonl.write(path, [Question(f"q{i}", stem, OPTIONS, a, e) for i, (stem, a, e) in enumerate(questions)])
    return path


def test_numbers_by_hand(tmp_path):
    path = put(tmp_path / "a.questions.jsonl", ("甲乙", "A", "丙丁甲"), ("甲", "AB", None), ("戊戊戊", None, "a b"))
    (column,) = stats.stats([path]).values()
    assert column["questions"] == 3 and column["vocabulary"] == len("甲乙丙丁戊a b") and column["dropped_rows"] == 0
    assert column["question"] == {"max": 3, "mean": 2, "median": 2, "q1": 1.5, "q3": 2.5}
    assert column["answer"] == {"max": 2, "mean": 1, "median": 1, "q1": 0.5, "q3": 1.5}
    assert column["explanation"] == {"max": 3, "mean": 2, "median": 3, "q1": 1.5, "q3": 3}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 99, 1000])
def test_quantiles_are_those_of_numpy(count):
    numpy = pytest.importorskip("numpy")
    values = [random.Random(count + i).randrange(50) for i in range(count)]
    assert stats.quartiles(Counter(values)) == pytest.approx(numpy.quantile(values, (0.25, 0.5, 0.75)))


def test_several_files_and_their_union(tmp_path, capsys):
    first = put(tmp_path / "a.questions.jsonl", ("甲乙", "A", None), ("甲乙丙", "A", None))
    second = put(tmp_path / "b.questions.jsonl", ("丁", "AB", "释"))
    stats.main(["--questions", str(first), str(second), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed == stats.stats([first, second])
    assert [column["questions"] for column in printed.values()] == [2, 1, 3]
    assert [column["vocabulary"] for column in printed.values()] == [3, 2, 5]
    assert printed["Total"]["question"]["mean"] == 2
    stats.main(["--questions", str(first), str(second)])
    head = capsys.readouterr().out.splitlines()[0].split()
    assert head == ["a", "b", "Total"]


def test_dropped_rows_count_only_with_the_report_of_the_same_questions(tmp_path, capsys):
    raw = tmp_path / "t.csv"
    with raw.open("w", encoding="utf-8", newline="") as handle:
        rows = [["Question", "Options", "Answer", "Explanation"]]
        rows += [["甲乙", "A 1\nB 2", "A", ""], ["甲乙丙丁", "A 1\nB 2", "", "新字"], ["", "A 1\nB 2", "A", "看不见"]]
        csv.writer(handle).writerows(rows)
    preprocess("cmexam", [raw], tmp_path)
    path = tmp_path / "t.questions.jsonl"
    column = stats.stats([path])["t"]
    assert (column["questions"], column["vocabulary"], column["dropped_rows"]) == (2, 6, 1)
    assert column["question"]["max"] == 4 and column["answer"]["mean"] == 0.5
    assert "1 dropped row(s) of the exam file added, from t.report.json" in capsys.readouterr().err
    path.write_text(path.read_text(encoding="utf-8").replace("甲乙", "甲"), encoding="utf-8")
    assert stats.stats([path])["t"]["questions"] == 1
    assert "belongs to another version of t.questions.jsonl" in capsys.readouterr().err
    (tmp_path / "t.report.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="not a report of preprocess"):
        stats.stats([path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"Question,Options\n", r"a\.jsonl:1: broken JSON"),
        (b'{"prompt": "x"}\n', "cmexam-tune preprocess"),
        (b'{"id": "1", "stem": "x", "options": {"A": "x", "B": "y"}, "answer": "C"}\n', r"a\.jsonl:1: .*names C"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, capsys, content, message):
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        stats.stats([path])
    with pytest.raises(SystemExit) as stop:
        cli.run(stats.main, ["--questions", str(path)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and "Traceback" not in error


def test_two_columns_need_two_names(tmp_path):
    path = put(tmp_path / "a.questions.jsonl", ("甲", "A", None))
    with pytest.raises(UserError, match="a second file called 'a'"):
        stats.stats([path, path])


@needs_data
def test_the_dev_column_of_the_paper_to_the_digit(tmp_path, capsys):
    preprocess("cmexam", [VAL], tmp_path)
    stats.main(["--questions", str(tmp_path / "val.questions.jsonl")])
    assert capsys.readouterr().out == DEV


def test_power_before_any_training(tmp_path, capsys):
    path = put(tmp_path / "a.questions.jsonl", *[("甲乙", "A", None)] * 400)
    stats.main(["--questions", str(path), "--power"])
    printed = capsys.readouterr().out
    assert "20% disagree" in printed and "6.2" in printed.split("20% disagree")[1].splitlines()[0]
    stats.main(["--questions", str(path), "--power", "--json"])
    assert json.loads(capsys.readouterr().out)["a"]["smallest_difference"]["0.2"] == pytest.approx(6.23, abs=0.05)
