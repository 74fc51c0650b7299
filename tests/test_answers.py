"""Reading answers: the labelled table against the thresholds, and what no rule may ever do."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import real_data

from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import answer_parsing

ROOT = Path(__file__).resolve().parents[1]
ROWS = [json.loads(line) for line in (ROOT / "tests/data/answers.jsonl").read_text(encoding="utf-8").splitlines()]
DRUGS = Question(
    "q",
    "首选的药物是",
    dict(zip("ABCDE", ["青霉素", "头孢曲松", "阿奇霉素", "左氧氟沙星", "万古霉素"], strict=True)),
    "B",
)


def _read(row):
    return answer_parsing.parse(row["text"], Question("q", row["stem"], row["options"], None, kind=row["kind"]))


def test_the_table_is_large_enough_and_has_no_row_twice():
    assert len(ROWS) >= 300
    assert sum(row["answer"] is None for row in ROWS) >= 60
    assert len({(row["stem"], row["text"]) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        Question("q", row["stem"], row["options"], row["answer"])  # a label names offered letters, sorted


@pytest.mark.parametrize("part", ["tuned", "held_out"])
def test_precision_and_recall_on_the_labelled_table(part):
    rows = [row for row in ROWS if row["part"] == part]
    read = [(row, _read(row)) for row in rows]
    wrong = [(row["text"], row["answer"], answer) for row, answer in read if answer != row["answer"]]
    right = sum(answer is not None and answer == row["answer"] for row, answer in read)
    precision = right / sum(answer is not None for _, answer in read)
    recall = right / sum(row["answer"] is not None for row in rows)
    assert precision >= 0.99, (precision, wrong)
    assert recall >= 0.97, (recall, wrong)


def test_the_benchmark_prints_our_rules_beside_the_original_scripts():
    command = [sys.executable, str(ROOT / "benchmarks/answers.py")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    for name in ("standard", "cmexam-lora", "cmexam-chatglm", "cmb", "held_out"):
        assert name in out.stdout


def test_only_offered_letters_sorted_and_distinct_whatever_the_text():
    rng = random.Random(0)
    pieces = [*"ABCDEFGabcdZ、，。：（）是选不或和\n 答案正确错误12{}", "答案", "正确", "<think>", "</think>", "青霉素"]
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        answer = answer_parsing.parse(text, DRUGS)
        if answer is not None:
            assert answer
            assert answer == "".join(sorted(set(answer) & set("ABCDE"))), text


@pytest.mark.parametrize("letter", list("ABCDE"))
@pytest.mark.parametrize(
    "form", ["答案：{}", "故选{}。", "{}", "（{}）", "**{}**", "正确选项为{}", '{{"answer": "{}"}}', "{}正确，其余错误"]
)
def test_each_letter_in_each_form(form, letter):
    assert answer_parsing.parse(form.format(letter), DRUGS) == letter


def test_ten_options_and_two():
    ten = Question("q", "哪项正确", {letter: f"第{i}项内容" for i, letter in enumerate("ABCDEFGHIJ")}, "J")
    assert answer_parsing.parse("答案：AJ", ten) == "AJ"
    assert answer_parsing.parse("j", ten) == "J"
    two = Question("q", "对吗", {"A": "对", "B": "错"}, "A")
    assert answer_parsing.parse("答案：B", two) == "B"
    assert answer_parsing.parse("错", two) == "B"
    assert answer_parsing.parse("答案：C", two) is None


DUCTS = Question(
    "q", "输精管道不包括", dict(zip("ABCDE", ["睾丸", "附睾", "输精管", "射精管", "尿道"], strict=True)), "A"
)


def cut_within_an_option(first, form="{}. {}", between="\n"):
    """Yield the list of options cut at each place behind an option's letter; `first`: how many are whole at least."""
    items = [form.format(*item) for item in DUCTS.options.items()]
    for whole in range(first, len(items)):
        before = between.join(items[:whole]) + between
        yield from (before + items[whole][:size] for size in range(form.index("}"), len(items[whole])))


@pytest.mark.parametrize(
    ("form", "between"), [("{}. {}", "\n"), ("{}、{}", "；"), ("**{}** {}", " "), ("（{}）{}", "\n")]
)
def test_where_a_limit_cut_a_list_of_options_changes_no_answer(form, between):
    for listed in cut_within_an_option(1, form, between):
        for cut in (listed, listed + "\ufffd", listed + " "):
            assert answer_parsing.parse(cut, DUCTS) is None, cut
            assert answer_parsing.parse(f"选项如下：\n{cut}", DUCTS) is None, cut
            assert answer_parsing.parse(f"答案：D\n{cut}", DUCTS) == "D", cut


def test_an_answer_before_a_cut_list_stays():
    for listed in cut_within_an_option(1):
        assert answer_parsing.parse(f"答案：{listed}", DUCTS) == "A", listed
        assert answer_parsing.parse(f"B. 附睾\n{listed}", DUCTS) == "B", listed
    assert answer_parsing.parse("B. 附睾\nA. 睾", DUCTS) == "B"
    assert answer_parsing.parse("正确答案：B. 附睾。\nC", DUCTS) == "B"
    assert answer_parsing.parse("B. 附", DUCTS) == "B"


def test_several_letters_with_their_whole_texts_are_an_answer():
    assert answer_parsing.parse("A. 睾丸\nC. 输精管", DUCTS) == "AC"
    assert answer_parsing.parse("A. 睾丸，C. 输精管。", DUCTS) == "AC"
    assert answer_parsing.parse("A、C", DUCTS) == "AC"


def test_the_first_letters_count_before_an_explanation_that_says_otherwise():
    assert answer_parsing.parse("答案: B. \n 解释: 头孢曲松有效，青霉素耐药。故选C。", DRUGS) == "B"
    assert answer_parsing.parse("我觉得答案是B。再想想，青霉素耐药，故选C。", DRUGS) == "C"


@pytest.mark.parametrize(
    ("text", "explanation"),
    [
        ("答案: B. \n 解释: 因为感染", "因为感染"),
        ("答案：C，解释：x", "x"),
        ("【答案】A【解析】细菌感染", "细菌感染"),
        ("解析：支原体。\n答案：C", "支原体。"),
        ("<think>先想</think>答案：A\n解析：后写", "后写"),
        ('{"answer": "B", "explanation": "见教材"}', "见教材"),
        ("B。因为感染", "因为感染"),
        ("患者发热，故选B。", "患者发热，故选B。"),
        ("CT检查为首选。", "CT检查为首选。"),
        ("答案：B", None),
        ("答案: B 青霉素", None),
        ("B", None),
        ("", None),
        ("<think>没有想完", None),
    ],
)
def test_explanation(text, explanation):
    assert answer_parsing.split_explanation(text) == explanation


REAL = real_data.find("val.csv")


@pytest.mark.skipif(not REAL.exists(), reason="the real CMExam validation file is not on this machine")
def test_real_explanations_stems_and_options():
    import csv

    rows = list(csv.DictReader(REAL.open(encoding="utf-8-sig")))
    questions = []
    for i, row in enumerate(rows):
        options = {line.strip()[0]: line.strip()[1:].strip() for line in row["Options"].splitlines() if line.strip()}
        if row["Answer"]:
            gold = "".join(sorted(row["Answer"]))
            questions.append(Question(str(i), row["Question"], options, gold, row["Explanation"] or None))
    read = [(q, answer_parsing.parse(q.explanation, q)) for q in questions if q.explanation]
    told = [(q, answer) for q, answer in read if answer]
    assert len(told) > 0.8 * len(read)
    assert sum(q.answer == answer for q, answer in told) > 0.99 * len(told)
    # A stem is no answer, an option's text is.
    assert sum(answer_parsing.parse(q.stem, q) is not None for q in questions) <= 5
    named = [answer_parsing.parse(text, q) == letter for q in questions for letter, text in q.options.items()]
    assert sum(named) > 0.999 * len(named)
