"""Rewards: the strict reader by hand-made cases and on 900 difficult outputs, each term, and their sum."""

import dataclasses
import json

import pytest
from kit import SHARED

from cmexam_tune import prompts, rewards
from cmexam_tune.config import RewardConfig
from cmexam_tune.core import jsonl
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.rewards import terms
from cmexam_tune.rewards.terms import JudgedOutput, Output

GOLDEN = SHARED / "golden" / "scorers"
QUESTION = Question("q", "哪些正确？", {"A": "甲", "B": "CT检查", "C": "丙", "D": "丁", "E": "戊"}, "AC")
SINGLE = dataclasses.replace(QUESTION, answer="B")

STRICT = {
    "答案: C": "C",
    "答案：AC": "AC",
    "答案是：AC": "AC",
    "答案：A、C。": "AC",
    "答案: AC 甲；丙. ": "AC",
    "因为如此。所以答案是AC。": "AC",
    "因为如此。\n\n最终答案：B\n\n": "B",
    "<think>答案：A，不对。</think>正确答案为AC": "AC",
    "AC": None,  # no statement
    "故选C": None,
    "答案: CA": None,  # not sorted
    "答案: AA": None,  # not distinct
    "答案: AF": None,  # not on offer
    "答案: A或B": None,  # two answers
    "答案：A\n答案：C": None,
    "答案：A。The answer is C": None,
    "答案：\nC": None,  # not one line
    "答案：C。因为如此": None,  # goes on
    "答案：C\n因为如此": None,  # not at the end
    "答案：B超": None,  # a word
    "答案：c": None,
    "**答案：C**": None,
    "<think>答案：C": None,  # never stopped thinking
    "": None,
}


@pytest.mark.parametrize(("text", "letters"), STRICT.items())
def test_strict_reading(text: str, letters: str | None) -> None:
    assert rewards.read_strictly(text, QUESTION) == letters


def test_an_answer_that_comes_first_counts_where_the_style_has_it_first() -> None:
    text = "答案: AC 甲；丙. \n 解释:因为如此。"
    assert rewards.read_strictly(text, QUESTION) is None
    assert rewards.statement(text, QUESTION, "start") == ("AC", "因为如此。")
    assert rewards.read_strictly("因为如此。所以答案是AC。", QUESTION, "start") is None


@pytest.mark.parametrize("style", {style.name: style for style in prompts.STYLES.values()}.values())
def test_what_a_style_writes_can_be_read(style: prompts.Style) -> None:
    """A style's own completion states its letters, and what is left is its explanation: rejection sampling loses
    nothing."""
    question = dataclasses.replace(QUESTION, explanation="甲对丙对。")
    completion = prompts.render(question, style).completion
    stated = rewards.statement(completion, question, rewards.answer_place(style))
    if "{letters}" not in style.write:
        assert stated is None
    else:
        assert stated == ("AC", question.explanation if "{explanation}" in style.write else "")
        assert prompts.render(dataclasses.replace(question, explanation=stated.explanation), style).completion == (
            completion if stated.explanation else prompts.render(question, style).completion
        )


CUES = ("答案:", "答案：", "答案 ：", "答案： ", "答案: ", "答案是", "答案为", "答案是：")


def by_hand(text: str, question: Question) -> str | None:
    """Read strictly with string methods only: the same rule, written down another way."""
    if "<think>" in text and "</think>" not in text:
        return None
    text = text.split("</think>")[-1].strip()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    announced = sum(text.count(word) for word in ("答案是", "答案为", "答案:", "答案：", "答案 ：", "答案选", "答案应"))
    announced += text.lower().count("answer is") + text.lower().count("answer:")
    if announced != 1 or not lines:
        return None
    for cue in sorted(CUES, key=len, reverse=True):
        _, found, rest = lines[-1].partition(cue)
        if not found:
            continue
        for letters in {rest, rest.rstrip("。."), rest.rstrip("。. ")}:
            named = [part for part in letters.replace("、", "").replace(",", "").replace("，", "").strip()]
            if named and named == sorted({*named} & {*question.options}):
                return "".join(named)
        for count in range(1, len(question.options) + 1):
            options = "；".join(question.options.get(letter, "?") for letter in rest[:count])
            named = [*rest[:count]]
            if named == sorted({*named} & {*question.options}) and rest[count:].strip(" 。.") == options.strip(" 。."):
                return "".join(named)
        return None
    return None


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the difficult outputs are not on this machine")
def test_difficult_outputs() -> None:
    questions = {question.id: question for question in jsonl.read(GOLDEN / "questions.jsonl", Question)}
    read = 0
    outputs = [
        json.loads(line)
        for number in (1, 2, 3)
        for line in (GOLDEN / f"outputs{number}.jsonl").read_text("utf-8").splitlines()
    ]
    assert len(outputs) == 900
    for output in outputs:
        question, text = questions[output["question_id"]], output["text"]
        strict = rewards.read_strictly(text, question)
        assert strict == by_hand(text, question), text[-200:]
        # Whatever is beyond doubt, the lenient reader of `evaluate` reads the same.
        assert strict is None or strict == answer_parsing.parse(text, question), text[-200:]
        earned = rewards.Reward(RewardConfig()).of(question, [text])[0]
        right, read = strict == question.answer, read + (strict is not None)
        assert earned == pytest.approx(1.0) if right else earned <= 0.05 + 0.475
        assert strict is not None or earned == 0
    assert 150 < read < 450


def value(term: terms.Term, question: Question, text: str, **length: int) -> float:
    return term(JudgedOutput.of(question, Output(text, **length)))


def test_partial_credit_is_for_several_right_letters_only() -> None:
    assert value(terms.partial, QUESTION, "答案: A") == 0.5
    assert value(terms.partial, QUESTION, "答案: ABCDE") == 0.4
    assert value(terms.partial, QUESTION, "答案: AC") == 0  # that is `exact`
    assert value(terms.partial, SINGLE, "答案: ABCDE") == 0  # a guess of everything
    assert value(terms.partial, QUESTION, "答案: A或C") == 0


def test_partial_credit_fades() -> None:
    reward = rewards.Reward(RewardConfig(partial=1.0, partial_steps=10, format=0.0))
    assert [reward.of(QUESTION, ["答案: A"], step)[0] for step in (0, 5, 10, 99)] == [0.5, 0.25, 0, 0]
    assert rewards.Reward(RewardConfig(partial=1.0, partial_steps=None, format=0.0)).of(QUESTION, ["答案: A"], 999) == [
        0.5
    ]


def test_overlong() -> None:
    lengths = {100: 0, 320: 0, 352: -0.5, 384: -1, 500: -1}
    assert {n: value(terms.overlong, QUESTION, "x", tokens=n, limit=384) for n in lengths} == lengths
    assert value(terms.overlong, QUESTION, "x", tokens=4, limit=8) == 0  # a short limit: half of it is free
    assert value(terms.overlong, QUESTION, "x", tokens=8, limit=8) == -1
    assert value(terms.overlong, QUESTION, "x") == 0


def test_language_leaves_out_what_the_exam_writes() -> None:
    assert value(terms.language, QUESTION, "应当做CT检查。\n答案：B") == 1
    assert value(terms.language, QUESTION, "the answer 是") == pytest.approx(1 / 10)
    assert value(terms.language, QUESTION, "答案：B 123") == 1


def test_an_explanation_must_not_argue_for_other_letters() -> None:
    assert value(terms.argues, QUESTION, "综合分析，故选B。\n答案：AC") == -1
    assert value(terms.argues, QUESTION, "综合分析，故选AC。\n答案：AC") == 0
    assert value(terms.argues, QUESTION, "分析。\n答案：AC") == 0
    assert value(terms.argues, QUESTION, "故选B") == 0  # nothing is answered


def test_each_term_has_a_weight_and_its_source() -> None:
    weights = {field.name for field in dataclasses.fields(RewardConfig)} - {"partial_steps"}
    assert weights == set(rewards.TERMS)
    assert all(term.__doc__ for term in rewards.TERMS.values())


def test_the_sum() -> None:
    reward = rewards.Reward(RewardConfig())
    texts = ["答案: AC", "答案: B", "AC", Output("答案: AC", tokens=384, limit=384)]
    assert reward.of(QUESTION, texts) == pytest.approx([1.0, 0.05, 0.0, 0.8])
    assert "exact" in rewards.Reward(RewardConfig(exact=0.0)).weights, "it decides which groups teach anything"
