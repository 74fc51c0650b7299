"""What a server said: bytes become a completion of known types without the key, or `Unreadable`.

Everything that a server says passes here before anything of it is kept, cut or shown.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cmexam_tune.models.completion import LEAST, Completion, Token
from cmexam_tune.prompts import PromptRequest

LONGEST_NAME = 200
"""Characters that are kept of a server's name for its model."""
SHOWN = 300
"""Characters of a server's words that a message repeats."""
MOST_TOKENS = 10**9
UNSEEN = r"[\s\x00-\x1f\x7f\u200b-\u200f\u2060\ufeff]*"
"""White space and characters without a width: a key with these in it can be read all the same."""
WHOLE = 8
"""Characters from which on a key is also found with `UNSEEN` in it; shorter ones would be found in any text."""


class Unreadable(ValueError):
    """A reply that is no completion; the message is the reason."""


class Secret:
    """A key, and how it is kept out of sight."""

    def __init__(self, key: str, *, shared: bool = False) -> None:
        """Take a key; one that is `shared` is no secret."""
        self.key = key
        between = UNSEEN if len(key) >= WHOLE else ""
        self._pattern = None if shared else re.compile(between.join(map(re.escape, key)))

    def hide(self, text: str) -> str:
        """Return a text in which the key is replaced by stars, also where it is broken by `UNSEEN` characters."""
        return text if self._pattern is None else self._pattern.sub("***", text)

    def line(self, text: str) -> str:
        """Return a text without the key in one line that fits into a message."""
        return " ".join(self.hide(text).split())[:SHOWN]

    def clean(self, value: object) -> Any:
        """Return JSON without the key, and with a replacement character for every half of a surrogate pair."""
        if isinstance(value, str):
            return self.hide(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        if isinstance(value, list):
            return [self.clean(item) for item in value]
        if isinstance(value, dict):
            return {self.clean(key): self.clean(item) for key, item in value.items()}
        return value


def read(request: PromptRequest, content: bytes, secret: Secret, chat: bool) -> Completion:
    """Return what the body of the reply to a request says.

    Raises:
        Unreadable: it is no JSON, or no completion of the kind that was asked for.
    """
    try:
        value = secret.clean(json.loads(content.decode("utf-8", "replace")))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the server's reply is no JSON ({secret.line(str(error))}).") from None
    choices = value.get("choices") if isinstance(value, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if chat and isinstance(choice, dict) else choice
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Unreadable("the server sent no completion; is this the address of an OpenAI API?")
    usage = value.get("usage")
    if not isinstance(usage, dict):
        usage = {}
    withheld = Completion(
        request,
        "",
        "error",
        reason="the server's content filter held the answer back.",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        model=_name(value.get("model")),
        fingerprint=_name(value.get("system_fingerprint")),
    )
    finish = choice.get("finish_reason")
    if finish == "content_filter":
        return withheld
    # Hidden once more: a text in parts may hold the key in parts.
    text = secret.hide(_spoken(message) if chat else _text(choice.get("text")))
    ended: Literal["stop", "length"] = "length" if finish == "length" else "stop"
    return replace(
        withheld,
        text=text,
        finish=ended,
        reason=None,
        logprobs=_logprobs(choice.get("logprobs")),
        token_ids=_token_ids(choice.get("token_ids")),
    )


def complaint(content: bytes, secret: Secret) -> str:
    """Return the message of an error in OpenAI's or FastAPI's format on one line, or the whole body in any other."""
    text = content.decode("utf-8", "replace")
    try:
        value = secret.clean(json.loads(text))
        error = value.get("error", value) if isinstance(value, dict) else value
        said = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        text = said if isinstance(said, str) else json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return secret.line(text)


def _text(value: object) -> str:
    """Return a text, or the texts of a list of parts, as some servers send them.

    Raises:
        Unreadable: it is something else.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_text(part.get("text") if isinstance(part, dict) else part) for part in value)
    if not isinstance(value, str):
        raise Unreadable(f"the server sent a {type(value).__name__} where the answer's text belongs.")
    return value


def _spoken(message: Mapping[str, object]) -> str:
    """Return a message's text with what the model thought before it, as local models write it."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    text = _text(message.get("content"))
    return f"<think>\n{thought}\n</think>\n\n{text}" if isinstance(thought, str) and thought else text


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS else 0


def _name(value: object) -> str | None:
    return value[:LONGEST_NAME] if isinstance(value, str) else None


def _token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else []
    return tuple(ids) if all(type(token) is int and 0 <= token < MOST_TOKENS for token in ids) else ()


def _logprobs(logs: object) -> tuple[Token, ...]:
    """Return the tokens of a text with their log-probabilities; nothing where the server sends none.

    A chat's log-probabilities are a list of tokens under `content`, a text's four lists beside each other.

    Raises:
        Unreadable: log-probabilities of wrong types.
    """
    if not isinstance(logs, dict):
        return ()
    try:
        if logs.get("content"):
            rows = [[chosen, *(chosen.get("top_logprobs") or ())] for chosen in logs["content"]]
            return _tokens([[(top["token"], top["logprob"]) for top in row] for row in rows])
        if logs.get("top_logprobs"):
            columns = zip(logs["tokens"], logs["token_logprobs"], logs["top_logprobs"], strict=True)
            return _tokens([[(token, log), *(top or {}).items()] for token, log, top in columns])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise Unreadable("the server's log-probabilities cannot be read.") from None
    return ()


def _tokens(rows: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[Token, ...]:
    """Return tokens; each row holds the written one, then the most probable ones at its place."""
    tokens, start = [], 0
    for row in rows:
        tops: dict[str, float] = {}
        for text, log in row:
            if not isinstance(text, str) or isinstance(log, bool) or not isinstance(log, int | float):
                raise TypeError
            if math.isfinite(log):  # of minus infinity there is nothing to compare
                tops.setdefault(text, float(log))
        written = str(row[0][0])
        best_first = tuple(sorted(tops.items(), key=lambda top: -top[1]))
        tokens.append(Token(written, tops.get(written, LEAST), best_first, start))
        start += len(written)
    return tuple(tokens)
