"""OpenAI's protocol: what a request may say, how an answer and an error look."""

import hmac
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cmexam_tune.evaluation.answer_parsing import HALF

if TYPE_CHECKING:
    from cmexam_tune.models.generation.items import Written

FIELDS = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream",
    "stream_options", "logprobs", "top_logprobs", "seed", "n",
}  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Fields of the protocol that have no effect here: any value but these is refused."""
IGNORED = {
    "user", "store", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key",
}  # fmt: skip
"""Fields of the protocol that change no answer, whatever they hold."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_CHOICES = 128
"""Answers that one request may ask for, as OpenAI allows; together of all its prompts."""
MOST_TOP = 20
"""Most probable tokens that a request may ask for, as OpenAI and vLLM allow."""


class Refused(Exception):
    """A request that is not answered: status and what is wrong."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        """Name the HTTP status, the message and the field of the request."""
        super().__init__(message)
        self.status, self.field = status, field

    def content(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kinds = {401: "authentication_error", 413: "invalid_request_error", 500: "server_error", 504: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": None}}


def number(wanted: Mapping[str, Any], field: str, low: float, high: float | None) -> float | None:
    """Return a number of a request, None where it is not given; `high` None is no upper bound."""
    value = wanted.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < low or (high and value > high):
        raise Refused(400, f"{field}: a number from {low:g}{f' to {high:g}' if high else ''} is needed.", field)
    return float(value)


def seed(wanted: Mapping[str, Any]) -> int | None:
    """Return what the random numbers of a request start from, None where any will do."""
    value = wanted.get("seed")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise Refused(400, "seed: a whole number or null is needed.", "seed")
    return value


def count_of_choices(wanted: Mapping[str, Any]) -> int:
    """Return how many answers a request wants to each prompt."""
    count = number(wanted, "n", 1, MOST_CHOICES)
    if count is not None and count != int(count):
        raise Refused(400, "n: a whole number is needed.", "n")
    return int(count or 1)


def texts_to_continue(prompt: Any) -> list[str]:
    """Return the prompts of a completion: a text or a list of texts."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise Refused(
            400, "messages or prompt: one of them is needed; a prompt is a text or a list of texts, not ids.", "prompt"
        )
    return texts


def conversation(given: Any) -> list[dict[str, str]]:
    """Return the messages of a chat as roles and texts; `developer` is OpenAI's newer word for `system`."""
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages: a list with at least one message is needed.", "messages")
    found = []
    for number, message in enumerate(given):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if not isinstance(content, str) or role is None:
            where = f"messages[{number}]"
            raise Refused(400, f"{where}: a role ({', '.join(ROLES)}) and a content of text are needed.", where)
        found.append({"role": role, "content": content})
    return found


def stop_texts(wanted: Mapping[str, Any]) -> list[str]:
    """Return the texts at which a request wants its answer to end."""
    stops = [] if (given := wanted.get("stop")) is None else given
    if isinstance(stops, str):
        return [stops] if stops else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refused(400, "stop: a text or a list of texts is needed.", "stop")
    return [stop for stop in stops if stop]


def top_tokens(wanted: Mapping[str, Any]) -> int | None:
    """Return how many of the most probable tokens a request wants for each token; None: no log-probabilities."""
    asked, field = wanted.get("logprobs"), "top_logprobs" if "messages" in wanted else "logprobs"
    if field == "top_logprobs":
        if not isinstance(asked, bool | None):
            raise Refused(400, "logprobs: true or false is needed.", "logprobs")
        if wanted.get(field) is not None and not asked:
            raise Refused(400, "top_logprobs: needs logprobs: true.", field)
    elif wanted.get("top_logprobs") is not None:
        raise Refused(400, "top_logprobs: belongs to chats; here logprobs is a number.", "top_logprobs")
    if asked is None or asked is False:
        return None
    count = number(wanted, field, 0, MOST_TOP)
    if count is not None and count != int(count):
        raise Refused(400, f"{field}: a whole number is needed.", field)
    if wanted.get("stream"):
        raise Refused(400, "logprobs: not while streaming. Leave out stream.", "logprobs")
    return int(count or 0)


def with_usage(wanted: Mapping[str, Any]) -> bool:
    """Return whether a stream ends with the numbers of tokens; wrong stream fields are refused."""
    if not isinstance(wanted.get("stream") or False, bool):
        raise Refused(400, "stream: true or false is needed.", "stream")
    options = wanted.get("stream_options")
    if options is None:
        return False
    usage = options.get("include_usage", False) if isinstance(options, dict) else None
    if not isinstance(usage, bool) or set(options) - {"include_usage"} or not wanted.get("stream"):
        raise Refused(400, 'stream_options: only {"include_usage": true or false}, with stream.', "stream_options")
    return usage


def settled(text: str, stops: Sequence[str]) -> str:
    """Return what of an unfinished text stays, whatever comes: no half character, no beginning of a stop text."""
    if ends := [place for stop in stops if (place := text.find(stop)) >= 0]:
        return text[: min(ends)]
    text = text.rstrip(HALF)
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held]


def completion(answers: "Sequence[Written]", wanted: Mapping[str, Any], name: str, chatting: bool) -> dict[str, Any]:
    """Return the answers to a request, `n` to each prompt in the order of the prompts, as one object."""
    choices = []
    for index, written in enumerate(answers):
        content = {"message": {"role": "assistant", "content": written.text}} if chatting else {"text": written.text}
        logprobs = None if top_tokens(wanted) is None else _logprobs(written, chatting)
        choices.append({"index": index, **content, "finish_reason": written.finish, "logprobs": logprobs})
    return {
        **_envelope("chat.completion" if chatting else "text_completion", name),
        "choices": choices,
        "usage": _usage(answers, count_of_choices(wanted)),
    }


def _usage(answers: "Sequence[Written]", n: int) -> dict[str, int]:
    """Return the numbers of tokens; a prompt counts once, however many of the answers are to it."""
    prompt_tokens = sum(written.prompt_tokens for written in answers[::n])
    completion_tokens = sum(written.tokens for written in answers)
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _logprobs(written: "Written", chatting: bool) -> dict[str, Any]:
    """Return the log-probabilities of the answer's tokens as chats or completions hold them."""

    def entry(text: str, logprob: float) -> dict[str, Any]:
        # A token of a part of a character has no text of its own.
        return {"token": text, "logprob": logprob, "bytes": None if HALF in text else list(text.encode())}

    if chatting:
        content = [
            {**entry(token.text, token.logprob), "top_logprobs": [entry(*top) for top in token.top]}
            for token in written.logs
        ]
        return {"content": content, "refusal": None}
    return {
        "tokens": [token.text for token in written.logs],
        "token_logprobs": [token.logprob for token in written.logs],
        "top_logprobs": [dict(reversed(token.top)) for token in written.logs],
        "text_offset": [token.start for token in written.logs],
    }


class Stream:
    """The answers to a request as server-sent events while they are written."""

    def __init__(self, wanted: Mapping[str, Any], name: str, chatting: bool) -> None:
        """Take the request and what the model is called."""
        self.chatting, self.usage = chatting, with_usage(wanted)
        self.head = _envelope("chat.completion.chunk" if chatting else "text_completion", name)
        self.n = count_of_choices(wanted)
        self.sent: dict[int, str] = {}
        """Of each choice that has begun, the text that was sent."""

    def end(self, answers: "Sequence[Written]") -> Iterator[str]:
        """Yield the rest of the texts, why they ended, and the numbers of tokens if they are wanted."""
        for index, written in enumerate(answers):
            yield self.more(index, written.text)
            yield self._event([self._choice(index, {} if self.chatting else "", str(written.finish))])
        if self.usage:
            yield self._event([], _usage(answers, self.n))
        yield "data: [DONE]\n\n"

    def more(self, index: int, text: str) -> str:
        """Return an event with what is new in a choice's text so far; an empty text if nothing is."""
        part = text[len(self.sent.get(index, "")) :]
        if not part and index in self.sent:
            return ""
        role = {} if index in self.sent else {"role": "assistant"}
        self.sent[index] = self.sent.get(index, "") + part
        return self._event([self._choice(index, {**role, "content": part} if self.chatting else part, None)])

    def _choice(self, index: int, content: Any, finish: str | None) -> dict[str, Any]:
        field = "delta" if self.chatting else "text"
        return {"index": index, field: content, "finish_reason": finish, "logprobs": None}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        return event({**self.head, "choices": choices, **({"usage": usage} if self.usage else {})})


def check_key(key: str | None, headers: Mapping[str, str]) -> None:
    """Refuse a request without the key, if there is one."""
    given = headers.get("authorization", "").removeprefix("Bearer ")
    if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
        raise Refused(401, "the API key is missing or wrong (Authorization: Bearer KEY).")


def event(content: Mapping[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _envelope(kind: str, name: str) -> dict[str, Any]:
    mark = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{mark}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}
