"""What the cells of exam files mean: options and answers in every form that the released files and re-exports use."""

import ast
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from cmexam_tune.core.schema import MAX_OPTIONS, MIN_OPTIONS, letters
from cmexam_tune.exams._rows import Reporter, RowReport

NO_ANSWER = "no answer"
NO_QUESTION = "no question text"
_MISSING = frozenset({"", "nan", "none", "null", "n/a", "#n/a"})
_LONGEST_MISSING = max(map(len, _MISSING))
_LETTERS = "ABCDEFGHIJ"
_SINGLE_LETTERS = frozenset(_LETTERS)
_LETTER = "[A-Za-zＡ-Ｚａ-ｚ]"
# A dot is a mark only right after the letter: in `A .5 mg` it belongs to the text.
_MARK = r"(?:[.．、:：)）]\s*|\s+[、．:：]\s*|\s+)"
_OPTION = re.compile(rf"\s*[(（]?({_LETTER})(?:{_MARK}(.*)|$)", re.DOTALL)
_UNMARKED = re.compile(rf"\s*({_LETTER})([^\x00-\x7fＡ-Ｚａ-ｚ].*)", re.DOTALL)
_PLAIN_TEXT = r" +([^\s、．:：](?:[^\n]*\S)?)[^\S\n]*"
_PLAIN = re.compile(
    f"A{_PLAIN_TEXT}\nB{_PLAIN_TEXT}"
    + "".join(f"(?:\n{letter}{_PLAIN_TEXT}" for letter in _LETTERS[MIN_OPTIONS:])
    + ")?" * (MAX_OPTIONS - MIN_OPTIONS)
)
_MARKED = re.compile("[、．:：]").match
# Only before the next option: option texts may hold `\nu` and the like.
_LITERAL_BREAK = re.compile(rf"(?:\\r)?\\n(?=\s*(?:[(（]?{_LETTER}(?:{_MARK}|[^\x00-\x7f])|[A-Z]?$))")
_SEPARATORS = re.compile(r"[\s,;:/|.、。\[\]'\"()和与及&+-]|答案")


class Unreadable(Exception):
    """A row that has to be dropped; the message is the reason that is counted."""


class Cells:
    """Readers for the cells of one row that remember what they had to repair."""

    def __init__(self) -> None:
        self.repairs: list[str] = []

    def text(self, value: object, missing: frozenset[str] = _MISSING) -> str | None:
        """Return the text without surrounding white space, None where the cell is missing (or says `nan`)."""
        if value is None:
            return None
        text = str(value).strip()
        if len(text) > _LONGEST_MISSING or text.lower() not in missing:
            return text
        if text:
            self.repairs.append("the word nan or null as a missing value")
        return None

    def stem(self, value: object) -> str:
        """Return the question's text.

        Raises:
            Unreadable: there is none.
        """
        text = self.text(value, frozenset({""}))
        if text is None:
            raise Unreadable(NO_QUESTION)
        return text

    def answer(self, value: object) -> str | None:
        """Return the sorted letters of an answer in any order, case, width and with any separators.

        Raises:
            Unreadable: there is something else in the cell.
        """
        if isinstance(value, str) and value in _SINGLE_LETTERS:
            return value
        text = self.text("".join(map(str, value)) if isinstance(value, list | tuple) else value)
        if text is None:
            return None
        plain = _SEPARATORS.sub("", unicodedata.normalize("NFKC", text)).upper()
        if not re.fullmatch("[A-Z]+", plain):
            raise Unreadable("unreadable answer")
        if plain != text:
            self.repairs.append("answer letters normalized")
        if len(set(plain)) < len(plain):
            self.repairs.append("answer letter repeated")
        elif letters(plain) != plain:
            self.repairs.append("answer letters sorted")
        return letters(plain)

    def chosen(self, value: object, options: Mapping[str, str], written: str) -> str | None:
        """Return the letters of an answer written as `number` (from 1), `index` (from 0) or `text` of an option.

        Raises:
            Unreadable: no option is meant.
        """
        listed = [str(part).strip() for part in value] if isinstance(value, list | tuple) else [self.text(value) or ""]
        order, found = list(options), []
        for part in filter(None, listed):
            if written == "text":
                found += [letter for letter, text in options.items() if text == part][:1] or [""]
            else:
                numbers = [int(float(n)) - (written == "number") for n in re.findall(r"\d+(?:\.0+)?", part)]
                found += [order[n] if 0 <= n < len(order) else "" for n in numbers] or [""]
        if "" in found:
            raise Unreadable("unreadable answer")
        return letters("".join(found)) or None

    def options(self, value: object) -> dict[str, str]:
        """Return letter -> text from lines of text, a list of `{key, value}`, a list of texts or a mapping.

        Raises:
            Unreadable: there are too few, too many, or two with one letter.
        """
        if plain := _plain_options(value):
            return plain
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            value = _parsed(value)
        if isinstance(value, Mapping):
            pairs = [(str(key), _plain(text)) for key, text in value.items()]
        elif isinstance(value, list | tuple):
            pairs = self._listed(value)
        else:
            pairs = self._split(_plain(value))
        return self._checked(pairs)

    def _listed(self, items: Iterable[Any]) -> list[tuple[str, str]]:
        pairs = []
        for number, item in enumerate(items):
            if isinstance(item, Mapping):
                pairs.append((_plain(item.get("key")), _plain(item.get("value"))))
                continue
            match = _OPTION.fullmatch(_plain(item)) or _UNMARKED.fullmatch(_plain(item))
            pairs.append((match[1], match[2] or "") if match else (chr(ord("A") + number), _plain(item)))
        return pairs

    def _split(self, text: str) -> list[tuple[str, str]]:
        lines = text.splitlines()
        if len(lines) == 1 and _LITERAL_BREAK.search(text):
            lines = _LITERAL_BREAK.split(text)
            self.repairs.append("options joined by backslash-n")
        if len(lines) == 1 and len(lines := _one_line(text)) > 1:
            self.repairs.append("options in one line")
        pairs: list[tuple[str, str]] = []
        for line in lines:
            match = _OPTION.fullmatch(line) or _UNMARKED.fullmatch(line)
            expected = chr(ord(_letter(pairs[-1][0])) + 1) if pairs else "A"
            if match and (match.re is _OPTION or _letter(match[1]) == expected):
                pairs.append((match[1], match[2] or ""))
            elif pairs and line.strip():
                self.repairs.append("option text over several lines")
                pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]} {line.strip()}")
            elif line.strip():
                raise Unreadable("options without letters")
        return pairs

    def _checked(self, pairs: list[tuple[str, str]]) -> dict[str, str]:
        options: dict[str, str] = {}
        for key, text in pairs:
            letter = _letter(key)
            if not re.fullmatch("[A-Z]", letter):
                raise Unreadable("option letter is not one of A to Z")
            if letter != key:
                self.repairs.append("option letters normalized")
            if letter in options:
                raise Unreadable("two options with one letter")
            options[letter] = text.strip()
        for letter in [letter for letter, text in options.items() if not text]:
            self.repairs.append("empty option left out")
            del options[letter]
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            raise Unreadable(f"{'fewer' if len(options) < MIN_OPTIONS else 'more'} options than possible")
        if list(options) != sorted(options):
            self.repairs.append("options sorted")
        return dict(sorted(options.items()))


def check_answer(answer: str, options: Mapping[str, str]) -> None:
    """Refuse an answer that names no option.

    Raises:
        Unreadable: it does.
    """
    if answer not in options and not set(answer) <= set(options):
        raise Unreadable("answer letter with no option")


def tell(report: Reporter, row: int, repairs: Iterable[str]) -> None:
    """Report the repairs of a row that was kept, each reason once."""
    for reason in dict.fromkeys(repairs):
        report(RowReport(row, "repaired", reason))


def _plain_options(value: object) -> dict[str, str] | None:
    """Return options written as nearly all are, `A text` lines or A, B, C as keys; None where more must be done."""
    if isinstance(value, str):
        found = _PLAIN.fullmatch(value)
        return dict(zip(_LETTERS, filter(None, found.groups()), strict=False)) if found else None
    if not isinstance(value, dict) or not MIN_OPTIONS <= len(value) <= MAX_OPTIONS:
        return None
    try:
        texts = list(map(str.strip, value.values()))
    except TypeError:
        return None
    usual = "".join(value) == _LETTERS[: len(texts)] and all(texts) and not any(map(_MARKED, texts))
    return dict(zip(value, texts, strict=True)) if usual else None


def _letter(key: str) -> str:
    return unicodedata.normalize("NFKC", key).strip().upper()


def _plain(value: object) -> str:
    return "" if value is None else str(value)


def _parsed(text: str) -> object:
    """Return what a cell with JSON or a Python list in it holds, else the text as it is."""
    for parse, error in ((json.loads, ValueError), (ast.literal_eval, (ValueError, SyntaxError))):
        try:
            value: object = parse(text)
        except error:
            continue
        return value
    return text


def _one_line(text: str) -> list[str]:
    """Split `A 甲 B 乙 C 丙` before each letter that is next in the alphabet."""
    starts, position = [], 0
    for number in range(MAX_OPTIONS):
        letter = chr(ord("A") + number)
        full = chr(ord("Ａ") + number)
        match = re.compile(rf"(?:^|\s)({letter}|{letter.lower()}|{full}){_MARK}").search(text, position)
        if not match:
            break
        starts.append(match.start(1))
        position = match.end(1)
    if len(starts) < MIN_OPTIONS:
        return [text]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
