"""The prompt, once: how a question is asked and how its answer is to be written.

`render` is what preprocess, train and predict all use. Styles 1 to 6 are those of the CMExam repository and
`cmb_answer` and `cmb_cot` those of CMB-Exam, to the character, with three repairs of what the released scripts do:
the text of an answer with several letters is the texts of all of them joined by `；` (released: empty), an option's
text is kept whole (released: its last word), and a question that a style cannot render raises `Unrenderable`
(released: the model is taught to write `解释:nan`).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cmexam_tune.core.errors import ConfigError, DataError
from cmexam_tune.core.schema import Example, Question
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:  # evaluate and preprocess ask by no recipe: they start without pydantic
    from cmexam_tune.config import PromptConfig

TEXT_SEPARATOR = "；"
"""Between the option texts of an answer with several letters."""
NO_EXPLANATION = "no explanation"
"""Reason of `Unrenderable` for a style that writes explanations."""


class Unrenderable(DataError):
    """A style cannot render this question; `reason` is the short phrase to count it under."""

    def __init__(self, question: Question, style: str, reason: str) -> None:
        super().__init__(f"question {question.id!r} cannot be rendered in style {style!r}: {reason}.")
        self.reason = reason


@dataclass(frozen=True)
class Style:
    """Two texts with fields in braces.

    Fields of `ask`: question, options (`A text` lines), option_str (`A. text` lines), exam and question_type (CMB).
    Fields of `write`: letters, text (of the correct options), explanation.
    """

    name: str
    ask: str
    write: str
    ask_by_kind: tuple[tuple[str, str], ...] = ()
    """(kind, text that replaces `ask` for it)."""
    write_unexplained: str | None = None
    """What is to be written where a question has no explanation; None: it cannot be rendered."""
    shortest_option: int = 0
    """Options of fewer characters are not shown."""


_WITH_OPTIONS = "问题: {question}, \n 选项: {options}"
_OPEN = "问题: {question}"
_CMB = "以下是中国{exam}的一道{question_type}，"
_ZEROSHOT_END = (
    "注意，请给出两行，第一行只需要返回答案的英文选项，第二行进行简要的解释。输出格式限制为“答案：”，“解释：”"
)
_ZEROSHOT_SINGLE = (
    "返回限制：只返回两行。假设你是一位医疗行业专家，请回答下列问题，注意是单选题，只需要返回一个最合适的选项。\n"
    "{question}:\n{options}\n"
    "注意，结果只有两行，第一行只需要返回答案的英文选项(注意只需要返回一个最合适的答案)，第二行进行简要的解释。"
    "输出格式限制为：“答案：”，“解释：”。\n"
    "注意，题目是单选题，若有多个合适的答案，只返回最准确的即可。"
)
_EXPERT = "假设你是一位医疗行业专家，请回答下列问题。"

_NUMBERED = (
    Style("answer", _WITH_OPTIONS, "答案: {letters}"),
    Style("answer_text", _WITH_OPTIONS, "答案: {letters} {text}"),
    Style("explain", _WITH_OPTIONS, "解释: {explanation}"),
    Style("answer_explain", _WITH_OPTIONS, "答案: {letters} {text}. \n 解释:{explanation}"),
    Style("open", _OPEN, "答案: {text}"),
    Style("open_explain", _OPEN, "答案: {text}. \n 解释: {explanation}"),
)
_CMB_ANSWER = Style(
    "cmb_answer", _CMB + "不需要做任何分析和解释，直接输出答案选项。\n{question}\n{option_str}", "答案是{letters}。"
)
_CMB_COT = Style(
    "cmb_cot", _CMB + "请分析每个选项，并最后给出答案。\n{question}\n{option_str}", "{explanation}所以答案是{letters}。"
)
_NAMED = (
    _CMB_ANSWER,
    _CMB_COT,
    # The released code loses options of one character, so that `C. 苯` is not among the choices.
    dataclasses.replace(_CMB_ANSWER, name="cmb_answer_script", shortest_option=2),
    dataclasses.replace(_CMB_COT, name="cmb_cot_script", shortest_option=2),
    # The released script picks the wording by the length of the gold answer. Here only what the exam paper prints
    # (`kind`) decides; a question of unknown kind gets the wording in `ask`, which names neither.
    Style(
        "zeroshot",
        _EXPERT + "注意，该问题可能有一个或多个正确答案\n{question}:\n{options}\n" + _ZEROSHOT_END,
        "答案：{letters}\n解释：{explanation}",
        ask_by_kind=(
            ("multiple", _EXPERT + "注意，该问题是多选题\n{question}:\n{options}\n" + _ZEROSHOT_END),
            ("single", _ZEROSHOT_SINGLE),
        ),
        write_unexplained="答案：{letters}",
    ),
    # HuatuoGPT-II's own evaluation publishes no completion; CMB's is used.
    Style("huatuogpt2", "请回答下面选择题。\n[{question_type}]{question}\n{option_str}", "答案是{letters}。"),
)

STYLES: dict[str, Style] = {
    **{style.name: style for style in _NUMBERED + _NAMED},
    **{str(number): style for number, style in enumerate(_NUMBERED, 1)},
}
"""Name -> style; the original repository's ids "1" to "6" are keys too."""


def resolve_style(source: "str | Style | PromptConfig") -> Style:
    """Return the style that `source` stands for.

    Args:
        source: a name or id; a prompt file (`*.yaml`) with own words; a configuration, which may bring own words for a
            part of its style; a style is returned as it is.

    Raises:
        ConfigError: there is none of that name; the message suggests the nearest one.
        UserError: a prompt file that cannot be used.
    """
    if isinstance(source, Style):
        return source
    if isinstance(source, str):
        return _from_file(Path(source)) if Path(source).suffix in (".yaml", ".yml") else _named(source)
    style = _named(source.style)
    if source.ask is not None:
        style = dataclasses.replace(style, ask=source.ask, ask_by_kind=())
    return style if source.write is None else dataclasses.replace(style, write=source.write, write_unexplained=None)


def _named(name: str) -> Style:
    if name not in STYLES:
        raise ConfigError(f"prompt style {name!r} is unknown{suggest(name, STYLES)}; known: {', '.join(STYLES)}.")
    return STYLES[name]


def _from_file(path: Path) -> Style:
    """Return a prompt file's style, whose name is the file's."""
    # `preprocess` names files <stem>.<style>.jsonl, and <stem>.questions.jsonl is taken.
    if path.stem == "questions":
        raise ConfigError(
            f"{path}: `questions` is what the questions file is called. Give the prompt file another name."
        )
    from cmexam_tune.config import PromptConfig, read_prompt_file

    problems = Problems()
    if (config := build(PromptConfig, read_prompt_file(path), "", problems)) is None:
        raise ConfigError(f"{path}: {'; '.join(problems)}.")
    return dataclasses.replace(resolve_style(config), name=path.stem)


def prompt(question: Question, style: str | Style) -> str:
    """Return what the model is asked, whether or not the completion can be rendered; the answer is never read.

    Raises:
        ConfigError: unknown style.
    """
    chosen = resolve_style(style)
    # By what the exam prints and never by the answer: a prompt that depends on the answer gives it away.
    ask = dict(chosen.ask_by_kind).get(question.kind or "", chosen.ask)
    options = [(letter, text) for letter, text in question.options.items() if len(text) >= chosen.shortest_option]
    # `format` puts the values in as they are: braces in a question are no fields.
    return ask.format(
        question=question.stem,
        options="\n".join(f"{letter} {text}" for letter, text in options),
        option_str="\n".join(f"{letter}. {text}" for letter, text in options),
        exam=_exam(question),
        question_type=_question_type(question),
    )


def _exam(question: Question) -> str:
    """Return CMB's `{exam_type}中{exam_class}考试`; a question without these facets is of some `医学考试`."""
    kind, name = question.facets.get("exam_type"), question.facets.get("exam_class")
    if kind and name:
        return f"{kind}中{name}考试"
    return f"{name}考试" if name else kind or "医学考试"


def _question_type(question: Question) -> str:
    printed = question.facets.get("question_type")
    return printed or {"single": "单项选择题", "multiple": "多项选择题"}.get(question.kind or "", "选择题")


def render(question: Question, style: str | Style) -> Example:
    """Return what the model reads and should write; a question without a published answer has completion "".

    Raises:
        Unrenderable: the style writes an explanation and this answered question has none.
        ConfigError: unknown style.
    """
    chosen = resolve_style(style)
    asked = prompt(question, chosen)
    if question.answer is None:
        return Example(question.id, asked, "", chosen.name)
    write = chosen.write
    if "{explanation}" in write and not question.explanation:
        if chosen.write_unexplained is None:
            raise Unrenderable(question, chosen.name, NO_EXPLANATION)
        write = chosen.write_unexplained
    texts = TEXT_SEPARATOR.join(question.options[letter] for letter in question.answer)
    completion = write.format(letters=question.answer, text=texts, explanation=question.explanation)
    return Example(question.id, asked, completion, chosen.name)


def answer_head(question: Question, letters: str, style: str | Style) -> str:
    """Return how a completion begins that answers with `letters`, up to and including them: `答案: AC`.

    Raises:
        ConfigError: the style's completion does not start with the letters.
    """
    chosen = resolve_style(style)
    before, field, _ = chosen.write.partition("{letters}")
    if not field or "{" in before:
        possible = ", ".join(
            dict.fromkeys(s.name for s in STYLES.values() if s.write.find("{") == s.write.find("{letters}"))
        )
        raise ConfigError(
            f"prompt.style: {chosen.name!r} does not start with the answer's letters. Use one of {possible}."
        )
    return before + letters


def shorten_stem(question: Question, keep: int) -> Question:
    """Return the question with `keep` characters of its stem, head and tail alike, and `…` for the middle.

    The tail is the longer half: it holds what is asked. A stem of at most `keep` characters stays as it is.
    """
    if len(question.stem) <= keep:
        return question
    head = max(keep, 0) // 2
    tail = max(keep, 0) - head
    stem = question.stem[:head] + "…" + (question.stem[-tail:] if tail else "")
    return dataclasses.replace(question, stem=stem)
