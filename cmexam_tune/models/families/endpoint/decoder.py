"""What a model behind an address is asked, and the predictions that its replies are."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.evaluation.answer_parsing import letter_sets
from cmexam_tune.models.families.endpoint.client import Body, Client
from cmexam_tune.models.families.endpoint.replies import Reply
from cmexam_tune.prompts import Asked

SENT = ("do_sample", "max_new_tokens", "temperature", "top_p", "stop_strings")
"""Settings that OpenAI's protocol has, under names of its own."""
EXTRA = {
    "top_k": "top_k",
    "min_p": "min_p",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
}
"""Settings that OpenAI's protocol lacks -> their names in vLLM and SGLang; sent only where a recipe sets them."""
DEFAULTS = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
"""Settings that say what happens anyway."""
OWN = ("model", "messages", "prompt", "stream")
"""Fields that `generation.extra_body` cannot replace: they are the question."""
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields of vLLM and SGLang: the model goes on with the last message instead of answering it."""
REFUSED = ("400", "422")
"""How the reason of a request begins that the server understood and did not want."""
TOP = 20
"""Most probable tokens that are asked for; the most that OpenAI and vLLM give."""
ROOM = 8
"""Tokens in which a model that begins its answer itself must come to the letter."""

Choices = Sequence[str]
DIALECTS: Mapping[str, Callable[[Choices], Mapping[str, Any]]] = {
    "structured_outputs": lambda choices: {"structured_outputs": {"choice": list(choices)}},
    "guided_choice": lambda choices: {"guided_choice": list(choices)},
    "regex": lambda choices: {"regex": "(" + "|".join(re.escape(choice) for choice in choices) + ")"},
}
"""How a list of allowed texts is written: vLLM since 0.11, vLLM before, SGLang."""


@dataclass(frozen=True)
class Written:
    """What the model wrote to one question, before anybody reads an answer out of it."""

    asked: Asked
    text: str
    finish: Literal["stop", "length", "error"]
    reason: str | None = None
    """Why there is no text, where `finish` is `error`."""


class Remote:
    """A model behind an address, with the methods of `models.decode.Decoder`: `answer` and `write`."""

    def __init__(self, config: Config) -> None:
        """Check address, key and settings; nothing is sent yet.

        Raises:
            UserError: an address, key or setting that cannot be used.
        """
        self.config = config
        self._settings, self._extra = _settings(config)
        self._template = None if config.prompt.template == "auto" else prompts.template(config.prompt.template)
        self.client = Client(config.model, config.generation)
        self.usage = self.client.usage

    def write(self, asked: Sequence[Asked]) -> Iterator[Written]:
        """Let the model write; requests that fail for good have `finish` error and a reason.

        Raises:
            UserError: wrong key, model or address.
            TrainingStopped: the server fails again and again.
        """
        for item, reply in self._send(asked, self._request):
            yield Written(item, reply.text, reply.finish, reply.reason)

    def answer(self, asked: Sequence[Asked]) -> Iterator[Prediction]:
        """Yield a prediction for each question in the way that `generation.mode` names, as replies come in.

        Raises:
            UserError: wrong key, model or address; a server or style that lacks what the mode needs.
            TrainingStopped: the server fails again and again.
        """
        mode = self.config.generation.mode
        if mode == "generate":
            for written in self.write(asked):
                yield read(written)
        elif asked:
            yield from self._constrained(asked) if mode == "constrained" else self._likelihood(asked)

    def _constrained(self, asked: Sequence[Asked]) -> Iterator[Prediction]:
        """Yield predictions that can only be legal answers.

        Raises:
            UserError: the server takes no list of allowed texts; or whatever `write` raises.
        """
        sets = self.config.generation.answer_sets
        forced = self._forces_words(asked[0], "constrained-words")

        def choices(question: Question) -> dict[str, str]:
            """Return what the model may write -> the letters that it stands for."""
            start = self._head(question)[1] if forced else "".join(self._head(question))
            return {start + letters: letters for letters in letter_sets(question, sets)}

        def request(item: Asked, dialect: str) -> Body:
            allowed = DIALECTS[dialect](list(choices(item.question)))
            return self._request(item, extra=allowed, forced=forced)

        dialect = self._dialect({name: request(asked[0], name) for name in DIALECTS}, choices(asked[0].question))
        for item, reply in self._send(asked, lambda item: request(item, dialect)):
            letters = choices(item.question).get(reply.text)
            if reply.finish == "error":
                yield _failed(item.question, reply.reason)
            elif letters is None:
                yield _failed(item.question, "the server wrote a text that is not allowed.")
            else:
                yield self._lettered(item.question, letters)

    def _dialect(self, tries: Mapping[str, Body], allowed: Mapping[str, str]) -> str:
        """Return the name of the first way of writing a list of allowed texts that the server keeps to."""
        failures = []
        for name, request in tries.items():
            reply = self.client.ask(request)
            if reply.text in allowed:
                return name
            failures.append(f"{name}: {reply.reason or f'answered {reply.text[:20]!r}'}")
        raise UserError(
            f"{self.client.address}: generation.mode=constrained needs a server that writes only given texts "
            f"(vLLM, SGLang); this one does not ({'; '.join(failures)}). Use generation.mode=generate."
        )

    def _likelihood(self, asked: Sequence[Asked]) -> Iterator[Prediction]:
        """Yield the most probable letter behind the answer's first words; one letter for each question.

        Only the letters among the server's most probable tokens are compared: the best of them is the best of all.
        Where the server does not let the words be forced, the letter is read at the first token of the model's own
        answer that is a letter: not what local models do, hence another name.

        Raises:
            UserError: questions with several answers, normalised likelihoods, or a server without log-probabilities.
        """
        generation = self.config.generation
        if generation.length_normalization or generation.prior_normalization:
            raise ConfigError("generation: likelihood behind an address cannot be normalised; only local models can.")
        sets = generation.answer_sets
        several = sum(len(letter_sets(item.question, sets)) > len(item.question.options) for item in asked)
        if several:
            raise ConfigError(
                f"generation.mode=likelihood behind an address reads one letter, and {several} questions may have "
                "several. Use generation.mode=constrained, or set generation.answer_sets=single."
            )
        forced = self._forces_words(asked[0], "first-letter")
        fields = {"logprobs": TOP} if self._template else {"logprobs": True, "top_logprobs": TOP}
        fields["max_tokens"] = 1 if forced else ROOM
        sample = self.client.ask(self._request(asked[0], fields, forced=forced))
        if sample.finish != "error" and not sample.logprobs:
            raise UserError(
                f"{self.client.address}: generation.mode=likelihood needs log-probabilities, and the server sends "
                "none. Use generation.mode=generate or constrained."
            )
        for item, reply in self._send(asked, lambda item: self._request(item, fields, forced=forced)):
            if not reply.logprobs:
                yield _failed(item.question, reply.reason or "the server sent no log-probabilities.")
                continue
            letter = _best(reply.logprobs[:1] if forced else _from_letter(reply, item.question), item.question)
            yield self._lettered(item.question, letter) if letter else Prediction(item.question.id, reply.text, None)

    def _head(self, question: Question) -> tuple[str, str]:
        """Return the answer's words before the letters, and the spaces between: a letter's token holds its space."""
        head = prompts.answer_head(question, "", prompts.style_of(self.config.prompt))
        words = head.rstrip(" ")
        return words, head[len(words) :]

    def _lettered(self, question: Question, letters: str) -> Prediction:
        return Prediction(question.id, "".join(self._head(question)) + letters, letters)

    def _forces_words(self, first: Asked, otherwise: str) -> bool:
        """Return whether the server goes on behind words put into the model's mouth; if not, say so.

        A server that ignores the fields closes the words like any message and opens another one, so that the prompt
        is as long with the fields as without; one that knows them leaves both out.

        Args:
            first: a question to try it with; two tokens are written.
            otherwise: the name of what is done instead.

        Raises:
            UserError: the server fails.
        """
        words, _ = self._head(first.question)
        if self._template or not words:
            return True
        request = self._request(first, {"max_tokens": 1}, forced=True)
        plain = {key: value for key, value in request["extra_body"].items() if key not in CONTINUED}
        continued, answered = self.client.ask(request), self.client.ask({**request, "extra_body": plain})
        refused = continued.reason is not None and continued.reason.startswith(REFUSED)
        if continued.finish == "error" and not refused:
            raise UserError(f"{self.client.address}: the first request failed: {continued.reason}")
        # Some chat templates refuse to answer an assistant's message.
        only_continued = answered.reason is not None and answered.reason.startswith(REFUSED)
        if not refused and (only_continued or continued.prompt_tokens < answered.prompt_tokens):
            return True
        self.usage.mode = otherwise
        cli.note(
            f"warning: {self.client.address} does not let the answer begin with {words!r} (no continue_final_message), "
            f"as local models do for generation.mode={self.config.generation.mode}. The results are not comparable "
            f"with theirs and are named {otherwise!r}."
        )
        return False

    def _send(self, asked: Sequence[Asked], request: Callable[[Asked], Body]) -> Iterator[tuple[Asked, Reply]]:
        return self.client.send((item, request(item)) for item in asked)

    def _request(
        self, item: Asked, fields: Body | None = None, *, extra: Body | None = None, forced: bool = False
    ) -> dict[str, Any]:
        """Return what is sent for a question: a chat, or one text in the wrapper that `prompt.template` names.

        Args:
            item: the question.
            fields: of OpenAI's protocol, in place of the config's.
            extra: fields beyond it.
            forced: whether the model goes on behind the answer's first words.

        Raises:
            ConfigError: a wrapper without a place for what was said before.
        """
        dialogue = item.dialogue()
        if dialogue.system is None:
            dialogue = dialogue._replace(system=self.config.prompt.system)
        words = self._head(item.question)[0] if forced else ""
        request = {**self._settings, **(fields or {})}
        beyond = {**self._extra, **(extra or {})}
        if self._template is not None:
            request["prompt"] = self._template.render(dialogue) + words
            if stop := list(dict.fromkeys([*request.get("stop", ()), *self._template.stop])):
                request["stop"] = stop
        elif words:
            request["messages"] = [*dialogue.messages(), {"role": "assistant", "content": words}]
            beyond |= CONTINUED
        else:
            request["messages"] = dialogue.messages()
        if self.config.generation.arguments.get("do_sample"):
            # As local models: each output has a seed of its own, so that votes differ and a run can be repeated.
            request["seed"] = zlib.crc32(f"{self.config.generation.seed}/{item.question.id}".encode())
        return {**request, "extra_body": beyond}


def read(written: Written) -> Prediction:
    """Return the prediction that a text is; a failed request is one without text or answer."""
    question, text = written.asked.question, written.text
    if written.finish == "error":
        return _failed(question, written.reason)
    return Prediction(
        question.id,
        text,
        answer_parsing.parse(text, question),
        answer_parsing.split_explanation(text),
        finish=written.finish,
    )


def _failed(question: Question, reason: str | None) -> Prediction:
    return Prediction(question.id, "", None, None, finish="error", reason=reason)


def _from_letter(reply: Reply, question: Question) -> tuple[Mapping[str, float], ...]:
    """Return the tokens of an answer from its first letter on; of an answer of one token that one."""
    if len(reply.logprobs) == 1:
        return reply.logprobs
    own = (next(iter(tops), "").strip() for tops in reply.logprobs)
    start = next((place for place, token in enumerate(own) if token in question.options), len(reply.logprobs))
    return reply.logprobs[start:]


def _best(tokens: Sequence[Mapping[str, float]], question: Question) -> str | None:
    """Return the most probable letter at the first of `tokens`; None if no letter is among the most probable."""
    letters: dict[str, float] = {}
    for token, log in tokens[0].items() if tokens else ():
        letter = token.strip()
        if letter in question.options:
            letters[letter] = max(log, letters.get(letter, log))
    return max(letters, key=letters.__getitem__, default=None)


def _settings(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the config sends with every question: fields of OpenAI's protocol, and those beyond it.

    Raises:
        ConfigError: a setting that no server knows, or that would replace the question.
    """
    wanted = {key: value for key, value in config.generation.arguments.items() if value is not None}
    for key, value in wanted.items():
        if key not in (*SENT, *EXTRA) and DEFAULTS.get(key) != value:
            raise ConfigError(
                f"generation.{key}: a server has no such setting. Leave it out; fields that yours has beyond OpenAI's "
                "go into generation.extra_body."
            )
    for key in OWN:
        if key in config.generation.extra_body:
            raise ConfigError(f"generation.extra_body: {key} is what is asked, and cannot be replaced. Leave it out.")
    samples = wanted.get("do_sample", False)
    fields: dict[str, Any] = {"temperature": wanted.get("temperature", 1.0) if samples else 0.0}
    if samples and "top_p" in wanted:
        fields["top_p"] = wanted["top_p"]
    if "max_completion_tokens" not in config.generation.extra_body:
        fields["max_tokens"] = wanted.get("max_new_tokens", config.prompt.max_target_length)
    if stop := wanted.get("stop_strings"):
        fields["stop"] = [stop] if isinstance(stop, str) else list(stop)
    extra = {EXTRA[key]: wanted[key] for key in EXTRA if key in wanted} | dict(config.generation.extra_body)
    return {key: value for key, value in fields.items() if key not in extra}, extra
