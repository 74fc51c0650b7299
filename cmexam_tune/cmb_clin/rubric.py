"""What a judge is asked, and how strictly its answer is read. The words are in `rubric.yaml` and can be replaced."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cmexam_tune.core import documents
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Case, Question, Turn
from cmexam_tune.core.strict import Problems, build
from cmexam_tune.prompts import PromptRequest, dialogue, rounds

SHIPPED = Path(__file__).with_name("rubric.yaml")
LOW, HIGH = 1, 5
Variant = Literal["plain", "reversed", "no_reference"]
"""As the rubric says; with the axes in the opposite order; without the reference answer."""
FIELDS = {
    "prompt": {"record", "conversation", "question", "reference", "answer", "axes", "format"},
    "conversation": {"conversation"},
    "turn": {"question", "answer"},
    "reference": {"reference"},
    "axis": {"name", "key", "levels"},
    "again": {"format"},
}
"""Text of the rubric -> the fields it may and, all of them, must have."""


@dataclass(frozen=True)
class Axis:
    """One axis: its name for the judge, and what each score from 1 to 5 means."""

    name: str
    levels: Mapping[str, str]

    def __post_init__(self) -> None:
        """Refuse levels that are not 1 to 5."""
        if list(self.levels) != [str(score) for score in range(LOW, HIGH + 1)]:
            raise ValueError(f"levels: {LOW} to {HIGH} are needed in this order, found {', '.join(self.levels)}")


@dataclass(frozen=True)
class Rubric:
    """The texts of `rubric.yaml`."""

    axes: Mapping[str, Axis]
    prompt: str
    conversation: str
    turn: str
    reference: str
    axis: str
    again: str

    def __post_init__(self) -> None:
        """Refuse texts without the fields they need."""
        for name, fields in FIELDS.items():
            if found := {*re.findall(r"\{(\w+)\}", getattr(self, name))} ^ fields:
                raise ValueError(f"{name}: the fields {{{'}, {'.join(sorted(fields))}}} are needed; differs in {found}")
        if len(self.axes) < 1:
            raise ValueError("axes: at least one is needed")

    def format(self, variant: Variant = "plain") -> str:
        """Return the JSON that a judge is to write."""
        return json.dumps(dict.fromkeys(self._order(variant), 3), ensure_ascii=False)

    def request(self, case: Case, number: int, answer: str, variant: Variant = "plain") -> PromptRequest:
        """Return the question to a judge about the answer to turn `number` (from 1) of a case."""
        turn, earlier = case.turns[number - 1], case.turns[: number - 1]
        before = "\n".join(_fill(self.turn, question=past.question, answer=past.answer) for past in earlier)
        words = _fill(
            self.prompt,
            record=case.record,
            conversation=_fill(self.conversation, conversation=before) if earlier else "",
            question=turn.question,
            reference="" if variant == "no_reference" else _fill(self.reference, reference=turn.answer),
            answer=answer,
            axes="\n".join(self._described(key) for key in self._order(variant)),
            format=self.format(variant),
        )
        question = Question(dialogue.key(case, number), words, dialogue.NO_OPTIONS, None)
        return PromptRequest(question, lambda shown: shown.stem)

    def request_again(self, request: PromptRequest, wrote: str, variant: Variant = "plain") -> PromptRequest:
        """Return the request for the scores alone, after a judge wrote something else."""
        question = Question(
            request.question.id, _fill(self.again, format=self.format(variant)), dialogue.NO_OPTIONS, None
        )
        history = rounds([Turn(request.question.stem, wrote)])
        return PromptRequest(question, lambda shown: shown.stem, history)

    def parse(self, text: str) -> dict[str, int] | None:
        """Return the score of each axis, or None unless the text is one JSON object of all axes with integers 1 to 5.

        Thoughts before it and a code fence around it do not count; anything else does: no score is ever guessed.
        """
        text = text.rpartition("</think>")[2].strip()
        if fence := re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", text, re.DOTALL):
            text = fence[1]
        try:
            scores = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(scores, dict) or self.problem(scores):
            return None
        return {axis: scores[axis] for axis in self.axes}

    def problem(self, scores: Mapping[str, object]) -> str | None:
        """Say why these are no scores of this rubric, or return None: all axes are needed, each an integer 1 to 5."""
        if {*scores} != {*self.axes}:
            return f"the axes are {', '.join(scores) or 'missing'}; the rubric has {', '.join(self.axes)}"
        for axis, score in scores.items():
            # `True` is an instance of int.
            if type(score) is not int or not LOW <= score <= HIGH:
                return f"{axis} is {score!r}, an integer from {LOW} to {HIGH} is needed"
        return None

    def _order(self, variant: Variant) -> list[str]:
        return list(self.axes)[:: -1 if variant == "reversed" else 1]

    def _described(self, key: str) -> str:
        levels = "；".join(f"{score} 分：{text}" for score, text in self.axes[key].levels.items())
        return _fill(self.axis, name=self.axes[key].name, key=key, levels=levels)


def _fill(text: str, **values: str) -> str:
    """Put values into their fields in one pass, so that braces inside a value stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], text)


def read(path: str | Path | None = None) -> Rubric:
    """Return a rubric from a file, by default the one that is shipped.

    Raises:
        ConfigError: no such file, or one that is no rubric; every problem is named.
    """
    path = SHIPPED if path is None else Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such rubric. The shipped one is {SHIPPED}.")
    values = documents.read_yaml(path, "rubric")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} is no rubric: an object with keys (axes, prompt, ...) is needed, found "
            f"{type(values).__name__}. The shipped one is {SHIPPED}."
        )
    # YAML reads the levels 1 to 5 as integers; `build` goes through JSON, whose keys are text.
    for axis in values.get("axes", {}).values() if isinstance(values.get("axes"), dict) else ():
        if isinstance(axis, dict) and isinstance(axis.get("levels"), dict):
            axis["levels"] = {str(score): text for score, text in axis["levels"].items()}
    problems = Problems()
    rubric: Rubric | None = build(Rubric, values, "", problems)
    if rubric is None:
        raise ConfigError("\n".join([f"{path} is no rubric:", *(f"  - {problem}" for problem in problems)]))
    return rubric
