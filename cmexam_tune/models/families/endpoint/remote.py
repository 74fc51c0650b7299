"""What a remote model is asked, and what it answered."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cmexam_tune import prompts
from cmexam_tune.config import Config
from cmexam_tune.core.errors import ConfigError
from cmexam_tune.core.schema import Prediction
from cmexam_tune.evaluation import answer_parsing
from cmexam_tune.models.families.endpoint.client import (
    Client,
    Reply,
    Request,
    Usage,
)
from cmexam_tune.prompts import Asked, Dialogue

FIELDS = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "stop_strings": "stop"}
"""transformers' name of a setting -> OpenAI's."""
EXTRA = {
    "top_k": "top_k",
    "min_p": "min_p",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
}
"""Settings that OpenAI's protocol lacks -> their names in vLLM and SGLang; sent only where a recipe sets them."""
DEFAULTS = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True}
"""Settings that say what happens anyway."""


@dataclass(frozen=True)
class Written:
    """What the model wrote to one question, before anybody reads an answer out of it."""

    asked: Asked
    text: str
    finish: Literal["stop", "length", "error"]
    reason: str | None = None
    """Why there is no text, where `finish` is `error`."""


class Connection:
    """A model behind an address that writes."""

    def __init__(self, config: Config) -> None:
        """Check address, key and settings; nothing is sent yet.

        Raises:
            UserError: an address, key or setting that cannot be used.
        """
        self.config = config
        body(Dialogue("?"), config)
        self.client = Client(config.model, config.generation)

    @property
    def usage(self) -> Usage:
        """What was sent and received so far."""
        return self.client.usage

    def write(self, asked: Sequence[Asked]) -> Iterator[Written]:
        """Let the model write; requests that fail for good have `finish` error and a reason.

        Raises:
            UserError: wrong key, model or address.
            TrainingStopped: the server fails again and again.
        """
        for item, reply in self.send(asked, lambda item: {}):
            yield Written(item, reply.text, reply.finish, reply.reason)

    def send(self, asked: Sequence[Asked], more: Callable[[Asked], Mapping[str, Any]]) -> Iterator[tuple[Asked, Reply]]:
        """Send every question with the fields that `more` adds to its body, and yield the replies as they come."""
        requests = (self.request(item, str(number), more(item)) for number, item in enumerate(asked))
        for reply in self.client.send(requests):
            yield asked[int(reply.key)], reply

    def request(self, item: Asked, key: str, more: Mapping[str, Any]) -> Request:
        """Return what is sent for a question; fields of `extra_body` are put together."""
        fields = self.body(item)
        if self.config.generation.arguments.get("do_sample"):
            # As local models: each output has a seed of its own, so that votes differ and a run can be repeated.
            fields["seed"] = zlib.crc32(f"{self.config.generation.seed}/{item.question.id}".encode())
        extra = {**fields.get("extra_body", {}), **more.get("extra_body", {})}
        return Request(key, {**fields, **more, **({"extra_body": extra} if extra else {})})

    def body(self, item: Asked) -> dict[str, Any]:
        """Return a question as it is sent, see `body`."""
        dialogue = item.dialogue()
        if dialogue.system is None:
            dialogue = dialogue._replace(system=self.config.prompt.system)
        return body(dialogue, self.config)


def read(written: Written) -> Prediction:
    """Return the prediction that a text is; a failed request is one without text or answer."""
    question = written.asked.question
    if written.finish == "error":
        return Prediction(question.id, "", None, None, finish="error", reason=written.reason)
    text = written.text
    return Prediction(
        question.id,
        text,
        answer_parsing.parse(text, question),
        answer_parsing.split_explanation(text),
        finish=written.finish,
    )


def body(dialogue: Dialogue, config: Config) -> dict[str, Any]:
    """Return what is sent beside the model's name: a chat, or one text in the wrapper that `prompt.template` names.

    Raises:
        ConfigError: a setting that no server knows, or a wrapper without a place for what was said before.
    """
    fields = _settings(config)
    if config.prompt.template == "auto":
        return {"messages": dialogue.messages(), **fields}
    template = prompts.template(config.prompt.template)
    stop = list(dict.fromkeys([*fields.pop("stop", []), *template.stop]))
    return {"prompt": template.text(dialogue), **fields, **({"stop": stop} if stop else {})}


def _settings(config: Config) -> dict[str, Any]:
    wanted = {key: value for key, value in config.generation.arguments.items() if value is not None}
    extra = dict(config.generation.extra_body)
    unknown = [
        key for key, value in wanted.items() if key not in (*FIELDS, *EXTRA, "do_sample") and DEFAULTS.get(key) != value
    ]
    if unknown:
        raise ConfigError(
            f"generation.{unknown[0]}: a server has no such setting. Leave it out; fields that yours has beyond "
            "OpenAI's go into generation.extra_body."
        )
    samples = bool(wanted.pop("do_sample", False))
    fields: dict[str, Any] = {"temperature": wanted.get("temperature", 1.0) if samples else 0.0}
    if samples and "top_p" in wanted:
        fields["top_p"] = wanted["top_p"]
    if not {"max_tokens", "max_completion_tokens"} & set(extra):
        fields["max_tokens"] = wanted.get("max_new_tokens", config.prompt.max_target_length)
    if stop := wanted.get("stop_strings"):
        fields["stop"] = [stop] if isinstance(stop, str) else list(stop)
    extra = {EXTRA[key]: wanted[key] for key in EXTRA if key in wanted} | extra
    for key in [key for key in extra if key in fields]:
        del fields[key]
    return {**fields, **({"extra_body": extra} if extra else {})}
