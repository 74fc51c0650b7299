"""What a model is asked: the words of a question, after what was said before them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cmexam_tune.core.schema import Question, Turn


class Dialogue(NamedTuple):
    """A prompt before its template: the user's last words and all that comes before them."""

    words: str
    turns: tuple[Turn, ...] = ()
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        """Return the dialogue as chat templates and OpenAI's protocol read it."""
        spoken = [("system", self.system)] if self.system else []
        for turn in self.turns:
            spoken += [("user", turn.question), ("assistant", turn.answer)]
        return [{"role": role, "content": text} for role, text in [*spoken, ("user", self.words)]]


@dataclass(frozen=True)
class Asked:
    """A question and how it is put."""

    question: Question
    """Its options and kind say which answers are legal; its id names the prediction."""
    words: Callable[[Question], str]
    """Returns the user's last words for `question`, or for the same with a shorter stem or with blanks."""
    turns: tuple[Turn, ...] = ()
    """What was asked and answered before, oldest first: worked examples, or a conversation so far."""
    system: str | None = None

    def dialogue(self, question: Question | None = None) -> Dialogue:
        """Return the prompt, with `question` in place of its own if one is given."""
        return Dialogue(self.words(question or self.question), self.turns, self.system)
