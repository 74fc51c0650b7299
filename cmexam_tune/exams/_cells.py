"""What the cells of exam files mean: options and answers in every form that the released files and re-exports use.

What had to be repaired or dropped is told row by row, as `RowReport`.
"""

import ast
import datetime
import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from cmexam_tune.core.documents import unique
from cmexam_tune.core.schema import MAX_OPTIONS, MIN_OPTIONS, letters

NO_ANSWER = "no answer"
NO_QUESTION = "no question text"
ZERO = "answer 0, but options are counted from 1"
BEYOND = "answer beyond the options"
UNREADABLE = "unreadable answer"
_CONTINUED = "option text over several lines"
_SORTED = "options sorted"
_MISSING = frozenset({"", "nan", "none", "null", "n/a", "#n/a"})
_LONGEST_MISSING = max(map(len, _MISSING))
_LETTERS = "ABCDEFGHIJ"
_SINGLE_LETTERS = frozenset(_LETTERS)
_LETTER = "[A-Za-zＡ-Ｚａ-ｚ]"
# A dot is a mark only right after the letter: in `A .5 mg` it belongs to the text.
_MARK = r"(?:[.．、:：)）]\s*|\s+[、．:：]\s*|\s+)"
_OPTION = re.compile(rf"\s*[(（]?({_LETTER})(?:{_MARK}(.*)|$)", re.DOTALL)
_UNMARKED = re.compile(rf"\s*({_LETTER})([^\x00-\x7fＡ-Ｚａ-ｚ].*)", re.DOTALL)
# Nearly all options are written as plain `A text` lines: one match reads them, where the general way tries each line.
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
_FROM_TO = re.compile(r"\W*([A-Z])\s*-\s*([A-Z])\W*")
# Not `-`, which is a sign here, and `.` only as in `2.0`.
_BETWEEN_NUMBERS = re.compile(r"(?:[\s,;:/|、。\[\]'\"()和与及&+]|答案|选项)+")
_NUMBER = re.compile(r"(\d{1,4})(?:\.0*)?")
_LETTER_BEFORE = re.compile(r"[(（]?([A-ZＡ-Ｚ])[.．、:：)）]\s*")
_GENUS = re.compile(r"[A-Z]\. ?[a-z]")  # E.coli
_INLINE = re.compile(rf"(?:^|(?<=\s))[(（]?({_LETTER})({_MARK})")
_SHEET_ERRORS = frozenset({"#N/A", "#NAME?", "#REF!", "#VALUE!", "#DIV/0!", "#NULL!", "#NUM!"})


@dataclass(frozen=True)
class RowReport:
    """What happened to one row that was not simply kept."""

    row: int
    """Number of the item in its file, from 1, header not counted."""
    action: Literal["dropped", "repaired", "unread"]
    """`unread`: the file has a column that nothing reads; it is reported once, with its first row."""
    reason: str
    """A short fixed phrase, counted in the preprocess report: `no answer`, `options in one line`, ...; for `unread`
    the column's name."""
    item: Mapping[str, str] | None = None
    """stem, answer and explanation of a dropped row as far as they could be read; the paper's statistics count it."""


Reporter = Callable[[RowReport], None]


class UnreadableRow(Exception):
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
            UnreadableRow: there is none.
        """
        text = self.text(value, frozenset({""}))
        if text is None:
            raise UnreadableRow(NO_QUESTION)
        return text

    def answer(self, value: object) -> str | None:
        """Return the sorted letters of an answer in any order, case, width and with any separators.

        Raises:
            UnreadableRow: there is something else in the cell.
        """
        if isinstance(value, str) and value in _SINGLE_LETTERS:
            return value
        text = self.text("".join(map(str, value)) if isinstance(value, list | tuple) else value)
        if text is None:
            return None
        wide = unicodedata.normalize("NFKC", text).upper()
        plain = _SEPARATORS.sub("", wide)
        span = _FROM_TO.fullmatch(wide)
        # `A-D` may be A and D, or A to D.
        if not re.fullmatch("[A-Z]+", plain) or (span and ord(span[2]) - ord(span[1]) != 1):
            raise UnreadableRow(UNREADABLE)
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
            UnreadableRow: no option is meant.
        """
        listed = [str(part).strip() for part in value] if isinstance(value, list | tuple) else [self.text(value) or ""]
        choose = self._with_text if written == "text" else self._counted
        first = 0 if written == "index" else 1
        chosen = [letter for part in filter(None, listed) for letter in choose(part, options, first)]
        if len(set(chosen)) < len(chosen):  # [0, 1, 0, 0] perhaps, which counts nothing
            raise UnreadableRow("answer names an option twice")
        return letters("".join(chosen)) or None

    def _with_text(self, part: str, options: Mapping[str, str], _: int) -> list[str]:
        """Return the letter of the option whose text is `part`; the third argument is that of `_counted`."""
        named = [letter for letter, text in options.items() if text == part]
        if len(named) > 1:
            raise UnreadableRow("answer is the text of several options")
        if not named:
            raise UnreadableRow(UNREADABLE)
        return named

    def _counted(self, part: str, options: Mapping[str, str], first: int) -> list[str]:
        """Return the letters of the options that the numbers in `part` count, starting at `first`."""
        # Numbers count options as they were written, which sorting has changed.
        if _SORTED in self.repairs:
            raise UnreadableRow("answer counts options that are out of order")
        named = []
        for text in filter(None, _BETWEEN_NUMBERS.split(unicodedata.normalize("NFKC", part))):
            if not (number := _NUMBER.fullmatch(text)):
                raise UnreadableRow(UNREADABLE)
            if (place := int(number[1]) - first) < 0:
                raise UnreadableRow(ZERO)
            # By letter: an empty option before it is not among `options`, but it was counted.
            letter = chr(ord("A") + place)
            if letter not in options:
                raise UnreadableRow(BEYOND)
            named.append(letter)
        if not named:
            raise UnreadableRow(UNREADABLE)
        return named

    def by_column(self, values: Mapping[str, object]) -> dict[str, str]:
        """Return letter -> text of options that each have a column; a letter before the text (`B. text`) is left out.

        An empty column between others keeps its letter for itself: those after it do not move up.

        Raises:
            UnreadableRow: too few options, or their own letters contradict the columns', or a spreadsheet has made a
                date or an error of one.
        """
        texts = {}
        for letter, value in values.items():
            text = _plain(value).strip()
            if isinstance(value, datetime.date | datetime.time) or text in _SHEET_ERRORS:
                raise UnreadableRow("an option is a date or an error of the spreadsheet")
            texts[letter] = text
        while texts and not texts[last := max(texts)]:
            del texts[last]
        return self.options(_without_letters(texts))

    def options(self, value: object) -> dict[str, str]:
        """Return letter -> text from lines of text, a list of `{key, value}`, a list of texts or a mapping.

        Raises:
            UnreadableRow: there are too few, too many, or two with one letter.
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

    def _listed(self, items: Sequence[object]) -> list[tuple[str, str]]:
        if any(isinstance(item, Mapping) for item in items):
            pairs = [(item.get("key"), item.get("value")) if isinstance(item, Mapping) else ("", "") for item in items]
            return [(_plain(key), _plain(text)) for key, text in pairs]
        if len(items) > len(_LETTERS):
            raise UnreadableRow(f"more than {MAX_OPTIONS} options")
        texts = dict(zip(_LETTERS, (_plain(item).strip() for item in items), strict=False))
        places = [letter for letter, text in texts.items() if text]
        lettered = _lettered([text for text in texts.values() if text])
        printed = [letter for letter, _ in lettered]
        # `C 反应蛋白` beside options that begin with no letter is a text: only if all have one, the letters are theirs.
        if lettered and (printed == places or "".join(sorted(printed)) == _LETTERS[: len(printed)]):
            return lettered + [(letter, "") for letter in texts if letter not in places and letter not in printed]
        if printed == sorted(printed) and lettered and set(printed) <= _SINGLE_LETTERS:
            raise UnreadableRow("option letters skip one")
        return [*_without_letters(texts).items()]

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
            letter = _letter(match[1]) if match else ""
            if match and (letter == expected or (match.re is _OPTION and letter in _SINGLE_LETTERS)):
                # CMExam skips letters as well. Only a line without one raises the doubt whether it has lost its own.
                if letter != expected and self.repairs[-1:] == [_CONTINUED]:
                    raise UnreadableRow("option letters skip one")
                pairs.append((match[1], match[2] or ""))
            elif pairs and line.strip():
                self.repairs.append(_CONTINUED)
                pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]} {line.strip()}")
            elif line.strip():
                raise UnreadableRow("options without letters")
        printed = [_letter(key) for key, _ in pairs]
        if printed != sorted(printed) and ord(max(printed)) - ord("A") >= len(printed):
            raise UnreadableRow("option letters skip one")  # `G 蛋白偶联受体` on a line of its own, perhaps
        return pairs

    def _checked(self, pairs: list[tuple[str, str]]) -> dict[str, str]:
        options: dict[str, str] = {}
        for key, text in pairs:
            letter = _letter(key)
            if not re.fullmatch("[A-Z]", letter):
                raise UnreadableRow("option letter is not one of A to Z")
            if letter != key:
                self.repairs.append("option letters normalized")
            if letter in options:
                raise UnreadableRow("two options with one letter")
            options[letter] = text.strip()
        for letter in [letter for letter, text in options.items() if not text]:
            self.repairs.append("empty option left out")
            del options[letter]
        if len(options) < MIN_OPTIONS:
            raise UnreadableRow(f"fewer than {MIN_OPTIONS} options")
        if len(options) > MAX_OPTIONS:
            raise UnreadableRow(f"more than {MAX_OPTIONS} options")
        if list(options) != sorted(options):
            self.repairs.append(_SORTED)
        return dict(sorted(options.items()))


def check_answer(answer: str, options: Mapping[str, str]) -> None:
    """Refuse an answer with a letter that no option has.

    Raises:
        UnreadableRow: it has one.
    """
    if answer not in options and not set(answer) <= set(options):
        raise UnreadableRow("answer letter with no option")


def tell(report: Reporter, row: int, repairs: Iterable[str]) -> None:
    """Report the repairs of a row that was kept, each reason once."""
    for reason in dict.fromkeys(repairs):
        report(RowReport(row, "repaired", reason))


def _plain_options(value: object) -> dict[str, str] | None:
    """Return options written as nearly all are, `A text` lines or A, B, C as keys; None where more must be done."""
    if isinstance(value, str):
        match = _PLAIN.fullmatch(value)
        return dict(zip(_LETTERS, filter(None, match.groups()), strict=False)) if match else None
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
    # NaN, parquet's and pandas' empty cell, is unequal to itself.
    return "" if value is None or value != value else str(value)


def _parsed(text: str) -> object:
    """Return what a cell with JSON or a Python list in it holds, else the text as it is."""
    for parse in (partial(json.loads, object_pairs_hook=unique), ast.literal_eval):
        try:
            value: object = parse(text)
        except (json.JSONDecodeError, SyntaxError, RecursionError, MemoryError):  # the last two: `[` 100,000 times
            continue
        except ValueError:  # a key that stands twice, a number without end, a call
            return text
        return value
    return text


def _lettered(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (letter, rest) of texts that all begin with a letter; nothing where one does not, or for `A型`, `B型`."""
    matches = [match for text in texts if (match := _OPTION.fullmatch(text) or _UNMARKED.fullmatch(text))]
    rests = [match[2] or "" for match in matches]
    if len(matches) < len(texts) or (any(rests) and len(set(rests)) < len(rests)):
        return []
    return [(_letter(match[1]), rest) for match, rest in zip(matches, rests, strict=True)]


def _without_letters(texts: Mapping[str, str]) -> dict[str, str]:
    """Return letter -> text where the place gives the letter, without that letter before the text.

    Raises:
        UnreadableRow: several texts begin with option letters, and not all of these are those of their places.
    """
    marks = {place: match for place, text in texts.items() if (match := _LETTER_BEFORE.match(text))}
    if not marks:
        return dict(texts)
    printed = {place: _letter(match[1]) for place, match in marks.items()}
    strange = [place for place in printed if printed[place] != place and not _GENUS.match(texts[place])]
    # One alone may be a text that happens to begin so.
    if strange and len(printed) > 1 and set(printed.values()) <= _SINGLE_LETTERS:
        raise UnreadableRow("option letters contradict their places")
    return {place: text[marks[place].end() :] if printed.get(place) == place else text for place, text in texts.items()}


def _one_line(text: str) -> list[str]:
    """Split `A 甲 B 乙 C 丙` before its letters.

    Raises:
        UnreadableRow: another letter could begin an option as well, as in `A 维生素 B 缺乏 B 乙`.
    """
    marks = [(match.start(), _letter(match[1]), _letter(match[2])[:1]) for match in _INLINE.finditer(text)]
    if not marks or text[: marks[0][0]].strip():
        return [text]
    looks_like_options = False
    # First only letters marked as the first one is (`A.`): a `B ` in the text of an option is then no mark.
    for tried in ([mark for mark in marks if mark[2] == marks[0][2]], marks):
        starts, strays = list[int](), list[tuple[int, str]]()
        for start, letter, _ in tried:
            if letter == _LETTERS[len(starts) : len(starts) + 1]:
                starts.append(start)
            else:
                strays.append((start, letter))
        if len(starts) < MIN_OPTIONS:
            continue
        looks_like_options = True
        used = _LETTERS[: len(starts)]
        if not any(letter in used or (start > starts[-1] and letter in _LETTERS) for start, letter in strays):
            return [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]
    if looks_like_options:
        raise UnreadableRow("options in one line cannot be told apart")
    return [text]
