"""Plain mappings (of YAML or JSON) into frozen dataclasses: every problem is collected, nothing is guessed."""

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from cmexam_tune.core.variants import suggest


class Problems(list[str]):
    """Problems found so far, each one line that starts with the key it is about."""

    def __init__(self, more_keys: bool = False) -> None:
        """Start with none; with `more_keys`, keys that a class does not have are left out and are no problem."""
        super().__init__()
        self.more_keys = more_keys

    def add(self, key: str, text: str) -> None:
        """Record that the value at `key` cannot be used because of `text`."""
        self.append(f"{key}: {text}")


@functools.cache
def _annotations(cls: type) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Return a dataclass's types by field, and the fields that have no default."""
    missing = dataclasses.MISSING
    needed = (f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing)
    return typing.get_type_hints(cls), frozenset(needed)


def build(cls: type, values: Mapping[str, Any], where: str, problems: Problems) -> Any:
    """Return `cls(**values)`, or None after adding every problem of `values` to `problems`.

    Nested dataclasses, `X | None`, `Literal`, `tuple[X, ...]` (one value stands for itself) and mappings are read
    by their annotations; a `ValueError` of `__post_init__` becomes a problem of `where`.
    """
    hints, needed = _annotations(cls)
    before = len(problems)
    ready: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{where}.{name}" if where else str(name)
        if name not in hints:
            if not problems.more_keys:
                problems.add(key, f"unknown key{suggest(str(name), hints)}")
            continue
        ready[name] = convert(hints[name], value, key, problems)
    for name in hints:
        if name in needed and name not in values:
            problems.add(f"{where}.{name}" if where else name, "required key is missing")
    if len(problems) > before:
        return None
    try:
        return cls(**ready)
    except ValueError as error:
        problems.add(where or cls.__name__, str(error))
        return None


def convert(hint: Any, value: Any, key: str, problems: Problems) -> Any:
    """Return `value` as `hint` wants it, or add a problem and return None."""
    if hint is Any or type(value) is hint:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, key, problems)
    if origin is typing.Literal:
        if value not in arguments:
            near = suggest(str(value), [str(a) for a in arguments])
            problems.add(key, f"{value!r} is not a choice{near}; known: {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        return tuple(convert(arguments[0], item, f"{key}[{i}]", problems) for i, item in enumerate(items))
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        if not isinstance(value, Mapping):
            return _require(False, None, "mapping", value, key, problems)
        of = arguments[1] if arguments else Any
        return {name: convert(of, item, f"{key}.{name}", problems) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            return _require(False, None, "mapping with keys", value, key, problems)
        return build(typing.cast(type, hint), value, key, problems)
    return _convert_scalar(hint, value, key, problems)


def _convert_union(choices: Sequence[Any], value: Any, key: str, problems: Problems) -> Any:
    if type(value) in choices:
        return value
    attempts = []
    for choice in choices:
        if choice is type(None):
            continue
        found = Problems(problems.more_keys)
        result = convert(choice, value, key, found)
        if not found:
            return result
        attempts.append(found)
    problems.extend(attempts[0])
    return None


def _convert_scalar(hint: Any, value: Any, key: str, problems: Problems) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    fits = isinstance(value, hint) and not (hint in (int, float) and isinstance(value, bool))
    return _require(fits, value, hint.__name__, value, key, problems)


def _require(fits: bool, result: Any, wanted: str, value: Any, key: str, problems: Problems) -> Any:
    if not fits:
        problems.add(key, f"expected {wanted}, got {type(value).__name__} {reprlib.repr(value)}")
        return None
    return result
