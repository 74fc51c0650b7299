"""What the note beside a predictions file says about the run: `predictions.jsonl.meta.json`, written by predict."""

from collections.abc import Mapping, Sequence
from typing import Any

from cmexam_tune.prompts import STYLES

_PLACES = {"questions", "run", "versions", "result"}
_SEEDS = {"seed", "data_seed", "shots_seed"}
_NOT_THE_EXPERIMENT = {"out", "data", "output_dir", "logging_dir", "run_name"}


def prompt(note: object) -> Mapping[str, Any]:
    """Return the section `prompt` of the run's config, empty where it is unknown."""
    config = note.get("config") if isinstance(note, Mapping) else None
    found = config.get("prompt") if isinstance(config, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def style(note: object) -> str | None:
    """Return the prompt style that the run was asked in, `own words` for words of its own, None where unknown."""
    if prompt(note).get("ask"):
        return "own words"
    name = prompt(note).get("style")
    return STYLES[name].name if isinstance(name, str) and name in STYLES else None


def asks_for_explanations(note: object) -> bool | None:
    """Return whether the run's prompt wants an explanation written, None where that is unknown."""
    write, name = prompt(note).get("write"), prompt(note).get("style")
    if not isinstance(write, str):
        write = STYLES[name].write if isinstance(name, str) and name in STYLES else None
    return None if write is None else "{explanation}" in write


def seeds_of_one_experiment(notes: Sequence[object]) -> bool:
    """Return whether the runs differ in their seeds, weights and places only; false where a note is missing."""
    kept = [_experiment(note) for note in notes if isinstance(note, Mapping) and "config" in note]
    return len(kept) == len(notes) > 1 and all(one == kept[0] for one in kept)


def _experiment(note: Mapping[str, Any]) -> Any:
    """Return the note without what differs between two seeds of one experiment."""
    trained = note.get("run") is not None
    keys = {key for key in note if key not in _PLACES and not key.endswith("sha256")}
    model = {} if trained else {"model": note.get("model_sha256")}
    return _strip({key: note[key] for key in keys}) | model


def _strip(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _strip(item) for key, item in value.items() if key not in _SEEDS | _NOT_THE_EXPERIMENT}
