"""Who a report is about: model, data, prompt and day, without the paths of the machine that wrote it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\).*?([^\\/]*)[\\/]*$", re.S)


@dataclass(frozen=True)
class Identity:
    """What a reader wants to know before the first number; None is unknown."""

    date: str
    profile: str
    questions: str
    """Name of the questions file."""
    n: int
    model: str | None = None
    adapter: str | None = None
    method: str | None = None
    prompt: str | None = None
    """Style, template and number of examples."""
    mode: str | None = None
    """How answers were decoded: `generate`, `constrained`, `likelihood`, or a server's `first-letter` and
    `constrained-words`."""


def portable(value: Any) -> Any:
    """Return JSON without the folders of this machine: of an absolute path its last part is left."""
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str):
        found = _ABSOLUTE.fullmatch(value)
        return found[1] if found and found[1] else value
    return [portable(item) for item in value] if isinstance(value, Sequence) else value


def identify(made_by: Mapping[str, Any], questions: str, n: int, profile: str, date: str) -> Identity:
    """Return who was scored, as far as `predict` wrote it into the note beside its predictions.

    Args:
        made_by: That note; empty where another tool made the predictions.
        questions: The questions file.
        n: Number of questions.
        profile: Whose rules scored it.
        date: Day of the report.
    """
    config = _section(made_by, "config")
    model, prompt = _section(config, "model"), _section(config, "prompt")
    words = [f"{key} {prompt[key]}" for key in ("style", "template") if prompt.get(key)]
    words += [f"{prompt['shots']} shots"] if prompt.get("shots") else []
    return Identity(
        date=date,
        profile=profile,
        questions=str(portable(questions)),
        n=n,
        model=_text(model.get("model_name_or_path")),
        adapter=_text(made_by.get("run") or model.get("adapter_name_or_path")),
        method=_text(_section(config, "tuning").get("method")) if made_by.get("run") else None,
        prompt=", ".join(words) or None,
        # A server may lack what the mode means, and answer in a way of another name.
        mode=_text(_section(made_by, "result").get("mode") or made_by.get("mode")),
    )


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = values.get(key)
    return section if isinstance(section, Mapping) else {}


def _text(value: Any) -> str | None:
    return str(portable(value)) if isinstance(value, str) and value else None
