"""Variants found by file name: `models/families/llama.py` is `model.family: llama`.

A dotted name is a module from elsewhere. Its code runs only if the user has asked for it, in the command or by
importing it: a config file, which may be a stranger's, cannot make it run.
"""

import difflib
import functools
import importlib
import pkgutil
import sys
from abc import ABC
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

from cmexam_tune.core.errors import ConfigError

T = TypeVar("T", bound="Variant")
Folder = Literal["exams", "families", "tuning", "objectives", "scorers", "metrics"]
PACKAGES: dict[Folder, str] = {
    "exams": "cmexam_tune.exams",
    "families": "cmexam_tune.models.families",
    "tuning": "cmexam_tune.models.adapters",
    "objectives": "cmexam_tune.training.objectives",
    "scorers": "cmexam_tune.evaluation.scorers",
    "metrics": "cmexam_tune.evaluation.metrics",
}
PROTOCOLS: dict[Folder, str] = {
    "exams": "Exam",
    "families": "Family",
    "tuning": "Method",
    "objectives": "Objective",
    "scorers": "ScorerModule",
    "metrics": "MetricModule",
}
"""The class in each package that says what its files provide: as functions, or (`IN_CONFIGS`) as a subclass."""
# Of exams only: a map of columns is data. What trains, scores or answers is code, and looks like code.
FROM_YAML: tuple[Folder, ...] = ("exams",)
"""Packages whose `from_yaml(path)` makes a variant of a YAML file: one beside the code, or the user's own."""
IN_CONFIGS: tuple[Folder, ...] = ("families", "tuning", "objectives")
"""Variants that a config file can name; the others are only ever named by a command or a caller."""


@functools.cache
def names(folder: Folder) -> tuple[str, ...]:
    """Return the names of the variants in a folder; an exam may be a YAML file. Names with `_` in front are helpers."""
    package = importlib.import_module(PACKAGES[folder])
    stems = {m.name for m in pkgutil.iter_modules(package.__path__)} | {f.stem for f in _yamls(folder)}
    return tuple(sorted(name for name in stems if not name.startswith("_")))


def _yamls(folder: Folder) -> list[Path]:
    package = importlib.import_module(PACKAGES[folder])
    return list(Path(package.__path__[0]).glob("*.yaml")) if folder in FROM_YAML else []


def problem(folder: Folder, name: str) -> str | None:
    """Say why the variant `name` cannot be loaded, or return None."""
    if "." in name:
        if name in sys.modules or folder not in IN_CONFIGS:
            return None
        return (
            f"{name!r} is a module from outside cmexam_tune, and a file cannot make it run. If you trust it, repeat "
            "the setting on the command line, or import the module before"
        )
    if name in names(folder):
        return None
    return f"{name!r} is unknown{suggest(name, names(folder))}; known: {', '.join(names(folder))}"


def load(folder: Folder, name: str) -> ModuleType:
    """Return the variant `name` of a folder, or the module or YAML file `name` of the user's own.

    Raises:
        ConfigError: there is no such variant (the message suggests the nearest name), or it lacks what variants of
            this folder provide.
    """
    if wrong := problem(folder, name):
        raise ConfigError(f"{folder}: {wrong}.")
    files = {path.stem: path for path in _yamls(folder)}
    if name.endswith(".yaml") and folder in FROM_YAML:
        files[name] = Path(name)
    if name in files:
        variant: ModuleType = importlib.import_module(PACKAGES[folder]).from_yaml(files[name])
        return variant
    if "." not in name:
        return importlib.import_module(f"{PACKAGES[folder]}.{name}")
    module = import_outside(name)
    if folder in IN_CONFIGS:
        return module  # its class is looked for by `the_class`
    protocol = PROTOCOLS[folder]
    required = vars(getattr(importlib.import_module(PACKAGES[folder]), protocol))
    if missing := [key for key in required if not key.startswith("_") and key not in vars(module)]:
        raise ConfigError(f"{name}: lacks {', '.join(missing)}; see {PACKAGES[folder]}.{protocol}.")
    return module


def the_class(folder: Folder, name: str) -> type[Any]:
    """Return the one class of the variant `name` that inherits from the class in `PROTOCOLS`.

    Raises:
        ConfigError: there is no such variant, it defines none or several, or one that lacks a method.
    """
    module = load(folder, name)
    base = getattr(importlib.import_module(PACKAGES[folder]), PROTOCOLS[folder])
    defined = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    where = f"{PACKAGES[folder]}.{base.__name__}"
    if len(defined) != 1:
        named = ", ".join(value.__name__ for value in defined) or "none"
        raise ConfigError(f"{name}: must define one class that inherits from {where}; it defines {named}.")
    if missing := sorted(getattr(defined[0], "__abstractmethods__", ())):
        raise ConfigError(f"{name}: {defined[0].__name__} lacks {', '.join(missing)}; see {where}.")
    cls: type[Any] = defined[0]
    return cls


class Variant(ABC):
    """Base of the classes that a config's variants inherit from, each found by the name of its file."""

    folder: ClassVar[Folder]

    @classmethod
    def named(cls: type[T], name: str) -> T:
        """Return the variant of this name: `Family.named("llama")`.

        Raises:
            ConfigError: as `the_class`.
        """
        variant: T = the_class(cls.folder, name)()
        return variant


def import_outside(name: str) -> ModuleType:
    """Import a module that the user's own command names.

    Raises:
        ConfigError: there is no such module.
    """
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, TypeError) as error:  # TypeError: a relative name such as `.x`
        if isinstance(error, ModuleNotFoundError) and error.name is not None and not name.startswith(error.name):
            raise
        raise ConfigError(f"no module {name!r} can be imported. Is its folder on PYTHONPATH?") from None


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
