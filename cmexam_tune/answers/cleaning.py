"""What `answers` does to an output before it looks for letters: one alphabet, no markup, no thinking, no JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

THINK, THOUGHT = "<think>", "</think>"
"""What a reasoning model puts around its thinking."""
ANSWER_KEYS = ("answer", "答案", "正确答案", "最终答案", "选项", "option", "choice", "final_answer")
EXPLANATION_KEYS = ("explanation", "解释", "解析", "分析", "理由", "reason", "rationale")

_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " ", 0x00A0: " "}
_MARKUP = re.compile("</?[a-z]+>|[*`#\"'“”‘’「」$]|__")
_BOXED = re.compile(r"\\boxed\s*\{(?:\\text\s*\{)?([^{}]*)\}\}?")
_LABEL = re.compile(r"(?<![A-Za-z0-9])([A-Z])[\s.、:,)(]*")
_BLANK = re.compile(r"[\s(]{4,}")
_JSON = re.compile(r"\{[^{}]*\}|\[[^\[\]{}]*\]")


def final_part(text: str) -> str:
    """Return what follows a reasoning model's thinking; nothing where it never stopped thinking."""
    if THOUGHT in text:
        return text.rpartition(THOUGHT)[2]
    return "" if still_thinking(text) else text


def still_thinking(text: str) -> bool:
    """Return whether a reasoning model's output ends within its thinking."""
    return THINK in text and THOUGHT not in text


def json_field(text: str, keys: tuple[str, ...]) -> Any:
    """Return the first value with one of `keys` in a JSON object inside the text, or a list of letters; else None."""
    for match in _JSON.finditer(text):
        try:
            value = json.loads(match[0])
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            named = {str(key).strip().lower(): item for key, item in value.items()}
            if found := [named[key] for key in keys if key in named]:
                return found[0] if found[0] is not None else ""
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
    """Return a blank that says the same: same line, next line or next paragraph, then a bracket or none."""
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
