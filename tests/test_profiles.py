"""Published scripts' numbers on the same outputs: unit cases of our own, and the goldens where they are at hand."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cmexam_tune import evaluate
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import grading, scorers, text_metrics
from cmexam_tune.evaluation.metrics import Metric
from cmexam_tune.evaluation.scorers import _cmexam

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
needs_golden = pytest.mark.skipif(
    not (GOLDEN / "metrics_golden.json").exists(), reason="the golden metrics are not on this machine"
)
DRUGS = {"A": "阿司匹林", "B": "青霉素", "C": "5 mg", "D": "头孢", "E": "以上均非"}
QUESTION = Question("q", "首选", DRUGS, "B")


@pytest.mark.parametrize(
    ("text", "answer", "explanation"),
    [
        ("答案: B. \n 解释: 因为", "B", "因为"),
        ("青霉素", "B", "青霉素"),
        ("BA", "AB", "BA"),
        ("解释: 选B\n答案: C", "B", "选B\n答案: C"),
        ("答案: C 5 mg \n 解释:甲解释:乙", "C", "甲"),
        ("第5条", "C", "第5条"),
        ("答案：B，解释：全角", "B", "答案：B，解释：全角"),
        ("a", None, "a"),
        ("", None, "无答案"),
        ("NA", None, "无答案"),
    ],
)
def test_cmexam_lora_reads(text, answer, explanation):
    assert scorers.get("cmexam-lora").read(text, QUESTION) == (answer, explanation)


@pytest.mark.parametrize(
    ("text", "answer", "explanation"),
    [
        ("答案：B，\n解释：因为x", "B", "因为x"),
        ("答案：B，解释：因为x，y", "B，解释：因为x", "因为x，y"),
        ("答案: B. \n 解释: 半角", None, None),
        ("答案：B\n解释：没有逗号", None, None),
        ("答案：B，", None, None),
        ("答案：，\n解释：空", None, "空"),
        ("", None, None),
    ],
)
def test_cmexam_chatglm_reads(text, answer, explanation):
    assert scorers.get("cmexam-chatglm").read(text, QUESTION) == (answer, explanation)


@pytest.mark.parametrize(
    ("text", "single", "multiple"),
    [
        ("答案是A，不是B。", "A", "AB"),
        ("答案为A和C，其中A最常见", "A", "ACA"),
        ("答案：CA。选D", "C", "CA"),
        ("答案: B", "B", "B"),
        ("患者CT阳性，故选E", "C", "CE"),
        ("正确选项是维生素D。故选A", "D", "D"),
        ("无", None, None),
        ("Ｂ", None, None),
    ],
)
def test_cmb_reads(text, single, multiple):
    read = scorers.get("cmb").read
    assert read(text, QUESTION).answer == single
    assert read(text, Question("q", "首选", DRUGS, "B", kind="multiple")).answer == multiple


def test_denominators_differ_on_the_same_outputs():
    questions = [Question(str(i), "首选", DRUGS, "B", "因为") for i in range(4)]
    texts = ["答案：B，\n解释：因为", "答案：A，\n解释：因为", "无法回答", ""]
    predictions = [Prediction(str(i), text) for i, text in enumerate(texts)]
    table = {name: grading.score(grading.grade(questions, predictions, name), name) for name in scorers.names()}
    assert {name: scores["n"] for name, scores in table.items()} == dict.fromkeys(scorers.names(), 4)
    assert table["standard"]["accuracy"] == table["cmexam-lora"]["accuracy"] == table["cmb"]["accuracy"] == 25
    assert (table["cmexam-chatglm"]["accuracy"], table["cmexam-chatglm"]["scored"]) == (50, 2)
    assert table["standard"]["bleu1"] != table["standard-jieba"]["bleu1"]


def test_repetition_is_free_in_the_scripts_rouge_but_not_in_the_standard():
    (script,) = _cmexam.statistics(["的的的的"], ["的"], words=list)
    assert script.rouge1 == pytest.approx((1, 1, 1))
    standard = grading.grade([Question("q", "问", DRUGS, "B", "的")], [Prediction("q", "解释: 的的的的")])
    assert standard[0].text.rouge1.precision == 0.25


def test_qilin_looks_for_the_texts_of_a_to_e_only():
    """As the list of choices that its script is given; a letter is read wherever it is written."""
    six = Question("q", "首选", DRUGS | {"F": "万古霉素"}, "B")
    assert scorers.get("qilin").read("青霉素优于万古霉素", six).answer == "B"
    assert scorers.get("qilin").read("万古霉素", six).answer is None
    assert scorers.get("qilin").read("F", six).answer == "F"


@needs_golden
def test_unit_cases_of_the_scripts():
    for case in _golden()["unit_cases"]:
        (pair,) = _cmexam.statistics([case["hyp"]], [case["ref"]], words=lambda text: "".join(text.split()))
        for name, rouge in (("rouge_1", pair.rouge1), ("rouge_2", pair.rouge2), ("rouge_l", pair.rougeL)):
            f, precision, recall = case[f"{name}_f_p_r"]
            assert rouge == pytest.approx((precision, recall, f), rel=1e-9, abs=1e-15), case
        for n in (1, 2, 4):
            expected = case[f"bleu_{n}"]
            value = text_metrics.aggregate([pair], "none")[f"bleu{n}"]
            assert value is None if isinstance(expected, str) else value == pytest.approx(expected)


@needs_golden
@pytest.mark.parametrize(
    ("profile", "texts", "path", "rouge", "suffix"),
    [
        ("cmexam-lora", "prediction", ("evaluate_lora_result", "from_csv"), "rouge", ""),
        (
            "cmexam-chatglm",
            "prediction_fullwidth",
            ("evaluate_chatglm_result", "own_regexes_on_prediction_fullwidth"),
            "rouge_as_in_script_arguments_swapped",
            "_jieba",
        ),
    ],
)
def test_goldens_through_the_command_line(tmp_path, profile, texts, path, rouge, suffix):
    overall = _evaluate(tmp_path, texts, profile)
    golden = _golden()[path[0]][path[1]]
    accuracy = golden["accuracy_percent"] if "accuracy_percent" in golden else 100 * golden["accuracy"]
    expected = {"accuracy": accuracy, **{f"bleu{n}": golden[f"bleu_{n}{suffix}"] for n in (1, 2, 4)}}
    for ours, theirs in (("precision", "precision"), ("recall", "recall"), ("weighted_f1", "f1")):
        expected[ours] = golden[f"{theirs}_weighted"]
    for ours, theirs in (("rouge1", "rouge_1"), ("rouge2", "rouge_2"), ("rougeL", "rouge_l")):
        for tail, letter in (("", "f"), ("_precision", "p"), ("_recall", "r")):
            expected[ours + tail] = golden[rouge][f"{theirs}/{letter}_score"]
    assert {name: overall[name] for name in expected} == pytest.approx(expected, rel=1e-6)


@needs_golden
def test_the_chatglm_script_finds_nothing_in_half_width_outputs(tmp_path):
    overall = _evaluate(tmp_path, "prediction", "cmexam-chatglm")
    assert (overall["answered"], overall["scored"], overall["accuracy"], overall["bleu1"]) == (0, 0, None, None)


@needs_golden
def test_standard_on_the_golden_outputs_equals_the_libraries(tmp_path):
    overall = _evaluate(tmp_path, "prediction", "standard")
    golden = _golden()
    memory = golden["evaluate_lora_result"]["in_memory_without_csv_round_trip"]
    # Unsmoothed character BLEU is sacreBLEU's where every order has matches.
    for n in (1, 2, 4):
        assert overall[f"bleu{n}"] == pytest.approx(memory[f"bleu_{n}"], rel=1e-9)
    assert overall["accuracy"] == pytest.approx(55)
    assert overall["weighted_f1"] == pytest.approx(memory["f1_weighted"], rel=1e-9)
    assert overall["answered"] == 190


@needs_golden
def test_every_recorded_reading_of_the_scripts():
    for row in _rows():
        question = _question(row)
        lora, glm = scorers.get("cmexam-lora").read, scorers.get("cmexam-chatglm").read
        answer, explanation = lora(row["prediction"], question)
        assert (answer or "无答案", explanation) == (row["lora_parsed_option"], row["lora_parsed_explanation"])
        answer, explanation = glm(row["prediction_fullwidth"], question)
        assert (answer or "") == row["chatglm_regex_answer_fullwidth"]
        assert (explanation or "") == row["chatglm_regex_explanation_fullwidth"]


def _golden():
    return json.loads((GOLDEN / "metrics_golden.json").read_text(encoding="utf-8"))


def _rows():
    lines = (GOLDEN / "metrics_inputs.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _question(row):
    options = {line[0]: line[2:] for line in row["options"].split("\n")}
    return Question(str(row["row"]), row["question"], options, row["answer"], row["explanation"])


def _evaluate(folder, texts, profile):
    rows = _rows()
    jsonl.write(folder / "questions.jsonl", map(_question, rows))
    jsonl.write(folder / "predictions.jsonl", [{"question_id": str(row["row"]), "text": row[texts]} for row in rows])
    files = ["--predictions", str(folder / "predictions.jsonl"), "--questions", str(folder / "questions.jsonl")]
    assert not evaluate.main([*files, "--out", str(folder / "out"), "--profile", profile])
    return json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))["overall"]


def test_a_profile_of_ones_own_by_its_dotted_name(tmp_path, monkeypatch):
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "prof.py").write_text(
        "from cmexam_tune.evaluation.scorers import Reading, Scorer\n"
        "SCORER = Scorer('my_lab.prof', 'last character', lambda text, q: Reading(text[-1:] or None, None), {})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    jsonl.write(tmp_path / "questions.jsonl", [QUESTION])
    jsonl.write(tmp_path / "predictions.jsonl", [Prediction("q", "A然后B")])
    files = ["--predictions", str(tmp_path / "predictions.jsonl"), "--questions", str(tmp_path / "questions.jsonl")]
    assert not evaluate.main([*files, "--out", str(tmp_path / "out"), "--profile", "my_lab.prof"])
    assert json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["overall"]["accuracy"] == 100


def test_a_scorer_brings_metrics_of_its_own(tmp_path, monkeypatch):
    """Each is a function of graded questions, for every facet too; there is none of no questions."""

    def first_letter(graded):
        return 100 * sum(item.question.answer[:1] == (item.answer or "")[:1] for item in graded) / len(graded)

    metric = Metric(first_letter, "First letter %", "首字母 %")
    scorer = dataclasses.replace(scorers.get("standard"), metrics={"first_letter": metric})
    questions = [Question("a", "题", DRUGS, "AB"), Question("b", "题", DRUGS, "C")]
    outputs = [Prediction("a", "答案: AC"), Prediction("b", "说不清")]
    graded = grading.grade(questions, outputs, scorer)
    assert grading.score(graded, scorer)["first_letter"] == 50
    assert grading.score(graded[:1], scorer)["first_letter"] == 100
    assert grading.score([], scorer)["first_letter"] is None
    monkeypatch.setitem(sys.modules, "my_lab.first", SimpleNamespace(SCORER=scorer))
    report = evaluate.evaluate(outputs, questions, tmp_path / "out", profile="my_lab.first")
    assert report.overall["first_letter"] == 50 and [*report.metrics] == ["first_letter"]
    assert "first_letter" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "首字母 %" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
