"""What a model behind an address is asked, and the answers that its replies are."""

import dataclasses
import functools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.config.settings import LOCAL_ONLY
from cmexam_tune.core import cli
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.evaluation.answer_parsing import letter_sets
from cmexam_tune.models.completion import Completion, Token, normalised
from cmexam_tune.models.families.endpoint.client import Body, Client
from cmexam_tune.prompts import PromptRequest

SENT = ("do_sample", "max_new_tokens", "temperature", "top_p")
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
    # A text of GBNF is quoted as in JSON.
    "grammar": lambda choices: {
        "grammar": "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)
    },
}
"""How a list of allowed texts is written: vLLM since 0.11, vLLM before, SGLang, llama.cpp."""


class Remote:
    """A model behind an address; a `models.completion.TextEngine`."""

    local_only: ClassVar[Sequence[str]] = LOCAL_ONLY
    """Settings that cannot be kept."""

    def __init__(self, config: Config) -> None:
        """Check address, key and settings; nothing is sent yet.

        Raises:
            UserError: an address, key or setting that cannot be used.
        """
        self.config = config
        self._settings, self._extra = _settings(config, self.local_only)
        self._template = None if config.prompt.template == "auto" else prompts.template(config.prompt.template)
        self.client = Client(config.model, config.generation)
        self.usage = self.client.usage

    @property
    def chats(self) -> bool:
        """Whether messages are sent and the server applies its template; otherwise the finished prompt is sent."""
        return self._template is None

    def effective_generation_config(self) -> dict[str, object]:
        """Return the fields that every request has beside the model's name and the prompt."""
        return {**self._settings, **self._extra}

    def generate(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Let the model write; requests that fail for good have `finish` error and a reason.

        Raises:
            UserError: wrong key, model or address.
            TrainingStopped: the server fails again and again.
        """
        return self._send(requests, self._request)

    def answer(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield a completion for each request in the way that `generation.mode` names, as replies come in.

        Raises:
            UserError: wrong key, model or address; a server or style that lacks what the mode needs.
            TrainingStopped: the server fails again and again.
        """
        modes = {"generate": self.generate, "constrained": self._constrained, "likelihood": self._likelihood}
        return modes[self.config.generation.mode](requests) if requests else iter(())

    def _constrained(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
        """Yield completions that can only be allowed answers.

        Raises:
            UserError: the server takes no list of allowed texts; or whatever `generate` raises.
        """
        sets = self.config.generation.answer_sets
        forced = self._forces_words(requests[0], "constrained-words")

        def choices(question: Question) -> dict[str, str]:
            """Return what the model may write -> the letters that it stands for."""
            start = self._head(question)[1] if forced else "".join(self._head(question))
            return {start + letters: letters for letters in letter_sets(question, sets)}

        def request(item: PromptRequest, dialect: str, allowed: Choices) -> Body:
            return self._request(item, extra=DIALECTS[dialect](allowed), forced=forced)

        first = requests[0]
        dialect = self._dialect(first, functools.partial(request, first), list(choices(first.question)))
        for completion in self._send(requests, lambda item: request(item, dialect, list(choices(item.question)))):
            letters = choices(completion.request.question).get(completion.text)
            if completion.finish != "error" and letters is None:
                yield _failed(completion, "the server wrote a text that is not allowed.")
            else:
                yield self._chosen(completion, letters)

    def _dialect(self, first: PromptRequest, request: Callable[[str, Choices], Body], allowed: Choices) -> str:
        """Return the name of the first way of writing a list of allowed texts that the server keeps to.

        A server that ignores a field may write an allowed text all the same. So it is asked once more without the one
        that it wrote: then only a server that keeps to the list writes another one of it.
        """
        failures = []
        for name in DIALECTS:
            completion = self.client.ask(first, request(name, allowed))
            if completion.text in allowed:
                others = [text for text in allowed if text != completion.text]
                if not others or self.client.ask(first, request(name, others)).text in others:
                    return name
            failures.append(f"{name}: {completion.reason or f'answered {completion.text[:20]!r}'}")
        raise UserError(
            f"{self.client.address}: generation.mode=constrained needs a server that writes only given texts "
            f"(vLLM, SGLang); this one does not ({'; '.join(failures)}). Use generation.mode=generate."
        )

    def _likelihood(self, requests: Sequence[PromptRequest]) -> Iterator[Completion]:
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
        multiple = sum(len(letter_sets(item.question, sets)) > len(item.question.options) for item in requests)
        if multiple:
            raise ConfigError(
                f"generation.mode=likelihood behind an address reads one letter, and {multiple} questions may have "
                "several. Use generation.mode=constrained, or set generation.answer_sets=single."
            )
        forced = self._forces_words(requests[0], "first-letter")
        fields = {"logprobs": True, "top_logprobs": TOP} if self.chats else {"logprobs": TOP}
        fields["max_tokens"] = 1 if forced else ROOM
        sample = self.client.ask(requests[0], self._request(requests[0], fields, forced=forced))
        if sample.finish != "error" and not sample.logprobs:
            raise UserError(
                f"{self.client.address}: generation.mode=likelihood needs log-probabilities, and the server sends "
                "none. Use generation.mode=generate or constrained."
            )
        for completion in self._send(requests, lambda item: self._request(item, fields, forced=forced)):
            if completion.logprobs:
                tokens = completion.logprobs if forced else _from_letter(completion)
                scores = _scores(tokens, completion.request.question)
                self.usage.unseen += not scores
                chosen = self._chosen(completion, max(scores, key=scores.__getitem__, default=None))
                yield replace(chosen, probabilities=normalised(scores) if scores else None)
            elif completion.finish == "error":
                yield completion
            else:
                yield _failed(completion, "the server sent no log-probabilities.")

    def _head(self, question: Question) -> tuple[str, str]:
        """Return the answer's words before the letters, and the spaces between: a letter's token holds its space."""
        head = prompts.answer_head(question, "", prompts.resolve_style(self.config.prompt))
        words = head.rstrip(" ")
        return words, head[len(words) :]

    def _chosen(self, completion: Completion, letters: str | None) -> Completion:
        """Return the completion in the style's words for the choice that the server made; failures are unchanged."""
        if completion.finish == "error":
            return completion
        text = completion.text if letters is None else "".join(self._head(completion.request.question)) + letters
        return replace(completion, text=text, finish=None, letters=letters)

    def _forces_words(self, first: PromptRequest, otherwise: str) -> bool:
        """Return whether the server continues a prefilled assistant message; note it if not.

        A server that ignores the fields closes the words like any message and opens another one, so that the prompt
        is as long with the fields as without; one that knows them leaves both out.

        Args:
            first: a question to try it with; two tokens are written.
            otherwise: the name of what is done instead.

        Raises:
            UserError: the server fails.
        """
        words, _ = self._head(first.question)
        if not self.chats or not words:
            return True
        request = self._request(first, {"max_tokens": 1}, forced=True)
        plain = {key: value for key, value in request["extra_body"].items() if key not in CONTINUED}
        continued = self.client.ask(first, request)
        answered = self.client.ask(first, {**request, "extra_body": plain})
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

    def _send(
        self, requests: Sequence[PromptRequest], request: Callable[[PromptRequest], Body]
    ) -> Iterator[Completion]:
        return self.client.send((item, request(item)) for item in requests)

    def _request(
        self, item: PromptRequest, fields: Body | None = None, *, extra: Body | None = None, forced: bool = False
    ) -> dict[str, Any]:
        """Return what is sent for a question.

        Args:
            item: the question.
            fields: of OpenAI's protocol, in place of the config's.
            extra: fields beyond it.
            forced: whether the model goes on behind the answer's first words.

        Raises:
            ConfigError: a wrapper without a place for what was said before.
        """
        prompt, beyond = self._prompt(item, forced=forced)
        request = {**self._settings, **(fields or {}), **prompt}
        if self.config.generation.arguments.get("do_sample"):
            # As local models: each output has a seed of its own, so that votes differ and a run can be repeated.
            # A checksum, because Python's `hash` of a text changes with every process.
            request["seed"] = zlib.crc32(f"{self.config.generation.seed}/{item.question.id}".encode())
        return {**request, "extra_body": {**self._extra, **(extra or {}), **beyond}}

    def _prompt(self, item: PromptRequest, *, forced: bool) -> tuple[Body, Body]:
        """Return the fields that are the question, and fields beyond OpenAI's protocol that say how it is meant.

        A chat, or one text in the wrapper that `prompt.template` names.
        """
        dialogue = item.dialogue()
        if dialogue.system is None:
            dialogue = dialogue._replace(system=self.config.prompt.system)
        words = self._head(item.question)[0] if forced else ""
        if self._template is not None:
            stop = list(dict.fromkeys([*self._settings.get("stop", ()), *self._template.stop]))
            return {"prompt": self._template.render(dialogue) + words, **({"stop": stop} if stop else {})}, {}
        if words:
            return {"messages": [*dialogue.messages(), {"role": "assistant", "content": words}]}, CONTINUED
        return {"messages": dialogue.messages()}, {}


def _failed(completion: Completion, reason: str) -> Completion:
    return replace(completion, text="", finish="error", reason=reason)


def _from_letter(completion: Completion) -> tuple[Token, ...]:
    """Return the tokens of an answer from its first letter on; of an answer of one token that one."""
    if len(completion.logprobs) == 1:
        return completion.logprobs
    options = completion.request.question.options
    start = next((place for place, token in enumerate(completion.logprobs) if token.text.strip() in options), None)
    return () if start is None else completion.logprobs[start:]


def _scores(tokens: Sequence[Token], question: Question) -> dict[str, float]:
    """Return letter -> log-probability at the first of `tokens`, of the letters that are among the most probable."""
    scores: dict[str, float] = {}
    for text, logprob in tokens[0].top if tokens else ():
        if text.strip() in question.options:
            # Best first: `A` and ` A` are two tokens, of which the likelier counts.
            scores.setdefault(text.strip(), logprob)
    return scores


def _settings(config: Config, local_only: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the config sends with every question: fields of OpenAI's protocol, and those beyond it.

    Raises:
        ConfigError: a setting that no server knows, or that would replace the question.
    """
    arguments = {key: value for key, value in config.generation.arguments.items() if value is not None}
    for key, value in arguments.items():
        if key not in (*SENT, *EXTRA) and DEFAULTS.get(key) != value:
            raise ConfigError(
                f"generation.{key}: a server has no such setting. Leave it out; fields that yours has beyond OpenAI's "
                "go into generation.extra_body."
            )
    defaults = {field.name: field.default for field in dataclasses.fields(config.generation)}
    for key in local_only:
        if getattr(config.generation, key) != defaults[key]:
            raise ConfigError(f"generation.{key}: a server has no such setting. Leave it out.")
    for key in OWN:
        if key in config.generation.extra_body:
            raise ConfigError(f"generation.extra_body: {key} is what is asked, and cannot be replaced. Leave it out.")
    samples = arguments.get("do_sample", False)
    fields: dict[str, object] = {"temperature": arguments.get("temperature", 1.0) if samples else 0.0}
    if samples and "top_p" in arguments:
        fields["top_p"] = arguments["top_p"]
    if "max_completion_tokens" not in config.generation.extra_body:
        fields["max_tokens"] = arguments.get("max_new_tokens", config.prompt.max_target_length)
    if config.generation.stop_strings:
        fields["stop"] = list(config.generation.stop_strings)
    extra = {EXTRA[key]: arguments[key] for key in EXTRA if key in arguments} | dict(config.generation.extra_body)
    return {key: value for key, value in fields.items() if key not in extra}, extra
