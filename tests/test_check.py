"""`check`: pairs, findings, what is dropped, what is written; MinHash against the true similarity."""

import json
import math
import random
import time
from pathlib import Path

import pytest
import real_data

from cmexam_tune import check, preprocess
from cmexam_tune.core import cli, jsonl, normalise
from cmexam_tune.core.errors import DataError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluate import evaluate
from cmexam_tune.evaluation.breakdowns import Share, Subset
from cmexam_tune.exams import cmb, cmexam
from cmexam_tune.prompts import question_checks
from cmexam_tune.quality import contamination, errata, findings, minhash
from cmexam_tune.quality.duplicates import Index
from cmexam_tune.quality.findings import AnswerLetters

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the released files are not here")
CASE = "患者，男，45岁。反复上腹痛一年，进食后呕吐一个月，呕吐物含有宿食，查体可见胃型及振水音。"
FIVE = {"A": "青霉素", "B": "红霉素", "C": "四环素", "D": "氯霉素", "E": "头孢唑啉"}


def q(name, stem="下列治疗军团菌病的首选药物是哪一种", options=FIVE, answer="B", **rest):
    return Question(name, stem, options, answer, **rest)


def write(folder, name, questions):
    path = folder / f"{name}.questions.jsonl"
    jsonl.write(path, questions)
    return path


def reasons(result):
    return {(one.id, one.other_id): one.reason for one in result.overlaps}


def test_equal_questions_in_any_order_and_contradictions(tmp_path):
    turned = dict(zip("ABCDE", reversed(FIVE.values()), strict=True))
    train = [
        q("same", options=turned, answer="D"),
        q("other", options=turned, answer="E"),
        q("alone", "别的题目", answer="A"),
    ]
    result = check.check([write(tmp_path, "train", train)], [write(tmp_path, "test", [q("t")])], tmp_path / "out")
    assert reasons(result) == {("same", "t"): "exact", ("other", "t"): "contradiction"}
    kept = [one.id for one in jsonl.read(tmp_path / "out/train.clean.questions.jsonl", Question)]
    assert kept == ["alone"]
    (one, _) = [json.loads(line) for line in (tmp_path / "out/train.overlap.jsonl").read_text("utf-8").splitlines()]
    assert (one["id"], one["other_id"], one["reason"], one["jaccard"], one["against"]) == (
        "same",
        "t",
        "exact",
        1.0,
        True,
    )
    assert (tmp_path / "train.questions.jsonl").read_text("utf-8").count("\n") == 3


def test_repetitions_keep_the_first_and_contradictions_none(tmp_path):
    train = write(
        tmp_path,
        "train",
        [
            q("a"),
            q("b"),
            q("c", answer="A", stem="另一道题目的题干在这里有十二字"),
            q("d", answer="B", stem="另一道题目的题干在这里有十二字"),
        ],
    )
    result = check.check([train])
    assert result.dropped == {"train": {2: "duplicate", 3: "contradiction", 4: "contradiction"}}
    assert check.check([train], drop=[]).dropped == {"train": {}}


def test_near_similar_sibling_stem_and_case(tmp_path):
    long = "关于药物不良反应的描述中，下列各项叙述正确的是哪一项呢"
    train = [
        q("near", long, {**FIVE, "E": "头孢唑林"}),
        q("sibling", "下列治疗结核病变的首选药物是哪一种", answer="A"),
        q("stem", options={"A": "地塞米松", "B": "阿司匹林"}),
        q("case", CASE + "最有价值的检查是", {"A": "胃镜", "B": "超声"}),
    ]
    tests = [q("n", long), q("s"), q("c", CASE + "首选的治疗是", {"A": "手术切除", "B": "抗酸药物"}, "A")]
    result = check.check([write(tmp_path, "train", train)], [write(tmp_path, "test", tests)])
    assert reasons(result) == {
        ("near", "n"): "near",
        ("sibling", "s"): "sibling",
        ("stem", "s"): "stem",
        ("case", "c"): "case",
    }
    assert result.dropped["train"] == {1: "near", 3: "stem"}


@pytest.mark.parametrize(
    ("finding", "question"),
    [
        ("repeated-options", q("x", options={"A": "甲，乙", "B": "甲、乙", "C": "丙"}, answer="C")),
        ("explanation-contradicts", q("x", explanation="红霉素无效，故选C。")),
        ("explanation-contradicts", q("x", explanation="首选四环素（C对），红霉素（B错）耐药。")),
        ("explanation-contradicts", q("x", explanation="（A对）（B错）四环素（D对C错，为本题正确答案）。")),
        ("kind-contradicts", q("x", answer="AB", kind="single")),
        ("kind-contradicts", q("x", answer="A", kind="multiple")),
        ("missing-case", q("x", "上述各项，属虚证的是")),
        ("missing-case", q("x", "该患者最可能的诊断是")),
        ("not-shufflable", q("x", options={"A": "甲", "B": "乙", "C": "以上都是"})),
        ("not-shufflable", q("x", options={"A": "甲", "B": "乙", "C": "A+B"})),
        ("mojibake", q("x", "锟斤拷的作用是")),
        ("mojibake", q("x", "甲&nbsp;乙")),
    ],
)  # fmt: skip
def test_a_finding_in_one_question(finding, question):
    assert [name for name, _ in question_checks.look(question)] == [finding]


@pytest.mark.parametrize(
    "question",
    [
        q("x", explanation="红霉素有效（B对），故选B。青霉素（A错），故不选A选项。"),
        q("x", "下列哪项是错误的", explanation="甲（A对），乙（C对），丙（B错，为本题正确答案）。"),
        q("x", "下列哪项不正确", explanation="甲（A对），乙（C对），丙（B错）。"),
        q("x", CASE + "该患者最可能的诊断是"),
        q("x", options={"A": "3个月以上6个月以下", "B": "1年以上2年以下"}),
        q("x", "WBC 13.2×10⁹/L，温度＞39℃，<5 mg", answer="AB", kind="multiple"),
    ],
)
def test_nothing_is_found_in_a_sound_question(question):
    assert list(question_checks.look(question)) == []


def test_a_question_inside_an_explanation_and_lines_that_are_none(tmp_path):
    stem = "关于消化性溃疡的叙述，下列各项中错误的是哪一项"
    path = write(tmp_path, "a", [q("1", explanation=f"选B。第2题：{stem}（）"), q("2", stem, {"A": "1", "B": "2"})])
    path.write_text(
        path.read_text("utf-8") + '{"id": "3", "stem": "s", "options": {"A": "1", "B": "2"}, "answer": "C"}\n', "utf-8"
    )
    found = {(one.id, one.finding) for one in check.check([path]).findings}
    assert found == {("1", "question-in-explanation"), ("3", "unreadable")}


def test_letters_are_compared_with_equal_shares():
    letters = AnswerLetters()
    for number in range(100):
        letters.add(q(str(number), answer="B" if number < 60 else "ACDE"[number % 4]))
    (row,) = letters.table()
    half = row["chi2"] / 2
    assert row["counts"] == {"A": 10, "B": 60, "C": 10, "D": 10, "E": 10} and half == pytest.approx(50)
    assert row["p"] == pytest.approx(math.exp(-half) * (1 + half))  # the tail in closed form: four degrees of freedom


def test_signatures_estimate_the_true_similarity():
    rng = random.Random(1)
    base = ["".join(chr(0x4E00 + rng.randrange(500)) for _ in range(90)) for _ in range(60)]
    changed = []
    for number, text in enumerate(base):
        places = rng.sample(range(90), number // 5)
        changed.append("".join("变" if i in places else c for i, c in enumerate(text)))
    found = minhash.signatures([*base, *changed])
    errors = []
    for i, (a, b) in enumerate(zip(base, changed, strict=True)):
        estimate = float((found[i] == found[60 + i]).mean())
        errors.append(estimate - normalise.jaccard(a, b))
    assert max(map(abs, errors)) < 0.16 and abs(sum(errors) / len(errors)) < 0.02
    near = {(a, b) for a, b in minhash.candidates(found, found[:, 0] >= 0, 0.7).tolist()}
    assert near >= {(i, 60 + i) for i in range(60) if normalise.jaccard(base[i], changed[i]) >= 0.7}


def test_short_texts_and_few_questions():
    assert minhash.signatures(["甲", "甲乙丙丁戊己"]).shape == (2, 128)
    index = Index()
    index.add(q("1", "甲", {"A": "1", "B": "2"}, "A"), 0, 1, False)
    assert list(index.pairs()) == []


def test_known_errors_of_cmb():
    facets = {"exam_type": "药师考试", "exam_class": "初级中药士"}
    hit = errata.by_erratum([q("5205", facets=facets), q("5218", facets=facets), q("5205"), q("1", facets=facets)])
    named = {name: ids for (name, _), ids in hit.items()}
    once = {"5205"}
    assert named == {"cmb-test-2024-02": once, "cmb-test-one-letter": once, "cmb-test-unsorted": {"5218"}}
    sizes = {one.name: len(set(one.ids)) for one in errata.errata()}
    assert sizes == {"cmb-test-2024-02": 29, "cmb-test-one-letter": 25, "cmb-test-unsorted": 4}


@needs_data
def test_errata_are_those_of_the_released_answers():
    answers = json.loads(real_data.find("CMB-test-choice-answer.json").read_text("utf-8"))
    known = {one.name: set(one.ids) for one in errata.errata()}
    assert known["cmb-test-unsorted"] == {x["id"] for x in answers if "".join(sorted(x["answer"])) != x["answer"]}
    several = [x for x in answers if x["question_type"] == "多项选择题"]
    assert known["cmb-test-one-letter"] == {x["id"] for x in several if len(x["answer"]) == 1}
    assert known["cmb-test-one-letter"] < known["cmb-test-2024-02"]
    facets = {
        tuple(sorted({k: x[k] for k in ("exam_type", "exam_class")}.items()))
        for x in answers
        if x["id"] in known["cmb-test-2024-02"]
    }
    assert facets == {tuple(sorted(errata.errata()[0].facets.items()))}


def call(*argv):
    with pytest.raises(SystemExit) as stop:
        cli.run(check.main, list(map(str, argv)))
    return stop.value.code


def test_the_program(tmp_path, capsys):
    path = write(tmp_path, "a", [q("1", "锟斤拷<b>&")])
    other = write(tmp_path, "b", [q("2", "锟斤拷<b>&")])
    assert call("--questions", path, "--against", other, "--out", tmp_path / "out") == 0
    assert "same stem and options, in any order" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("check.json", "check.md", "check.html", "a.clean.questions.jsonl", "a.overlap.jsonl"),
    }
    page = (tmp_path / "out/check.html").read_text("utf-8")
    assert "锟斤拷&lt;b&gt;&amp;" in page and "锟斤拷<b>" not in page and "default-src 'none'" in page
    assert "Check of question files" in page and "题目文件检查" in page
    assert json.loads((tmp_path / "out/check.json").read_text("utf-8"))["pairs"]["exact"] == {"within": 0, "against": 1}
    assert call("--questions", path, "--against", other, "--out", tmp_path / "out") == 2
    assert "exists. Add --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--questions", "A", "--out", "OUT", "--drop", "exat"], "'exat' is unknown, did you mean 'exact'"),
        (["--questions", "A", "A", "--out", "OUT"], "a second file called 'a'"),
        (["--questions", "NONE", "--out", "OUT"], "no such"),
        (["--questions", "A", "--out", "A"], "is a file, --out needs a folder"),
        (["--questions", "A"], "--out"),
    ],
)
def test_wrong_calls(argv, message, tmp_path, capsys):
    path = write(tmp_path, "a", [q("1")])
    known = {"A": path, "OUT": tmp_path / "out", "NONE": tmp_path / "none.jsonl"}
    assert call(*[known.get(word, word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "out").exists()


@needs_data
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_released_files(step, tmp_path):
    """Every sixth question of the validation file, or all."""
    preprocess.preprocess("cmexam", [DATA / "cmexam/val.csv", DATA / "cmexam/dev98.csv"], tmp_path)
    preprocess.preprocess("cmb", [DATA / "cmb/cmb_single90.json"], tmp_path)
    paths = [tmp_path / f"{name}.questions.jsonl" for name in ("val", "dev98", "cmb_single90")]
    rows = paths[0].read_text(encoding="utf-8").splitlines(keepends=True)
    paths[0].write_text("".join(rows[::step]), encoding="utf-8")
    result = check.check(paths[:1], paths[1:])
    # Found without an index, by looking at all questions that have a pair and one in twenty of the others.
    asked = list(cmexam.read([DATA / "cmexam/val.csv"]))[::step]
    others = [*cmexam.read([DATA / "cmexam/dev98.csv"]), *cmb.read([DATA / "cmb/cmb_single90.json"])]
    grams = [(one.id, normalise.shingles(normalise.question_text(one.stem, one.options))) for one in others]
    some = {one.id for one in result.overlaps} | {one.id for one in asked[::20]}
    near = set()
    for one in asked:
        if one.id in some:
            mine = normalise.shingles(normalise.question_text(one.stem, one.options))
            near |= {(one.id, name) for name, held in grams if len(mine & held) / len(mine | held) >= 0.7}
    assert {(one.id, one.other_id) for one in result.overlaps if one.against and one.jaccard >= 0.7} == near
    assert sum(one.finding == "explanation-contradicts" for one in result.findings) < 10


def scored(tmp_path, right, baseline=None):
    """Evaluate 40 questions, those in `right` answered right, after a check that found t0 to t3 in train."""
    tests = [q(f"t{i}", f"第{i}道题目，题干各不相同，编号{i * 7919}", FIVE, "B") for i in range(40)]
    test = write(tmp_path, "test", tests)
    train = write(tmp_path, "train", [q(f"q{i}", tests[i].stem) for i in range(4)])
    check.check([train], [test], tmp_path / "checked", overwrite=True)
    files = {}
    for name, ids in {"run": right, "base": baseline}.items():
        if ids is not None:
            files[name] = tmp_path / f"{name}.jsonl"
            answers = [Prediction(one.id, f"答案：{'B' if one.id in ids else 'A'}") for one in tests]
            jsonl.write(files[name], answers, overwrite=True)
    report = evaluate(
        files["run"],
        test,
        tmp_path / "report",
        baseline=files.get("base"),
        overlap=tmp_path / "checked/train.overlap.jsonl",
        overwrite=True,
    )
    return report.subsets[0]


def test_scores_with_and_without_what_was_trained_on(tmp_path):
    found = scored(tmp_path, {f"t{i}" for i in range(22)}, {f"t{i}" for i in range(2, 20)})
    assert (found.everything.n, found.only.n, found.without.n) == (40, 4, 36)
    assert (found.everything.accuracy, found.only.accuracy, found.without.accuracy) == (55.0, 100.0, 50.0)
    low, high = found.without.accuracy_ci
    assert low < 50 < high and (found.gain, found.gain_only) == (10.0, 5.0)
    for words in (
        "4 of 40 questions",
        "55.00 with them, 50.00 without",
        "of the +10.00 points",
        "+5.00 come from these 4",
    ):
        assert words in found.sentence
    text = (tmp_path / "report/report.md").read_text("utf-8")
    assert "With and without" in text and "55.00 with them" in text
    assert json.loads((tmp_path / "report/report.json").read_text("utf-8"))["subsets"][0]["only"]["n"] == 4
    one, other = Share(4, 2, 50.0, (15.0, 85.0)), Share(3, 1.5, 50.001, (15.0, 85.0))
    assert "-0.00" not in Subset("seen before", one, one, other, -0.001, -0.0).sentence


def test_a_check_of_other_files_says_so(tmp_path, capsys):
    scored(tmp_path, {"t1"})
    jsonl.write(tmp_path / "run2.jsonl", [Prediction("x", "A")])
    other = write(tmp_path, "other", [q("x", "别的题目")])
    report = evaluate(tmp_path / "run2.jsonl", other, overlap=tmp_path / "checked/train.overlap.jsonl")
    assert "no pair of" in capsys.readouterr().err
    assert report.subsets[0].sentence.startswith("None of the 1 questions")
    with pytest.raises(DataError, match=r"run2\.jsonl:1: no pair of `cmexam-tune check`"):
        evaluate(tmp_path / "run2.jsonl", other, overlap=tmp_path / "run2.jsonl")


def test_known_errors_are_scored_apart(tmp_path):
    facets = {"exam_type": "药师考试", "exam_class": "初级中药士"}
    asked = [q(str(i), f"第{i}题", facets=facets) for i in (5205, 5206, 5218)]
    asked.append(q("5207", "该患者最可能的诊断是", facets=facets))
    report = evaluate([Prediction(one.id, "B" if one.id != "5205" else "A") for one in asked], asked)
    found = {one.name.split(" ")[0]: (one.only.n, one.without.accuracy) for one in report.subsets}
    assert found == {
        "cmb-test-2024-02": (1, 100.0),
        "cmb-test-one-letter": (1, 100.0),
        "cmb-test-unsorted": (1, 66 + 2 / 3),
        "missing-stem": (1, 66 + 2 / 3),
    }


def test_training_says_when_it_sees_what_is_held_out(tmp_path):
    train = write(tmp_path, "train", [q("a"), q("b", "另一题")])
    test = write(tmp_path, "test", [q("x", options=dict(zip("ABCDE", reversed(FIVE.values()), strict=True)))])
    clean = write(tmp_path, "clean", [q("y", "第三题")])
    (text,) = contamination.warnings([str(train)], [str(test), str(clean)])
    assert f"1 of {test}" in text and f"check --questions {train} --out checked --against {test}" in text
    assert contamination.warnings([str(train)], [str(clean)]) == []
    (text,) = contamination.warnings([str(train)], [str(clean)], [str(test)])
    assert f"trained on again: 1 of {test}" in text


def test_training_says_when_a_key_is_doubtful(tmp_path):
    facets = {"exam_type": "药师考试", "exam_class": "初级中药士"}
    doubtful = [q("5211", facets=facets), q("b", "第二题", kind="multiple"), q("c", "第三题", explanation="故选A。")]
    train = write(tmp_path, "train", [q("a", "第一题"), *doubtful])
    (text,) = contamination.warnings([train], [])
    assert "(1 known-error, 1 kind-contradicts, 1 explanation-contradicts)" in text
    drop = text.rpartition("--drop ")[2].split(",")
    assert findings.check_files([train], [], drop).dropped["train"].keys() == {2, 3, 4}


def templated(name, count, seed, answers="B"):
    """Return questions that differ in six characters, as exams made from a template do."""
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        symptom = "".join(chr(0x4E00 + rng.randrange(2500)) for _ in range(6))
        stem = (
            f"患者，男，45岁。因{symptom}三天入院，查体未见明显异常，既往体健。根据上述资料，最可能的诊断是哪一种疾病"
        )
        explanation = f"解析：{stem}，故选B。"
        questions.append(q(f"{name}{number}", stem, answer=rng.choice(answers), explanation=explanation))
    return questions


@pytest.mark.parametrize("answers", ["B", "ABCDE"])
def test_many_that_are_alike_are_groups_and_not_all_pairs(answers, tmp_path):
    train, tests = templated("q", 300, 1, answers), templated("t", 30, 2, answers)
    path, held = write(tmp_path, "train", train), write(tmp_path, "test", tests)
    alone = check.check([path])
    # Of every answer the first stays: with another answer it is a sibling.
    assert 300 - len(alone.dropped["train"]) == len(answers)
    assert len(alone.overlaps) < 4 * 300 and all(one.jaccard >= 0.5 for one in alone.overlaps)
    both = check.check([path], [held])
    assert {one.other_id for one in both.overlaps if one.against} == {one.id for one in tests}
    assert len(both.dropped["train"]) == 300 and len(both.overlaps) < 4 * 330


def test_a_near_pair_is_found_among_thousands_that_are_somewhat_alike():
    rng = random.Random(3)

    def text():
        return (
            "".join(chr(0x4E00 + rng.randrange(2500)) for _ in range(30))
            + "根据上述资料，最可能的诊断是哪一种疾病，其首选的治疗方法"
        )

    texts = [text() for _ in range(3000)]
    assert 0.25 < normalise.jaccard(texts[0], texts[1]) < 0.5
    texts += [one[:3] + "变" + one[4:] for one in texts[:100]]
    found = minhash.signatures(texts)
    pairs = {(a, b) for a, b in minhash.candidates(found, found[:, 0] >= 0, 0.5).tolist()}
    assert pairs >= {(number, 3000 + number) for number in range(100)}
    assert len(pairs) <= minhash.NEIGHBOURS * len(texts)


@pytest.mark.parametrize("text", ["ABCDE" * 4000, "A" + " " * 20000 + "。", "故选" + "A、" * 20000 + "z"])
def test_a_long_explanation_takes_no_quadratic_time(text):
    start = time.process_time()
    question_checks.contradicted(q("x", explanation=text))
    assert time.process_time() - start < 5
