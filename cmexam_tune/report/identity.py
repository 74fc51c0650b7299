"""Which run a report is about and where its numbers come from, without the folders of the machine that wrote it."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import overload

from cmexam_tune.core import __version__, files
from cmexam_tune.evaluation import prediction_metadata
from cmexam_tune.evaluation.prediction_metadata import PredictionMetadata, section

_ABSOLUTE = re.compile(r"(?:/|~|[A-Za-z]:[\\/]|\\\\).*?([^\\/]*)[\\/]*$", re.S)
_LIBRARIES = ("rapidfuzz", "sacrebleu", "rouge-score", "jieba")


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


def identify(metadata: PredictionMetadata, questions: str, n: int, profile: str, date: str) -> Identity:
    """Return who was scored, as far as `predict` recorded it beside its predictions.

    Args:
        metadata: What it recorded; empty where another tool predicted.
        questions: The questions file.
        n: Number of questions.
        profile: Name of the scorer.
        date: Day of the report.
    """
    values, prompt = metadata.values, metadata.prompt
    config = section(values, "config")
    model = section(config, "model")
    asked = [f"{key} {prompt[key]}" for key in ("style", "template") if prompt.get(key)]
    asked += [f"{prompt['shots']} shots"] if prompt.get("shots") else []
    if context := section(prompt, "context"):
        asked.append(f"{context.get('k')} passages of {portable(str(context.get('passages')))} by {context.get('by')}")
    return Identity(
        date=date,
        profile=profile,
        questions=str(portable(questions)),
        n=n,
        model=_text(model.get("model_name_or_path")),
        adapter=_text(values.get("run") or model.get("adapter_name_or_path")),
        method=_text(section(config, "tuning").get("method")) if values.get("run") else None,
        prompt=", ".join(asked) or None,
        # A server may lack what the mode means, and answer in a way of another name.
        mode=_text(section(values, "result").get("mode") or values.get("mode")),
    )


def _text(value: object) -> str | None:
    return str(portable(value)) if isinstance(value, str) and value else None


def provenance(sources: Mapping[str, Sequence[str | Path]]) -> dict[str, object]:
    """Return what report.json says under `provenance`: checksums of the files, how predictions were made, versions.

    Args:
        sources: `questions`, `predictions` and `baseline` -> files.

    Raises:
        DataError: the metadata beside a predictions file are broken.
    """
    versions = {"cmexam_tune": __version__, "python": platform.python_version()}
    return {
        **{name: [_origin(Path(path)) for path in paths] for name, paths in sources.items()},
        "versions": versions | {name: version(name) for name in _LIBRARIES},
    }


def _origin(path: Path) -> dict[str, object]:
    origin: dict[str, object] = {"path": portable(str(path)), "sha256": files.sha256(path)}
    if metadata := prediction_metadata.read(path):
        origin["made_by"] = portable(metadata.values)
    return origin


@overload
def portable(value: Mapping[str, object]) -> dict[str, object]: ...


@overload
def portable(value: object) -> object: ...


def portable(value: object) -> object:
    """Return a JSON value in which only the last part of each absolute path is left.

    Reports are published: folders name people and machines, and differ between two runs of the same experiment.
    """
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, str):
        path = _ABSOLUTE.fullmatch(value)
        return path[1] if path and path[1] else value
    return [portable(item) for item in value] if isinstance(value, Sequence) else value


def names(paths: Sequence[str | Path]) -> list[str]:
    """Return what files are called where nobody has named them: as given, absolute paths from where they differ."""
    absolute = [path for path in map(Path, paths) if path.is_absolute()]
    if not absolute:
        return [str(path) for path in paths]
    parents = [set(path.parent.parents) | {path.parent} for path in absolute]
    shared = max(set.intersection(*parents), key=lambda path: len(path.parts))
    return [str(Path(path).relative_to(shared)) if Path(path).is_absolute() else str(path) for path in paths]
