"""Variants found by file name: `families/llama.py` is `model.family: llama`. A dotted name is imported as it is."""

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Literal

from cmexam_tune.errors import ConfigError

Folder = Literal["exams", "families", "tuning"]


def names(folder: Folder) -> tuple[str, ...]:
    """Return the names of the variants in a folder; modules that start with `_` are not variants."""
    package = importlib.import_module(f"cmexam_tune.{folder}")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


def load(folder: Folder, name: str) -> ModuleType:
    """Import the variant `name` of a folder.

    Raises:
        ConfigError: there is no such variant; the message suggests the nearest name.
    """
    if "." in name:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and not name.startswith(error.name):
                raise
            raise ConfigError(f"{folder}: no module {name!r} can be imported. Is its folder on PYTHONPATH?") from None
    if name not in names(folder):
        raise ConfigError(
            f"{folder}: {name!r} is unknown{suggest(name, names(folder))}; known: {', '.join(names(folder))}."
        )
    return importlib.import_module(f"cmexam_tune.{folder}.{name}")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
