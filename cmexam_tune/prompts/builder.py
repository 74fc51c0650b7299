"""What a model is asked: the words of a question, after what was said before them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cmexam_tune.core.schema import Question, Turn
from cmexam_tune.prompts import order
from cmexam_tune.prompts.shots import Shots
from cmexam_tune.prompts.styles import prompt, style_of

if TYPE_CHECKING:  # evaluate and preprocess ask by no recipe: they start without pydantic
    from cmexam_tune.config import Config, PromptConfig


class Message(NamedTuple):
    """What somebody said in a conversation."""

    role: str
    """system, user or assistant."""
    content: str


def rounds(turns: Iterable[Turn]) -> tuple[Message, ...]:
    """Return questions and their answers as messages of user and assistant."""
    return tuple(
        message for turn in turns for message in (Message("user", turn.question), Message("assistant", turn.answer))
    )


class Dialogue(NamedTuple):
    """A prompt before its template: the user's last words and all that comes before them."""

    words: str
    history: tuple[Message, ...] = ()
    """The conversation so far, oldest message first. Roles may come in any order; not every template has a form for
    all of them."""
    system: str | None = None
    examples: tuple[Turn, ...] = ()

    def messages(self) -> list[dict[str, str]]:
        """Return the dialogue as chat templates and OpenAI's protocol read it."""
        system = [Message("system", self.system)] if self.system is not None else []
        messages = [*system, *rounds(self.examples), *self.history, Message("user", self.words)]
        return [message._asdict() for message in messages]


@dataclass(frozen=True)
class Asked:
    """A question and how it is put."""

    question: Question
    """Its options and kind say which answers are legal; its id names the prediction."""
    words: Callable[[Question], str]
    """Returns the user's last words for `question`, or for the same with a shorter stem or with blanks."""
    history: tuple[Message, ...] = ()
    """The conversation so far, oldest message first."""
    system: str | None = None
    examples: tuple[Turn, ...] = ()
    """Worked examples that come before everything else."""

    def dialogue(self, question: Question | None = None) -> Dialogue:
        """Return the prompt, with `question` in place of its own if one is given."""
        return Dialogue(self.words(question or self.question), self.history, self.system, self.examples)


def plainly(questions: Sequence[Question], config: "Config") -> list[Asked]:
    """Return the questions in the config's words, with nothing said before."""
    style = style_of(config.prompt)
    return [Asked(question, lambda shown: prompt(shown, style)) for question in questions]


class Asking:
    """How the questions of one file are put: style or own words, order of the options, examples."""

    def __init__(self, config: "PromptConfig", asked: Iterable[Question] = (), pool: Iterable[Question] = ()) -> None:
        """Resolve a configuration.

        Args:
            config: its section `prompt`.
            asked: all questions of the file, none of which may become an example.
            pool: what examples are drawn from, if any are wanted.

        Raises:
            ConfigError: unknown style.
        """
        self.style, self.order = style_of(config), config.option_order
        self._shots = Shots(pool, asked, self.style, config.shots, config.shots_seed) if config.shots else None

    def asked(self, question: Question) -> Asked:
        """Return the question as it is put; its options may stand in another order, see `restored`.

        Raises:
            DataError: too few examples for a question of that class.
        """
        examples = () if self._shots is None else self._shots.of(question)
        return Asked(
            order.shown(question, self.order),
            lambda shown: prompt(shown, self.style),
            examples=tuple(Turn(example.prompt, example.completion) for example in examples),
        )

    def restored(self, answer: str | None, question: Question) -> str | None:
        """Return the exam's letters for an answer to `asked(question)`."""
        return order.restored(answer, question, self.order)
