"""The evaluate program: its files, its messages, its speed, and that it starts without torch."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import kit
import pytest
from kit import questions

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.prompts import order
from cmexam_tune.report import result_tables

ROOT = Path(__file__).resolve().parents[1]
KEYS = {
    *("n", "answered", "accuracy", "accuracy_ci", "precision", "recall", "weighted_f1", "explanations"),
    *("bleu1", "bleu2", "bleu4", "rouge1", "rouge2", "rougeL"),
}


def _records(count=60, seed=1, characters=30):
    rng = random.Random(seed)
    questions, predictions = [], []
    for i in range(count):
        options = {letter: f"选项内容{rng.randrange(10**6)}" for letter in "ABCDE"}
        explanation = "".join(rng.choices("细菌感染首选青霉素过敏者用阿奇霉素，耐药时换药。", k=characters))
        facets = {"Difficulty level": str(rng.randrange(1, 6)), "Clinical Department": rng.choice(["内科", "外科"])}
        questions.append(Question(f"val:{i}", f"第{i}题" * 5, options, rng.choice("ABCDE"), explanation, facets=facets))
        said = questions[-1].answer if rng.random() < 0.6 else rng.choice("ABCDE")
        text = "无法回答" if i % 20 == 7 else f"答案: {said}. \n 解释: {explanation[: rng.randrange(characters)]}"
        predictions.append(Prediction(f"val:{i}", text))
    return questions, predictions


@pytest.fixture
def files(tmp_path):
    questions, predictions = _records()
    jsonl.write(tmp_path / "questions.jsonl", questions)
    jsonl.write(tmp_path / "predictions.jsonl", [{"question_id": p.question_id, "text": p.text} for p in predictions])
    return tmp_path


def _run(folder, *extra, predictions="predictions.jsonl", questions="questions.jsonl", out="out"):
    words = ["--predictions", predictions, "--questions", questions, "--out", out]
    return kit.run_program("evaluate", *words, *extra, folder=folder)


def test_three_files_with_the_contracts_keys(files):
    """In a process of its own, as readers start it."""
    words = ["--predictions", "predictions.jsonl", "--questions", "questions.jsonl", "--out", "out"]
    command, environment = (
        [sys.executable, "-m", "cmexam_tune.evaluate", *words],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(command, cwd=files, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((files / "out" / "report.json").read_text(encoding="utf-8"))
    assert set(report["overall"]) >= KEYS
    assert report["overall"]["n"] == 60
    assert report["overall"]["answered"] == 57
    for values in report["by_facet"].values():
        for scores in values.values():
            assert set(scores) >= KEYS
    assert sum(scores["n"] for scores in report["by_facet"]["Clinical Department"].values()) == 60
    assert "tok:char" in json.dumps(report["signature"])
    assert (files / "out" / "report.md").stat().st_size > 500
    html = (files / "out" / "report.html").read_text(encoding="utf-8")
    assert "第3题" in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    assert "Acc" in done.stdout


def test_provenance_names_files_checksums_and_how_predictions_were_made(files):
    (files / "predictions.jsonl.meta.json").write_text('{"mode": "likelihood", "config": {"out": "runs/x"}}')
    assert _run(files).returncode == 0
    text = json.dumps(json.loads((files / "out" / "report.json").read_text(encoding="utf-8"))["provenance"])
    from cmexam_tune.core.files import sha256

    for word in (sha256(files / "questions.jsonl"), sha256(files / "predictions.jsonl"), "likelihood", "runs/x"):
        assert word in text


def test_every_profile_in_one_table(files):
    (files / "again.jsonl").write_bytes((files / "predictions.jsonl").read_bytes())
    done = _run(files, "--profile", "all", "--predictions", str(files / "again.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "predictions.jsonl by every profile" in done.stdout, "also beside other runs"
    for name in ("standard", "cmexam-lora", "cmexam-chatglm", "cmb"):
        assert name in done.stdout


def test_as_a_function_on_records():
    questions, predictions = _records()
    result = evaluate(predictions, questions)
    assert result.overall["n"] == 60
    assert "accuracy" in result._repr_html_()
    assert evaluate(predictions, questions, profile="cmb").overall["accuracy"] == result.overall["accuracy"]


def _broken(files):
    (files / "predictions.jsonl").write_text('{"question_id": "val:0", "text": "A"}\n{"question_id": "val:1", "te')


def _empty(files):
    (files / "predictions.jsonl").write_text("")


def _keyless(files):
    (files / "predictions.jsonl").write_text('{"id": "val:0", "said": "A"}\n')


def _twice(files):
    line = '{"question_id": "val:0", "text": "A"}\n'
    (files / "predictions.jsonl").write_text(line + line)


def _short(files):
    lines = (files / "predictions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (files / "predictions.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")


def _foreign(files):
    with (files / "predictions.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"question_id": "test:9", "text": "A"}\n')


def _gbk(files):
    (files / "predictions.jsonl").write_bytes('{"question_id": "val:0", "text": "答案"}\n'.encode("gbk"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_broken, ["predictions.jsonl:2", "broken JSON"]),
        (_empty, ["predictions.jsonl", "empty"]),
        (_keyless, ["predictions.jsonl:1", "no output", "response"]),
        (_twice, ["predictions.jsonl:2", "duplicate", "val:0"]),
        (_short, ["2 questions have no prediction", "val:58"]),
        (_foreign, ["1 predictions belong to no question", "test:9"]),
        (_gbk, ["predictions.jsonl:1", "UTF-8"]),
    ],
)
def test_bad_predictions(files, spoil, words):
    spoil(files)
    done = _run(files)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (files / "out").exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"predictions": "none.jsonl"}, ["none.jsonl", "no such"]),
        ({"questions": "none.jsonl"}, ["none.jsonl", "no such"]),
        ({"questions": "predictions.jsonl"}, ["not a Question", "preprocess"]),
        ({"flags": ["--profile", "cmexam-lore"]}, ["cmexam-lore", "did you mean 'cmexam-lora'"]),
        ({"flags": ["--baseline", "none.jsonl"]}, ["none.jsonl", "no such"]),
        ({"flags": ["--predcitions", "x"]}, ["--predcitions"]),
    ],
)
def test_bad_calls(files, extra, words):
    done = _run(files, *extra.pop("flags", []), **extra)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (files / "out").exists()


def test_nothing_is_overwritten_without_the_flag(files):
    assert _run(files).returncode == 0
    before = {path.name: path.read_bytes() for path in (files / "out").iterdir()}
    (files / "predictions.jsonl").write_text(
        (files / "predictions.jsonl").read_text(encoding="utf-8").replace("答案: A", "答案: B"), encoding="utf-8"
    )
    again = _run(files)
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    assert {path.name: path.read_bytes() for path in (files / "out").iterdir()} == before
    assert _run(files, "--overwrite").returncode == 0
    assert (files / "out" / "report.json").read_bytes() != before["report.json"]


def test_the_output_may_not_be_a_file(files):
    (files / "out").write_text("mine")
    done = _run(files, "--overwrite")
    assert done.returncode == 2
    assert (files / "out").read_text() == "mine"


def test_starts_without_heavy_libraries():
    heavy = "torch", "transformers", "jieba", "sacrebleu", "numpy", "datasets", "pandas"
    code = f"import sys, cmexam_tune.evaluate; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("count", [300, pytest.param(6811, marks=pytest.mark.slow)])
def test_a_whole_validation_file_is_quick_and_needs_no_torch(count, tmp_path):
    questions, predictions = _records(count, characters=223)
    jsonl.write(tmp_path / "questions.jsonl", questions)
    jsonl.write(tmp_path / "predictions.jsonl", predictions)
    code = (
        "import sys; from cmexam_tune.evaluate import main; "
        "main(['--predictions', 'predictions.jsonl', '--questions', 'questions.jsonl', '--out', 'out']); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert time.perf_counter() - start < 60  # under 20 s on two free cores; tests share theirs
    assert (tmp_path / "out" / "report.html").exists()


def test_runs_side_by_side_and_against_a_baseline(files):
    questions, _ = _records()
    jsonl.write(
        files / "other.jsonl", [Prediction(q.id, f"答案: {q.answer}\n解释: {q.explanation}") for q in questions]
    )
    done = _run(files, "--predictions", "other.jsonl", "--baseline", "other.jsonl", "--latex")
    assert done.returncode == 0, done.stderr
    report = json.loads((files / "out" / "report.json").read_text(encoding="utf-8"))
    first, second = (report["runs"][name]["accuracy"] for name in ("predictions.jsonl", "other.jsonl"))
    assert second == 100 > first == report["overall"]["accuracy"]
    assert "summary" not in report  # two models have no mean
    assert report["ranking"] == ["other.jsonl", "predictions.jsonl"]
    (pair,) = report["pairs"]
    assert pair["difference"] == pytest.approx(second - first) and pair["adjusted_p"] == pair["p_value"] < 0.001
    assert report["comparison"]["metrics"]["accuracy"]["p_value"] == report["comparison"]["mcnemar_p"]
    assert list(report["agreement"].values()) == pytest.approx([first])
    assert report["comparison"]["gained"] == []
    assert len(report["comparison"]["lost"]) == round(60 * (1 - first / 100))
    assert report["comparison"]["mcnemar_p"] < 0.001
    assert "\\toprule" in (files / "out" / "report.tex").read_text(encoding="utf-8")
    assert "newly wrong" in done.stdout


def test_the_same_run_twice_is_refused(files):
    done = _run(files, "--predictions", "predictions.jsonl")
    assert done.returncode == 2
    assert "given twice" in done.stderr


@pytest.mark.parametrize("profile", ["standard", "cmb", "cmexam-chatglm", "all"])
def test_unpublished_answers_leave_a_report_without_accuracy(tmp_path, profile):
    options = {"A": "肝", "B": "心"}
    facets = {"exam_type": "医师考试", "exam_class": "执业医师"}
    questions = [Question(str(i), "开窍于目的是", options, None, facets=facets) for i in range(3)]
    predictions = [Prediction(q.id, "答案：A") for q in questions]
    result = evaluate(predictions, questions, tmp_path / "out", profile=profile)
    assert (result.overall["n"], result.overall["scored"], result.overall["accuracy"]) == (3, 0, None)
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["overall"]["accuracy"] is None


def test_several_orders_of_the_options_say_how_many_answers_flip(tmp_path: Path) -> None:
    asked = questions(12)
    jsonl.write(tmp_path / "q.jsonl", asked)
    orders = ("rotate:0", "rotate:1", "shuffle:3")
    for how in orders:
        # A model that knows the first four answers and likes the letter B for the others.
        seen = [order.shown(one, how) for one in asked]
        letters = [one.answer if i < 4 else "B" for i, one in enumerate(seen)]
        said = [Prediction(one.id, f"答案: {letter}") for one, letter in zip(asked, letters, strict=True)]
        jsonl.write(tmp_path / how, said)
        note = {"config": {"prompt": {"option_order": how}}}
        (tmp_path / f"{how}.meta.json").write_text(json.dumps(note), encoding="utf-8")
    report = evaluate([tmp_path / how for how in orders], tmp_path / "q.jsonl", tmp_path / "report")
    meant = [{one.options["B"] for one in (order.shown(one, how) for how in orders)} for one in asked[4:]]
    assert report.flips == sum(len(texts) > 1 for texts in meant) > 0
    assert f"| questions whose answer changes | {report.flips} of 12 |" in (tmp_path / "report/report.md").read_text()
    right = [i < 4 or order.shown(one, "rotate:1").answer == "B" for i, one in enumerate(asked)]
    rotated = evaluate(tmp_path / "rotate:1", tmp_path / "q.jsonl").overall["accuracy"]
    assert rotated == pytest.approx(100 * sum(right) / 12)
    (tmp_path / "rotate:1.meta.json").write_text('{"config": {"prompt": {"option_order": "up"}}}', encoding="utf-8")
    with pytest.raises(DataError, match="no order of options"):
        evaluate(tmp_path / "rotate:1", tmp_path / "q.jsonl")


def _meta(files, name, **changes):
    prompt = {"style": changes.pop("style", "answer_explain"), "write": None}
    note = {"config": {"prompt": prompt, "training": {"seed": 1}, "out": "runs/1"}, "run": "runs/1", **changes}
    (files / f"{name}.meta.json").write_text(json.dumps(note), encoding="utf-8")


def test_mean_and_deviation_only_for_seeds_of_one_experiment(files):
    text = (files / "predictions.jsonl").read_text(encoding="utf-8")
    (files / "other.jsonl").write_text(text, encoding="utf-8")
    both = ["--predictions", "other.jsonl", "--overwrite"]

    def summary(*extra):
        assert _run(files, *both, *extra).returncode == 0
        return json.loads((files / "out" / "report.json").read_text(encoding="utf-8")).get("summary")

    assert summary() is None
    assert summary("--seeds")["accuracy"]["runs"] == 2
    _meta(files, "predictions.jsonl")
    _meta(
        files,
        "other.jsonl",
        run="runs/2",
        config={"prompt": {"style": "answer_explain", "write": None}, "training": {"seed": 2}, "out": "runs/2"},
    )
    assert summary()["accuracy"]["std"] == 0
    _meta(files, "other.jsonl", style="answer")
    assert summary() is None


def test_text_metrics_only_where_explanations_were_asked_for(files):
    questions, predictions = _records()
    _meta(files, "predictions.jsonl", style="answer")
    asked = evaluate(files / "predictions.jsonl", files / "questions.jsonl")
    assert asked.overall["explanations"] == 0 and asked.overall["bleu4"] is None and not asked.computed["intervals"]
    assert asked.overall["accuracy"] == evaluate(predictions, questions).overall["accuracy"]
    _meta(files, "predictions.jsonl")
    assert evaluate(files / "predictions.jsonl", files / "questions.jsonl").overall["bleu4"] > 0


def test_a_run_asked_in_other_words_is_marked(files):
    _meta(files, "predictions.jsonl", style="answer")
    found = evaluate(files / "predictions.jsonl", files / "questions.jsonl", profile="opencompass-cmb").bridges
    assert "asked in style 'answer'" in found["opencompass-cmb"].mark
    _meta(files, "predictions.jsonl", style="cmb_answer")
    found = evaluate(files / "predictions.jsonl", files / "questions.jsonl", profile="opencompass-cmb").bridges
    assert found["opencompass-cmb"].mark is None


def test_questions_of_one_case_are_drawn_together():
    questions, predictions = _records(120)
    alone = evaluate(predictions, questions)
    cases = [replace(q, facets={**q.facets, "group": str(i // 6)}) for i, q in enumerate(questions)]
    # All questions of a case right or wrong together: the interval is that of 20 draws, not of 120.
    texts = [Prediction(q.id, f"答案: {q.answer if int(q.facets['group']) % 2 else '无'}") for q in cases]
    grouped, single = evaluate(texts, cases), evaluate(texts, questions)
    assert grouped.overall["accuracy"] == single.overall["accuracy"] == 50
    width = [high - low for low, high in (grouped.overall["accuracy_ci"], single.overall["accuracy_ci"])]
    assert 1.8 < width[0] / width[1] < 3  # sqrt(6) = 2.4
    assert alone.overall["accuracy_ci"] != grouped.overall["accuracy_ci"]
    against = evaluate(texts, cases, baseline=predictions).comparison
    assert against.clusters == 20 and against.metrics["accuracy"].resolution > 0
    assert "McNemar" not in result_tables.comparison(against, "a").title


def test_a_comparison_says_when_only_what_computed_the_answers_differs(files):
    questions, predictions = _records()
    text = f"答案: {'B' if '答案: A' in predictions[0].text else 'A'}"
    other = [replace(predictions[0], text=text), *predictions[1:]]
    jsonl.write(files / "served.jsonl", [{"question_id": p.question_id, "text": p.text} for p in other])

    def note(name, decoding, **model):
        config = {"model": {"model_name_or_path": "m", **model}, "prompt": {"style": "answer"}, "generation": {}}
        values = {"config": config, "versions": {"transformers": "5.0"}, "result": {"decoding": decoding}}
        (files / f"{name}.jsonl.meta.json").write_text(json.dumps(values), encoding="utf-8")

    def said():
        compared = evaluate(files / "served.jsonl", questions, baseline=files / "predictions.jsonl").comparison
        return result_tables.comparison(compared, "served").note

    note("predictions", {"dtype": "float32"}, engine=None)
    served = {"dtype": "bfloat16", "engine": "vllm", "engine_version": "0.32.0", "batch_invariant": True}
    note("served", served, engine="vllm", engine_command="x", dtype="auto")
    assert "vllm 0.32.0 (bfloat16, batch-invariant) instead of transformers 5.0 (float32)): 1 of 60 answers" in said()
    assert "did not change, as far as these questions show" in said()
    note("served", served, engine="vllm", model_name_or_path="another")
    assert "computed" not in said()
    note("served", {"dtype": "float32"}, engine=None)
    assert "computed" not in said()


def test_a_part_is_scored_only_where_asked_for_and_said(files):
    questions, predictions = _records()
    with pytest.raises(DataError, match=r"--answered-only scores the questions.* --limit N the first"):
        evaluate(predictions[:20], questions)
    first = evaluate(predictions[:20], questions[:20]).overall
    assert evaluate(predictions[:20], questions, limit=20).overall == first
    assert evaluate(predictions, questions, limit=20).overall == first
    assert evaluate(predictions[:20], questions, answered_only=True).overall == first
    assert evaluate(predictions[10:40], questions, baseline=predictions[30:], answered_only=True).overall["n"] == 10
    assert evaluate(predictions, questions, answered_only=True).selection is None
    with pytest.raises(DataError, match="1 predictions belong to no question: strange"):
        evaluate([*predictions, Prediction("strange", "A")], questions, answered_only=True)
    with pytest.raises(UserError, match="no question is left"):
        evaluate(predictions[:20], questions, answered_only=True, baseline=predictions[30:])
    with pytest.raises(UserError, match="at least 1"):
        evaluate(predictions, questions, limit=0)
    jsonl.write(files / "some.jsonl", predictions[:20])
    done = _run(files, "--answered-only", predictions="some.jsonl")
    sentence = "only 20 of 60 questions are scored: those with a prediction"
    assert sentence in done.stdout, done.stderr
    assert sentence in (files / "out" / "report.md").read_text(encoding="utf-8")
    report = json.loads((files / "out" / "report.json").read_text(encoding="utf-8"))
    assert (report["selection"]["n"], report["selection"]["of"], report["overall"]["n"]) == (20, 60, 20)


def test_outputs_that_were_cut_off_are_counted(files):
    _, predictions = _records()
    assert evaluate(predictions, _records()[0]).cut == {}
    ended = [replace(one, finish="stop") for one in predictions]
    ended[0] = Prediction(ended[0].question_id, "<think>我想", finish="length")
    ended[1] = Prediction(ended[1].question_id, "<think>想</think>答案", finish="length")
    ended[2] = Prediction(ended[2].question_id, "<think>我想", finish="stop")
    jsonl.write(files / "ended.jsonl", ended)
    done = _run(files, predictions="ended.jsonl")
    assert "2 of 60 outputs reached generation.max_new_tokens and were cut, 1 of them while thinking" in done.stdout, (
        done.stderr
    )
    report = json.loads((files / "out" / "report.json").read_text(encoding="utf-8"))
    assert list(report["cut"].values()) == [{"outputs": 60, "cut": 2, "thinking": 1}]
    assert "Outputs cut off by their limit" in (files / "out" / "report.md").read_text(encoding="utf-8")
