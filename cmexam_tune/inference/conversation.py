"""A conversation with a model that writes: messages as it is asked, and its reply."""

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core.errors import UserError
from cmexam_tune.core.schema import Question
from cmexam_tune.exams import Cells, UnreadableRow
from cmexam_tune.models import families
from cmexam_tune.models.families import Loaded

Messages = Sequence[Mapping[str, str]]
"""Turns as `{"role": "system" | "user" | "assistant", "content": text}`, the last one mostly by the user."""


NOTHING = Question("chat", "?", {"A": "?", "B": "?"}, None)
"""Stands where a question is needed and nobody asked one."""


class Reply(NamedTuple):
    """What the model wrote, and how long prompt and reply were in tokens."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def reply(config: Config, loaded: Loaded, messages: Messages) -> Reply:
    """Return what the model says to the last message of a conversation.

    Earlier turns count where the model's template has a form for them, see `remembers`.

    Raises:
        UserError: more tokens than the model has positions for, no message is the user's, or unusable generation
            settings.
    """
    request = to_request(messages, prompts.resolve_style(config.prompt))
    # Where it samples, a conversation is not to be repeated.
    anew = dataclasses.replace(config.generation, seed=random.getrandbits(32))
    decoder = _decoder(dataclasses.replace(config, generation=anew), loaded)
    if not decoder.codec.remembers:
        request = dataclasses.replace(request, history=())
    _check_length(decoder, request)
    completion = next(decoder.generate([request]))
    return Reply(completion.text.strip(), completion.prompt_tokens, completion.completion_tokens)


def _check_length(decoder: Any, request: prompts.PromptRequest) -> None:
    """Refuse more than the model has positions for: its attention would need memory without end."""
    (item,) = decoder.ask([request])
    if decoder.positions is not None and len(item.ids) > decoder.positions:
        raise UserError(
            f"the conversation takes {len(item.ids):,} tokens, this model has {decoder.positions:,} positions. "
            "Say it shorter, or forget what was said before with /reset."
        )


def remembers(config: Config, loaded: Loaded) -> bool:
    """Return whether the model's template can render earlier turns; if not, each message is asked by itself."""
    return bool(_decoder(config, loaded).codec.remembers)


def _decoder(config: Config, loaded: Loaded) -> Any:
    return families.writer(config.model.family, "talk").engine(loaded, config)


def to_request(
    messages: Messages, style: str | prompts.Style | None = None, *, continues: bool = False
) -> prompts.PromptRequest:
    """Return a conversation as the model is asked.

    Args:
        messages: they keep their roles and order, so that a template that has no form for them can refuse.
        style: puts the user's exam questions into its words; None: every message goes to the model as it is.
        continues: the model goes on with the last message, which is its own, instead of answering it.

    Raises:
        UserError: no message is the user's, or the last one is not the model's and is to be continued.
    """
    turns: list[prompts.Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "user" and style is not None:
            content = in_style(content, style)
        turns.append(prompts.Message(message["role"], content))
    if continues and (not turns or turns[-1].role != "assistant"):
        raise UserError("the last message must have the role assistant, as it is to be continued.")
    start = turns.pop().content if continues else ""
    place = max((place for place, turn in enumerate(turns) if turn.role == "user"), default=None)
    if place is None:
        raise UserError("at least one message must have the role user.")
    # Published wrappers have a place for a system text at the start, and only there.
    system = turns[0].content if turns[0].role == "system" else None
    return prompts.PromptRequest(
        NOTHING,
        lambda question: turns[place].content,
        tuple(turns[0 if system is None else 1 : place]),
        system,
        since=tuple(turns[place + 1 :]),
        reply_start=start,
    )


def in_style(text: str, style: str | prompts.Style) -> str:
    """Return an exam question in the words of a style, and any other text unchanged."""
    start = re.search(r"^\s*[(（]?[AaＡａ][\s.．、:：)）]", text, re.MULTILINE)
    if start is None or not text[: start.start()].strip():
        return text
    try:
        options = Cells().options(text[start.start() :].strip())
    except UnreadableRow:
        return text
    return prompts.prompt(Question("chat", text[: start.start()].strip(), options, None), style)
