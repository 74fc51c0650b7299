"""JSON and YAML written by others: one reader for each, which returns plain values or raises `DataError`."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from cmexam_tune.core.errors import DataError
from cmexam_tune.core.files import check_input

MAX_DEPTH = 100
"""Levels of a document: far more than any has, far fewer than Python's own functions stumble over."""
MAX_JSON, MAX_YAML = 64 << 20, 1 << 20
"""Bytes of a document that is held in memory as a whole."""
MAX_VALUES = 100_000
"""Values in a YAML document, those behind an alias counted wherever it stands."""
KINDS: dict[type, str] = {dict: "an object with keys", list: "an array"}


class Broken(DataError):
    """A text that is not JSON or YAML at all; what reads several formats may try another one."""


def read_text(path: str | Path, what: str, limit: int) -> str:
    """Return a text file of at most `limit` bytes.

    Raises:
        UserError: the file is missing, empty or no file.
        DataError: it is too large or not UTF-8.
    """
    path = check_input(path, what)
    if (size := path.stat().st_size) > limit:
        raise DataError(f"{path}: {size:,} bytes, at most {limit:,} are read as one {what}. Is it the right file?")
    try:
        # Editors on Windows put a byte-order mark in front.
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8.") from None


def read_json(path: str | Path, what: str = "JSON file", kind: type = dict, finite: bool = True) -> Any:
    """Return the content of a JSON file, which must be of `kind` (dict or list).

    Raises:
        UserError: the file is missing, empty or no file.
        DataError: it is no JSON, or not of `kind`; see `parse_json`.
    """
    value = parse_json(read_text(path, what, MAX_JSON), str(path), finite)
    if not isinstance(value, kind):
        raise DataError(f"{path}: {KINDS[kind]} is needed, found {type(value).__name__}.")
    return value


def parse_json(text: str, where: str, finite: bool = True) -> Any:
    """Return the value of a JSON text; `where` (file or file:line) starts every message.

    Raises:
        DataError: broken, nested deeper than `MAX_DEPTH`, a key that stands twice, half of a surrogate pair, a number
            of more than 4,300 digits, or (where `finite`) NaN and infinity.
    """
    numbers: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=unique, **numbers)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        message = error.msg.removesuffix(" starting at")
        raise Broken(f"{where}: broken JSON, {message} at {line}column {error.colno}.") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deep; {MAX_DEPTH} levels are possible.") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}.") from None
    # No document is nested deeper than it has opening brackets, so few are walked through.
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_size(value, where, math.inf)
    # Text decoded from UTF-8 holds no surrogates; only an escape such as \ud83d can make half a pair.
    if "\\ud" in text.lower():
        _check_unicode(json.dumps(value, ensure_ascii=False), where)
    return value


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object whose keys are distinct, else raise `ValueError`."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:30]} is no number that can be used")
    return value


def _check_size(value: object, where: str, most: float) -> None:
    """Refuse a value of more than `MAX_DEPTH` levels, or of more than `most` values.

    Level by level and not recursively: a document that is nested too deep would end a recursion before it is refused.
    """
    level, depth, count = [value], 0, 0
    while level:
        depth += 1
        # Checked before the next level is built: aliases that multiply end here and not in memory.
        count += len(level)
        if depth > MAX_DEPTH:
            raise DataError(f"{where}: nested too deep; {MAX_DEPTH} levels are possible.")
        if count > most:
            raise DataError(f"{where}: more than {most:,} values; do its aliases (*name) multiply?")
        level = [inner for item in level for inner in _inside(item)]


def _inside(item: object) -> list[object]:
    if isinstance(item, dict):
        return [*item.values()]
    return [*item] if isinstance(item, list | tuple | set) else []


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end]
        raise DataError(f"{where}: {half!a} is half of a surrogate pair and no character.") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key that stands twice, and reads `2e-2` as the number everybody means."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # The same events, many times as fast; a PyYAML that was built without libyaml reads them by itself.
        if yaml.__with_libyaml__:
            events = yaml.CSafeLoader(text)
            for name in ("check_event", "get_event", "peek_event"):
                setattr(self, name, getattr(events, name))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before another is merged into it (<<)."""
        node = super().compose_mapping_node(anchor)
        keys = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := next((value for (_, value), count in keys.items() if count > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} stands twice", node.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge mappings into one, unless merges of merges make it too large."""
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) multiply", node.start_mark)


# PyYAML follows YAML 1.1, where a float needs a dot: without this `2e-5` is a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path, what: str = "YAML file") -> Any:
    """Return the content of a YAML file; see `parse_yaml`.

    Raises:
        UserError: the file is missing, empty or no file.
        DataError: it cannot be read as YAML.
    """
    return parse_yaml(read_text(path, what, MAX_YAML), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; `where` starts every message.

    Raises:
        DataError: broken, nested deeper than `MAX_DEPTH`, a key that stands twice, more than `MAX_VALUES` values, those
            behind an alias counted wherever it stands, NaN or infinity, or half of a surrogate pair.
    """
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise Broken(f"{where}: not YAML: {error}") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deep; {MAX_DEPTH} levels are possible.") from None
    except ValueError as error:  # a date such as 2020-13-45
        raise Broken(f"{where}: {error}.") from None
    _check_size(value, where, MAX_VALUES)
    _check_values(value, where)
    return value


def _check_values(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(key, where)
            _check_values(inner, f"{where}: {key}")
    elif isinstance(value, list | tuple | set):
        for inner in value:
            _check_values(inner, where)
    elif isinstance(value, str):
        _check_unicode(value, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: {value} is no number that can be used.")
