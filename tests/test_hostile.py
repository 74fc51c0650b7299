# ruff: noqa: E501 - tables, one hostile input after the other
"""What strangers send: outputs, cells, files, settings. Each row is handled or refused in one message, and soon."""

import io
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cmexam_tune
from cmexam_tune import chat
from cmexam_tune.cmb_clin import rubric
from cmexam_tune.core import files, jsonl
from cmexam_tune.core.errors import DataError, UserError, first_line
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import scorers
from cmexam_tune.exams import _sources
from cmexam_tune.interop import predictions
from cmexam_tune.preprocess import preprocess
from cmexam_tune.prompts import Dialogue, prompt
from cmexam_tune.prompts.chat_template import TEMPLATES, ChatTemplate

SECONDS = 10
"""Of processor time for one row: far more than any needs, far less than what grows with the square of its size."""
OPTIONS = {"A": "阿司匹林", "B": "青霉素", "C": "头孢", "D": "万古霉素", "E": "以上都不是"}
QUESTION = Question("q:1", "首选哪种药？", OPTIONS, "B", "因为青霉素有效。")
SAMPLE = Path(cmexam_tune.__file__).parent / "sample"


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def many(text: str, count: int = 4_000) -> str:
    return text * count


OUTPUTS = {
    "a number of 5,000 digits": '{"answer": ' + many("9", 5000) + "}", "digits": many("9"), "minus": '{"answer": -1e999}',
    "nested lists": many("[") + many("]"), "nested objects": many('{"a":'), "open boxes": many("\\boxed{"),
    "boxes": many("\\boxed{B}"), "letters": many("ABCDE"), "letters and marks": many("A对B错"), "commas": many("A,"),
    "brackets": many("("), "both brackets": many("()"), "stars": many("*"), "backticks": many("`"), "hashes": many("#"),
    "blanks": "答案" + many(" ") + "B", "lines": many("\n"), "answers": many("答案是"), "colons": "答案" + many("："),
    "A. B. C.": many("A. 阿司匹林\nB. 青霉素\n"), "explanations": many("解析："), "thoughts": many("<think>"),
    "ended thoughts": many("</think>"), "thought and end": many("<think></think>"), "quotes": many('"'),
    "a fence": "```json\n" + many("{") + "\n```", "fences": many("```\n"), "JSON list": json.dumps(["B"] * 4_000),
    "JSON of objects": json.dumps({"answer": {"B": {"B": "B"}}}), "JSON null": '{"answer": null}',
    "JSON NaN": '{"answer": NaN}', "JSON of true": '{"answer": true}', "keys": json.dumps({f"k{i}": i for i in range(5000)}),
    "half a pair": '{"answer": "\\ud83d"}', "control": "\x00\x1b[31m答案\x07B", "right to left": "\u202e答案：B\u202c",
    "invisible": "答\u200b案\u200b：\u200bB", "full width": "答案：Ｂ" * 5000, "letters of others": "答案：Б В Γ Ｂ",
    "HTML": "<script>答案：B</script>", "TeX": "\\input{/etc/passwd}答案：B", "YAML": "!!python/object/apply:os.system [B]",
    "combining": "B" + many("\u0301"), "emoji": many("👩‍⚕️"), "one word": many("苯"), "English": many("The answer is "),
    "options": many("选项"), "or": many("B或"), "ranges": many("A-"), "dots": many("."), "equal": many("="), "empty": "",
    "byte-order mark": "\ufeffB", "a bar": many("|"), "slashes": many("/"), "backslashes": many("\\"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_scored(name: str) -> None:
    score(OUTPUTS[name], ("standard", "opencompass-cmb"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_scored_by_every_scorer(name: str) -> None:
    score(OUTPUTS[name], scorers.names())


def score(text: str, profiles: Sequence[str]) -> None:
    for profile in profiles:
        votes = (text,) * 3 if profile.endswith("-vote") else ()
        overall = evaluate([Prediction(QUESTION.id, text, votes=votes)], [QUESTION], profile=profile).overall
        # Some published scripts leave unreadable outputs out of their denominator.
        assert overall["accuracy"] in (0, 100, None) and overall["n"] == 1, profile


CELLS = {
    "empty": "", "blank": " \u3000\n", "brackets": many("["), "objects": many('{"a":'), "minus": "[" + many("-") + "1]",
    "tilde": "[" + many("~") + "1]", "not": many("not "), "parentheses": many("("), "quotes": many('"'), "commas": many(","),
    "a bomb": "9**9**9**9", "a call": "__import__('os').system('touch owned')", "bytes": "b'" + many("A") + "'",
    "a set": "{'A', 'B'}", "a tuple": "('A', 'B')", "a number": many("9", 5000), "a float": "1e400", "NaN": "nan",
    "a formula": "=1+1", "a command": "=cmd|' /C calc'!A0", "HTML": "<b>A</b>", "letters": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "letters twice": "A 甲\nA 乙", "later letters": "Y 甲\nZ 乙", "no letters": "甲\n乙", "holes": "A 甲\nD 丁",
    "many options": "\n".join(f"{chr(65 + i)} 选项{i}" for i in range(26)), "null": "null", "true": "true", "zero": "\0",
    "escape": "\x1b]0;owned\x07", "right to left": "\u202eA 甲\nB 乙", "full width": "Ａ．甲\nＢ．乙", "tabs": "A\t甲\tB\t乙",
    "dictionary": "{'A': '甲', 'B': '乙'}", "list": "['甲', '乙']", "nested list": "[['甲', '乙'], 'B']",
    "long": "A " + many("甲") + "\nB 乙", "lines": many("\n"), "dots": many("A."), "half": "\\ud83d", "emoji": many("👩‍⚕️"),
}  # fmt: skip


@pytest.mark.parametrize("exam", ["cmexam", "cmb"])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_read_or_its_row_is_dropped(
    name: str, exam: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each column of a table, and in each field of an object."""
    monkeypatch.chdir(tmp_path)
    good = ["首选哪种药？", "A 阿司匹林\nB 青霉素", "B", "因为有效"]
    rows = [[CELLS[name] if place == column else cell for place, cell in enumerate(good)] for column in range(4)]
    if exam == "cmexam":
        import csv

        with Path("t.csv").open("w", encoding="utf-8", newline="") as handle:
            csv.writer(handle).writerows([["Question", "Options", "Answer", "Explanation"], good, *rows])
    else:
        keys = ("question", "option", "answer", "exam_type")
        items = [dict(zip(keys, row, strict=True)) for row in [[*good[:1], {"A": "甲", "B": "乙"}, *good[2:]], *rows]]
        Path("t.json").write_text(json.dumps(items), encoding="utf-8")
    (report,) = preprocess(exam, [next(iter(Path().glob("t.*")))], "out")
    assert report["rows"] == 5 == report["kept"] + sum(report["dropped"].values()) and report["kept"] >= 1
    assert not Path("owned").exists()


FOREIGN: dict[str, Any] = {
    "a number": 5, "a text": "B", "null": None, "a list": ["B"], "nothing": {}, "eval only": {"eval": {}},
    "samples of numbers": {"eval": {}, "samples": [1]}, "samples null": {"eval": {}, "samples": [None]},
    "samples without ids": {"eval": {}, "samples": [{"output": {}}]}, "no samples": {"eval": {}, "samples": []},
    "samples as text": {"eval": {}, "samples": "x"}, "an id that is true": {"eval": {}, "samples": [{"id": True}]},
    "an id that is a list": {"eval": {}, "samples": [{"id": ["q:1"]}]},
    "output text": {"eval": {}, "samples": [{"id": "q:1", "output": "B"}]},
    "output null": {"eval": {}, "samples": [{"id": "q:1", "output": None}]},
    "choices null": {"eval": {}, "samples": [{"id": "q:1", "output": {"choices": None}}]},
    "choices number": {"eval": {}, "samples": [{"id": "q:1", "output": {"choices": 5}}]},
    "choices of numbers": {"eval": {}, "samples": [{"id": "q:1", "output": {"choices": [5]}}]},
    "message number": {"eval": {}, "samples": [{"id": "q:1", "output": {"choices": [{"message": 5}]}}]},
    "content number": {"eval": {}, "samples": [{"id": "q:1", "output": {"choices": [{"message": {"content": 5}}]}}]},
    "prediction number": {"0": {"prediction": 5}}, "prediction null": {"0": {"prediction": None}},
    "entry text": {"0": "B"}, "entry list": {"0": ["B"]}, "far place": {"9": {"prediction": "B"}},
    "Thai digits": {"๐": {"prediction": "B"}}, "superscript": {"²": {"prediction": "B"}},
    "long key": {many("9", 5000): {"prediction": "B"}}, "prompt number": {"0": {"prediction": "B", "origin_prompt": 5}},
    "deep prediction": {"0": {"prediction": [[[["B"]]]]}}, "an object": {"0": {"prediction": {"content": {"content": "B"}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(FOREIGN[name]), encoding="utf-8")
    try:
        found = predictions.read(path, [QUESTION])
    except UserError as error:
        assert "p.json" in str(error)
    else:
        assert [one.question_id for one in found] == ["q:1"]


def damaged(data: bytes, number: int) -> bytes:
    """Return a file that was cut, or of which some bytes are others."""
    chance = random.Random(number)
    if number % 3 == 0:
        return data[: chance.randrange(1, len(data))]
    changed = bytearray(data)
    for _ in range(1 if number % 3 == 1 else 40):
        changed[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(changed)


def archive(compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as packed:
        packed.writestr("train.csv", (SAMPLE / "cmexam" / "train.csv").read_bytes())
    return buffer.getvalue()


def workbook() -> bytes:
    import openpyxl

    book, buffer = openpyxl.Workbook(), io.BytesIO()
    for row in (["Question", "Options", "Answer", "Explanation"], ["问", "A 甲\nB 乙", "B", "因"]):
        book.active.append(row)
    book.save(buffer)
    return buffer.getvalue()


def parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    row = {"Question": "问", "Options": "A 甲\nB 乙", "Answer": "B", "Explanation": "因"}
    parquet.write_table(pyarrow.Table.from_pylist([row] * 20), buffer)
    return buffer.getvalue()


KINDS = {
    "deflate.zip": lambda: archive(zipfile.ZIP_DEFLATED), "bzip2.zip": lambda: archive(zipfile.ZIP_BZIP2),
    "lzma.zip": lambda: archive(zipfile.ZIP_LZMA), "t.xlsx": workbook, "t.parquet": parquet,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(12))
def test_a_damaged_file_is_one_message(kind: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / kind
    path.write_bytes(damaged(KINDS[kind](), number))
    try:
        preprocess("cmexam", [path], tmp_path / "out")
    except UserError as error:
        assert kind in str(error) or "train" in str(error), error
    else:
        assert number % 3  # a byte that nobody looks at


def test_a_broken_file_in_a_zip_is_named_by_the_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "exam.zip", "w") as packed:
        packed.writestr("inner/train.csv", (SAMPLE / "cmexam" / "train.csv").read_bytes() + b'"half')
    with pytest.raises(DataError, match=r"exam\.zip/inner/train\.csv:\d+: broken CSV"):
        preprocess("cmexam", [tmp_path / "exam.zip"], tmp_path / "out")


def test_a_folder_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/exam\xff.csv"
    Path(os.fsdecode(name)).write_bytes((SAMPLE / "cmexam" / "train.csv").read_bytes())
    with pytest.raises(UserError, match=r"not UTF-8\. Rename it"):
        _sources.find_sources([tmp_path], tmp_path / "unpacked")


LOOPS = {
    "nested": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "long": "{% for i in range(99999) %}{{ '甲' * 999 }}{% endfor %}", "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "attribute": "{{ ''.__class__.__mro__ }}", "globals": "{{ raise_exception.__globals__.x }}", "half": "{{ 1 / 0 }}",
    "include": "{% include '/etc/passwd' %}", "undefined": "{{ messages[0].nothing.more }}", "type": "{{ 1 + 'a' }}",
    "raise": "{{ raise_exception('no') }}", "format": "{{ '%d' % 'x' }}", "index": "{{ messages[99]['content'] }}",
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_ends(name: str) -> None:
    own = TEMPLATES["none"].apply.func  # type: ignore[attr-defined]
    template = ChatTemplate("auto", lambda messages, num_examples: own(LOOPS[name], None, messages=messages))
    with pytest.raises(UserError, match="the model's chat template"):
        template.render(Dialogue("问"))


def in_little_memory(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that gets 6 GiB of addresses."""
    import resource

    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SAMPLE.parents[1])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip


def test_a_template_that_wants_all_memory(tmp_path: Path) -> None:
    """Nothing but the machine's memory bounds one expression; what it does not hold is one message."""
    code = """
from cmexam_tune.core.errors import UserError
from cmexam_tune.prompts import Dialogue
from cmexam_tune.prompts.chat_template import TEMPLATES, ChatTemplate
own = TEMPLATES["none"].apply.func
try:
    ChatTemplate("auto", lambda messages, num_examples: own("{{ 'x'.center(10**10) }}", None)).render(Dialogue("q"))
except UserError as error:
    print(error)"""
    done = in_little_memory(code, tmp_path)
    assert done.stdout.startswith("the model's chat template cannot be filled (MemoryError)"), done


@pytest.mark.slow  # 2 GiB are unpacked
@pytest.mark.parametrize("name", ["line.csv", "line.json", "line.jsonl"])
def test_a_line_of_two_gigabytes_in_a_zip(name: str, tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "exam.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
        packed.open(name, "w", force_zip64=True) as member,
    ):
        member.write({"line.csv": b"Question,Options,Answer,Explanation\n"}.get(name, b'{"question": "'))
        for _ in range(128):
            member.write(b"x" * (16 << 20))
    words = ["preprocess", "cmexam", "--input", "exam.zip", "--out", "out"]
    code = f"import sys; from cmexam_tune import __main__; from cmexam_tune.core import cli; cli.run(__main__.main, {words})"
    done = in_little_memory(code, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("error: ") == 1, done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "values",
    [
        (5, None, OPTIONS, "B"), ("q", None, OPTIONS, "B"), (None, "s", OPTIONS, "B"), ("q", 5, OPTIONS, "B"),
        ("q", "s", {}, "B"), ("q", "s", {"A": "x"}, "A"), ("q", "s", OPTIONS, "Z"), ("q", "s", OPTIONS, "BA"),
        ("q", "s", OPTIONS, ""), ("", "s", OPTIONS, "B"), ("q", "  ", OPTIONS, "B"), (b"q", "s", OPTIONS, "B"),
        ("q", "s", {"a": "x", "b": "y"}, "a"), ("q", "s", {str(i): "x" for i in range(4)}, "1"), (["q"], "s", OPTIONS, "B"),
    ],
)  # fmt: skip
def test_a_question_that_cannot_be(values: Any) -> None:
    with pytest.raises(DataError, match="question "):
        Question(*values)


@pytest.mark.parametrize(
    "text", ["{{ 7*7 }}", "{question}", "{0}", "%s", "{letters}", "}{", "{", "\\", "</s>", "<|im_end|>"]
)
def test_braces_of_others_stay_text(text: str) -> None:
    question = Question("q", text, {"A": text, "B": "乙"}, "A")
    for style in ("answer", "zeroshot", "cmb_answer"):
        assert prompt(question, style).count(text) == 2, style


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_standard_input_in_another_encoding(locale: str) -> None:
    code = "import sys; from cmexam_tune import chat; print(*chat.messages_of(chat.decoded(sys.stdin)))"
    environment = {**os.environ, "PYTHONPATH": str(SAMPLE.parents[1]), "LC_ALL": locale, "PYTHONUTF8": "0"}
    ask = [sys.executable, "-c", f"from cmexam_tune.core.errors import UserError\ntry:\n  {code}\nexcept UserError as e: print('refused', e)"]  # fmt: skip
    words = "感冒怎么办？\n\n"
    done = subprocess.run(ask, input=words.encode("gbk"), env=environment, capture_output=True, check=True)
    assert b"refused standard input: not UTF-8" in done.stdout, done
    assert list(chat.messages_of(chat.decoded(iter([words])))) == [words.strip()]


def test_what_torch_says_about_code_is_not_repeated() -> None:
    import pickle

    words = "Weights only load failed. Re-running `torch.load` with `weights_only` set to `False` will likely succeed"
    for text in (words, f"first\n{words}"):
        said = first_line(pickle.UnpicklingError(text))
        assert "weights_only" not in said and "safetensors" in said
    assert first_line(ValueError("Validation error for field 'hidden_size':\n    must be int")).endswith("must be int")


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "5"])
def test_a_rubric_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"r.yaml is no rubric: .*axes"):
        rubric.read(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", '[{"id": 1, "title": "", "description": "x", "QA_pairs": {}}]', r"case 1: QA_pairs must be .* found \{\}"),
            ("c.json", '[{"question": "x', r"c.json:1: broken JSON, Unterminated string at column 15\."),
        ("c.jsonl", '{"question": "x', r"c.jsonl:1: broken JSON, Unterminated string at column 14\."),
    ],
)  # fmt: skip
def test_messages_name_the_place(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=words):
        preprocess("cmb", [tmp_path / name], tmp_path / "out")


def test_an_exam_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder, an exam file is needed"):
        files.check_input(tmp_path, "exam file")


def test_a_report_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """No file may be larger than 64 KiB, which the page is."""
    import resource

    jsonl.write(tmp_path / "q.jsonl", [replace(QUESTION, id=f"q:{i}") for i in range(60)])
    jsonl.write(tmp_path / "p.jsonl", [Prediction(f"q:{i}", "答案是B") for i in range(60)])
    words = ["evaluate", "--predictions", "p.jsonl", "--questions", "q.jsonl", "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "cmexam_tune", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SAMPLE.parents[1])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "File too large. Free some space" in done.stderr and "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["p.jsonl", "q.jsonl"]
