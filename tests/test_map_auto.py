"""`--map auto` and `preprocess --dry-run`: columns found by their names, and what would be read shown before."""

import json
from pathlib import Path

import pytest

from cmexam_tune import exams, preprocess
from cmexam_tune.core.errors import DataError

TABLES = {
    "序号,题目,选项Ａ,选项B,选项C,正确答案,解析,科室\n1,首选,甲,乙,丙,AC,因为,心内\n":
        "stem=题目,answer=正确答案,explanation=解析,options=选项Ａ..选项C,answer_as=letters,facet:科室=科室",
    "question,A,B,C,D,answer,explanation\nq,a,b,c,d,D,e\n":
        "stem=question,answer=answer,explanation=explanation,options=A..D,answer_as=letters",
    "id,question,opa,opb,opc,opd,cop\n7,q,a,b,c,d,1\n8,r,a,b,c,d,4\n":
        "stem=question,answer=cop,id=id,options=opa..opd,answer_as=number",
    "Question,Option 1,Option 2,Option 3,Answer\nq,a,b,c,0\nr,a,b,c,2\n":
        "stem=Question,answer=Answer,options=Option 1..Option 3,answer_as=index",
    "题干,A项,B项,C项,答案\n一,甲,乙,丙,丙\n二,丁,戊,己,戊\n": "stem=题干,answer=答案,options=#2..#4,answer_as=text",
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TABLES.items())
def test_usual_names_are_found(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "bank.csv"
    path.write_text(text, encoding="utf-8")
    assert exams.with_guesses("auto", path) == expected
    exam, _ = exams.load("table", expected)
    assert list(exam.read([path]))  # it is a map that reads the file


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("内容,A,B,答案\nq,a,b,A\n", "auto", r"no column for the stem. Found: 内容, A, B, 答案.*auto,stem=COLUMN"),
        ("题干,B,C,D,答案\nq,a,b,c,B\n", "auto", "no column for the options"),  # else B would become A
        ("题干,A,B,C,答案\nq,a,b,c,1\nr,a,b,c,2\n", "auto", "may count from 0 or from 1"),
        ("题干,A,B,C,答案\nq,a,b,c,1\nr,a,b,c,B\n", "auto", "some answers are numbers and some are not"),
    ],
)
def test_what_is_not_certain_is_asked(text: str, columns: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bank.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        preprocess.preprocess("table", [path], tmp_path / "out", columns=columns)
    assert not (tmp_path / "out").exists()


def test_the_users_own_words_win(tmp_path: Path) -> None:
    path = tmp_path / "bank.csv"
    path.write_text("内容,题目,A,B,C,答案\nq,x,a,b,c,1\nr,y,a,b,c,2\n", encoding="utf-8")
    (report,) = preprocess.preprocess(
        "table", [path], tmp_path / "out", columns="auto,stem=内容,answer_as=number,facet:题=题目"
    )
    assert report["map"] == "answer=答案,options=A..C,stem=内容,answer_as=number,facet:题=题目"
    first = json.loads((tmp_path / "out" / "bank.questions.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert (first["stem"], first["answer"], first["facets"]) == ("q", "A", {"题": "x"})


def test_a_dry_run_shows_three_questions_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bank.csv"
    rows = "".join(f"问{n},甲,乙,{'AB'[n % 2]},因为{'长' * 200}\n" for n in range(9))
    path.write_text(f"题干,A,B,答案,解析\n{rows}坏题,甲,,C,\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert not preprocess.main(["table", "--map", "auto", "--input", "bank.csv", "--dry-run"])
    printed = capsys.readouterr().out
    assert "--map 'stem=题干,answer=答案,explanation=解析,options=A..B,answer_as=letters'" in printed
    assert [line for line in printed.splitlines() if line.startswith("bank:")] == ["bank:1", "bank:2", "bank:3"]
    assert " *B 乙" in printed and "kept 9 of 10 rows" in printed and "nothing is written" in printed
    assert max(map(len, printed.splitlines())) < 150
    assert [item.name for item in tmp_path.iterdir()] == ["bank.csv"]
    with pytest.raises(SystemExit):
        preprocess.main(["table", "--map", "auto", "--input", "bank.csv"])
    assert "--out names the folder" in capsys.readouterr().err
