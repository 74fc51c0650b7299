"""Plain values (of YAML or JSON) into dataclasses: pydantic checks them strictly, and every problem is collected."""

import functools
import json
import re
import reprlib
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cmexam_tune.core.variants import suggest

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=str).encode


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
def adapter(cls: type) -> "TypeAdapter[Any]":
    """Return what checks and describes a class."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def build(
    cls: type[T], values: Mapping[str, object], where: str, problems: Problems, also: Collection[str] = ()
) -> T | None:
    """Return the dataclass (or TypedDict) `cls` of `values`, or None after adding their problems to `problems`.

    Args:
        cls: a dataclass, pydantic's or the standard library's, or a TypedDict; its annotations may hold `Field(ge=1)`.
        values: what YAML or JSON gave.
        where: the key of `values` itself, which starts the problems' keys; may be empty.
        problems: gets one line for each key that is wrong; a `ValueError` of `__post_init__` is a problem of `where`.
        also: names that are suggested beside those of `cls` where a key is unknown.
    """
    from pydantic import ValidationError

    # Strict pydantic takes a list for a tuple and an object for a dataclass only where it reads JSON.
    try:
        record: T = adapter(cast(type, cls)).validate_json(
            _encode(values), strict=True, extra="ignore" if problems.more_keys else "forbid"
        )
        return record
    except ValidationError as error:
        names = {*typing.get_type_hints(cls), *also}
        # Each choice of a union has its own error; the first says what is wanted.
        # Reversed, so that of equal keys the first error stays; the loop below restores the order.
        firsts = {_key(where, detail["loc"]): detail for detail in reversed(error.errors(include_url=False))}
        for key, detail in reversed(firsts.items()):
            text = _text(detail, names)
            if not detail["loc"] and (name := text.partition(": ")[0]) in names:
                key, text = f"{where}.{name}" if where else name, text.removeprefix(f"{name}: ")
            problems.add(key or cls.__name__, text)
    except TypeError as error:  # a date for a key
        problems.add(where or cls.__name__, str(error))
    return None


def _key(where: str, path: tuple[int | str, ...]) -> str:
    """Return where an error is, `data.train[0]`; pydantic's names for the choices of a union are left out."""
    key = where
    for part in path:
        if isinstance(part, int):
            key += f"[{part}]"
        elif not re.search(r"[^\w.]|^(int|float|str|bool|dict)$", part) or part == path[0]:
            key += f".{part}" if key else part
    return key


def _text(error: "ErrorDetails", names: Collection[str]) -> str:
    """Return what is wrong in our words."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return "required key is missing"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"unknown key{suggest(str(error['loc'][-1]), names)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"]) or [error["ctx"]["expected"]]
        return f"{value!r} is not a choice{suggest(str(value), choices)}; known: {', '.join(choices)}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    return f"{error['msg'].removeprefix('Input ')}, got {reprlib.repr(value)}"
