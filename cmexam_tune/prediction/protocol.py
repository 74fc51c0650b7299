"""OpenAI's protocol: what a request may say, how an answer and an error look."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cmexam_tune.models.items import Written

FIELDS = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream",
    "stream_options", "user",
}  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],), "response_format": ({"type": "text"},),
}  # fmt: skip
"""Fields of the protocol that have no effect here: any value but these (and null) is refused."""


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


def conversation(given: Any) -> list[dict[str, str]]:
    """Return the messages of a chat as roles and texts."""
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages: a list with at least one message is needed.", "messages")
    found = []
    for number, message in enumerate(given):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            texts = [part.get("text") for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) or message.get("role") not in ("system", "user", "assistant"):
            where = f"messages[{number}]"
            raise Refused(400, f"{where}: a role (system, user, assistant) and a content of text are needed.", where)
        found.append({"role": str(message["role"]), "content": content})
    return found


def _ended(written: "Written", wanted: Mapping[str, Any]) -> tuple[str, str]:
    """Return the text up to the first of the request's stop texts, and why it ended."""
    stops = [wanted["stop"]] if isinstance(wanted.get("stop"), str) else wanted.get("stop") or []
    ends = [at for stop in stops if stop and (at := written.text.find(stop)) >= 0]
    text = written.text[: min(ends)] if ends else written.text
    return text.strip() if "messages" in wanted else text, "stop" if ends else str(written.finish)


def completion(written: "Written", wanted: Mapping[str, Any], name: str, chatting: bool) -> dict[str, Any]:
    """Return an answer as one object."""
    text, finish = _ended(written, wanted)
    content = {"message": {"role": "assistant", "content": text}} if chatting else {"text": text}
    total = written.prompt_tokens + written.tokens
    usage = {"prompt_tokens": written.prompt_tokens, "completion_tokens": written.tokens, "total_tokens": total}
    choice = {"index": 0, **content, "finish_reason": finish, "logprobs": None}
    return {
        **_envelope("chat.completion" if chatting else "text_completion", name),
        "choices": [choice],
        "usage": usage,
    }


def events(written: "Written", wanted: Mapping[str, Any], name: str, chatting: bool) -> Iterator[str]:
    """Yield an answer as server-sent events: the text in one piece, then why it ended."""
    text, finish = _ended(written, wanted)
    head = _envelope("chat.completion.chunk" if chatting else "text_completion", name)
    for part, end in ((text, None), ("", finish)):
        delta = {"role": "assistant", "content": part} if end is None else {}
        content: dict[str, Any] = {"delta": delta} if chatting else {"text": part}
        choice = {"index": 0, **content, "finish_reason": end}
        yield f"data: {json.dumps({**head, 'choices': [choice]}, ensure_ascii=False)}\n\n"
    yield "data: [DONE]\n\n"


def _envelope(kind: str, name: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}
