"""What is suspicious in one question, whatever else is in its file.

Here and not in `quality/`, because `order.py` has to know which questions survive another order of their options.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from cmexam_tune.core.normalise import nfkc, plain
from cmexam_tune.core.schema import GROUP, Question

# No two parts that can match the same characters stand side by side, or long runs of them would take quadratic time.
_LETTERS = r"([A-J](?:\s*(?:[、,，和及/]\s*)?[A-J])*)(?![A-Za-z0-9])"
_CHOSEN = re.compile(
    rf"(?:故|因此|所以|综上|答案)[^。；;A-Za-z()不]{{0,8}}(?:选择?|答案应?[为是选]?)项?:?\s*{_LETTERS}"
    rf"|(?:正确|标准)答案(?:应?[为是选]|:)\s*{_LETTERS}"
    r"|(?<![A-J])([A-J]+)\s*(?:[对错]\s*)?(?:[,.。]\s*)?[为是]?本题的?正"
)
_MARK = re.compile(r"(?<![A-J])([A-J]+)\s*(对|错)")
_NEGATIVE = re.compile(r"不|非|无|未|错|除外|除了|禁|没有|少|例外|谬|误|有误|除.{0,12}外")
_UPWARD = re.compile(
    r"(?:^|[，,。；;]|属于|为|是|对)(?:以上|上述|上题)|^(?:根据|关于|对于?|针对)?(?:该|此|本)(?:例|病例|患者|病人|患儿|孕妇|产妇|男|女)"
    r"|^其(?!中|他|它|余)"
)
_LONGEST_WITHOUT_CASE = 45
"""Characters of a stem that can lack its case; a longer one that points upward mostly has the case in itself."""
_TOGETHER = re.compile(
    r"^(?:以上|上述)|(?:以上|上述|上列|前述)(?:[都均皆各全无非哪任诸三两四五]|者|选项|情况|因素|内容|答案|说法)"
    r"|前[两二三四](?!角)|后[两二三四](?!角)|[两二三四]者|[各全]项|选项[A-J]|[A-J](?:项|选项)"
    r"|^[A-J](?:[、,，和与及+＋/][A-J])+$|(?<![A-Za-z])[A-E]\s*[、和与及+＋]\s*[A-E](?![A-Za-z])"
)
_RUN = re.compile("A?B?C?D?E?F?G?H?I?J?")
_ALL = re.compile("(?<!平)均(?![数匀一衡方值])|都(?!气)|皆|全[是对错]|全部(?:[是对错正不]|$)")
_LONGEST_ALL = 12
"""`均有` in a longer option speaks of what stands in it."""
_MOJIBAKE = re.compile(
    "[\ufffd\ue000-\uf8ff\x80-\x9f\x00-\x08\x0b\x0c\x0e-\x1f]|锟斤拷|烫烫|屯屯|[ÃÂ][\x80-\xbf]|â€|ï¼|"
    r"\?{3,}|？{4,}|&(?:nbsp|lt|gt|amp|quot|#\d+);|</?(?:img|p|br|span|div|sub|sup|table|td|tr)\b[^>]{0,200}>"
)


def repeated_options(question: Question) -> str | None:
    """Two options with the same text."""
    count = Counter(map(plain, question.options.values()))
    return next((text or "(only signs)" for text, times in count.items() if times > 1), None)


def contradicted(question: Question) -> str | None:
    """The explanation names another answer than the question has."""
    text = nfkc(question.explanation or "")
    if question.answer is None or not text:
        return None
    groups = (letters for match in _CHOSEN.finditer(text) for letters in match.groups() if letters)
    stated = {letter for letters in groups for letter in letters if "A" <= letter <= "J"}
    if stated:
        return None if stated & set(question.answer) else f"says {''.join(sorted(stated))}, answer {question.answer}"
    marks: dict[str, set[str]] = {"对": set(), "错": set()}
    for match in _MARK.finditer(text):
        marks[match[2]].update(match[1])
    # A letter that is marked both ways, as in a quotation of a wrong view, says nothing.
    right, wrong = marks["对"] - marks["错"], marks["错"] - marks["对"]
    if not _NEGATIVE.search(question.stem) and right and set(question.answer) <= wrong:
        return f"marks {''.join(sorted(right))} as right and {''.join(sorted(question.answer))} as wrong"
    return None


def kind_contradicted(question: Question) -> str | None:
    """A question printed as single with several right letters, or the reverse."""
    if question.answer is None or question.kind is None:
        return None
    answer_kind = "multiple" if len(question.answer) > 1 else "single"
    return f"{question.kind}, answer {question.answer}" if answer_kind != question.kind else None


def missing_case(question: Question) -> str | None:
    """The stem points at something above it that is not there (the C type of CMB)."""
    match = _UPWARD.search(question.stem)
    if not match or len(question.stem) > _LONGEST_WITHOUT_CASE or GROUP in question.facets:
        return None
    return match[0]


def not_shufflable(question: Question) -> str | None:
    """An option or the stem speaks of other options by place or letter: their order carries meaning."""
    for text in question.options.values():
        # `AB` may be two options; `DIC` and `CEA` are what they are.
        if len(text) > 1 and _RUN.fullmatch(text) and set(text) <= set(question.options):
            return text
        if match := _TOGETHER.search(text) or (_ALL.search(text) if len(text) <= _LONGEST_ALL else None):
            return match[0]
    match = re.search(r"(?:选项|答案|备选项)\s*[A-J](?![A-Za-z])|[A-E]项", question.stem)
    return match[0] if match else None


def mojibake(question: Question) -> str | None:
    """Text that a wrong encoding or a web page left behind."""
    for text in (question.stem, *question.options.values(), question.explanation or ""):
        if match := _MOJIBAKE.search(text):
            return repr(match[0])
    return None


CHECKS: Mapping[str, Callable[[Question], str | None]] = {
    "repeated-options": repeated_options,
    "explanation-contradicts": contradicted,
    "kind-contradicts": kind_contradicted,
    "missing-case": missing_case,
    "not-shufflable": not_shufflable,
    "mojibake": mojibake,
}
"""Name of a finding -> what looks for it and returns what it saw, or None."""


def look(question: Question) -> Iterator[tuple[str, str]]:
    """Yield (finding, what was seen) of one question."""
    for name, check in CHECKS.items():
        if (seen := check(question)) is not None:
            yield name, seen
