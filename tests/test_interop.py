"""Files of other tools: read as predictions, and our questions written as their tasks."""

import json

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
    path.write_text('{"model": "x"}', encoding="utf-8")
    with pytest.raises(DataError, match="not predictions of OpenCompass"):
        predictions.read(path, QUESTIONS)


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
