"""Every published scorer against what its authors' own code read and scored on the same outputs."""

import dataclasses
import json
import random
from collections import Counter, defaultdict
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import comparison, grading, scorers
from cmexam_tune.evaluation.graded import Graded
from cmexam_tune.evaluation.scorers import (
    _reading,
    cmmlu,
    evalscope,
    huatuo2,
    huatuo_o1,
    medevalkit,
    zsy_answer_line,
)
from cmexam_tune.evaluation.significance import wilson

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "scorers"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the scorers' golden answers are not on this machine")
FILES = ("outputs1", "outputs2", "outputs3")
SCORERS = (
    *("cmb", "cmb-vote", "opencompass-cmb", "medevalkit", "huatuo2", "huatuo2-vote", "huatuo-o1", "apollo", "qilin"),
    *("evalscope", "med-bench-arena", "zsy", "zsy-answer-line", "cmmlu"),
)


@cache
def questions() -> dict[str, Question]:
    return {question.id: question for question in jsonl.read(GOLDEN / "questions.jsonl", Question)}


@cache
def outputs(name: str) -> dict[str, str]:
    return {one["question_id"]: one["text"] for _, one in jsonl.read_objects(GOLDEN / f"{name}.jsonl")}


@cache
def golden(name: str = "expected.json") -> dict:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def texts(name: str, key: str) -> list[str]:
    if name == "vote5":
        return {one["question_id"]: one["texts"] for _, one in jsonl.read_objects(GOLDEN / "votes.jsonl")}[key]
    return [outputs(file)[key] for file in FILES] if name == "vote3" else [outputs(name)[key]]


def graded(profile, name: str, keep=lambda question: True) -> list[Graded]:
    asked = [question for question in questions().values() if keep(question)]
    said = []
    for question in asked:
        one, *more = texts(name, question.id)
        said.append(Prediction(question.id, one, votes=(one, *more) if more else ()))
    return grading.grade(asked, said, profile)


def source(name: str):
    return lambda question: question.facets["source"] == name


def one_letter_at_a_time(profile, text, question):
    """As the golden answers of medevalkit were made: each letter for which the script says right."""
    asked = [SimpleNamespace(**{**vars(question), "answer": letter}) for letter in question.options]
    found = [one.answer for one in asked if profile.right(profile.read(text, one).answer, one)]
    return "".join(found) or None


def reader(scorer: str, mode: str = ""):
    profile = scorers.get(scorer)
    special = {
        "medevalkit": lambda text, q: one_letter_at_a_time(profile, text, q),
        "evalscope": lambda text, q: evalscope.read_mode(text, q, mode == "multi").answer,
        "huatuo-o1": lambda text, q: dict(
            zip(("last", "first", "type"), huatuo_o1.readings(text, q), strict=True)  # keys as in the golden file
        ),
    }
    if mode == "cot":
        return zsy_answer_line.answer_line
    return special.get(scorer, lambda text, q: profile.read(text, q).answer)


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_answer_and_verdict(scorer):
    profile, expected = scorers.get(scorer), golden()[scorer]
    checked = 0
    for key, answers in expected["answers"].items():
        mode, _, name = key.rpartition("/")
        for question_id, wanted in answers.items():
            question, found = questions()[question_id], texts(name, question_id)
            if name.startswith("vote"):
                answer = profile.vote(found, question).answer
            else:
                answer = reader(scorer, mode)(found[0], question)
            wanted = None if wanted == "random:ABCD" else wanted
            assert answer == wanted, (key, question_id, found)
            right = expected.get("right", {}).get(key, {}).get(question_id)
            if right is not None and scorer != "huatuo-o1":
                answer = profile.read(found[0], question).answer if scorer == "medevalkit" else answer
                assert profile.right(answer, question) == right, (key, question_id)
            checked += 1
    assert checked >= 80


@pytest.mark.parametrize("scorer", SCORERS)
def test_items_that_a_clean_record_cannot_hold(scorer):
    """Empty, blank, null, repeated options, unsorted golds, letters with gaps; where the script crashes, we do not."""
    special = golden("special_items.json")
    names = [name for name in special["expected"] if name == scorer or name.startswith(f"{scorer}-")]
    sets = scorer in ("zsy", "evalscope", "med-bench-arena")
    for name in names if scorer != "cmb" else ["cmb"]:
        read = reader(scorer, name.rpartition("-")[2])
        for item in special["items"]:
            gold = "".join(sorted(item["answer"])) if sets else item["answer"]
            question = SimpleNamespace(
                options=item["option"],
                answer=gold,
                kind="multiple" if item["question_type"] == "多项选择题" else "single",
                facets={"question_type": item["question_type"]},
            )
            for text, wanted in zip(
                special["outputs"][str(item["id"])], special["expected"][name][str(item["id"])], strict=True
            ):
                if "crash" in wanted:  # on null, which a Question cannot hold, or on an option of several lines
                    assert None in item["option"].values() or scorer == "qilin"
                    continue
                answer = read(text, question)
                if scorer == "med-bench-arena" and answer:  # its own answers are positions
                    answer = "".join(sorted(position_of(letter, question) for letter in answer))
                assert answer == wanted["answer"], (name, item["what"], text)
                if scorer != "huatuo-o1":
                    assert (
                        scorers.get(scorer).right(scorers.get(scorer).read(text, question).answer, question)
                        == (wanted["right"])
                    ), (name, item["what"], text)


def position_of(letter, question):
    given = {own: new for new, own in _reading.by_position(question).items()}
    return given[letter]


@pytest.mark.parametrize("name", [*FILES, "vote3", "vote5", "outputs1, first 150 lines only"])
def test_metrics_of_cmb(name):
    scorer = "cmb-vote" if name.startswith("vote") else "cmb"
    expected = golden()[scorer]["metrics"][name]
    first = list(outputs("outputs1"))[:150]
    known = golden()[scorer]["answers"].get(name) or golden()["cmb"]["answers"]["outputs1"]
    found = graded(scorer, name.partition(",")[0], lambda question: question.id in known)
    if "," in name:
        found = [one if one.question.id in first else dataclasses.replace(one, answer=None, right=0.0) for one in found]
        assert expected["unparsed"] == sum(one.answer is None and one.question.id in first for one in found)
    else:
        assert expected["unparsed"] == sum(one.answer is None for one in found)
    assert (len(found), sum(one.right for one in found)) == (expected["n"], expected["right"])
    scores = expected["score_py_2025_03_17"]
    for kind, value in scores["accuracy_per_category"].items():
        some = [one for one in found if one.question.facets["exam_type"] == kind]
        assert grading.average(some, ("exam_class",)) / 100 == pytest.approx(value, abs=1e-12)
        for group, accuracy in scores["accuracy_per_subcategory"][kind].items():
            cell = [one for one in some if one.question.facets["exam_class"] == group]
            assert grading.average(cell, ()) / 100 == pytest.approx(accuracy, abs=1e-12)
    overall = grading.score(found, scorer)
    assert overall["accuracy_macro"] / 100 == pytest.approx(fmean(scores["accuracy_per_category"].values()), abs=1e-12)
    older = expected.get("score_py_2025_03_08", {})
    if "avg" in older:
        assert overall["accuracy_macro"] == pytest.approx(float(str(older["avg"]).rstrip("%")), abs=0.011)


@pytest.mark.parametrize(
    ("scorer", "percent"), [("opencompass-cmb", 1), ("qilin", 1), ("apollo", 100), ("med-bench-arena", 100)]
)
@pytest.mark.parametrize("name", FILES)
def test_metrics_by_source(scorer, percent, name):
    for part, wanted in golden()[scorer]["metrics"][name].items():
        scores = grading.score(graded(scorer, name, source(part) if part != "all" else lambda question: True), scorer)
        assert scores["scored"] == wanted["n"]
        assert scores["accuracy"] == pytest.approx(wanted["accuracy"] * percent, abs=1e-9)


@pytest.mark.parametrize("name", FILES)
def test_metrics_of_medevalkit(name):
    everything = dataclasses.replace(medevalkit.SCORER, subset=None)
    for part, profile, keep in (
        ("all", everything, lambda question: True),
        ("cmexam", medevalkit.SCORER, source("cmexam")),
        ("cmb_single", medevalkit.SCORER, source("cmb")),
    ):
        wanted = golden()["medevalkit"]["metrics"][name][part]
        scores = grading.score(graded(profile, name, keep), profile)
        assert (scores["scored"], scores["accuracy"]) == (wanted["total"], pytest.approx(100 * wanted["acc"]))
    for question_id, cut in golden()["medevalkit"]["details"]["cut"][name].items():
        left = medevalkit.remains(outputs(name)[question_id], questions()[question_id])
        assert medevalkit.cut(left) == cut


@pytest.mark.parametrize("name", FILES)
def test_metrics_of_huatuo2(name):
    wanted = golden()["huatuo2"]["metrics"][name]
    found = graded("huatuo2", name)
    assert grading.average(found, ()) == pytest.approx(100 * wanted["选择题总分"])
    assert wanted["unmatched"] == sum(not huatuo2.find_letters(one.prediction.text, one.question) for one in found)
    for key, count in wanted["counts"].items():
        place, _, kind = key.partition("___")
        some = [
            one
            for one in found
            if source(place)(one.question) and (not kind or one.question.facets.get("question_type") == kind)
        ]
        assert (len(some), grading.average(some, ())) == (count, pytest.approx(100 * wanted[key]))


@pytest.mark.parametrize("name", ["vote3", "vote5"])
def test_metrics_of_huatuo2_vote(name):
    wanted = golden()["huatuo2-vote"]["metrics"][name]
    found = graded("huatuo2-vote", name, source("pharmacist"))
    assert grading.score(found, "huatuo2-vote")["accuracy"] == pytest.approx(100 * wanted["总分"])
    by_type = defaultdict(list)
    for one in found:
        by_type[one.question.facets["question_type"]].append(one)
    assert {key: grading.average(some, ()) / 100 for key, some in by_type.items()} == pytest.approx(
        {key: wanted[key] for key in by_type}
    )
    # A type that its table lacks is a KeyError there; here such a question is not counted.
    assert not any(one.counted for one in graded("huatuo2-vote", "outputs1", source("cmb")) if not one.question.kind)


@pytest.mark.parametrize("name", FILES)
def test_metrics_of_huatuo_o1(name):
    wanted = golden()["huatuo-o1"]["metrics"][name]
    for part in ("pharmacist", "cmb", "cmexam", "all"):
        found = graded("huatuo-o1", name, source(part) if part != "all" else lambda question: True)
        scores = grading.score(found, "huatuo-o1")
        assert scores["scored"] == wanted[part]["n"]
        assert scores["accuracy"] == pytest.approx(100 * wanted[part]["accuracy"])
    dropped = {one.question.id for one in graded("huatuo-o1", name) if not one.counted}
    assert dropped == set(golden()["huatuo-o1"]["skipped"][name])
    sure = Counter()
    for question_id, text in outputs(name).items():
        question = questions()[question_id]
        last, first, way = huatuo_o1.readings(text, question)
        if way == 1 and question_id not in dropped:
            sure.update(n=1, first_right=first == question.answer, last_right=last == question.answer)
    assert sure == {key: value for key, value in wanted["all_ignore_miss"].items() if key != "accuracy"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mode", ["single", "multi"])
def test_metrics_of_evalscope(name, mode):
    profile = dataclasses.replace(
        evalscope.SCORER, read=partial(evalscope.read_mode, several=mode == "multi"), name=mode
    )
    parts = {
        "all": lambda question: True,
        **{place: source(place) for place in ("cmb", "pharmacist", "cmexam")},
        **{f"kind_{kind}": lambda question, kind=kind: question.kind == kind for kind in ("single", "multiple")},
        "gold_one_letter": lambda question: len(question.answer) == 1,
        "gold_several_letters": lambda question: len(question.answer) > 1,
    }
    expected = golden()["evalscope"]["metrics"][f"{mode}/{name}"]
    assert set(expected) == set(parts)
    found = graded(profile, name)
    for part, wanted in expected.items():
        some = [one for one in found if parts[part](one.question)]
        assert (len(some), grading.average(some, ())) == (wanted["n"], pytest.approx(100 * wanted["accuracy"]))


@pytest.mark.parametrize("name", FILES)
def test_metrics_of_zsy(name):
    wanted = golden()["zsy"]["metrics"][name]
    pair = wanted["score_cmb"]
    base, tuned = (graded("zsy", pair[key]) for key in ("base_file", "sft_file"))
    assert wanted["unparsed"] == sum(one.answer is None for one in base)
    found = comparison.compare(base, tuned)
    assert [sum(one.right for one in some) for some in (base, tuned)] == [
        pair["base"]["correct"],
        pair["sft"]["correct"],
    ]
    theirs = pair["comparison"]
    assert (len(found.gained), len(found.lost)) == (theirs["improved_questions"], theirs["regressed_questions"])
    assert (found.both, found.neither) == (theirs["both_correct"], theirs["both_wrong"])
    assert found.mcnemar_p == pytest.approx(theirs["mcnemar_exact_pvalue"], rel=1e-12)
    for facet, groups in wanted["groups"].items():
        for value, count in groups.items():
            some = [[one for one in run if one.question.facets.get(facet, "unknown") == value] for run in (base, tuned)]
            assert [len(some[0]), *(sum(one.right for one in run) for run in some)] == list(count.values())
    single = wanted["score_predictions"]
    assert grading.score(base, "zsy")["accuracy"] == pytest.approx(single["accuracy"])
    assert grading.score(base, "zsy")["accuracy_ci"] == pytest.approx(single["wilson95"], abs=1e-9)
    for facet, cells in single["slices"].items():
        for value, cell in cells.items():
            some = [one for one in base if one.question.facets.get(facet) == value]
            ends = [100 * end for end in wilson(sum(one.right for one in some), len(some))]
            assert (len(some), ends) == (cell["n"], pytest.approx(cell["wilson95"], abs=1e-9))


@pytest.mark.parametrize("name", FILES)
def test_strict_form_of_zsy_answer_line(name):
    """Its own flag: letters alone, upper-case, sorted, nothing between them; in `cot` the line after 解析."""
    for question_id, strict in golden()["zsy-answer-line"]["details"]["strict"][f"direct/{name}"].items():
        text, question = outputs(name)[question_id], questions()[question_id]
        alone = zsy_answer_line.letters_alone(text, question)
        assert strict == (alone is not None and text.replace("\r\n", "\n").strip() == alone)


@pytest.mark.parametrize("name", FILES)
def test_metrics_of_cmmlu(name):
    wanted = golden()["cmmlu"]["metrics"][name]
    found = [one for one in graded("cmmlu", name) if "cmmlu_subject" in one.question.facets]
    assert all(one.counted for one in found)
    subjects = {
        subject: [one for one in found if one.question.facets["cmmlu_subject"] == subject] for subject in wanted["n"]
    }
    assert {subject: len(some) for subject, some in subjects.items()} == wanted["n"]
    draw = random.Random(2026)
    seeded = {}
    for subject, some in subjects.items():
        drawn = [one.answer or cmmlu.CHOICES[draw.randint(0, 3)] for one in some]
        seeded[subject] = 100 * fmean(a == one.question.answer for a, one in zip(drawn, some, strict=True))
        for letter, theirs in wanted["letter_forced"].items():
            forced = 100 * fmean((one.answer or letter) == one.question.answer for one in some)
            assert forced == pytest.approx(theirs[subject])
        assert grading.average(some, ()) == pytest.approx(wanted["expected"][subject])
    assert seeded == pytest.approx(wanted["seed_2026"])
    overall = sum(seeded.values()) / wanted["subjects_in_overall"]
    assert overall == pytest.approx(wanted["overall_seed_2026"], abs=0.005)


@pytest.mark.parametrize("scorer", [*SCORERS, "cmexam-lora", "cmexam-chatglm", "standard"])
@pytest.mark.parametrize("name", FILES)
def test_the_decomposition_adds_up(scorer, name):
    asked = list(questions().values())
    said = [Prediction(question.id, outputs(name)[question.id]) for question in asked]
    ours, theirs = (grading.grade(asked, said, rules) for rules in ("standard", scorer))
    found = comparison.decompose(ours, theirs, scorer)
    assert found.standard == grading.score(grading.grade(asked, said), "standard")["accuracy"]
    theirs = grading.score(grading.grade(asked, said, scorer), scorer)
    assert found.theirs == theirs[scorers.get(scorer).headline]
    steps = [found.by_subset, found.by_reading, found.by_denominator, found.by_average]
    if found.theirs is None:  # the script reads none of these outputs, and drops what it cannot read
        assert scorer == "cmexam-chatglm" and found.scored == 0
        return
    assert found.standard + sum(steps) == pytest.approx(found.theirs, abs=1e-9)
    assert len({one.question_id for one in found.differing}) == len(found.differing)
    if scorer == "standard":
        assert steps == [0, 0, 0, 0] and not found.differing
