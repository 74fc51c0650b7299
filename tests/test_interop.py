"""Files of other tools: read as predictions, and our questions written as their tasks."""

import json
from dataclasses import replace

import pytest

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.interop import predictions

OPTIONS = {"A": "阿司匹林", "B": "青霉素", "C": "头孢", "D": "万古霉素"}
QUESTIONS = [
    Question("7", "首选", OPTIONS, "B"),
    Question("x:2", "次选", OPTIONS, "AC"),
    Question("9", "三选", OPTIONS, "D"),
]


def lines(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def lm_eval(number, resps, name="none"):
    question = QUESTIONS[number]
    document = {"id": question.id, "prompt": question.stem, "answer": question.answer}
    return {"doc_id": number, "doc": document, "target": question.answer, "resps": resps, "filter": name}


FORMS = {
    "ours": [{"question_id": q.id, "text": q.answer} for q in QUESTIONS],
    "integer ids": [{"id": 7, "output": "B"}, {"id": "x:2", "output": "AC"}, {"id": 9, "output": "D"}],
    "responses": [{"id": q.id, "response": q.answer} for q in QUESTIONS],
    "predictions": [{"id": q.id, "prediction": q.answer} for q in QUESTIONS],
    "lm-eval": [lm_eval(i, [[q.answer]], name) for i, q in enumerate(QUESTIONS) for name in ("letters", "none")],
    "lm-eval without its own ids": [{"doc_id": i, "doc": {}, "resps": [[q.answer]]} for i, q in enumerate(QUESTIONS)],
    "evalscope": [
        {
            "index": i,
            "model": "m",
            "model_output": {"choices": [{"message": {"role": "assistant", "content": q.answer}}]},
        }
        for i, q in enumerate(QUESTIONS)
    ],
    "evalscope with reasoning": [
        {
            "index": i,
            "model_output": {
                "choices": [
                    {
                        "message": {
                            "content": [{"type": "reasoning", "reasoning": "想"}, {"type": "text", "text": q.answer}]
                        }
                    }
                ]
            },
        }
        for i, q in enumerate(QUESTIONS)
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_score(tmp_path, form):
    path = lines(tmp_path / "predictions.jsonl", *FORMS[form])
    assert [one.question_id for one in predictions.read(path, QUESTIONS)] == ["7", "x:2", "9"]
    assert evaluate(path, QUESTIONS).overall["accuracy"] == 100


def test_opencompass_goes_by_place(tmp_path):
    path = tmp_path / "cmb.json"
    entries = {str(i): {"origin_prompt": "..", "prediction": q.answer, "gold": "x"} for i, q in enumerate(QUESTIONS)}
    path.write_text(json.dumps(entries), encoding="utf-8")
    assert evaluate(path, QUESTIONS).overall["accuracy"] == 100


def test_another_json_file_is_told_what_is_read(tmp_path):
    path = tmp_path / "log.json"
    path.write_text('{"version": 2, "results": []}', encoding="utf-8")
    words = r"log.json: .*keys version, results.*lm-eval.*EvalScope.*OpenCompass.*inspect_ai"
    with pytest.raises(DataError, match=words):
        predictions.read(path, QUESTIONS)
    with pytest.raises(DataError, match=r"log.eval: a packed log.*inspect log convert --to json"):
        predictions.read(tmp_path / "log.eval", QUESTIONS)


def inspect_log(path, questions, *, epochs=1, ids=True):
    """Write the right answers as inspect_ai 0.3.285 does; without `ids` it numbers the samples itself."""
    thought = {"type": "reasoning", "reasoning": "想 A"}
    samples = [
        {
            "id": question.id if ids else number, "epoch": epoch, "target": question.answer,
            "input": "\n".join(["请作答。", question.stem, *question.options.values()]),
            "output": {"model": "m", "completion": question.answer, "choices": [
                {"message": {"role": "assistant", "content": content}, "stop_reason": "stop"}]},
        }
        for epoch in range(1, epochs + 1)
        for number, question in enumerate(questions, 1)
        for content in [question.answer if number % 2 else [thought, {"type": "text", "text": question.answer}]]
    ]  # fmt: skip
    path.write_text(json.dumps({"version": 2, "status": "success", "eval": {}, "samples": samples}), encoding="utf-8")
    return path


def test_inspect_logs_go_by_their_ids(tmp_path):
    log = inspect_log(tmp_path / "log.json", QUESTIONS[::-1])
    assert {one.question_id: one.text for one in predictions.read(log, QUESTIONS)} == {"7": "B", "x:2": "AC", "9": "D"}
    part = inspect_log(tmp_path / "part.json", QUESTIONS[1:])
    assert evaluate(part, QUESTIONS, answered_only=True).overall["accuracy"] == 100
    numbered_ones = inspect_log(tmp_path / "numbered.json", QUESTIONS, ids=False)
    assert evaluate(numbered_ones, QUESTIONS).overall["accuracy"] == 100
    # Numbers of its own are no ids of ours, where ours are numbers too.
    other = inspect_log(tmp_path / "other.json", numbered("1", "2", "3")[::-1], ids=False)
    with pytest.raises(DataError, match=r"other.json:1: .*question '1', but question '3' was asked"):
        evaluate(other, numbered("1", "2", "3"))


def test_epochs_are_votes(tmp_path):
    (first, *_) = predictions.read(inspect_log(tmp_path / "log.json", QUESTIONS, epochs=3), QUESTIONS)
    assert first.votes == ("B", "B", "B")


def test_a_sample_that_failed_is_unreadable_and_counted(tmp_path, capsys):
    path = inspect_log(tmp_path / "log.json", QUESTIONS)
    log = json.loads(path.read_text(encoding="utf-8"))
    log["samples"][0] |= {"error": {"message": "limit"}, "output": {"model": "m", "choices": []}}
    path.write_text(json.dumps(log), encoding="utf-8")
    assert evaluate(path, QUESTIONS).overall["answered"] == 2
    assert "1 output(s) are null or empty" in capsys.readouterr().err


TOOLS = ("lm-eval", "evalscope", "opencompass")


def numbered(*ids):
    """Return questions with these ids; the right answers are A, B, C, ... in turn."""
    return [
        Question(name, f"第 {letter} 题，问什么？", OPTIONS, letter) for name, letter in zip(ids, "ABCD", strict=False)
    ]


def written_by(tool, questions, path, *, ids=False, words=True):
    """Write the right answers as a tool does that was given these questions in this order."""
    rows = []
    for place, question in enumerate(questions):
        options = "\n".join(f"{letter}) {text}" for letter, text in question.options.items())
        asked = f"请作答。\n{question.stem}\n\n{options}\n答案：" if words else "请作答。"
        record = {"id": int(question.id)} if ids else {}
        if tool == "lm-eval":
            row = {"doc_id": place, "doc": record | {"prompt": asked}, "resps": [[question.answer]], "filter": "none"}
        elif tool == "evalscope":
            messages = [{"role": "user", "content": asked}]
            row = {"index": place, "model_output": question.answer, "metadata": record, "messages": messages}
        else:
            row = {"origin_prompt": [{"role": "HUMAN", "prompt": asked}], "prediction": question.answer}
        rows.append(row)
    if tool != "opencompass":
        return lines(path.with_suffix(".jsonl"), *rows)
    path = path.with_suffix(".json")
    path.write_text(json.dumps({str(place): row for place, row in enumerate(rows)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("ids", [("1", "2", "3"), ("2", "0", "1")])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_place_is_no_id(tmp_path, tool, ids, words):
    questions = numbered(*ids)
    path = written_by(tool, questions, tmp_path / "p", words=words)
    assert {one.question_id: one.text for one in predictions.read(path, questions)} == dict(
        zip(ids, "ABC", strict=True)
    )


@pytest.mark.parametrize("ids", [("1", "2", "3"), ("2", "0", "1")])
@pytest.mark.parametrize("tool", ["lm-eval", "evalscope"])
def test_an_id_that_comes_back_counts_before_the_place(tmp_path, tool, ids):
    """As where EvalScope gets single and multiple choice in two files: the places are those of a part."""
    questions = numbered(*ids)
    path = written_by(tool, questions[1:], tmp_path / "p", ids=True)
    report = evaluate(path, questions, answered_only=True)
    assert (report.overall["n"], report.overall["accuracy"]) == (2, 100)


@pytest.mark.parametrize("tool", TOOLS)
def test_places_in_another_file_are_refused(tmp_path, tool):
    questions = numbered("1", "2", "3")
    other_part = written_by(tool, questions[1:], tmp_path / "part")
    with pytest.raises(DataError, match=r"part.jsonl?:1: .*question '1', but question '2' was asked"):
        evaluate(other_part, questions, answered_only=True)
    another_order = written_by(tool, questions[::-1], tmp_path / "order")
    with pytest.raises(DataError, match=r"order.jsonl?:1: .*question '1', but question '3' was asked"):
        evaluate(another_order, questions)
    too_many = written_by(tool, questions, tmp_path / "more")
    with pytest.raises(DataError, match=r"more.jsonl?:3: place 2 of 2 questions"):
        evaluate(too_many, questions[:2])


@pytest.mark.parametrize("tool", TOOLS)
def test_a_part_by_place_needs_the_words_that_were_asked(tmp_path, tool):
    questions = numbered("1", "2", "3")
    limited = written_by(tool, questions[:2], tmp_path / "limited")
    report = evaluate(limited, questions, answered_only=True)
    assert (report.overall["n"], report.overall["accuracy"]) == (2, 100)
    bare = written_by(tool, questions[:2], tmp_path / "bare", words=False)
    with pytest.raises(DataError, match=r"2 outputs for 3 questions.*cannot be told.*first lines"):
        evaluate(bare, questions, answered_only=True)
    assert evaluate(bare, questions[:2]).overall["accuracy"] == 100


def test_ids_of_another_data_set_say_nothing(tmp_path):
    rows = [{"doc_id": i, "doc": {"id": f"theirs-{i}"}, "resps": [[q.answer]]} for i, q in enumerate(QUESTIONS)]
    assert evaluate(lines(tmp_path / "p.jsonl", *rows), QUESTIONS).overall["accuracy"] == 100


def test_likelihoods_of_letters(tmp_path):
    resps = [[["-3.5", "False"]], [["-0.5", "True"]], [["-2.0", "False"]], [["-9.0", "False"]]]
    path = lines(tmp_path / "samples.jsonl", lm_eval(0, resps))
    (one,) = predictions.read(path, QUESTIONS)
    assert (one.question_id, one.text) == ("7", "B")


def test_null_outputs_are_unreadable_and_counted(tmp_path, capsys):
    rows = [{"id": "7", "output": None}, {"id": "x:2", "output": "AC"}, {"id": "9", "output": ""}]
    path = lines(tmp_path / "predictions.jsonl", *rows)
    overall = evaluate(path, QUESTIONS).overall
    assert (overall["n"], overall["scored"], overall["answered"]) == (3, 3, 1)
    assert "2 output(s) are null or empty" in capsys.readouterr().err


def test_several_outputs_are_votes(tmp_path):
    path = lines(tmp_path / "predictions.jsonl", {"id": "7", "output": ["A", "答案是B", "答案是B"]})
    (one,) = predictions.read(path, QUESTIONS)
    assert one.votes == ("A", "答案是B", "答案是B")
    assert evaluate([one], QUESTIONS[:1], profile="cmb-vote").overall["accuracy"] == 100


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "7", "said": "A"}, "no output"),
        ({"output": "A"}, "no id"),
        ({"id": True, "output": "A"}, "no id"),
        ({"id": "7", "output": 5}, "holds no text"),
        ({"id": "7", "output": {"a": 1}}, "holds no text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, row, words):
    with pytest.raises(DataError, match=rf"p.jsonl:1: .*{words}"):
        predictions.read(lines(tmp_path / "p.jsonl", row), QUESTIONS)


def test_an_id_twice(tmp_path):
    with pytest.raises(DataError, match=r"p.jsonl:2: duplicate .*'7', first on line 1"):
        predictions.read(lines(tmp_path / "p.jsonl", {"id": 7, "output": "A"}, {"id": "7", "output": "B"}), QUESTIONS)


@pytest.mark.parametrize(
    ("outputs", "scored"),
    [
        (["B。青霉素有效。", "A、C 都可以。", "答案是 D。"], 0),
        (["B。青霉素有效。", "答案：AC\n解析：都可以。", "D"], 0),
        (["答案：B\n解析：青霉素有效。", "AC", "答案：D\n解释：耐药。"], 3),
        (['{"answer": "B", "explanation": "有效"}', '{"answer": "AC", "explanation": "都可以"}', "D"], 3),
    ],
)
def test_other_words_are_no_explanations_unless_they_are_marked(tmp_path, outputs, scored):
    """Nobody noted whether another tool asked for explanations; words around the letters are none."""
    questions = [replace(question, explanation="青霉素有效") for question in QUESTIONS]
    rows = [{"id": q.id, "output": text} for q, text in zip(questions, outputs, strict=True)]
    path = lines(tmp_path / "p.jsonl", *rows)
    overall = evaluate(path, questions).overall
    assert (overall["explanations"], overall["bleu1"] is None) == (scored, not scored)
    # A published script scores whatever it takes for an explanation.
    assert evaluate(path, questions, profile="cmexam-lora").overall["explanations"] == 3
