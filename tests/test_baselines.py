"""What guessing scores: closed forms, simulation and the paper's random row on real questions."""

import csv

import pytest
import real_data

from cmexam_tune.core.schema import Question, letters
from cmexam_tune.report import baselines

VAL = real_data.find("val.csv")


def question(number, answer, options="ABCDE"):
    return Question(str(number), "题干", {letter: f"选项{letter}" for letter in options}, answer)


MIXED = [question(0, "A"), question(1, "C"), question(2, "C"), question(3, "ACD"), question(4, "B", "ABCD")]


@pytest.mark.parametrize(
    ("name", "accuracy"),
    [
        ("uniform_subset", 100 * (4 / 31 + 1 / 15) / 5),
        ("uniform_single", 100 * (3 / 5 + 1 / 4) / 5),
        ("majority", 100 * 2 / 5),
    ],
)
def test_expected_accuracy_in_closed_form(name, accuracy):
    assert baselines.expected(name, MIXED) == pytest.approx(accuracy)


@pytest.mark.parametrize("name", ["uniform_subset", "uniform_single"])
def test_simulation_tends_to_the_expectation(name):
    many = [question(i, "AB"[i % 2] + "C" * (i % 3 == 0)) for i in range(500)]
    runs = baselines.simulated(name, many, 40)
    assert sum(runs) / 40 == pytest.approx(baselines.expected(name, many), abs=0.6)
    assert len(set(runs)) > 5


def test_subsets_are_uniform_over_all_answers():
    answers = [one.answer for one in baselines.guess("uniform_subset", [question(i, "A", "ABC") for i in range(7000)])]
    counts = {answer: answers.count(answer) for answer in set(answers)}
    assert sorted(counts) == ["A", "AB", "ABC", "AC", "B", "BC", "C"]
    assert all(abs(count - 1000) < 150 for count in counts.values())


@pytest.mark.parametrize("name", baselines.NAMES)
def test_guesses_are_legal_and_follow_the_seed(name):
    questions = [question(i, "B" if i % 4 else None, "ABCD" if i % 2 else "ABCDEF") for i in range(60)]
    first, again, other = (list(baselines.guess(name, questions, seed)) for seed in (1, 1, 2))
    assert first == again
    assert [one.question_id for one in first] == [one.id for one in questions]
    assert (first != other) == (name != "majority")
    for one, asked in zip(first, questions, strict=True):
        assert one.answer == letters(one.answer)
        assert set(one.answer) <= set(asked.options)


def test_majority_letter():
    assert baselines.majority(MIXED) == "C"
    assert baselines.majority([question(0, "D"), question(1, "B")]) == "B"
    assert baselines.majority([question(0, None)]) == "A"


def test_unpublished_answers_give_no_baseline():
    assert baselines.compute([question(0, None)]) == {}
    assert baselines.expected("majority", [question(0, None)]) is None
    assert baselines.compute([*MIXED, question(9, None)])["uniform_subset"]["expected"] == baselines.expected(
        "uniform_subset", MIXED
    )


def test_unknown_baseline():
    for call in (lambda: list(baselines.guess("best", MIXED)), lambda: baselines.expected("best", MIXED)):
        with pytest.raises(ValueError, match=r"'best' is no baseline; known: uniform_subset"):
            call()


@pytest.mark.skipif(not VAL.exists(), reason="the real CMExam validation split is not here")
def test_random_row_of_the_paper():
    """CMExam Table 3 prints 3.1±0.2 for its random row, 1/31 = 3.2%: uniform over the subsets of five letters."""
    with VAL.open(encoding="utf-8-sig", newline="") as handle:
        rows = list(csv.DictReader(handle))
    questions = [
        Question(
            str(i), row["Question"], {line[0]: line for line in row["Options"].splitlines()}, letters(row["Answer"])
        )
        for i, row in enumerate(rows)
        if row["Answer"]
    ]
    assert len(questions) == 6810
    table = baselines.compute(questions, seeds=10)
    assert table["uniform_subset"]["mean"] == pytest.approx(3.2, abs=0.2)
    assert table["uniform_subset"]["std"] < 0.4
    assert table["uniform_single"]["expected"] == pytest.approx(19.5, abs=0.1)
    assert table["majority"] == {"expected": pytest.approx(21.0, abs=0.1), "answer": "C"}
