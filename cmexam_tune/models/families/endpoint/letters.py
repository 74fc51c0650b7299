"""Answers without reading: a list of allowed texts, or the most probable letter, where the server offers them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cmexam_tune import prompts
from cmexam_tune.core.errors import ConfigError, UserError
from cmexam_tune.core.schema import Prediction, Question
from cmexam_tune.evaluation.answer_parsing import letter_sets
from cmexam_tune.models.families.endpoint.client import Reply
from cmexam_tune.models.families.endpoint.remote import Connection
from cmexam_tune.prompts import Asked

TOP = 20
"""Most probable tokens that are asked for; the most that OpenAI and vLLM give."""
ROOM = 8
"""Tokens in which the answer's letter must come."""

Choices = Sequence[str]
DIALECTS: dict[str, Callable[[Choices], Mapping[str, Any]]] = {
    "structured_outputs": lambda choices: {"structured_outputs": {"choice": list(choices)}},
    "guided_choice": lambda choices: {"guided_choice": list(choices)},
    "regex": lambda choices: {"regex": "(" + "|".join(re.escape(choice) for choice in choices) + ")"},
}
"""How a list of allowed texts is written: vLLM since 0.11, vLLM before, SGLang."""


def constrained(remote: Connection, asked: Sequence[Asked]) -> Iterator[Prediction]:
    """Yield predictions that can only be legal answers.

    Raises:
        UserError: the server takes no list of allowed texts; or whatever `Connection.write` raises.
    """
    style, sets = prompts.style_of(remote.config.prompt), remote.config.generation.answer_sets

    def heads(question: Question) -> dict[str, str]:
        """Return text -> letters of each legal answer, as the style starts its completion."""
        chosen = letter_sets(question, sets)
        return {prompts.answer_head(question, letters, style): letters for letters in chosen}

    def prediction(item: Asked, reply: Reply) -> Prediction:
        if reply.finish == "error":
            return Prediction(item.question.id, "", None, None, finish="error", reason=reply.reason)
        letters = heads(item.question).get(reply.text)
        if letters is None:
            return Prediction(
                item.question.id, "", None, None, finish="error", reason="the server wrote a text that is not allowed."
            )
        return Prediction(item.question.id, reply.text, letters)

    if asked:
        dialect = _dialect(remote, asked[0], heads(asked[0].question))
        for item, reply in remote.send(asked, lambda item: {"extra_body": dialect(list(heads(item.question)))}):
            yield prediction(item, reply)


def _dialect(remote: Connection, first: Asked, heads: Mapping[str, str]) -> Callable[[Choices], Mapping[str, Any]]:
    """Return the first way of writing a list of allowed texts that the server keeps to."""
    failures = []
    for name, dialect in DIALECTS.items():
        fields = {"extra_body": dialect(list(heads))}
        reply = remote.client.ask(remote.request(first, "", fields))
        if reply.text in heads:
            return dialect
        failures.append(f"{name}: {reply.reason or f'answered {reply.text[:20]!r}'}")
    raise UserError(
        f"{remote.client.address}: generation.mode=constrained needs a server that writes only given texts "
        f"(vLLM, SGLang); this one does not ({'; '.join(failures)}). Use generation.mode=generate."
    )


def likelihood(remote: Connection, asked: Sequence[Asked]) -> Iterator[Prediction]:
    """Yield the most probable letter at the place where the model writes its answer; one letter for each question.

    Only the letters among the server's most probable tokens are compared: the best of them is the best of all.

    Raises:
        UserError: questions with several answers, normalised likelihoods, or a server without log-probabilities.
    """
    config = remote.config
    if config.generation.length_normalization or config.generation.prior_normalization:
        raise ConfigError("generation: likelihood behind an address cannot be normalised; only local models can.")
    sets = config.generation.answer_sets
    several = sum(len(letter_sets(item.question, sets)) > len(item.question.options) for item in asked)
    if several:
        raise ConfigError(
            f"generation.mode=likelihood behind an address reads one letter, and {several} questions may have several. "
            "Use generation.mode=constrained, or set generation.answer_sets=single."
        )
    chat = config.prompt.template == "auto"
    tops: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}

    def head(item: Asked) -> str:
        return prompts.answer_head(item.question, "", prompts.style_of(config.prompt))

    def more(item: Asked) -> Mapping[str, Any]:
        if chat:
            return {**tops, "max_tokens": ROOM}
        return {**tops, "max_tokens": 1, "prompt": remote.body(item)["prompt"] + head(item)}

    for item, reply in remote.send(asked, more):
        if reply.finish == "error":
            yield Prediction(item.question.id, "", None, None, finish="error", reason=reply.reason)
            continue
        if not reply.logprobs:
            raise UserError(
                f"{remote.client.address}: generation.mode=likelihood needs log-probabilities, and the server sends "
                "none. Use generation.mode=generate or constrained."
            )
        letter = _best(reply, item.question)
        text = prompts.answer_head(item.question, letter, prompts.style_of(config.prompt)) if letter else reply.text
        yield Prediction(item.question.id, text, letter)


def _best(reply: Reply, question: Question) -> str | None:
    """Return the most probable letter at the first token that is a letter of the question; None if there is none."""
    for tops in reply.logprobs:
        own = next(iter(tops))
        if len(reply.logprobs) > 1 and own.strip() not in question.options:
            continue
        letters = {token.strip(): log for token, log in sorted(tops.items(), key=lambda top: top[1])}
        known = {letter: log for letter, log in letters.items() if letter in question.options}
        return max(known, key=known.__getitem__) if known else None
    return None
