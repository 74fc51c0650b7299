"""What a model is asked: a question in its style, after what was said before it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cmexam_tune.core.schema import Question, Turn
from cmexam_tune.prompts import order
from cmexam_tune.prompts.retrieval import RETRIEVERS, Passage, words
from cmexam_tune.prompts.shots import Shots
from cmexam_tune.prompts.styles import prompt, resolve_style

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
    """A prompt before its template: the user's last message and all that comes before it."""

    prompt_text: str
    history: tuple[Message, ...] = ()
    """The conversation so far, oldest message first. Roles may come in any order; not every template has a form for
    all of them."""
    system: str | None = None
    examples: tuple[Turn, ...] = ()
    since: tuple[Message, ...] = ()
    """What was said after the user's last message; the model speaks again."""

    def messages(self) -> list[dict[str, str]]:
        """Return the dialogue as chat templates and OpenAI's protocol read it."""
        system = [Message("system", self.system)] if self.system is not None else []
        messages = [*system, *rounds(self.examples), *self.history, Message("user", self.prompt_text), *self.since]
        return [message._asdict() for message in messages]

    def with_texts(self, change: Callable[[str], str]) -> "Dialogue":
        """Return the dialogue with `change` made to every text in it."""

        def changed(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(message._replace(content=change(message.content)) for message in messages)

        return Dialogue(
            change(self.prompt_text),
            changed(self.history),
            None if self.system is None else change(self.system),
            tuple(Turn(change(turn.question), change(turn.answer)) for turn in self.examples),
            changed(self.since),
        )


@dataclass(frozen=True)
class PromptRequest:
    """A question and how a model is asked it."""

    question: Question
    """Its options and kind say which answers are allowed; its id names the prediction."""
    render: Callable[[Question], str]
    """Returns the user's last message for `question`, or for the same with a shorter stem or with blanks."""
    history: tuple[Message, ...] = ()
    """The conversation so far, oldest message first."""
    system: str | None = None
    examples: tuple[Turn, ...] = ()
    """Worked examples that come before everything else."""
    since: tuple[Message, ...] = ()
    """What was said after the user's last message."""
    reply_start: str = ""
    """How the model's reply begins: it goes on from there."""
    ids: tuple[int, ...] | None = None
    """The whole prompt as token ids, which go to a local model as they are; None: it is made of the above."""

    def dialogue(self, question: Question | None = None) -> Dialogue:
        """Return the prompt, with `question` in place of its own if one is given."""
        return Dialogue(self.render(question or self.question), self.history, self.system, self.examples, self.since)


def default_prompts(questions: Sequence[Question], config: "Config") -> list[PromptRequest]:
    """Return the questions in the config's style, with nothing said before."""
    style = resolve_style(config.prompt)
    return [PromptRequest(question, lambda shown: prompt(shown, style)) for question in questions]


class PromptBuilder:
    """Makes the requests for one file of questions: style or own words, order of the options, examples."""

    def __init__(
        self,
        config: "PromptConfig",
        questions: Iterable[Question] = (),
        pool: Iterable[Question] = (),
        passages: Sequence[Passage] = (),
    ) -> None:
        """Resolve a configuration.

        Args:
            config: its section `prompt`.
            questions: all questions of the file, none of which may become an example.
            pool: what examples are drawn from, if any are wanted.
            passages: what stands in front of a question is drawn from, if anything is wanted there.

        Raises:
            ConfigError: unknown style.
        """
        # A Chinese character is about a token: passages leave at least half of the prompt to the question.
        self._context, self._room = config.context, config.max_source_length // 2
        self._retriever = RETRIEVERS[config.context.by](passages) if config.context else None
        # Kept, since the orders of a question, and samples of it, are requested one by one.
        self._passages_of: dict[str, list[Passage]] = {}
        self.style, self.order = resolve_style(config), config.option_order
        self._shots = Shots(pool, questions, self.style, config.shots, config.shots_seed) if config.shots else None

    def request(self, question: Question, option_order: str | None = None) -> PromptRequest:
        """Return the request for a question, its options in this order, or else in the config's; see `order.restored`.

        Raises:
            DataError: too few examples for a question of that class.
        """
        examples = () if self._shots is None else self._shots.of(question)
        before = words(self.passages(question), self._room)
        return PromptRequest(
            # Requests hold the question as shown: engines and allowed answers work with the shown letters only.
            order.shown(question, option_order or self.order),
            lambda shown: before + prompt(shown, self.style),
            examples=tuple(Turn(example.prompt, example.completion) for example in examples),
        )

    def passages(self, question: Question) -> list[Passage]:
        """Return the passages that stand in front of a question, in any order of its options the same."""
        if self._retriever is None or self._context is None:
            return []
        if question.id not in self._passages_of:
            self._passages_of[question.id] = self._retriever.best(question, self._context.k)
        return self._passages_of[question.id]
