"""What a recipe can say, as a JSON Schema for editors, and for readers."""

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from cmexam_tune.config import installed_versions
from cmexam_tune.config.overrides import ALIASES
from cmexam_tune.config.reading import dump_config
from cmexam_tune.config.settings import SECTIONS, Config, TrainingArguments
from cmexam_tune.core import variants
from cmexam_tune.core.strict import adapter

Schema = dict[str, Any]
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_BY_NAME = {"extends": "Another recipe that this one starts from.", "out": "The run folder; default: runs/<its name>."}
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
    sections = {name: section_schema(cls) for name, cls in SECTIONS.items()}
    for name in ("training", "generation"):
        sections[name]["properties"] |= section_schema(installed_versions.arguments(name))["properties"]
    # What an objective's trainer knows beyond them: which of them a recipe can use follows from its objective.
    for trl_config in installed_versions.TRL_FILES if installed_versions.has_trl() else ():
        of_trainer = section_schema(installed_versions.arguments("training", trl_config))["properties"]
        sections["training"]["properties"] = {**of_trainer, **sections["training"]["properties"]}
    sections["prompt"]["properties"]["file"] = {"type": "string", "description": PROMPT_FILE}
    methods = {name: section_schema(variants.the_class("tuning", name).Settings) for name in variants.names("tuning")}
    for name, method in methods.items():
        method["properties"]["method"] = {"const": name, "description": method["description"]}
    # A method with a dot is a module of the user's, whose settings nobody knows before it is imported.
    users_module = {"properties": {"method": {"pattern": r"\."}}, "required": ["method"]}
    sections["tuning"] = {"type": "object", "anyOf": [*methods.values(), users_module]}
    # Editors know the names of other tools as well, and strike them through.
    for (section, old), new in ALIASES.items():
        for part in methods.values() if section == "tuning" else [sections[section]]:
            if known := part["properties"].get(new.partition(".")[2]):
                part["properties"][old] = {**known, "description": f"Called {new} here.", "deprecated": True}
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
    schema, helps = _inlined(adapter(cls).json_schema()), _helps(cls)
    properties = {name: part for name, part in schema.get("properties", {}).items() if name != "arguments"}
    for name, part in properties.items():
        part.pop("title", None)
        part.setdefault("description", helps.get(name, ""))
    description = (inspect.getdoc(cls) or "").split("\n\n")[0]
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": False}


def _inlined(schema: Schema) -> Schema:
    """Return a schema with each reference replaced by what it refers to: sections are put into one schema."""
    known = schema.pop("$defs", {})

    # Sections do not refer to themselves, so that this ends; pydantic has no option that writes a schema without $ref.
    def inline(part: object) -> Any:
        if isinstance(part, dict):
            name = part.get("$ref", "").rpartition("/")[2] if isinstance(part.get("$ref"), str) else ""
            return inline(known[name]) if name in known else {key: inline(value) for key, value in part.items()}
        return [inline(item) for item in part] if isinstance(part, list) else part

    inlined: Schema = inline(schema)
    return inlined


def _helps(cls: type) -> dict[str, str]:
    """Return the string below each field of a class, where its source is at hand: Python itself forgets them."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # made in a notebook, or by code
        return {}
    helps = {}
    for field, below in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            helps[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return helps


def keys(cls: type) -> Iterator[Key]:
    """Yield every setting of a dataclass, in its order."""
    schema = section_schema(cls)
    required = adapter(cls).json_schema().get("required", ())
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
        item, comma, limits = _values(part["items"]).partition(",")
        name += f" of {item}s{comma}{limits}"
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
        methods = [variants.the_class("tuning", name).Settings for name in variants.names("tuning")]
        for key in [key for part in (methods if section == "tuning" else [cls]) for key in keys(part)]:
            lines.append(f"  {section}.{key.name}  ({key.values}; {key.default})")
            lines += textwrap.wrap(key.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def show_config(config: Config) -> str:
    """Return the resolved config as YAML, and in comments what transformers does where the recipe is silent."""
    # `global_batch_size` decides the accumulation steps, so that transformers' default for them would mislead.
    stated = {*config.training.arguments, "gradient_accumulation_steps" if config.training.global_batch_size else ""}
    library = section_schema(installed_versions.arguments("training"))["properties"]
    silent = {
        name: library[name]["default"]
        for name in TrainingArguments.__annotations__
        if name not in stated and "default" in library[name]
    }
    comments = "".join(f"  # {line}\n" for line in yaml.safe_dump(silent, sort_keys=False).splitlines())
    head, generation, tail = dump_config(config).partition("\ngeneration:\n")
    return f"{head}\n  # transformers' own where nothing is said:\n{comments.rstrip()}{generation}{tail}"
