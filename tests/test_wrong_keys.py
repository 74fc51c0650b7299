"""Planted wrong keys are found among simulated answers, judged in a sheet, and scored with and without."""

import json
import shutil

import numpy as np
import openpyxl
import pytest
import yaml

from cmexam_tune import check
from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import DataError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation import grading
from cmexam_tune.quality import wrong_keys

LETTERS = "ABCDE"
PLANTED = 20


def exam_of(count, seed=0):
    """Questions, of which the first `PLANTED` have a wrong key, and their right answers."""
    dice = np.random.default_rng(seed)
    truth = [LETTERS[i] for i in dice.integers(0, 5, count)]
    keys = [LETTERS[(LETTERS.index(t) + 1 + i % 4) % 5] if i < PLANTED else t for i, t in enumerate(truth)]
    exam = [
        Question(f"t:{i}", f"第{i}题", dict(zip(LETTERS, "甲乙丙丁戊", strict=True)), key) for i, key in enumerate(keys)
    ]
    return exam, truth


def answers_of(truth, ability, difficulties, seed):
    """A run of the Rasch model; half of its errors go to one attractive wrong letter of each question."""
    dice = np.random.default_rng(seed)
    given = []
    for i, right in enumerate(truth):
        if dice.random() < 1 / (1 + np.exp(difficulties[i] - ability)):
            given.append(right)
        else:
            wrong = [letter for letter in LETTERS if letter != right]
            given.append(wrong[i % 4] if dice.random() < 0.5 else wrong[dice.integers(4)])
    return given


@pytest.fixture(scope="module")
def simulated():
    exam, truth = exam_of(1000)
    difficulties = np.random.default_rng(9).normal(-0.5, 1.2, len(exam))
    runs = {
        f"run{i}": [Prediction(q.id, f"答案: {a}") for q, a in
                    zip(exam, answers_of(truth, ability, difficulties, i), strict=True)]
        for i, ability in enumerate(np.linspace(-1, 2.5, 12))
    }  # fmt: skip
    return exam, truth, runs


def test_planted_wrong_keys_are_at_the_top(simulated):
    exam, truth, runs = simulated
    found = wrong_keys.suspects({name: grading.grade(exam, run) for name, run in runs.items()})
    planted = {f"t:{i}" for i in range(PLANTED)}
    top = [suspect.question_id for suspect in found[:PLANTED]]
    hits = planted & set(top)
    assert len(hits) >= 15, sorted(planted - set(top))
    assert len(planted & {suspect.question_id for suspect in found}) >= 16 and len(found) < 45  # of 1,000
    by_id = dict(zip([q.id for q in exam], truth, strict=True))
    others = [suspect.other == by_id[suspect.question_id] for suspect in found if suspect.question_id in hits]
    assert np.mean(others) > 0.9
    correlated = [s.correlation for s in found if s.question_id in planted and s.correlation is not None]
    assert np.median(correlated) < 0


def test_the_explanation_is_a_sign_and_two_runs_are_none():
    exam = [
        Question(f"e:{i}", "题干", {"A": "甲", "B": "乙"}, "A", "故选B。" if i == 3 else "故选A。") for i in range(8)
    ]
    right = grading.grade(exam, [Prediction(q.id, "答案: A") for q in exam])
    (found,) = wrong_keys.suspects(dict.fromkeys("abc", right) | {})
    assert found.question_id == "e:3" and found.signs == ("its explanation says B, answer A",)
    with pytest.raises(UserError, match=r"--predictions: 2 files; at least 3"):
        wrong_keys.suspects({"a": right, "b": right})


@pytest.fixture
def files(simulated, tmp_path):
    exam, _, runs = simulated
    exam, runs = exam[:120], {name: run[:120] for name, run in list(runs.items())[::3]}
    jsonl.write(tmp_path / "q.questions.jsonl", exam)
    for name, run in runs.items():
        jsonl.write(tmp_path / f"{name}.jsonl", run)
    return tmp_path, [tmp_path / f"{name}.jsonl" for name in runs]


def fill(path, **rows):
    """Write verdicts into a sheet as a doctor would: `question=(verdict, answer, reviewer, reason)`."""
    book = openpyxl.load_workbook(path)
    sheet = book.active
    columns = {cell.value: cell.column for cell in sheet[1]}
    for row in range(2, sheet.max_row + 1):
        words = rows.get(str(sheet.cell(row, columns["question_id"]).value).replace(":", "_"), ())
        for name, text in zip(("verdict", "answer", "reviewer", "reason"), words, strict=False):
            sheet.cell(row, columns[name]).value = text
    book.save(path)


def test_from_predictions_to_a_score_without_wrong_keys(files):
    folder, paths = files
    asked, out = folder / "q.questions.jsonl", folder / "keys"
    found = check.check([asked], out=out, predictions=paths, drop=())
    assert 5 < len(found.suspects) < 60
    values = json.loads((out / "check.json").read_text(encoding="utf-8"))
    assert values["suspects"][0]["signs"] and "Keys that may be wrong" in (out / "check.md").read_text(encoding="utf-8")
    # Nothing is dropped by machine.
    assert len((out / "q.clean.questions.jsonl").read_text(encoding="utf-8").splitlines()) == 120
    first, second, third = (suspect.question_id for suspect in found.suspects[:3])
    verdicts = {
        first.replace(":", "_"): ("key wrong", "CD", "王医生", "指南已更新"),
        second.replace(":", "_"): ("broken", None, "王医生", "缺少图"),
        third.replace(":", "_"): ("key right", None, None, None),
    }
    fill(out / "keys.review.xlsx", **verdicts)
    # A later check keeps what was written.
    check.check([asked], out=out, predictions=paths[1:], overwrite=True)
    check.check([asked], out=folder / "reviewed", reviewed=out / "keys.review.xlsx")
    entries = yaml.safe_load((folder / "reviewed" / "errata.yaml").read_text(encoding="utf-8"))
    assert [(entry["ids"], entry["reviewer"]) for entry in sorted(entries, key=lambda e: e["problem"])] == [
        ([first], "王医生"), ([second], "王医生")]  # fmt: skip
    wrong = next(entry for entry in entries if entry["problem"] == "the key is wrong")
    assert wrong["answers"] == {first: "CD"} and wrong["reasons"] == {first: "指南已更新"}
    report = evaluate(paths[-1], asked, errata=folder / "reviewed" / "errata.yaml")
    assert sorted(part.only.n for part in report.subsets) == [1, 1]
    assert all(part.without.n == 119 for part in report.subsets)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("wrong", "A", "王", "因为"), r"row \d+: verdict 'wrong' is not one of key wrong, broken, key right"),
        (("key wrong", "A", "王", None), "a verdict needs a reviewer and a reason"),
        (("key wrong", "AZ", "王", "因为"), "answer 'AZ': the right letters are needed, of ABCDE"),
        ((None, "A", None, None), "verdict '' is not one of"),
    ],
)
def test_a_sheet_that_says_nothing_clear_is_refused(files, words, message):
    folder, paths = files
    asked = folder / "q.questions.jsonl"
    found = check.check([asked], out=folder / "keys", predictions=paths)
    fill(folder / "keys" / "keys.review.xlsx", **{found.suspects[0].question_id.replace(":", "_"): words})
    with pytest.raises(DataError, match=message):
        check.check([asked], out=folder / "reviewed", reviewed=folder / "keys" / "keys.review.xlsx")
    assert not (folder / "reviewed").exists()


def test_mistakes_have_one_message(files):
    folder, paths = files
    asked = folder / "q.questions.jsonl"
    shutil.copy(asked, folder / "again.questions.jsonl")
    with pytest.raises(UserError, match="about one file of --questions, and 2 are given"):
        check.check([asked, folder / "again.questions.jsonl"], predictions=paths)
    (folder / "bad.yaml").write_text("- {name: x}\n")
    with pytest.raises(DataError, match=r"bad.yaml is no list of errata:\n  - \[0\]\.source: required key"):
        evaluate(paths[0], asked, errata=folder / "bad.yaml")
