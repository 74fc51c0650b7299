"""Reading an answer from what a model wrote: one pure function, and the rules it tries in order.

The rules go from what can hardly be meant otherwise to what takes more reading; the first that applies decides, also
where it decides that nothing can be read. Precision comes first: an output that a careful reader could take for two
answers is unreadable. benchmarks/answers.py measures the rules on a labelled table.

A new phrase goes into the cue that it belongs to (`_ANSWER`, `_CHOOSE`, `_RIGHT`, `_WRONG`, `_WEAK`), a new kind of
statement is a rule in `RULES`. The readers of other published scripts are in `scorers/`.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cmexam_tune.core.schema import Question, letters

THINK, THOUGHT = "<think>", "</think>"
"""What a reasoning model puts around its thinking."""
HALF = "\ufffd"
"""What a tokenizer gives for a part of a character."""
# Keys under which models put the answer and its explanation where they write JSON, asked for or not.
ANSWER_KEYS = ("answer", "答案", "正确答案", "最终答案", "选项", "option", "choice", "final_answer")
EXPLANATION_KEYS = ("explanation", "解释", "解析", "分析", "理由", "reason", "rationale")

# Full-width ASCII (U+FF01 to U+FF5E), the ideographic space and the no-break space.
_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " ", 0x00A0: " "}
_MARKUP = re.compile("</?[a-z]+>|[*`#\"'“”‘’「」$]|__")
_BOXED = re.compile(r"\\boxed\s*\{(?:\\text\s*\{)?([^{}]*)\}\}?")
# The lookbehind keeps out the ends of words: the T of CT is no option letter.
_LABEL = re.compile(r"(?<![A-Za-z0-9])([A-Z])[\s.、:,)(]*")
_BETWEEN_ITEMS = re.compile(r"[\s,、;.。()-]*(?:选项)?")
_BLANK = re.compile(r"[\s(]{4,}")
_JSON = re.compile(r"\{[^{}]*\}|\[[^\[\]{}]*\]")
# 故选C, 故本题选 A、C, 因此答案为 B, 所以正确答案是 D项; what stands between the cue and the letters is short.
_CONCLUSION = re.compile(
    r"(?:故|因此|所以|综上)[^。；;\n]{0,8}?(?:选择?|答案(?:是|为|应为|选)?)[:：\s]{0,2}([A-J](?:[、,，和及\s]{0,2}[A-J]){0,9})(?![A-Za-z])"
)


def final_part(text: str) -> str:
    """Return what follows a reasoning model's thinking; nothing where it never stopped thinking."""
    # Some templates open the thinking within the prompt: the output then holds only its end.
    if THOUGHT in text:
        return text.rpartition(THOUGHT)[2]
    return "" if still_thinking(text) else text


def still_thinking(text: str) -> bool:
    """Return whether a reasoning model's output ends within its thinking."""
    return THINK in text and THOUGHT not in text


def json_field(text: str, keys: tuple[str, ...]) -> object:
    """Return the value of the first of `keys` that a JSON object inside the text has, or a JSON list of letters.

    None where there is neither; a key whose value is null has the value "".
    """
    # Flat objects and lists only: no regular expression balances brackets, and models write answers flat.
    for match in _JSON.finditer(text):
        try:
            value = json.loads(match[0])
        except (ValueError, RecursionError):  # a number of 5,000 digits is JSON, and a ValueError
            continue
        if isinstance(value, dict):
            named = {str(key).strip().lower(): item for key, item in value.items()}
            if values := [named[key] for key in keys if key in named]:
                return values[0] if values[0] is not None else ""
        # A list without a key can only be the answer: ["A", "C"].
        elif value and keys is ANSWER_KEYS and all(isinstance(item, str) and len(item) == 1 for item in value):
            return value
    return None


def plain(text: str) -> str:
    """Return the text with half-width letters and brackets, without markup; an answer in a box or JSON says so.

    Long blanks and rows of brackets are shortened, so that no rule has to walk over them again and again.
    """
    field = json_field(text, ANSWER_KEYS)
    if field is not None:
        text = "答案:" + ("、".join(map(str, field)) if isinstance(field, list) else str(field))
    text = _BOXED.sub(r"答案:\1\n", text.translate(_HALF_WIDTH))
    text = _MARKUP.sub("", text).translate({ord("【"): "(", ord("】"): ")", ord("["): "(", ord("]"): ")"})
    return _BLANK.sub(lambda match: _shortened(match[0]), text)


def _shortened(blank: str) -> str:
    """Return the shortest blank with the same meaning: within a line, a new line or a new paragraph; then a bracket."""
    return ("\n" * min(blank.count("\n"), 2) or "  ") + "(" * ("(" in blank)


def drop_option_texts(text: str, options: Mapping[str, str]) -> tuple[str, bool]:
    """Return the text with "B 头孢曲松" cut to "B ", and whether every option is named so: a list, no answer."""
    pieces, start, named = [], 0, set()
    for match in _LABEL.finditer(text):
        words = options.get(match[1])
        if words and match.start() >= start and text.startswith(words, match.end()):
            pieces += [text[start : match.end(1)], " "]
            start = match.end() + len(words)
            start += text.startswith(")", start)
            named.add(match[1])
    return "".join([*pieces, text[start:]]), len(named) == len(options)


def drop_cut_list(text: str, options: Mapping[str, str]) -> str:
    """Return the text without a list of options at its end that breaks off inside an option.

    A model that recites the options until it reaches its token limit names letters, but which letter comes last only
    shows where the limit fell. None of them counts as an answer: not those before the break, and not a bare last
    letter where the break fell right behind it ("A. 睾丸<newline>B.").

    A list is a run of options in the order of their letters, each with its letter and its whole text, the last with its
    letter and the beginning of its text. A list that opens a line does not continue what an earlier line says:
    "答案：A. 睾丸<newline>B. 附" still answers A. A list whose last text is whole stays: it may be an answer of several
    letters.
    """
    text = text.rstrip()
    start, end, last, opens_line = 0, 0, "", False
    for match in _LABEL.finditer(text):
        letter, option = match[1], options.get(match[1])
        if not option or match.start() < end:
            continue
        named = text.startswith(option, match.end())
        # The beginning of an option's text only breaks off a list if it is the end of the whole text as well.
        if not named and not (end and option.startswith(text[match.end() : match.end() + len(option)])):
            continue
        goes_on = end > 0 and _BETWEEN_ITEMS.fullmatch(text, end, match.start()) is not None
        new_line = _BETWEEN_ITEMS.fullmatch(text, text.rfind("\n", 0, match.start()) + 1, match.start()) is not None
        if not goes_on or letter <= last or (new_line and not opens_line):
            start, opens_line = match.start(), new_line
        if not named:
            return text[:start] if goes_on else text
        end, last = match.end() + len(option), letter
    return text


def letter_sets(question: Question, answer_sets: Literal["kind", "single", "multiple"]) -> list[str]:
    """Return the answers that are allowed: single letters, or all sorted subsets, smaller ones first.

    Args:
        question: its options, and what the exam paper prints about the number of answers.
        answer_sets: `generation.answer_sets`; `kind` goes by the exam paper, one letter where it says nothing.
    """
    may_be_multiple = answer_sets == "multiple" or (answer_sets == "kind" and question.kind == "multiple")
    max_letters = len(question.options) if may_be_multiple else 1
    offered, sizes = sorted(question.options), range(1, max_letters + 1)
    return ["".join(subset) for size in sizes for subset in itertools.combinations(offered, size)]


# Letters, one or several with what people write between them; not a part of a word such as CT, HBsAg or B12. Their
# number is bounded, and `plain` bounds blanks: otherwise a rule that starts at each of n letters would read n on.
_JOIN = r"[^\S\n]*(?:(?:[、,;/+&和与及]|以及|and)[^\S\n]*(?:选项)?\(?)?"
_LETTERS = rf"[A-Z](?:{_JOIN}[A-Z]){{0,30}}|[a-j](?:[、,;/+&和与及]?[a-j]){{0,30}}"
_GROUP = rf"(?:选项)?[\s(]*(?<![A-Za-z0-9])({_LETTERS})(?![A-Za-z0-9])\)?"
# A Chinese word right after the letters must be one that can follow an answer: "B超", "A型", "C反应蛋白" are words.
_AFTER = (
    r"(?=$|[^一-鿿]|选项|[两三四五各]?项|是|为|均|都|正确|错|对|的|吧|而|不|因"
    r"|由于|理由|其|最|符合|这|或|还是|吗|呢|了|之一)"
)
# Before a cue: "不选A", "排除B" and "没有考虑C" state no answer.
_NEGATED = re.compile(
    r"(?:[不没别勿未非]|排除|除外?|无法)(?:能|应该?|该|要|可以?|宜|会|可能|考虑|再|选择?|是|为|能是)*$"
)
# Behind letters: "A或者", "A吗", "A之一" leave the answer open.
_DOUBTED = re.compile(r"\s*(?:选项|项)?\s*(?:或者?|还是|吗|呢|之一|\?)")
# Before a cue: "若选A, ...", "也可选A" weigh an answer without giving it.
_IF = re.compile(r"(?:如果?|若|假如|倘若)[^。;\n]{0,20}$|[既也又均都]可以?$")
_JUDGES = re.compile(r"\s*(?:[对错]|不)")
_ENDS = re.compile(r"\s*(?:$|[^\sA-Za-z一-鿿])")
# Before a weak cue: "可能是B" is a guess.
_MAY_BE = re.compile(r"(?:或许|也许|可能)(?:应该)?(?:是|为|选)?$")

# "解答:" and "问答:" are headings, not "答:".
_ANSWER = (
    r"(?:答\s*案\s*\)?|(?<![解问])答(?=\s*:)|结论(?=\s*:)|正解)"
    r"\s*(?:应该|应当|应|可能|就|只能)?\s*(?:是|为|选择?|包括|有)?[\s:,]*"
)
_ENGLISH = (
    r"(?i:\b(?:answer|option|choice)s?\b(?: to this question)?\s*(?:is|are|(?:should|must|would) be|:|=)?"
    r"|\b(?:choose|select|pick)\b)[\s:]*(?:(?i:option)\s*)?"
)
# "选项" is a noun: what follows it is talked about, not chosen.
_CHOOSE = r"选(?:择|定)?(?!项)\s*:?\s*"
_IS = r"的?(?:选项|选择|说法|叙述|描述|一项)?(?:应该?|就)?(?:是|为|有|包括|:)[\s:]*"
_RIGHT = rf"(?:正确|合适|恰当|适当|准确|合理|最佳|符合题意|最符合|题意){_IS}"
_WRONG = rf"(?:错误|不正确|不对|不恰当|不符合|不属于|不包括|有误){_IS}"
_WEAK = r"(?:是|为|考虑)\s*:?\s*"

_FILLER = r"(?:选项|[两三四五]项|项|的|说法|均|都|也|才|是|为|最|只有|[\s:])*"
# 对 is also the beginning of words (对于, 对照, 对比, 对症, 对应, 对抗, 对着), which judge nothing.
_JUDGED = re.compile(
    rf"{_GROUP}{_FILLER}"
    r"(?:(?P<right>正确|对(?![于照比症应抗着])|符合题意|符合要求|佳|首选|当选|合[适理]|恰当|√)|(?P<wrong>错|不正确|不对|不符合|不合[适理]|不恰当|有误|×))"
)
# Two views of one thing: a stem that surely asks for the wrong option, and one that may. Medical terms with a negative
# in them (不良反应, 不全, 不孕) ask for nothing.
_ASKS_WRONG = re.compile(
    "错误|不正确|不对|不属于|不包括|不符合|不恰当|不是|不应|不会|不宜|除外|除.{0,12}外|例外|有误|无关|禁忌"
)
_MAY_ASK_WRONG = re.compile("不(?!良|足|全|同|稳|孕|育|适)|[非除无未错误]|最小|最低|例外")
_CLAUSES = re.compile("[。，,;；?？]")
# "A为本题答案": the letters come before the cue.
_MARKED = re.compile(
    rf"{_GROUP}(?:对|错误?|正确)?[,]?\s*(?:故|因此)?(?:为|是)?(?:本题|该题)的?(?:正确|最佳)?(?:答案|选项)"
)
_REFUSAL = re.compile(
    r"抱歉|对不起|无法(?:判断|回答|作答|确定|给出|选择)|不能(?:回答|确定|判断)|不知道|不确定|不详|没有正确"
    r"|人工智能|语言模型|(?i:cannot|can't|unable to|as an ai)"
)
_LETTER_FIRST = r"[(（\[【*]*[A-Za-zＡ-Ｚ](?![A-Za-z0-9一-鿿])[^。，,\n]*"
_FIRST_SENTENCE = re.compile(
    rf"^\s*(?:[【\[*(（]*(?:正确|参考|标准|最终)?答\s*案[^。\n]*|{_LETTER_FIRST})(?:[。，,\n]|$)"
)
_MARKER = re.compile(
    r"(?:答案)?(?:解释|解析|分析|理由|explanation)(?:\s*[】\]）)])?\s*[:：]|[【\[](?:解释|解析|分析)[】\]]", re.I
)


@dataclass(frozen=True)
class _Output:
    """An output with what the rules need to know of its question."""

    text: str
    """Normalised, option texts after their own letter removed."""
    words: str
    """Normalised, complete."""
    lists_options: bool
    options: dict[str, str]
    stem: str

    @property
    def asks_wrong(self) -> bool:
        """Whether the question asks for what is wrong."""
        return bool(_ASKS_WRONG.search(self.stem))

    def value(self, group: str) -> str | None:
        """Return the letters of a group, None where one is not offered or the case is mixed."""
        named = letters("".join(re.findall("[A-Za-z]", group.replace("and", ""))))
        return named if named and all(letter in self.options for letter in named) else None


_HEAD, _TAIL = 10_000, 20_000
"""Of an output that is longer than both together, these characters are read: answers stand at an end."""

_Decision = str | None | Literal["next"]
"""The answer, None for unreadable, or "next" where a rule has nothing to say."""


def parse(text: str, question: Question) -> str | None:
    """Return the letters that an output answers with, sorted and distinct, or None where it cannot be read.

    Args:
        text: What the model wrote.
        question: Only letters that it offers are answers; its option texts are read too, and its stem tells whether
            "A 错误" speaks for or against A.
    """
    text = final_part(text)
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    options = {letter: plain(option).strip() for letter, option in question.options.items()}
    words = drop_cut_list(plain(text.rstrip(HALF)), options)
    short, lists_options = drop_option_texts(words, options)
    output = _Output(short, words, lists_options, options, question.stem)
    for rule in RULES:
        decision = rule(output)
        if decision != "next":
            return decision
    return None


def _is_option(output: _Output) -> _Decision:
    """Take an output that is one option's text: "B超" and "HBsAg" are no letters."""
    core = output.words.strip(" \n。.,、;:")
    matching = [letter for letter, option in output.options.items() if option and option == core]
    return matching[0] if len(matching) == 1 else "next"


def _bare(output: _Output) -> _Decision:
    """Take an output of nothing but letters: "B", "(D)", "A、C", "选项E", "A 咳嗽<newline>C 胸痛"."""
    one_line = re.sub(r"\s*\n\s*", " ", output.text.strip())
    match = re.fullmatch(rf"(?:1[.、]|选项)?[\s:(]*{_GROUP}[\s.。,、:;)]*", one_line)
    if not match or output.lists_options:
        return "next"
    return output.value(match[1])


def _answer_first(output: _Output) -> _Decision:
    """Take "答案: B. <newline> 解释: ..." by its first letters: so the prompts ask, the rest is comment."""
    head = re.match(rf"[\s(]*(?:正确|参考|标准|最终)?(?:{_ANSWER}|{_ENGLISH}){_GROUP}{_AFTER}", output.text)
    if not head or _DOUBTED.match(output.text, head.end()):
        return "next"
    marker = _MARKER.search(output.text, head.end())
    return output.value(head[1]) if marker and marker.start() - head.end() <= 60 else "next"


def _stated(output: _Output) -> _Decision:
    """Take the last statement of an answer: a chain of thought changes its mind, and ends with what it means."""
    cues = [_ANSWER, _ENGLISH, _CHOOSE, _WRONG if output.asks_wrong else _RIGHT]
    statements = list(_statements(output, rf"(?:{'|'.join(cues)})"))
    marked = [(match.start(), output.value(match[1]) or "") for match in _MARKED.finditer(output.text)]
    # Options marked one by one ("A为本题答案 ... C为本题答案") are one answer of several letters.
    marked_letters = letters("".join(group for _, group in marked))
    statements += [(at, marked_letters) for at, _ in marked]
    if not output.lists_options:
        statements += list(_statements(output, r"(?m:^)\s*(?:选项)?", r"\s*[.。]?\s*(?m:$)"))
    return max(statements)[1] or None if statements else "next"


def _statements(output: _Output, cue: str, after: str = "") -> Iterator[tuple[int, str]]:
    """Yield (position, letters) of letters behind a cue, "" where they are in doubt or not offered."""
    for match in re.finditer(rf"(?P<cue>{cue}){_GROUP}{_AFTER}{after}", output.text):
        if _NEGATED.search(output.text, max(0, match.start() - 8), match.start()):
            continue
        group = match[2]
        if output.value(group) is None and any(group in option for option in output.options.values()):
            continue  # "答案：CT" names an option, not letters
        if _JUDGES.match(output.text, match.end()):
            # "答案是A，B错误" states A; "不作首选（B错）" only judges, see `_judged`.
            group = re.sub("[^,;]*$", "", group)
            if not group:
                continue
        # "The answer is a common drug": a lower-case letter must end its clause.
        if group.islower() and not _ENDS.match(output.text, match.end()):
            continue
        doubted = _DOUBTED.match(output.text, match.end()) or _IF.search(
            output.text, max(0, match.start() - 25), match.start()
        )
        yield match.start(2), "" if doubted else output.value(group) or ""


def _refused(output: _Output) -> _Decision:
    """Leave refusals unread, whatever letters and options they mention."""
    return None if _REFUSAL.search(output.text) else "next"


def _judged(output: _Output) -> _Decision:
    """Take the options called right ("A错误，B正确", "（B对）"); where the question asks for the wrong one, that one.

    Whether a stem asks so cannot always be told, and writers differ in what they call right then: the one option that
    is judged unlike several others is meant.
    """
    called: dict[str, set[str]] = {"right": set(), "wrong": set()}
    for match in _JUDGED.finditer(output.text):
        negated = _NEGATED.search(output.text, max(0, match.start() - 8), match.start())
        if (group := output.value(match[1])) and not negated:
            called[match.lastgroup or ""].update(group)
    right, wrong = called["right"], called["wrong"]
    if not right and not wrong:
        return "next"
    chosen = right
    # What is asked for stands in the last clause; a 不 in the case before it says nothing about the question.
    if _MAY_ASK_WRONG.search([clause for clause in _CLAUSES.split(output.stem) if clause.strip()][-1]):
        if len(wrong) == 1 and (len(right) > 1 or (output.asks_wrong and not right)):
            chosen = wrong
        elif not (len(right) == 1 and len(wrong) > 1) and output.asks_wrong:
            return None
    return None if right & wrong else letters("".join(chosen)) or None


def _leading(output: _Output) -> _Decision:
    """Take letters that open the output: "B。因为...", "C，患者...", "A 青霉素"; not "E. coli" or "A、B 都有可能"."""
    match = re.match(rf"\s*{_GROUP}(?=\s*[.。:,\n(]|\s+|$)(?![.\s]*[a-z])", output.text)
    if not match or output.lists_options or match[1].islower() or _DOUBTED.match(output.text, match.end()):
        return "next"
    return output.value(match[1]) or "next"


def _weak(output: _Output) -> _Decision:
    """Take letters that end a clause after 是, 为 or 考虑: "我认为是E", "应为D。"; two different ones are none."""
    statements = [
        (at, group)
        for at, group in _statements(output, _WEAK, r"(?=\s*(?:$|[。.,;!\n)]|选项|项))")
        if not _MAY_BE.search(output.text[max(0, at - 8) : at].rstrip(" (:"))
    ]
    return "next" if not statements else statements[-1][1] or None


_SHORT_OUTPUT = 40
"""Characters up to which an output that mentions one option may mean that option."""
_FILLING = re.compile("[\\s。.,、;:!()和与及以]|检查|治疗")
"""What may stand beside option texts in an output that is nothing but these texts."""


def _option_text(output: _Output) -> _Decision:
    """Take option texts written without a letter: as the answer, as all there is, or as the one that is recommended."""
    stated = re.findall(r"(?:答\s*案|正确选项)\)?\s*(?:应该|应)?\s*(?:是|为|:)[\s:]*([^。\n]+)", output.words)
    for segment in (*stated[-1:], output.words):
        mentioned, remainder = _mentions(output, segment)
        if mentioned and not _FILLING.sub("", remainder):
            return letters("".join(mentioned))
    mentioned, _ = _mentions(output, output.words, longer_than=1)
    if len(set(mentioned)) != 1 or len(output.words) > _SHORT_OUTPUT:
        return "next"
    before = output.words[: output.words.find(output.options[mentioned[0]])]
    # "建议选用头孢曲松", or an output that is hardly more than the text; not "避免使用头孢曲松".
    recommended = re.search(r"(?:选|用|考虑|诊断|是|为|补充|做|行|应该?|:)[^。,;不]{0,3}$", before)
    mostly = 2 * len(output.options[mentioned[0]]) >= len(output.words.strip())
    return mentioned[0] if (recommended or mostly) and not re.search(r"[不无未非]|避免|禁", before[-8:]) else "next"


def _mentions(output: _Output, segment: str, longer_than: int = 0) -> tuple[list[str], str]:
    """Return the options whose texts occur, longest first so that none is found inside another, and what remains."""
    mentioned = []
    for letter, option in sorted(output.options.items(), key=lambda item: -len(item[1])):
        if len(option) <= longer_than or option not in segment or list(output.options.values()).count(option) > 1:
            continue
        edges = (r"(?<![A-Za-z0-9])" if option[0].isascii() else "", r"(?![A-Za-z0-9])" if option[-1].isascii() else "")
        segment, count = re.subn(re.escape(option).join(edges), " ", segment)
        mentioned += [letter] * (count > 0)
    return mentioned, segment


# Whole option texts go first, since "B超" would be read as B; refusals after stated answers, which outweigh an apology.
RULES: tuple[Callable[[_Output], _Decision], ...] = (
    _is_option,
    _bare,
    _answer_first,
    _stated,
    _refused,
    _judged,
    _leading,
    _weak,
    _option_text,
)


def marks_explanation(text: str) -> bool:
    """Return whether an output says where its explanation is: 解释, 解析, ... and a colon, or such a field of JSON."""
    text = final_part(text)
    return isinstance(json_field(text, EXPLANATION_KEYS), str) or _MARKER.search(text) is not None


def split_explanation(text: str) -> str | None:
    """Return the explanation in an output, or None where it holds none.

    It is what follows 解释, 解析, ... and a colon, up to a line that states the answer; without such a mark, everything
    but an answer in the first sentence.
    """
    text = final_part(text)
    field = json_field(text, EXPLANATION_KEYS)
    if isinstance(field, str):
        return field.strip() or None
    marker = _MARKER.search(text)
    if marker:
        body = re.split(r"\n[^\S\n]*[【\[*]*(?:正确|最终)?答案[】\]*]*\s*[:：是为]", text[marker.end() :])[0]
        return body.strip(" *\n\t\r") or None
    return _FIRST_SENTENCE.sub("", text, count=1).strip() or None


def conclusion(explanation: str | None, options: Iterable[str] = "ABCDE") -> str | None:
    """Return the letters that an explanation concludes with (故选C: the last of them counts), None without any.

    Letters that are no options belong to another word, such as ACEI.
    """
    matches = _CONCLUSION.findall(explanation or "")
    concluded = letters("".join(re.findall("[A-J]", matches[-1]))) if matches else ""
    return concluded if concluded and set(concluded) <= set(options) else None
