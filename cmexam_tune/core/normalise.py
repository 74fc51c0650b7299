"""What is the same text, the same question and the same case, for all programs alike.

When texts are compared, width, case, white space and punctuation are ignored; digits and signs count (`plain`). Two
questions are the same where stem and options are the same texts, the options in any order (`question_text`); id,
letters and answer do not count: of questions that are the same, answers are compared by the texts of their options
(`right_texts`).
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Set

SHINGLE = 5
"""Characters of an n-gram, as others clean these exams (research: MinHash over character 5-grams)."""
_SIGNS = re.compile(r"[\s,;:?!()\[\]{}\"、。《》〈〉【】「」“”·…—_]+")
_SIGNS_BY_NEIGHBOUR = re.compile(r"\.(?!\d)|(?<!\d)['‘’]")
"""A dot counts before a digit (`0.5`), a quote behind one (`5'`)."""
_SENTENCES = re.compile(r".*(?:[。？?!！；;]|\.(?!\d))", re.DOTALL)
_WIDE = [(sign, unicodedata.normalize("NFKC", sign)) for sign in "，（）：；？！～"]
"""Replaced first: most Chinese texts are in NFKC but for these, and to see that takes a twentieth of making it."""
SHORTEST_STEM = 12
"""Stems below this many characters (`下列说法正确的是`) are equal by chance."""
SHORTEST_CASE = 30


def nfkc(text: str) -> str:
    """Return the text in Unicode's normal form NFKC: full-width letters, ligatures and the like in their plain form."""
    for sign, narrow in _WIDE:
        text = text.replace(sign, narrow)
    return unicodedata.normalize("NFKC", text)


def folded(text: str) -> str:
    """Return the text in NFKC and lower case."""
    return nfkc(text).lower()


def plain(text: str) -> str:
    """Return the text reduced to what counts when texts are compared: NFKC, lower case, no space, no punctuation."""
    text = folded(text)
    # Few texts have one. In one pattern with the other signs the look around each would double the time of all texts.
    if "." in text or "'" in text or "‘" in text or "’" in text:
        text = _SIGNS_BY_NEIGHBOUR.sub("", text)
    return _SIGNS.sub("", text)


def question_text(stem: str, options: Mapping[str, str]) -> str:
    """Return stem and options as one plain text, a line each: two questions with the same one are the same."""
    # In one pass: six texts take half as long again. NUL is neither white space nor punctuation, so it stays.
    plain_stem, *plain_options = plain("\0".join([stem, *options.values()])).split("\0")
    return "\n".join([plain_stem, *sorted(plain_options)])


def shingles(text: str) -> set[str]:
    """Return the character 5-grams of a plain text; a shorter text is its own."""
    return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))}


def jaccard(a: str, b: str) -> float:
    """Return the Jaccard similarity of the 5-grams of two plain texts, 0 to 1."""
    return share_in_common(shingles(a), shingles(b))


def share_in_common(first: Set[str], second: Set[str]) -> float:
    """Return the Jaccard similarity of two sets, 0 to 1."""
    common = len(first & second)
    return common / (len(first) + len(second) - common)


def case_of(stem: str) -> str | None:
    """Return the plain text of the case that a stem tells before its last sentence, None where there is none.

    The last sentence is what is asked; of `患者男，52岁……。首选的检查是` the patient is the case.
    """
    match = _SENTENCES.match(stem.rstrip("。.？?！! "))
    case = plain(match[0]) if match else ""
    return case if len(case) >= SHORTEST_CASE else None


def right_texts(right_options: Iterable[str]) -> frozenset[str]:
    """Return right options as plain texts: equal for equal answers whatever the order of the options."""
    return frozenset(map(plain, right_options))
