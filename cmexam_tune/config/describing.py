"""What a recipe can say, as a JSON Schema for editors, and for readers."""

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from cmexam_tune.config import installed_versions
from cmexam_tune.config.overrides import ALIASES
from cmexam_tune.config.schema import SECTIONS
from cmexam_tune.core import variants

Schema = dict[str, Any]
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_BY_NAME = {"extends": "Another recipe that this one starts from.", "out": "The run folder; default: runs/<its name>."}
METHOD = "A file in `cmexam_tune/models/adapters/`, or a module of your own."
PROMPT_FILE = "A YAML file with the texts `ask` and `write`."


class Key(NamedTuple):
    """One setting, as a table shows it."""

    name: str
    values: str
    default: str
    help: str


def json_schema() -> Schema:
    """Return the JSON Schema of a recipe.

    Nothing is required, because a recipe may extend another one; whether all is there is seen when it is read.
    """
    sections = {name: section_schema(cls) for name, cls in SECTIONS.items() if name != "tuning"}
    for name in ("training", "generation"):
        sections[name]["properties"] |= section_schema(installed_versions.arguments(name))["properties"]
    for name, default in installed_versions.training_defaults().items():
        sections["training"]["properties"][name]["default"] = default
    sections["prompt"]["properties"]["file"] = {"type": "string", "description": PROMPT_FILE}
    sections["tuning"] = _tuning_schema()
    for (section, old), new in ALIASES.items():
        known = sections[section]["properties"]
        known[old] = {**known[new.partition(".")[2]], "description": f"Called {new} here.", "deprecated": True}
    texts = {name: {"type": "string", "description": text} for name, text in _BY_NAME.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of cmexam_tune",
        "type": "object",
        "properties": {**sections, **texts},
        "additionalProperties": False,
    }


def section_schema(cls: type) -> Schema:
    """Return the schema of one dataclass of settings."""
    schema, helps = TypeAdapter(cls).json_schema(), _helps(cls)
    properties = {name: part for name, part in schema.get("properties", {}).items() if name != "arguments"}
    for name, part in properties.items():
        part.pop("title", None)
        part.setdefault("description", helps.get(name, ""))
    description = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": False}


def _helps(cls: type) -> dict[str, str]:
    """Return the string below each field of a class, where its source is at hand."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # made in a notebook, or by code
        return {}
    helps = {}
    for field, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            helps[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return helps


def _tuning_schema() -> Schema:
    """Return the schema of the section whose keys depend on its `method`."""
    methods = {name: settings_schema(name)["properties"] for name in variants.names("tuning")}
    properties: Schema = {"method": {"type": "string", "description": METHOD, "examples": [*methods]}}
    for keys in methods.values():
        properties |= keys
    others = [old for section, old in ALIASES if section == "tuning"]
    rules = [
        {
            "if": {"properties": {"method": {"const": name}}, "required": ["method"]},
            "then": {"propertyNames": {"enum": ["method", *keys, *others]}},
        }
        for name, keys in methods.items()
    ]
    return {"type": "object", "description": "The tuning method.", "properties": properties, "allOf": rules}


def settings_schema(method: str) -> Schema:
    """Return the schema of a tuning method's own keys."""
    return section_schema(variants.load("tuning", method).Settings)


def keys(cls: type) -> Iterator[Key]:
    """Yield what a dataclass of settings holds."""
    schema = section_schema(cls)
    required = TypeAdapter(cls).json_schema().get("required", ())
    for name, part in schema["properties"].items():
        default = "required" if name in required else _plain(part.get("default", {}))  # a factory: {}
        yield Key(name, _values(part), default, part["description"])


def _values(part: Mapping[str, Any]) -> str:
    """Return which values a schema allows, in words."""
    if choices := part.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_values, choices)))
    if choices := part.get("enum", [part["const"]] if "const" in part else []):
        return ", ".join(map(_plain, choices))
    name = {"object": "mapping", "array": "list"}.get(part.get("type", ""), part.get("type", "anything"))
    if part.get("items"):
        name += f" of {_values(part['items'])}s"
    if {"minimum", "maximum"} <= {*part}:
        return f"{name}, {part['minimum']:,} to {part['maximum']:,}"
    bounds = [f"{word} {part[bound]:,}" for bound, word in _BOUNDS.items() if bound in part]
    return ", ".join(filter(None, (name, " and ".join(bounds))))


def _plain(value: object) -> str:
    """Return a value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def help_text() -> str:
    """Return the settings of a recipe as `--help` shows them."""
    lines = ["settings of a recipe (section.key=value):"]
    for section, cls in SECTIONS.items():
        methods = [variants.load("tuning", name).Settings for name in variants.names("tuning")]
        for key in [key for part in (methods if section == "tuning" else [cls]) for key in keys(part)]:
            lines.append(f"  {section}.{key.name}  ({key.values}; {key.default})")
            lines += textwrap.wrap(key.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
