"""Several orders of the options and probabilities: planted preferences are seen and corrected, planted errors found."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kit import make_config

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import OrderedOutput, Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import grading
from cmexam_tune.inference import request_estimate
from cmexam_tune.inference.loading import Source
from cmexam_tune.inference.records import ResumableFile
from cmexam_tune.predict import predict
from cmexam_tune.prompts import order
from cmexam_tune.report.calibration import calibration
from cmexam_tune.report.option_orders import option_orders

LETTERS = "ABCDE"


def question(number, stem="", answer="A", letters=LETTERS, **more):
    """Options that do not speak of each other, as those of `kit.question` seem to."""
    texts = dict(zip(letters, "甲乙丙丁戊", strict=False))
    return Question(f"q:{number}", stem or f"题{number}", {o: f"{t}{number}" for o, t in texts.items()}, answer, **more)


def softmax(values):
    weights = np.exp(values - np.max(values))
    return weights / weights.sum()


def asked_in_orders(exam, count, bias, spread=1.0, seed=0):
    """Predictions of a model that adds to its preference of the texts one of the letters; and without the latter."""
    dice, biased, fair = np.random.default_rng(seed), [], []
    for item in exam:
        wish = dice.normal(0, spread, len(item.options)) + 1.5 * np.array([o == item.answer for o in item.options])
        samples = []
        for how in order.several(item, count, 1):
            seen = order.moved(item, how) if how else order.moved(item, "rotate:0")
            shown = softmax(wish + np.array([bias[LETTERS.index(seen[letter])] for letter in LETTERS]))
            best = LETTERS[int(shown.argmax())]
            samples.append(
                OrderedOutput(f"答案: {seen[best]}", how, dict(zip(LETTERS, map(float, shown), strict=True)))
            )
        biased.append(
            Prediction(item.id, samples[0].text, probabilities=samples[0].probabilities, orders=tuple(samples))
        )
        fair.append(LETTERS[int(wish.argmax())])
    return biased, fair


def exam_of(count):
    return [question(i, f"题{i}", LETTERS[i % 5]) for i in range(count)]


def test_orders_are_different_and_repeatable():
    for item in (question(1), question(2, letters="AB"), question(3, letters="ABCD")):
        own = order.several(item, 30, 7)
        assert own == order.several(item, 30, 7) and own[0] is None
        shown = [tuple(order.shown(item, how).options.values()) for how in own]
        assert len(set(shown)) == len(shown) == min(30, {2: 2, 4: 24, 5: 30}[len(item.options)])
        # Over all rotations every text stands once under every letter.
        first = shown[: len(item.options)]
        assert all(len({texts[place] for texts in first}) == len(first) for place in range(len(first)))
    assert [order.several(question(i), 3, 7) for i in range(9)] != [order.several(question(i), 3, 8) for i in range(9)]
    fixed = Question("f", "题干", {"A": "甲", "B": "乙", "C": "以上都对"}, "C")
    assert order.several(fixed, 4, 0) == [None]
    assert order.several(question(1), 2, 0, "rotate:1")[0] == "rotate:1"


def test_a_planted_preference_of_a_letter_is_seen_and_corrected():
    exam, bias = exam_of(800), np.array([0.0, 0.0, 2.5, 0.0, -1.0])
    predictions, fair = asked_in_orders(exam, 5, bias)
    found = option_orders(grading.grade(exam, predictions))
    truth = 100 * np.mean([answer == item.answer for answer, item in zip(fair, exam, strict=True)])
    by_letter = {item.letter: item for item in found.letters}
    assert by_letter["C"].given > by_letter["C"].right + 25 and by_letter["E"].given < by_letter["E"].right - 5
    assert found.changed > 50 and found.all_right < found.mean < truth - 5
    assert found.recall_deviation > 20
    # Preferences of letters and of texts are added here as PriDe takes them to be: the truth comes back.
    assert found.debiased == pytest.approx(truth, abs=2.5) and found.averaged == pytest.approx(truth, abs=3.5)
    assert np.array([item.prior for item in found.letters]) / 100 == pytest.approx(softmax(bias), abs=0.015)
    calm = option_orders(grading.grade(exam, asked_in_orders(exam, 5, np.zeros(5))[0]))
    assert calm.changed == 0 and [calm.all_right, calm.first] == pytest.approx([calm.mean] * 2)
    assert calm.debiased == pytest.approx(truth, abs=1)


def test_the_correction_is_the_papers():
    """Prior: softmax of the mean log-probability over rotations, averaged; answer: log observed - log prior."""
    exam, bias = exam_of(60), np.array([0.3, 0.0, 1.5, 0.2, -1.0])
    predictions, _ = asked_in_orders(exam, 5, bias, spread=2)
    found = option_orders(grading.grade(exam, predictions))
    observed = []  # [questions, orders, letters as seen]
    for item, prediction in zip(exam, predictions, strict=True):
        rows = []
        for sample in prediction.orders:
            back = {new: old for old, new in order.moved(item, sample.order or "rotate:0").items()}
            rows.append([sample.probabilities[back[letter]] for letter in LETTERS])
        observed.append(rows)
    logs = np.log(np.array(observed))
    prior = np.mean([softmax(own.mean(0)) for own in logs], axis=0)
    chosen = [LETTERS[i] for i in (logs[:, 0] - np.log(prior)).argmax(1)]
    right = 100 * np.mean([letter == item.answer for letter, item in zip(chosen, exam, strict=True)])
    assert found.debiased == pytest.approx(right)
    assert [item.prior / 100 for item in found.letters] == pytest.approx(list(prior), abs=1e-6)


def probable(n, error, seed):
    """Answers of a model whose probabilities are too high by `error`, and the true error of its bins."""
    dice = np.random.default_rng(seed)
    confidence = dice.uniform(0.3, 1.0, n)
    right = dice.uniform(size=n) < confidence - error
    exam = [question(i, f"题{i}", "A", "AB") for i in range(n)]
    predictions = [
        Prediction(item.id, f"答案: {'A' if hit else 'B'}", probabilities={"AB"[not hit]: p, "AB"[bool(hit)]: 1 - p})
        for item, p, hit in zip(exam, map(float, confidence), right, strict=True)
    ]
    return grading.grade(exam, predictions), confidence, right


@pytest.mark.parametrize("error", [0.0, 0.12])
def test_a_known_calibration_lies_in_its_interval(error):
    found = [calibration(probable(900, error, seed)[0]) for seed in range(12)]
    covered = sum(one.ece_ci[0] <= 100 * error <= one.ece_ci[1] for one in found)
    assert covered >= 10, [(one.ece, one.ece_ci) for one in found]
    gap = np.mean([one.confidence - one.accuracy for one in found])
    assert gap == pytest.approx(100 * error, abs=1.5)


def test_bins_are_scikit_learns_and_the_surest_are_kept():
    from sklearn.calibration import calibration_curve

    graded, confidence, right = probable(700, 0.2, 5)
    found = calibration(graded)
    shares, means = calibration_curve(right, confidence, n_bins=10)
    assert [one.accuracy / 100 for one in found.bins] == pytest.approx(list(shares))
    assert [one.confidence / 100 for one in found.bins] == pytest.approx(list(means))
    sizes = np.array([one.n for one in found.bins])
    assert found.ece == pytest.approx(100 * np.sum(np.abs(shares - means) * sizes) / 700)
    kept = confidence >= np.quantile(confidence, 0.2)
    assert found.covered_accuracy == pytest.approx(100 * right[kept].mean())
    assert calibration(grading.grade([question(1)], [Prediction("q:1", "答案: A")])) is None


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """Config, questions file, predictions file: three orders by a tiny model."""
    folder = tmp_path_factory.mktemp("orders")
    exam = [*exam_of(7), Question("fixed", "下列正确的是", {"A": "甲", "B": "乙", "C": "以上都对"}, "C")]
    jsonl.write(folder / "q.jsonl", exam)
    config = make_config(generation__mode="likelihood", generation__orders=3, generation__batch_size=4)
    return config, folder / "q.jsonl", predict(config, folder / "q.jsonl", folder / "p.jsonl")


def test_every_order_is_a_prediction_of_its_own(predicted, tmp_path):
    config, asked, out = predicted
    exam = list(jsonl.read(asked, Question))
    estimate = request_estimate.estimate(Source(config, None), asked)
    assert (estimate.questions, estimate.requests) == (8, 7 * 3 + 1)
    lines = list(jsonl.read(out, Prediction))
    assert [len(line.orders) for line in lines] == [3] * 7 + [1]
    for item, line in zip(exam, lines, strict=True):
        assert line.orders[0].text == line.text and line.probabilities == line.orders[0].probabilities
        for sample in line.orders:
            # Probabilities are in the exam's letters, texts in those that the model saw.
            assert set(sample.probabilities) == set(item.options)
            assert sum(sample.probabilities.values()) == pytest.approx(1, abs=1e-3)
            best = max(sample.probabilities, key=sample.probabilities.get)
            seen = order.moved(item, sample.order)[best] if sample.order else best
            assert sample.text.rstrip().endswith(seen)
    # One order alone gives the same answer as that order among three.
    alone = tmp_path / "alone.jsonl"
    how = lines[0].orders[1].order
    predict(make_config(generation__mode="likelihood", prompt__option_order=how), asked, alone)
    one = next(jsonl.read(alone, Prediction))
    assert one.text == lines[0].orders[1].text
    assert one.probabilities == pytest.approx(lines[0].orders[1].probabilities, abs=1e-3)


def test_a_kill_in_the_middle_of_a_question_costs_no_answer(predicted, tmp_path, monkeypatch):
    config, asked, out = predicted
    append, left = ResumableFile.append, [10]

    def dying(self, record):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        append(self, record)

    again = tmp_path / "again.jsonl"
    monkeypatch.setattr(ResumableFile, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        predict(config, asked, again)
    monkeypatch.setattr(ResumableFile, "append", append)
    assert (tmp_path / "again.jsonl.orders").read_bytes().count(b"\n") == 10
    predict(config, asked, again)
    # Another batch may round the last digit of a probability differently.
    first, second = (
        [(line.question_id, [s.text for s in line.orders]) for line in jsonl.read(path, Prediction)]
        for path in (out, again)
    )
    assert first == second and not (tmp_path / "again.jsonl.orders").exists()


def test_orders_and_calibration_are_reported(predicted, tmp_path):
    _, asked, out = predicted
    exam, lines = list(jsonl.read(asked, Question)), list(jsonl.read(out, Prediction))
    report = evaluate(out, asked, tmp_path / "report")
    values = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert values["orders"]["n"] == 7 and values["orders"]["one_order"] == 1 and values["calibration"]["n"] == 8
    assert values["orders"]["first"] == pytest.approx(
        100 * sum(line.answer == item.answer for line, item in list(zip(lines, exam, strict=True))[:7]) / 7
    )
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "right in every order" in text and "expected calibration error" in text
    assert report.computed["orders"].debiased is not None


def test_the_page_shows_both_in_both_languages(predicted, tmp_path):
    if shutil.which("node") is None:
        pytest.skip("no node here to run the page's script")
    _, asked, out = predicted
    evaluate(out, asked, tmp_path)
    script = Path(__file__).with_name("shown_page.js")
    for language, words in (("en", "Order of the options"), ("zh", "最有把握的")):
        command = ["node", str(script), str(tmp_path / "report.html"), language]
        main = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)["main"]
        assert words in main and 'id="calibration"' in main and 'class="bar own"' in main


def test_without_probabilities_or_orders_nothing_is_said(tmp_path):
    exam = exam_of(5)
    report = evaluate([Prediction(item.id, "答案: A") for item in exam], exam, tmp_path)
    assert not {"orders", "calibration"} & set(report.to_dict())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"sections":[]' in page


def test_orders_of_votes_are_refused():
    with pytest.raises(ConfigError, match=r"orders: 2 orders of 3 votes"):
        make_config(generation={"do_sample": True, "votes": 3, "orders": 2})


def test_several_letters_have_orders_but_no_correction():
    exam = [question(i, f"题{i}", "AC", kind="multiple") for i in range(6)]
    dice, predictions = random.Random(0), []
    for item in exam:
        samples = tuple(
            OrderedOutput(f"答案: {order.shown(item, how).answer}", how, {"AC": 0.6 + dice.random() / 10, "A": 0.3})
            for how in order.several(item, 4, 0)
        )
        predictions.append(Prediction(item.id, samples[0].text, orders=samples))
    found = option_orders(grading.grade(exam, predictions))
    assert (found.mean, found.all_right, found.changed, found.debiased) == (100, 100, 0, None) and found.letters == ()
