"""Abilities and difficulties: known ones are found again, within their intervals; a subset stands for the whole."""

import json

import numpy as np
import pytest

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.report import item_response


def answered(abilities, difficulties, seed=0, sharpness=1.0):
    """[questions, runs] right answers of the Rasch model, or of the one with two parameters."""
    dice = np.random.default_rng(seed)
    logits = np.reshape(sharpness, (-1, 1)) * (np.array(abilities) - np.array(difficulties)[:, None])
    return (dice.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)


@pytest.mark.parametrize("runs", [3, 8])
def test_known_abilities_and_difficulties_are_found(runs):
    dice = np.random.default_rng(runs)
    abilities, difficulties = np.linspace(-1, 1.5, runs), dice.normal(0, 1.3, 1500)
    found = item_response.fit(answered(abilities, difficulties, runs))
    # The scale's zero is the mean difficulty of these questions, which was drawn, too.
    errors = (found.abilities - abilities + difficulties.mean()) / found.errors
    assert np.abs(errors).max() < 3 and np.sqrt(np.mean(errors**2)) < 1.8
    assert found.spread == pytest.approx(1.3, abs=0.15)
    covered = np.abs(found.difficulty - difficulties) < 1.96 * found.deviation
    assert covered.mean() == pytest.approx(0.95, abs=0.02)
    assert np.corrcoef(found.difficulty, difficulties)[0, 1] > (0.6 if runs == 3 else 0.75)


def test_the_likelihood_is_the_integral():
    """The fitted parameters maximise the product over questions of the integral over difficulty, done by scipy."""
    from scipy.integrate import quad
    from scipy.stats import norm

    right = answered([0.5, -0.5, 1.0], np.random.default_rng(1).normal(0, 1, 60), 1)
    found = item_response.fit(right)
    patterns, counts = np.unique(right, axis=0, return_counts=True)

    def log_likelihood(abilities, spread):
        def of(pattern):
            def joint(difficulty):
                chance = 1 / (1 + np.exp(difficulty - abilities))
                return np.prod(np.where(pattern == 1, chance, 1 - chance)) * norm.pdf(difficulty, 0, spread)

            return np.log(quad(joint, -10, 10)[0])

        return sum(count * of(pattern) for pattern, count in zip(patterns, counts, strict=True))

    best = log_likelihood(found.abilities, found.spread)
    for step in (-0.15, 0.15):
        for run in range(3):
            assert log_likelihood(found.abilities + step * np.eye(3)[run], found.spread) < best
        assert log_likelihood(found.abilities, found.spread + 2 * step) < best + 0.02


def test_many_runs_tell_how_sharp_questions_are():
    dice = np.random.default_rng(0)
    sharpness, difficulties = np.exp(0.5 * dice.normal(size=300)), dice.normal(0, 1, 300)
    found = item_response.fit(answered(dice.normal(0, 1, 60), difficulties, 0, sharpness), sharp=True)
    assert np.corrcoef(np.log(found.sharpness), np.log(sharpness))[0, 1] > 0.7
    assert np.corrcoef(found.difficulty, difficulties)[0, 1] > 0.9


def exam_of(difficulties):
    levels = np.digitize(difficulties, [-1.5, -0.5, 0.5, 1.5]) + 1
    options = {"A": "甲", "B": "乙"}
    return [Question(f"q{i}", f"题{i}", options, "A", facets={"难度": "x", "Difficulty level": str(level)})
            for i, level in enumerate(levels)]  # fmt: skip


def files_of(folder, exam, right):
    jsonl.write(folder / "q.jsonl", exam)
    for run in range(right.shape[1]):
        lines = [Prediction(q.id, f"答案: {'AB'[int(hit == 0)]}") for q, hit in zip(exam, right[:, run], strict=True)]
        jsonl.write(folder / f"run{run}.jsonl", lines)
    return [folder / f"run{run}.jsonl" for run in range(right.shape[1])]


def test_the_report_says_it_and_writes_a_subset(tmp_path):
    dice = np.random.default_rng(4)
    difficulties = dice.normal(0, 2.5, 600)
    exam = exam_of(difficulties)
    right = answered(np.linspace(-1, 2, 9), difficulties, 4)
    paths = files_of(tmp_path, exam, right)
    report = evaluate(paths, tmp_path / "q.jsonl", tmp_path / "out", subset=100)
    found = report.computed["item_response"]
    assert [run.name for run in sorted(found.abilities, key=lambda run: run.ability)] == [
        run.name for run in found.abilities
    ]
    assert found.spearman > 0.6
    means = [level.difficulty for level in found.levels]
    assert means == sorted(means) and sum(level.n for level in found.levels) == 600
    chosen = list(jsonl.read(tmp_path / "out" / "subset.questions.jsonl", Question))
    assert [q.id for q in chosen] == list(found.subset.ids) and len(chosen) == 100
    # Drawn by difficulty they miss the whole by less than drawn at random.
    assert found.subset.error < 0.85 * found.subset.random_error
    places = [int(q.id[1:]) for q in chosen]
    assert np.abs(right[places].mean(0) - right.mean(0)).max() < 0.12
    values = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert values["item_response"]["model"] == "Rasch" and len(values["item_response"]["items"]) == 600
    assert "Ability and difficulty" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    evaluate(paths[0], tmp_path / "q.jsonl", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "subset.questions.jsonl").exists(), "of the report that was replaced"


def test_two_runs_say_nothing_about_difficulty(tmp_path):
    exam = exam_of(np.zeros(20))
    paths = files_of(tmp_path, exam, answered([0, 1], np.zeros(20)))
    assert "item_response" not in evaluate(paths, tmp_path / "q.jsonl").computed
    with pytest.raises(UserError, match=r"--subset 5: at least 3 runs"):
        evaluate(paths, tmp_path / "q.jsonl", subset=5)
    (tmp_path / "t").mkdir()
    three = files_of(tmp_path / "t", exam, answered([0, 1, 2], np.zeros(20)))
    with pytest.raises(UserError, match=r"--subset 20: .*fewer than the 20 scored questions"):
        evaluate(three, tmp_path / "q.jsonl", subset=20)
