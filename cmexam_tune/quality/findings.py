"""One check: question files are read line by line, pairs and findings collected, and questions chosen to keep.

`WRONG_KEYS` are the findings that make an answer key doubtful.
"""

import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cmexam_tune.core import jsonl
from cmexam_tune.core.errors import ConfigError, DataError, UserError
from cmexam_tune.core.normalise import plain
from cmexam_tune.core.progress import Progress
from cmexam_tune.core.schema import Question
from cmexam_tune.core.variants import suggest
from cmexam_tune.prompts import question_checks
from cmexam_tune.quality.duplicates import Index, QuestionPair, Reason
from cmexam_tune.quality.errata import known_problems
from cmexam_tune.quality.passages import Leak
from cmexam_tune.quality.wrong_keys import Suspect
from cmexam_tune.report.table import Text

PAIRS: dict[Reason, Text] = {
    "exact": Text("same stem and options, in any order", "题干和选项都相同，次序不论"),
    "contradiction": Text("same stem and options, another answer", "题干和选项都相同，答案不同"),
    "near": Text("nearly the same, Jaccard of 5-grams at least 0.7", "几乎相同（5-gram Jaccard 不低于 0.7）"),
    "similar": Text(
        "similar, Jaccard 0.5 to 0.7: to be judged by a person", "相似（Jaccard 0.5 到 0.7），需要人工判断"
    ),
    "sibling": Text("same options, another stem and answer (matching questions)", "选项相同，题干和答案不同（配伍题）"),
    "stem": Text("same stem, other options", "题干相同，选项不同"),
    "case": Text("same case, another question", "同一病例的另一道题"),
}
SINGLE: dict[str, Text] = {
    "unreadable": Text("the line is no question", "该行不是题目"),
    "known-error": Text("listed in the errata of the exam", "列在该考试的勘误表里"),
    "explanation-contradicts": Text("the explanation names another answer", "解析里的答案与标准答案不同"),
    "kind-contradicts": Text(
        "single with several right letters, or multiple with one", "单选题有多个正确选项，或多选题只有一个"
    ),
    "repeated-options": Text("two options are the same", "有两个选项相同"),
    "missing-case": Text(
        "points at a case or list above it that is not there", "引用了上文的病例或备选项，但上文不存在"
    ),
    "question-in-explanation": Text("the explanation holds another question", "解析里混入了另一道题"),
    "mojibake": Text("text of a wrong encoding or of a web page", "乱码，或网页的残留文字"),
    "not-shufflable": Text("options speak of each other: their order carries meaning", "选项互相引用，次序不能打乱"),
}
DUPLICATE = "duplicate"
WRONG_KEYS = ("known-error", "explanation-contradicts", "kind-contradicts")
"""Findings about the key itself: what is right by a wrong key must not be learnt."""
REASONS = (*PAIRS, DUPLICATE, *SINGLE)
DEFAULT_DROP = ("exact", "contradiction", "near", "stem", DUPLICATE, "unreadable")
"""Dropped from the clean file: what is in a file held against, repetitions, and what cannot be read."""
_WINDOW = 14
"""First characters by which stems are looked up; no more than `_SHORTEST`."""
_SHORTEST = 18
"""Characters of a plain stem that is looked for in explanations; shorter ones occur there by themselves."""


@dataclass(frozen=True)
class Finding:
    """Something suspicious in one question."""

    id: str
    file: str
    line: int
    finding: str
    seen: str


@dataclass(frozen=True)
class Overlap:
    """A question and another that is the same or similar: one line of `<stem>.overlap.jsonl`."""

    id: str
    file: str
    line: int
    other_id: str
    other_file: str
    other_line: int
    reason: str
    jaccard: float
    against: bool
    """Whether the other question is in a file held against."""


@dataclass
class Checked:
    """What a check found."""

    questions: dict[str, int] = field(default_factory=dict)
    """Name of a checked file -> how many questions it has."""
    against: dict[str, int] = field(default_factory=dict)
    overlaps: list[Overlap] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    letters: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    dropped: dict[str, dict[int, str]] = field(default_factory=dict)
    """Name of a checked file -> line -> why the clean file does not have it."""
    suspects: list[Suspect] = field(default_factory=list)
    """Questions against whose key predictions speak, where there are any."""
    leaks: list[Leak] = field(default_factory=list)
    """Passages that hold questions or their explanations, where there are any."""

    def to_dict(self) -> dict[str, Any]:
        """Return check.json: counts, every finding, and how the answer letters are spread."""
        drops = {name: dict(Counter(lines.values())) for name, lines in self.dropped.items()}
        return {
            "questions": self.questions,
            "against": self.against,
            "pairs": {reason: self.count(reason) for reason in PAIRS},
            "findings": dict(Counter(finding.finding for finding in self.findings)),
            "dropped": drops,
            "kept": {name: count - len(self.dropped[name]) for name, count in self.questions.items()},
            "letters": self.letters,
            "list": [asdict(finding) for finding in self.findings],
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "leaks": [asdict(leak) for leak in self.leaks],
        }

    def count(self, reason: str) -> dict[str, int]:
        """Return how many pairs there are within the checked files and with those held against."""
        against = [overlap.against for overlap in self.overlaps if overlap.reason == reason]
        return {"within": against.count(False), "against": against.count(True)}


class Embedded:
    """Stems of other questions inside an explanation: pages that were cut in the wrong place."""

    def __init__(self) -> None:
        self._place_of: dict[str, int] = {}
        self._lengths: dict[str, set[int]] = {}
        """First characters -> lengths of the stems that start with them: thousands can, of a few lengths."""

    def add_stem(self, place: int, question: Question) -> None:
        """Remember the stem of the question at `place`."""
        stem = plain(question.stem)
        if len(stem) >= _SHORTEST:
            self._place_of.setdefault(stem, place)
            self._lengths.setdefault(stem[:_WINDOW], set()).add(len(stem))

    def inside(self, question: Question) -> int | None:
        """Return the place of a question whose whole stem stands in this one's explanation, and not in its stem."""
        if not question.explanation:
            return None
        text, its_stem = plain(question.explanation), plain(question.stem)
        for start in range(len(text) - _SHORTEST + 1):
            lengths = self._lengths.get(text[start : start + _WINDOW], ())
            stems = {text[start : start + length] for length in lengths} & self._place_of.keys()
            # An explanation may repeat its own question, or a longer or shorter wording of it.
            if places := [self._place_of[stem] for stem in stems if stem not in its_stem and its_stem not in stem]:
                return min(places)
        return None


class AnswerLetters:
    """How often each letter is the answer, among questions with one right letter and the same number of options."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str]] = {}

    def add(self, question: Question) -> None:
        """Count one question."""
        if question.answer and len(question.answer) == 1:
            self._counts.setdefault(len(question.options), Counter())[question.answer] += 1

    def table(self) -> list[dict[str, object]]:
        """Return for each number of options the counts, and a chi-square test against equal shares."""
        if not self._counts:
            return []
        from scipy.special import chdtrc  # chi2.sf of scipy.stats, which takes three times as long to import

        rows: list[dict[str, object]] = []
        for options, counts in sorted(self._counts.items()):
            by_letter = {letter: counts[letter] for letter in string.ascii_uppercase[:options]}
            expected = counts.total() / options
            chi2 = sum((count - expected) ** 2 for count in by_letter.values()) / expected
            rows.append({"options": options, "counts": by_letter, "chi2": chi2, "p": float(chdtrc(options - 1, chi2))})
        return rows


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the name of each file without `.questions.jsonl` -> its path.

    Raises:
        UserError: two files have one name.
    """
    names: dict[str, Path] = {}
    for path in paths:
        name = path.name.removesuffix(".jsonl").removesuffix(".questions")
        if name in names:
            raise UserError(f"{path}: a second file called {name!r}. What is written is named by it; rename one.")
        names[name] = path
    return names


def check_reasons(drop: Sequence[str]) -> None:
    """Refuse unknown reasons.

    Raises:
        ConfigError: one is unknown.
    """
    for reason in drop:
        if reason not in REASONS:
            raise ConfigError(f"--drop: {reason!r} is unknown{suggest(reason, REASONS)}; known: {', '.join(REASONS)}.")


def check_files(questions: Sequence[Path], against: Sequence[Path], drop: Sequence[str] = DEFAULT_DROP) -> Checked:
    """Check question files against themselves and others; the files are read line by line and not changed.

    Raises:
        UserError: a file is missing or empty, or two have one name.
        ConfigError: an unknown reason to drop.
    """
    check_reasons(drop)
    names = names_of([*questions, *against])
    result, index, embedded = Checked(), Index(), Embedded()
    order = list(names)
    for number, (name, path) in enumerate(names.items()):
        # Files that are held against come last: only the others are checked, and only theirs are findings.
        held = number >= len(questions)
        letters, count = AnswerLetters(), 0
        read = readable(path, name, None if held else result)
        for line, question in Progress(f"check {name}", "questions", patience=1).each(read):
            count += 1
            embedded.add_stem(index.add(question, number, line, held), question)
            if not held:
                letters.add(question)
                seen = [*question_checks.look(question), *known_problems(question)]
                result.findings += [Finding(question.id, name, line, finding, text) for finding, text in seen]
        (result.against if held else result.questions)[name] = count
        if not held:
            result.letters[name] = letters.table()
    # A second pass: a stem inside an explanation may be of a question that comes later.
    for name in result.questions:
        read = readable(names[name])
        total = result.questions[name]
        for line, question in Progress(f"explanations of {name}", "questions", total, patience=1).each(read):
            if (place := embedded.inside(question)) is not None:
                where = f"{index.ids[place]} of {order[index.files[place]]}"
                result.findings.append(Finding(question.id, name, line, "question-in-explanation", where))
    result.overlaps = [_overlap(pair, index, order) for pair in index.pairs()]
    result.overlaps.sort(key=lambda pair: (pair.file, pair.line, pair.other_file, pair.other_line))
    result.findings.sort(key=lambda finding: (finding.file, finding.line))
    result.dropped = _dropped(result, drop)
    return result


def readable(path: Path, name: str = "", result: Checked | None = None) -> Iterator[tuple[int, Question]]:
    """Yield (line, question); lines that are no question become findings of `result`."""
    for line, value in jsonl.read_objects(path):
        try:
            yield line, jsonl.from_object(Question, value, f"{path}:{line}")
        except DataError as error:
            if result is not None:
                text = str(error).removeprefix(f"{path}:{line}: ")[:200]
                result.findings.append(Finding(str(value.get("id", "")), name, line, "unreadable", text))


def _overlap(pair: QuestionPair, index: Index, names: Sequence[str]) -> Overlap:
    first, second = pair.first, pair.second
    return Overlap(
        *(index.ids[first], names[index.files[first]], index.lines[first]),
        *(index.ids[second], names[index.files[second]], index.lines[second]),
        *(pair.reason, round(pair.jaccard, 4), bool(index.against[second])),
    )


def _dropped(result: Checked, drop: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return which lines are left out. Of repetitions within the checked files the first is kept."""
    lines: dict[str, dict[int, str]] = defaultdict(dict)
    for pair in result.overlaps:
        if pair.against:
            if pair.reason in drop:
                lines[pair.file].setdefault(pair.line, pair.reason)
        elif pair.reason == "contradiction" and pair.reason in drop:
            # Nobody knows which of the two is right.
            lines[pair.file].setdefault(pair.line, pair.reason)
            lines[pair.other_file].setdefault(pair.other_line, pair.reason)
        elif pair.reason in ("exact", "near") and DUPLICATE in drop:
            lines[pair.file].setdefault(pair.line, DUPLICATE)
    for finding in result.findings:
        if finding.finding in drop:
            lines[finding.file].setdefault(finding.line, finding.finding)
    return {name: dict(sorted(lines[name].items())) for name in result.questions}
