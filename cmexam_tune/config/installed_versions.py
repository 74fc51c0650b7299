"""Names under `training` and `generation` that are transformers' own, as its installed version has them.

Types, defaults and help are read from its source, because importing it takes seconds; `settings.py` narrows some
ranges.
"""

import ast
import contextlib
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_type_hints

from pydantic import Field
from typing_extensions import TypedDict

from cmexam_tune.config.settings import GenerationOptions, TrainingArguments
from cmexam_tune.core.errors import ConfigError

# Numbers have bounds here too: where transformers has none, it fails on 1e30 long after the model was loaded.
_INT, _FLOAT = (Annotated[kind, Field(ge=-(10**9), le=10**9)] for kind in (int, float))
_TYPES: Mapping[str, Any] = {
    "int": _INT,
    "float": _FLOAT,
    "bool": bool,
    "str": str,
    "None": None,
    "dict": dict[str, Any],
    "list[str]": list[str],
    "list[int]": list[_INT],  # type: ignore[valid-type]
    "list[list[int]]": list[list[_INT]],  # type: ignore[valid-type]
}
# `name (`int`, *optional*, defaults to 8):` and the indented lines below it.
_DOCUMENTED = re.compile(r"^( +)(\w+):? ?\((`[^\n]*)\):\n((?:\1 [^\n]*\n|\n)+)", re.MULTILINE)


TRL_FILES = {"GRPOConfig": "trainer/grpo_config.py", "DPOConfig": "trainer/dpo_config.py"}
"""Where TRL keeps the arguments of its trainers; what they add to transformers' for all trainers is nothing new."""


def has_trl() -> bool:
    """Return whether TRL is installed."""
    return importlib.util.find_spec("trl") is not None


@functools.cache
def training(trl_config: str | None = None) -> Mapping[str, object]:
    """Return the fields of `transformers.TrainingArguments` with their annotations (Any: no type of YAML).

    Args:
        trl_config: a class of TRL whose fields are added.

    Raises:
        ConfigError: TRL is needed and not installed.
    """
    hints = _fields(_body("training_args.py", "TrainingArguments"))
    return hints if trl_config is None else {**hints, **_fields(_body(TRL_FILES[trl_config], trl_config, "trl"))}


def _fields(body: list[ast.stmt]) -> dict[str, Any]:
    narrowed, documented = get_type_hints(TrainingArguments, include_extras=True), _documented(body)
    hints: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "output_dir":
            name = node.target.id
            field = Field(description=documented.get(name, ("", ""))[1], json_schema_extra=_default(node.value))
            hints[name] = Annotated[narrowed.get(name, _type(ast.unparse(node.annotation))), field]
    return hints


@functools.cache
def generation() -> Mapping[str, object]:
    """Return the options of `transformers.GenerationConfig` with their annotations, which only its docstring gives."""
    body = _body("generation/configuration_utils.py", "GenerationConfig")
    narrowed, documented = get_type_hints(GenerationOptions, include_extras=True), _documented(body)
    # Its parameters are `**kwargs`: the names that it takes out of them are the only list of its options.
    init = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    hints: dict[str, object] = {}
    for name in re.findall(r"kwargs\.pop\('([a-z]\w*)'", ast.unparse(init)):
        kind, text = documented.get(name, ("", ""))
        hint = narrowed.get(name, Union[_type(kind.partition("*optional*")[0]), None])  # noqa: UP007
        hints[name] = Annotated[hint, Field(description=text)]
    return hints


@functools.cache
def arguments(section: str, trl_config: str | None = None) -> type:
    """Return the `TypedDict` that checks the libraries' own settings in a section: `training` or `generation`."""
    names = training(trl_config) if section == "training" else generation()
    return TypedDict(section, names, total=False)  # type: ignore[operator, no-any-return]


def _default(call: ast.expr | None) -> dict[str, Any]:
    """Return the `default` of a call of `field`, where it is a plain value."""
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        if keyword.arg == "default":
            with contextlib.suppress(ValueError):  # a name, such as OptimizerNames.ADAMW_TORCH
                return {"default": ast.literal_eval(keyword.value)}
    return {}


def _documented(body: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    """Return what a class's docstring says about each name: its type, and the first sentences of its help."""
    docstring = body[0].value if isinstance(body[0], ast.Expr) else None
    text = str(docstring.value) if isinstance(docstring, ast.Constant) else ""
    entries = _DOCUMENTED.finditer(f"{text}\n")
    return {entry[2]: (entry[3], " ".join(entry[4].split("\n\n")[0].split())) for entry in entries}


def _type(text: str) -> Any:
    """Return the type that an annotation (`dict[str, Any] | str | None`) or a docstring (`list[int]`) stands for.

    Any where it holds nothing that YAML can write, such as an enum: transformers checks those itself.
    """
    text = re.sub(r"dict\[[^]]*\]", "dict", text)
    kinds = tuple(_TYPES[name] for name in re.findall(r"(?:list\[)*\w+\]*", text) if name in _TYPES)
    return Union[kinds] if {*kinds} - {None} else Any  # noqa: UP007


@functools.cache
def _body(file: str, name: str, package: str = "transformers") -> list[ast.stmt]:
    """Return the statements of a class of transformers or TRL, read from its source.

    Raises:
        ConfigError: the package is not installed, or has no such class.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        extra = "'cmexam_tune[rl]' (Python 3.11 or later)" if package == "trl" else package
        raise ConfigError(f"{package} is not installed: pip install {extra}")
    path = Path(spec.origin).parent / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise ConfigError(f"{path}: has no class {name}. Install a version of {package} named in constraints.txt.")
