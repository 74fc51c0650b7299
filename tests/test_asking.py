"""Asking: CMB's own prompts to the character, examples that leak nothing, own words, options in another order."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from kit import SHARED, question, questions

from cmexam_tune import prompts
from cmexam_tune.config import PromptConfig
from cmexam_tune.core.errors import ConfigError, DataError
from cmexam_tune.core.schema import Question, Turn
from cmexam_tune.prompts import order
from cmexam_tune.prompts.shots import Shots

GOLDEN = SHARED / "golden" / "scorers" / "cmb_prompts.json"
STYLES = {"answer_only": "cmb_answer_script", "cot": "cmb_cot_script"}
FORMATS = {
    "huatuo-chat": "huatuogpt", "bentsao": "bentsao", "doctorglm": "cmb_chatglm", "bianque-v2": "bianque2",
    "chatglm-med": "cmb_chatglm", "chatmed-consult": "chatmed", "medicalgpt": "medicalgpt",
    "chatglm3_6b": "cmb_chatglm", "baichuan-13b-chat": "baichuan",
}  # fmt: skip
needs_golden = pytest.mark.skipif(not GOLDEN.is_file(), reason="CMB's prompts are not here")


def golden() -> Any:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def as_question(item: dict[str, Any], number: int) -> Question:
    facets = {key: item[key] for key in ("exam_type", "exam_class", "exam_subject", "question_type")}
    options = {letter: text for letter, text in item["option"].items() if text is not None}
    answer, explanation = item["answer"], item.get("explanation")
    return Question(f"q:{number}", item["question"], options, answer, explanation, None, facets)


def examples(pool: list[Question], places: list[int], style: str) -> tuple[Turn, ...]:
    rendered = (prompts.render(pool[place], style) for place in places)
    return tuple(Turn(example.prompt, example.completion) for example in rendered)


@needs_golden
def test_prompts_of_cmbs_own_code() -> None:
    data, equal = golden(), 0
    pool = [as_question(item, 1000 + i) for i, item in enumerate(data["pool"])]
    for number, item in enumerate(data["items"]):
        asked = as_question(item["item"], number)
        for mode, style in STYLES.items():
            for kind in ("zero_shot", "three_shot"):
                wanted = item[kind][mode]
                if "prompt" not in wanted:
                    assert "F" not in asked.options and "NoneType" in wanted["crash"]
                    continue
                shots = examples(pool, wanted.get("shots", []), style)
                words = prompts.prompt(asked, style)
                assert prompts.wrap(words, "baichuan", examples=shots) == wanted["prompt"]
                dialogue = prompts.Dialogue(words, (), None, shots)
                assert dialogue.messages() == wanted.get("turns", dialogue.messages())
                equal += 1
    assert equal == 30 * 4 - 3 * 4


@needs_golden
@pytest.mark.parametrize(("theirs", "ours"), FORMATS.items())
def test_the_other_published_formats(theirs: str, ours: str) -> None:
    data = golden()
    pool = [as_question(item, 1000 + i) for i, item in enumerate(data["pool"])]
    item = data["items"][0]
    asked = prompts.prompt(as_question(item["item"], 0), "cmb_answer_script")
    shots = examples(pool, item["three_shot"]["answer_only"]["shots"], "cmb_answer_script")
    if theirs in data["other_formats_item_1"]:
        wanted = data["other_formats_item_1"][theirs]
        assert prompts.wrap(asked, ours) == wanted["zero_shot"]
        assert prompts.wrap(asked, ours, examples=shots) == wanted["three_shot"]
    clin = json.loads((SHARED / "data" / "cmb" / "CMB-Clin-qa.json").read_text(encoding="utf-8"))
    cases = {str(case["id"]): case for case in clin}
    for case in data["clin"]:
        for number, wanted in enumerate(case["prompts"].get(theirs, [])):
            name = f"{ours}_clin" if ours in ("baichuan", "medicalgpt") else ours
            first, later = prompts.template(name).case
            record, pairs = cases[case["case_id"]]["description"], cases[case["case_id"]]["QA_pairs"]
            words = [(later if i else first).format(record=record, **pair) for i, pair in enumerate(pairs)]
            turns = [Turn(*said) for said in zip(words, (pair["answer"] for pair in pairs[:number]), strict=False)]
            assert prompts.wrap(words[number], name, turns=turns) == wanted


@needs_golden
def test_candidates_are_cmbs_and_in_its_order() -> None:
    data = golden()
    pool = [as_question(item, 1000 + i) for i, item in enumerate(data["pool"])]
    for mode, style in STYLES.items():
        generator = random.Random(data["seeds"][mode])
        for number, item in enumerate(data["items"]):
            asked = as_question(item["item"], number)
            drawn = generator.sample(list(Shots(pool, [asked], style, 3).candidates(asked)), 3)
            assert [int(example.question_id[2:]) - 1000 for example in drawn] == item["three_shot"][mode]["shots"]


def cmb(number: int, name: str = "执业医师", **more: Any) -> Question:
    return question(number, kind="single", facets={"exam_type": "医师考试", "exam_class": name}, **more)


def test_a_class_shares_examples_that_depend_on_the_seed_only() -> None:
    pool = [cmb(i) for i in range(9)] + [cmb(i, "护士") for i in range(9, 12)]
    asked = [cmb(100), cmb(101), cmb(102, "护士")]
    first = Shots(pool, asked, "cmb_answer", 3, seed=1)
    assert first.of(asked[0]) == first.of(asked[1]) == Shots(pool, [], "cmb_answer", 3, seed=1).of(cmb(7000))
    assert first.of(asked[0]) != first.of(asked[2]) and len({e.question_id for e in first.of(asked[2])}) == 3
    assert any(Shots(pool, [], "cmb_answer", 3, seed=s).of(asked[0]) != first.of(asked[0]) for s in range(2, 6))
    with pytest.raises(DataError, match=r"prompt.shots=4: .* 3 questions of 医师考试/护士"):
        Shots(pool, asked, "cmb_answer", 4).of(asked[2])


def test_what_is_asked_is_never_an_example() -> None:
    pool = [cmb(i) for i in range(6)]
    moved = order.shown(pool[0], "rotate:1")
    asked = [Question("other:1", f" {pool[0].stem} 。", moved.options, None, facets=pool[0].facets), pool[1]]
    drawn = {example.question_id for example in Shots(pool, asked, "cmb_answer", 4).of(asked[0])}
    assert drawn == {"q:2", "q:3", "q:4", "q:5"}
    with pytest.raises(DataError, match="4 questions"):
        Shots(pool, asked, "cmb_answer", 5).of(asked[0])


def test_examples_need_what_the_style_writes_and_any_exam_will_do() -> None:
    pool = [question(0, explanation=None), question(1, answer=None), *map(question, range(2, 5))]
    for style in ("cmb_cot", "answer_explain", "answer"):
        shots = Shots(pool, [], style, 3).candidates(question(9))
        assert [e.question_id for e in shots] == (["q:0"] if style == "answer" else []) + ["q:2", "q:3", "q:4"]
    config = PromptConfig("answer", 512, 64, shots=3)
    asked = prompts.PromptBuilder(config, [question(9)], pool).request(question(9))
    dialogue = asked.dialogue()
    assert [turn.answer for turn in dialogue.examples] == ["答案: C"] * 3 and len(dialogue.messages()) == 7
    assert prompts.wrap(dialogue.prompt_text, "none", examples=dialogue.examples).count("问题: ") == 4


def test_own_words_replace_the_style_everywhere() -> None:
    config = PromptConfig("zeroshot", 512, 64, ask="{{题}} {question} {options}", write="选{letters}")
    for kind in ("single", "multiple", None):
        asked = question(1, letters="AB", answer="A", kind=kind)
        example = prompts.render(asked, prompts.resolve_style(config))
        assert example.prompt == f"{{题}} {asked.stem} A 选项A1的内容\nB 选项B1的内容" and example.completion == "选A"
    assert prompts.answer_head(asked, "AB", prompts.resolve_style(config)) == "选AB"
    assert prompts.resolve_style(PromptConfig("answer", 1, 1)) is prompts.resolve_style("1")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ask", "{questoin}", "ask: {questoin} is unknown, did you mean 'question'?"),
        ("ask", "{question!r}", "{question!r} is unknown"),
        ("ask", "{question.id}", "{question.id} is unknown"),
        ("ask", "{question:>9}", "unknown"),
        ("ask", "{} {question}", "unknown"),
        ("ask", "{question", "written twice"),
        ("ask", "{options}", "no {question}"),
        ("ask", "{question} {letters}", "{letters} is unknown"),
        ("write", "答案", "no {letters} or {text} or {explanation}"),
        ("write", "{{letters}}", "no {letters}"),
        ("option_order", "rotate", "rotate:1"),
        ("option_order", "shuffle:-1", "shuffle:7"),
    ],
)
def test_mistakes_in_the_section_prompt(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        PromptConfig("answer", 1, 1, **{key: value})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("how", [None, "rotate:0", "rotate:1", "rotate:7", "shuffle:1", "shuffle:2"])
def test_another_order_is_the_same_question(how: str | None) -> None:
    for asked in questions(40):
        seen = order.shown(asked, how)
        assert list(seen.options) == list(asked.options)
        assert sorted(seen.options.values()) == sorted(asked.options.values())
        for letters in itertools.chain.from_iterable(itertools.combinations(asked.options, n) for n in (1, 2)):
            back = order.restored("".join(letters), asked, how)
            assert back is not None and {asked.options[x] for x in back} == {seen.options[x] for x in letters}
        assert order.restored(seen.answer, asked, how) == asked.answer
        assert order.restored(None, asked, how) is None and order.restored("Z", asked, how) == "Z"
        if how in (None, "rotate:0"):
            assert seen == asked


def test_rotation_moves_by_one_and_shuffles_differ() -> None:
    asked = question(1, letters="ABCD")
    assert list(order.shown(asked, "rotate:1").options.values()) == [asked.options[x] for x in "DABC"]
    orders = {tuple(order.shown(question(i), "shuffle:3").options[x][2] for x in "ABCDE") for i in range(30)}
    assert len(orders) > 15


def test_every_position_gets_every_option_once() -> None:
    asked = question(1)
    for letter in asked.options:
        texts = {order.shown(asked, f"rotate:{k}").options[letter] for k in range(5)}
        assert texts == set(asked.options.values())


def test_an_unknown_style_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cmb_answer'"):
        prompts.resolve_style(PromptConfig("cmb_anser", 1, 1))


def test_a_prompt_file_becomes_part_of_the_config(tmp_path: Path) -> None:
    from cmexam_tune.config import dump_config, load_config

    (tmp_path / "own.yaml").write_text('ask: "题：{question}\\n{options}"\nwrite: "选{letters}"\n', encoding="utf-8")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: zeroshot_qwen.yaml\nprompt:\n  file: own.yaml\n", encoding="utf-8")
    config = load_config(recipe)
    assert (config.prompt.ask, config.prompt.write) == ("题：{question}\n{options}", "选{letters}")
    recipe.write_text(dump_config(config), encoding="utf-8")
    assert load_config(recipe) == config
    (tmp_path / "other.yaml").write_text('ask: "{question}？"\n', encoding="utf-8")
    changed = load_config(recipe, [f"prompt.file={tmp_path / 'other.yaml'}"]).prompt
    assert (changed.ask, changed.write) == ("{question}？", "选{letters}")
    for word in ("prompt.shots=-1", "prompt.shots=101", "generation.votes=0", "generation.votes=3"):
        with pytest.raises(ConfigError, match=word.partition("=")[0].partition(".")[2]):
            load_config(recipe, [word])
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file"):
        load_config(recipe, ["prompt.file=nope.yaml"])
    (tmp_path / "bad.yaml").write_text("asks: x\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="`ask` and `write`, found asks"):
        load_config(recipe, [f"prompt.file={tmp_path / 'bad.yaml'}"])
