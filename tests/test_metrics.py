"""From records to scores: sklearn as witness, ids that do not match, denominators, macro averages."""

import random

import pytest

from cmexam_tune.core.errors import ConfigError, DataError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import grading, metrics, scorers

OPTIONS = dict(zip("ABCDE", ["青霉素", "头孢曲松", "阿奇霉素", "左氧氟沙星", "万古霉素"], strict=True))


def _records(count=300, seed=3):
    rng = random.Random(seed)
    answers = ["A", "B", "C", "D", "E", "AC", "ABCDE"]
    questions, predictions = [], []
    for i in range(count):
        gold = rng.choice(answers)
        explanation = None if rng.random() < 0.2 else "因为" + "".join(rng.choices("细菌感染耐药首选", k=12))
        questions.append(Question(f"q{i}", "首选的药物是", OPTIONS, gold, explanation))
        said = gold if rng.random() < 0.5 else rng.choice(answers)
        text = "抱歉，我无法回答。" if rng.random() < 0.1 else f"答案: {said}. \n 解释: 因为细菌{said}"
        predictions.append(Prediction(f"q{i}", text))
    rng.shuffle(predictions)
    return questions, predictions


def test_metrics_are_those_of_scikit_learn():
    from sklearn.metrics import cohen_kappa_score, f1_score

    graded = grading.grade(*_records())
    right = [item.question.answer for item in graded]
    given = [item.answer or "none" for item in graded]
    named = {key: metric.of(graded) for key, metric in map(metrics.get, metrics.names())}
    assert named == {
        "kappa": pytest.approx(100 * cohen_kappa_score(right, given)),
        "macro_f1": pytest.approx(100 * f1_score(right, given, average="macro")),
    }
    same = [item for item in graded if item.question.answer == item.answer == "A"]
    assert metrics.get("kappa")[1].of(same) == 0 and metrics.get("macro_f1")[1].of(same) == 100


def test_agrees_with_sklearn_and_keeps_unreadable_outputs():
    from sklearn.metrics import precision_recall_fscore_support

    questions, predictions = _records()
    graded = grading.grade(questions, predictions)
    assert [g.question.id for g in graded] == [q.id for q in questions]
    scores = grading.score(graded)
    gold, read = [g.question.answer for g in graded], [g.answer or "?" for g in graded]
    expected = precision_recall_fscore_support(gold, read, average="weighted", zero_division=0)
    assert [scores[name] for name in ("precision", "recall", "weighted_f1")] == pytest.approx(expected[:3])
    assert scores["accuracy"] == pytest.approx(100 * scores["recall"])
    assert scores["n"] == scores["scored"] == len(questions) > scores["answered"] > 0
    low, high = scores["accuracy_ci"]
    assert low < scores["accuracy"] < high
    assert scores["explanations"] == sum(q.explanation is not None for q in questions)


def test_subsets_are_scored_without_reading_again():
    questions, predictions = _records()
    graded = grading.grade(questions, predictions)
    half = grading.grade(questions[:150], [p for p in predictions if int(p.question_id[1:]) < 150])
    assert grading.score(graded[:150]) == grading.score(half)


def test_weighted_averages_of_corner_cases():
    assert grading.weighted([]) == {"precision": None, "recall": None, "weighted_f1": None}
    assert grading.weighted([("A", "A")]) == {"precision": 1.0, "recall": 1.0, "weighted_f1": 1.0}
    assert grading.weighted([("A", "B"), ("B", "A")]) == {"precision": 0.0, "recall": 0.0, "weighted_f1": 0.0}


@pytest.mark.parametrize(
    ("questions", "predictions", "words"),
    [
        ("abc", "ab", ["1 questions have no prediction: c"]),
        ("ab", "abc", ["1 predictions belong to no question: c"]),
        (
            "abcdefgh",
            "xyz",
            ["8 questions have no prediction: a, b, c, d, e, ...", "3 predictions belong to no question"],
        ),
    ],
)
def test_ids_must_match(questions, predictions, words):
    with pytest.raises(DataError) as error:
        grading.grade(
            [Question(name, "问", OPTIONS, "A") for name in questions], [Prediction(name, "A") for name in predictions]
        )
    for word in words:
        assert word in str(error.value)


def test_questions_without_published_answer_are_counted_but_not_scored():
    questions = [Question("a", "问", OPTIONS, "A"), Question("b", "问", OPTIONS, None)]
    scores = grading.score(grading.grade(questions, [Prediction("a", "A"), Prediction("b", "B")]))
    assert (scores["n"], scores["scored"], scores["answered"], scores["accuracy"]) == (2, 1, 2, 100)
    unpublished = grading.score(grading.grade(questions[1:], [Prediction("b", "B")]))
    assert (unpublished["scored"], unpublished["accuracy"], unpublished["accuracy_ci"]) == (0, None, None)


def test_text_is_scored_as_empty_where_others_explain_and_left_out_where_nobody_does():
    questions = [Question(name, "问", OPTIONS, "A", "细菌感染") for name in "ab"]
    one = grading.score(grading.grade(questions, [Prediction("a", "答案: A\n解释: 细菌感染"), Prediction("b", "A")]))
    assert (one["explanations"], one["rougeL"]) == (2, 50)
    none = grading.score(grading.grade(questions, [Prediction("a", "A"), Prediction("b", "A")]))
    assert (none["explanations"], none["rougeL"], none["bleu4"]) == (0, None, None)


def test_the_macro_average_of_cmb_is_over_categories_and_their_classes():
    cells = [("医师", "执业", "A"), ("医师", "执业", "B"), ("医师", "规培", "A"), ("护理", "护士", "B")]
    questions = [
        Question(str(i), "问", OPTIONS, "A", facets={"exam_type": kind, "exam_class": group})
        for i, (kind, group, _) in enumerate(cells)
    ]
    predictions = [Prediction(str(i), f"答案：{said}。") for i, (_, _, said) in enumerate(cells)]
    scores = grading.score(grading.grade(questions, predictions, "cmb"), "cmb")
    assert scores["accuracy"] == 50
    assert scores["accuracy_macro"] == pytest.approx(100 * ((0.5 + 1) / 2 + 0) / 2)


def test_unknown_profile_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'cmexam-lora'"):
        scorers.get("cmexam_lora")
    assert scorers.names()[0] == "standard"
