"""CMB-Exam and CMB-Clin files: items, answers in a second file, streaming, bad files."""

import json
import tracemalloc
from pathlib import Path

import pytest
import real_data

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import _tables, cmb

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "cmb"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the released files are not here")
ITEM = {
    "exam_type": "医师考试",
    "exam_class": "执业医师",
    "exam_subject": "临床执业医师",
    "question": "下列哪项是",
    "answer": "EB",
    "question_type": "多项选择题",
    "option": {"A": "甲", "B": "1 mg/kg", "C": "丙", "D": "", "E": "1", "F": "己"},
}
FACETS = {"exam_type": "医师考试", "exam_class": "执业医师", "exam_subject": "临床执业医师"}
CLIN = {
    "id": "0",
    "title": "案例",
    "description": "男，49岁。",
    "QA_pairs": [{"question": "诊断？", "answer": "疝。"}, {"question": "治疗？", "solution": "手术。"}],
}


def put(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def read(path, answers=None):
    told = []
    return list(cmb.read([path], answers, told.append)), told


def without(*names, **changes):
    return {**{key: value for key, value in ITEM.items() if key not in names}, **changes}


def test_an_item(tmp_path):
    questions, told = read(put(tmp_path / "train.json", [ITEM]))
    options = {"A": "甲", "B": "1 mg/kg", "C": "丙", "E": "1", "F": "己"}
    assert questions == [Question("train:1", "下列哪项是", options, "BE", None, "multiple", FACETS)]
    assert [(t.row, t.action, t.reason) for t in told] == [
        (1, "repaired", "answer letters sorted"),
        (1, "repaired", "empty option left out"),
    ]
    (tmp_path / "train.jsonl").write_text(json.dumps(ITEM) + "\n\n", encoding="utf-8")
    assert read(tmp_path / "train.jsonl")[0] == questions
    (tmp_path / "train.json").write_text(json.dumps(ITEM), encoding="utf-8-sig")
    assert read(tmp_path / "train.json")[0] == questions


@pytest.mark.parametrize(
    ("printed", "kind", "facet"),
    [
        ("单项选择题", "single", None),
        ("多项选择题", "multiple", None),
        ("A1型题", "single", "A1型题"),
        ("C型题", "single", "C型题"),
        ("X型题", "multiple", "X型题"),
        ("案例分析题", None, "案例分析题"),
        ("", None, None),
    ],
)
def test_kind_is_what_the_paper_prints(tmp_path, printed, kind, facet):
    for answer in ("A", "AB"):
        question = read(put(tmp_path / "t.json", [without(question_type=printed, answer=answer)]))[0][0]
        assert (question.kind, question.facets.get("question_type")) == (kind, facet)


def test_answers_in_a_second_file(tmp_path):
    items = [without("answer", id=number, question=f"第{number}题") for number in (1, 2, 3, 4)]
    items.append(without(id=5, answer="A", question="第5题"))
    questions = put(tmp_path / "test.json", items)
    answers = [{"id": 1, "answer": "FB"}, {"id": "2", "answer": "C"}, {"id": 3, "answer": "D"}]
    answers.append({"id": 5, "answer": "B"})
    found, told = read(questions, put(tmp_path / "answers.json", answers))
    assert [(q.id, q.answer) for q in found] == [("1", "BF"), ("2", "C")]
    assert [(t.row, t.reason) for t in told if t.action == "dropped"] == [
        (3, "answer letter with no option"),
        (4, "no answer"),
        (5, "answer differs from the file of answers"),
    ]
    unpublished, _ = read(questions)
    assert [q.answer for q in unpublished] == [None, None, None, None, "A"]


def test_an_empty_answer_where_answers_are_published_is_dropped(tmp_path):
    found, told = read(put(tmp_path / "t.json", [ITEM, without(answer="")]))
    assert len(found) == 1
    assert (told[-1].row, told[-1].action, told[-1].reason) == (2, "dropped", "no answer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "it has no rows"),
        (b"[1]", "an object is needed for every item, found int"),
        (b'[{"question": "q"}]', r"no column for options \(option\). Found: question"),
        (b'[{"id": 1, "answer": "A"}]', "give it as --answers"),
        (b'[{"QA_pairs": []}]', "CMB-Clin"),
        (b'[\n{"question": "q", "option": {}},\n{"a" 2}\n]', r"t\.json:3: broken JSON, Expecting ':'"),
        (b'[\n{"question": "q", "option": {}}\n{"a": 2}\n]', r"t\.json:3: broken JSON, expecting ','"),
        (b'[\n{"question": "q", "option": {}},\n{"a": "b\n"}]', r"t\.json:3: broken JSON, Invalid control character"),
        (b'[\n{"question": "q", "option": {}}', r"t\.json:2: broken JSON, the array does not end"),
        (b'[\n{"question": "q', r"t\.json:2: broken JSON"),
        (b'[{"question": "q", "option": {}}] x', "text after the end of the array"),
        (b"question,option\n", "broken JSON"),
        ('[\n{"question": "题"}]'.encode("gb18030"), r"t\.json:2: not UTF-8, byte 0xcc at offset 16.*GB18030"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "t.json")


def test_ids(tmp_path):
    with pytest.raises(DataError, match="items 1 and 3 have the same id '7'"):
        read(put(tmp_path / "t.json", [{**ITEM, "id": 7}, ITEM, {**ITEM, "id": "7"}]))
    answers = put(tmp_path / "a.json", [{"id": 1, "answer": "A"}])
    with pytest.raises(DataError, match=r"item 1 has no id, --answers are joined by id"):
        read(put(tmp_path / "t.json", [ITEM]), answers)
    with pytest.raises(DataError, match="item 2 repeats the id '1'"):
        read(put(tmp_path / "t.json", [{**ITEM, "id": 1}]), put(answers, [{"id": 1, "answer": "A"}] * 2))
    with pytest.raises(DataError, match="item 1 has no id, answer"):
        read(put(tmp_path / "t.json", [{**ITEM, "id": 1}]), put(answers, [{"x": 1}]))


def test_arrays(tmp_path):
    items = [{**ITEM, "id": number, "question": '𠮷题\\"\n' * number} for number in range(1, 6)]
    path = put(tmp_path / "t.json", items)
    assert [row for _, row in _tables.read(path)] == items
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert [row for _, row in _tables.read(path)] == items
    path.write_text(path.read_text(encoding="utf-8-sig").replace('"id": 4', '"id" 4'), encoding="utf-8")
    line = path.read_text(encoding="utf-8").split('"id" 4')[0].count("\n") + 1
    with pytest.raises(DataError, match=rf"t\.json:{line}: broken JSON"):
        list(_tables.read(path))
    put(path, {"one": items[:2], "two": items[2:]})
    assert [row for _, row in _tables.read(path)] == [
        {**item, _tables.SECTION: "one" if number < 2 else "two"} for number, item in enumerate(items)
    ]


def test_memory_is_the_text_and_not_its_dictionaries(tmp_path):
    path = put(tmp_path / "t.json", [ITEM] * 3000)
    tracemalloc.start()
    assert sum(1 for _ in _tables.read(path)) == 3000
    top = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert top < 5 * path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1, "a": 2}]', "key 'a' stands twice"),
        (b'{"train": [{"a": 1, "a": 2}]}', "key 'a' stands twice"),
        (b'[{"question": "\\ud800"}]', "half of a surrogate pair"),
        (b'{"train": [{"question": "\\ud800"}]}', "half of a surrogate pair"),
        (b'{"train": [' + b"[" * 100_000, "nested too deep"),
        (b'[{"id": ' + b"9" * 6000 + b"}]", "integer string conversion"),
        (b"[" * 100_000, "nested too deep"),
        (b'[{"a":' * 50_000, "nested too deep"),
    ],
)
def test_strange_json(tmp_path, content, message):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(_tables.read(tmp_path / "t.json"))


def test_clin(tmp_path):
    case = next(cmb.read_clin(put(tmp_path / "clin.json", [CLIN])))
    assert (case.id, case.title, case.record) == ("0", "案例", "男，49岁。")
    assert [(turn.question, turn.answer) for turn in case.turns] == [("诊断？", "疝。"), ("治疗？", "手术。")]
    for change, message in [
        ({"QA_pairs": []}, "case 1: QA_pairs must be a list"),
        ({"description": ""}, "case 1: description is missing"),
        ({"QA_pairs": [{"question": "q"}]}, "case 1, question 1: solution is missing"),
    ]:
        with pytest.raises(DataError, match=message):
            list(cmb.read_clin(put(tmp_path / "clin.json", [{**CLIN, **change}])))
    with pytest.raises(DataError, match="repeats the id '0'"):
        list(cmb.read_clin(put(tmp_path / "clin.json", [CLIN, CLIN])))


@needs_data
def test_the_released_files():
    questions, _ = read(DATA / "cmb_single90.json")
    assert len(questions) == 90 and sum(len(q.options) == 4 for q in questions) == 8
    assert any("尿" in q.options.values() for q in questions)
    cases = list(cmb.read_clin(real_data.find("CMB-Clin-qa.json")))
    assert (len(cases), sum(len(case.turns) for case in cases)) == (74, 208)


@needs_data
def test_every_released_answer_joins(tmp_path):
    answers = json.loads(real_data.find("CMB-test-choice-answer.json").read_text(encoding="utf-8"))
    items = [
        {**{k: v for k, v in a.items() if k != "answer"}, "question": "q", "option": dict.fromkeys("ABCDEF", "x")}
        for a in answers
    ]
    questions, told = read(put(tmp_path / "t.json", items), real_data.find("CMB-test-choice-answer.json"))
    assert len(questions) == 11_200
    assert {t.reason: t.row for t in told} == {"answer letters sorted": 5444} and len(told) == 4
    assert sum(q.kind == "multiple" for q in questions) == 1190
    assert sum("F" in (q.answer or "") for q in questions) == 8
