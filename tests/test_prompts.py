"""Prompts: byte for byte the published protocols, right where the released scripts are not."""

import dataclasses
import re
import sys

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cmexam_tune import prompts
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Example, Question, Turn
from cmexam_tune.prompts import chat_template

OPTIONS = {"A": "0.5 mg/kg", "B": "1 mg/kg", "C": "肝", "D": "以上均非"}
ONE = Question("t:1", "成人首剂是", OPTIONS, "B", "说明书。")
TWO = dataclasses.replace(ONE, answer="BC")
CMB = dataclasses.replace(
    ONE, kind="single", facets={"exam_type": "医师考试", "exam_class": "执业医师", "exam_subject": "临床"}
)
ASKED = "问题: 成人首剂是, \n 选项: A 0.5 mg/kg\nB 1 mg/kg\nC 肝\nD 以上均非"
DOTTED = "成人首剂是\nA. 0.5 mg/kg\nB. 1 mg/kg\nC. 肝\nD. 以上均非"


@pytest.mark.parametrize(
    ("number", "name", "asked", "single", "several"),
    [
        ("1", "answer", ASKED, "答案: B", "答案: BC"),
        ("2", "answer_text", ASKED, "答案: B 1 mg/kg", "答案: BC 1 mg/kg；肝"),
        ("3", "explain", ASKED, "解释: 说明书。", "解释: 说明书。"),
        (
            "4",
            "answer_explain",
            ASKED,
            "答案: B 1 mg/kg. \n 解释:说明书。",
            "答案: BC 1 mg/kg；肝. \n 解释:说明书。",
        ),
        ("5", "open", "问题: 成人首剂是", "答案: 1 mg/kg", "答案: 1 mg/kg；肝"),
        (
            "6",
            "open_explain",
            "问题: 成人首剂是",
            "答案: 1 mg/kg. \n 解释: 说明书。",
            "答案: 1 mg/kg；肝. \n 解释: 说明书。",
        ),
    ],
)
def test_the_six_styles_by_id_and_name(number, name, asked, single, several):
    assert prompts.render(ONE, number) == Example("t:1", asked, single, name) == prompts.render(ONE, name)
    assert prompts.render(TWO, number).completion == several


@pytest.mark.parametrize(
    ("style", "asked", "completion"),
    [
        (
            "cmb_answer",
            "以下是中国医师考试中执业医师考试的一道单项选择题，不需要做任何分析和解释，直接输出答案选项。\n" + DOTTED,
            "答案是B。",
        ),
        (
            "cmb_cot",
            "以下是中国医师考试中执业医师考试的一道单项选择题，请分析每个选项，并最后给出答案。\n" + DOTTED,
            "说明书。所以答案是B。",
        ),
        ("huatuogpt2", "请回答下面选择题。\n[单项选择题]" + DOTTED, "答案是B。"),
    ],
)
def test_cmb(style, asked, completion):
    example = prompts.render(CMB, style)
    assert (example.prompt, example.completion) == (asked, completion)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "以下是中国医学考试的一道选择题，"),
        ({"kind": "multiple"}, "以下是中国医学考试的一道多项选择题，"),
        ({"facets": {"exam_type": "护理考试"}}, "以下是中国护理考试的一道选择题，"),
        ({"facets": {"exam_class": "护士"}}, "以下是中国护士考试的一道选择题，"),
        ({"kind": "single", "facets": {"question_type": "A1型题"}}, "以下是中国医学考试的一道A1型题，"),
    ],
)
def test_cmb_wording_where_the_exam_prints_less(changes, words):
    assert prompts.prompt(dataclasses.replace(ONE, **changes), "cmb_answer").startswith(words)


def test_zeroshot_wording_follows_the_printed_kind_and_never_the_answer():
    one = prompts.prompt(dataclasses.replace(TWO, kind="single"), "zeroshot")
    many = prompts.prompt(dataclasses.replace(ONE, kind="multiple"), "zeroshot")
    assert one.startswith("返回限制：只返回两行。") and one.endswith("只返回最准确的即可。")
    assert many == (
        "假设你是一位医疗行业专家，请回答下列问题。注意，该问题是多选题\n成人首剂是:\nA 0.5 mg/kg\nB 1 mg/kg\nC 肝\n"
        "D 以上均非\n注意，请给出两行，第一行只需要返回答案的英文选项，第二行进行简要的解释。"
        "输出格式限制为“答案：”，“解释：”"
    )
    for style in prompts.STYLES:
        assert prompts.prompt(ONE, style) == prompts.prompt(TWO, style)
    assert "多选" not in prompts.prompt(TWO, "zeroshot") and "单选" not in prompts.prompt(TWO, "zeroshot")


def test_what_cannot_be_rendered():
    bare = dataclasses.replace(ONE, explanation=None)
    skipped = set()
    for name in prompts.STYLES:
        try:
            assert "nan" not in prompts.render(bare, name).completion
        except prompts.Unrenderable as error:
            skipped.add(name)
            assert error.reason == "no explanation" and "t:1" in str(error)
    assert skipped == {"3", "4", "6", "explain", "answer_explain", "open_explain", "cmb_cot", "cmb_cot_script"}
    assert prompts.render(bare, "zeroshot").completion == "答案：B"
    assert prompts.render(bare, "zeroshot").completion == "答案：B"
    asked = prompts.render(dataclasses.replace(bare, answer=None), "4")
    assert (asked.prompt, asked.completion) == (ASKED, "")
    with pytest.raises(ConfigError, match="did you mean 'answer_explain'"):
        prompts.render(ONE, "answer_explian")


def test_text_with_braces_is_only_text():
    odd = dataclasses.replace(ONE, stem="{options} {0}", options={"A": "{text}", "B": "{"}, explanation="{q}")
    example = prompts.render(odd, "4")
    assert example.prompt == "问题: {options} {0}, \n 选项: A {text}\nB {"
    assert example.completion == "答案: B {. \n 解释:{q}"
    assert prompts.wrap("{system}{a}", "bentsao") == "### 问题:\n{system}{a}\n### 回答:\n"


def test_answer_head_starts_the_completion():
    heads = {}
    for name in prompts.STYLES:
        try:
            heads[name] = prompts.answer_head(CMB, "BC", name)
        except ConfigError as error:
            assert "cmb_answer" in str(error)
            continue
        completion = prompts.render(dataclasses.replace(CMB, answer="BC"), name).completion
        assert completion.startswith(heads[name]) and heads[name].endswith("BC")
    assert heads["1"] == heads["2"] == heads["4"] == "答案: BC" and heads["cmb_answer"] == "答案是BC"
    assert not {"3", "5", "6", "cmb_cot", "cmb_cot_script"} & set(heads)


@pytest.mark.parametrize("keep", [0, 1, 2, 7, 9, 10, 50])
def test_shorten_stem(keep):
    question = dataclasses.replace(ONE, stem="0123456789")
    stem = prompts.shorten_stem(question, keep).stem
    if keep >= 10:
        assert stem == "0123456789"
        return
    head, tail = stem.split("…")
    assert len(head) + len(tail) == keep and 0 <= len(tail) - len(head) <= 1
    assert "0123456789".startswith(head) and "0123456789".endswith(tail)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "Q"),
        ("cmexam_lora", "Q\n### 回答:\n"),
        ("bentsao", "### 问题:\nQ\n### 回答:\n"),
        ("huatuo", "下面是一个问题，运用医学知识来正确回答提问.\n### 问题:\nQ\n### 回答:\n"),
        ("baichuan", "<reserved_102>Q<reserved_103>"),
        ("baichuan2", "<reserved_106>Q<reserved_107>"),
        ("bianque2", "病人：Q\n医生："),
        ("chatglm", "Q"),
        ("chatglm2", "[Round 1]\n\n问：Q\n\n答："),
        ("cmb_chatglm", "问：Q\n答："),
        ("chatmed", "问：\nQ\n答：\n"),
        ("huatuogpt2", "<问>：Q\n<答>："),
        (
            "alpaca",
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nQ\n\n### Response:",
        ),
        (
            "medicalgpt",
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:Q\n\n### Response: ",
        ),
    ],
)
def test_wrappers(name, text):
    assert prompts.wrap("Q", name) == text


def test_every_wrapper_is_well_formed():
    assert len(prompts.TEMPLATES) >= 16
    said = [Turn("<q1>", "<a1>"), Turn("<q2>", "<a2>")]
    for name, template in prompts.TEMPLATES.items():
        assert prompts.wrap("Q", name).count("Q") == 1
        for examples, turns in ((said, []), ([], said), (said[:1], said[1:])):
            text = prompts.wrap("<q3>", name, turns=turns, examples=examples)
            assert re.findall("<[qa][0-9]>", text) == ["<q1>", "<a1>", "<q2>", "<a2>", "<q3>"], name
            assert all(stop.strip() in text for stop in template.stop)


def test_system_text():
    assert prompts.wrap("Q", "vicuna", "S") == "S USER: Q ASSISTANT:"
    assert prompts.wrap("Q", "vicuna", "") == "USER: Q ASSISTANT:"
    assert prompts.wrap("Q", "huatuogpt").startswith("一位用户和智能医疗大模型HuatuoGPT之间的对话。")
    with pytest.raises(ConfigError, match=r"'bentsao' has no system message.*vicuna"):
        prompts.wrap("Q", "bentsao", "S")
    with pytest.raises(ConfigError, match="did you mean 'alpaca'"):
        prompts.wrap("Q", "alpacca")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cmb_chatglm", "[Round 0]\n问：q\n答：a\n问：Q\n答："),
        ("chatglm2", "[Round 1]\n\n问：q\n\n答：a\n\n[Round 2]\n\n问：Q\n\n答："),
        ("bentsao", "### 问题:\nq\n### 回答:\na\n### 问题:\nQ\n### 回答:\n"),
        ("baichuan", "<reserved_102>q<reserved_103>a</s><reserved_102>Q<reserved_103>"),
        ("bianque2", "病人：q\n医生：a\n病人：Q\n医生："),
    ],
)
def test_fewshot_in_wrappers(name, text):
    assert prompts.wrap("Q", name, examples=[Turn("q", "a")]) == text


HEAD = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"


@pytest.mark.parametrize(
    ("name", "examples", "turns", "text"),
    [
        ("chatglm", 0, 1, "[Round 0]\n问：q0\n答：a0\n[Round 1]\n问：Q\n答："),
        ("chatglm", 1, 0, "[Round 0]\n问：q0\n答：a0\n[Round 1]\n问：Q\n答："),
        ("cmb_chatglm", 0, 1, "[Round 0]\n问：q0\n答：a0\n[Round 1]\n问：Q\n答："),
        ("cmb_chatglm", 2, 0, "[Round 0]\n问：q0\n答：a0\n[Round 1]\n问：q1\n答：a1\n问：Q\n答："),
        ("cmb_chatglm", 1, 1, "[Round 0]\n问：q0\n答：a0\n[Round 1]\n问：q1\n答：a1\n[Round 2]\n问：Q\n答："),
        ("none", 0, 1, "q0\na0\n\nQ"),
        ("medicalgpt", 0, 1, HEAD + "### Instruction:问题：q0\n答案：a0\n\n\n\nQ\n\n### Response: "),
        ("medicalgpt_clin", 0, 1, HEAD + "### Instruction:q0答案：a0\n\nQ\n\n### Response: "),
        ("qizhen", 1, 1, HEAD + "### Instruction:q0\na0\n\nq1\na1\n\nQ\n\n### Response: "),
        ("baichuan_clin", 0, 1, "<reserved_102>q0 <reserved_103>a0</s><reserved_102>Q <reserved_103>"),
    ],
)
def test_earlier_turns_and_examples(name, examples, turns, text):
    said = [Turn(f"q{i}", f"a{i}") for i in range(examples + turns)]
    assert prompts.wrap("Q", name, turns=said[examples:], examples=said[:examples]) == text


def test_what_looks_like_a_template_in_a_message_is_only_text():
    odd = "{{ messages }}{% if %}{# \\n \" ' {} {round0}"
    for name in prompts.TEMPLATES:
        assert odd in prompts.wrap(odd, name, turns=[Turn(odd, odd)])


ENDLESS = {
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}": "without end",
    "{% macro f() %}{% for b in range(90000) %}x{% endfor %}{% endmacro %}{% for a in range(90000) %}{{ f() }}"
    "{% endfor %}": "without end",
    "{{ 'x'.center(20000000) }}": "20,000,000 characters",
    "{{ 'x'.center(10**17) }}": "MemoryError",
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_end_is_ended(source):
    """Beside our own wrappers, which are safe, templates come with the models of others."""

    def traced(*_):
        return None

    template = chat_template.ChatTemplate("auto", ImmutableSandboxedEnvironment().from_string(source).render)
    before = sys.gettrace()
    sys.settrace(traced)
    try:
        with pytest.raises(ConfigError, match=ENDLESS[source]):
            template.render(prompts.Dialogue("x"))
        assert sys.gettrace() is traced, "a debugger goes on"
    finally:
        sys.settrace(before)


def test_a_long_conversation_is_rendered():
    turns = [Turn("q" * 100, "a")] * 2000
    assert prompts.wrap("Q", "vicuna", turns=turns).endswith("USER: Q ASSISTANT:")
