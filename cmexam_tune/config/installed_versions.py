"""Names and types of the keys that belong to transformers, read from its source: importing it takes seconds."""

import ast
import functools
import importlib.util
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import ConfigError

_KINDS: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "None": None, "dict": Mapping, "list[str]": tuple[str, ...],
    "list[int]": tuple[int, ...], "list[list[int]]": tuple[tuple[int, ...], ...],
}  # fmt: skip


@functools.cache
def training() -> Mapping[str, Any]:
    """Return the fields of `transformers.TrainingArguments` with their types (Any: no type of YAML)."""
    found: dict[str, Any] = {}
    for node in _body("training_args.py", "TrainingArguments"):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _type(ast.unparse(node.annotation))
    del found["output_dir"]
    return found


@functools.cache
def generation() -> Mapping[str, Any]:
    """Return the options of `transformers.GenerationConfig` with their types, which only its docstring gives."""
    body = _body("generation/configuration_utils.py", "GenerationConfig")
    init = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    found: dict[str, Any] = {}
    for name in re.findall(r"kwargs\.pop\('([a-z]\w*)'", ast.unparse(init)):
        found[name] = Any
    docstring = body[0].value if isinstance(body[0], ast.Expr) else None
    text = str(docstring.value) if isinstance(docstring, ast.Constant) else ""
    for name, kind in re.findall(r"^ +(\w+):? \((`[^)]*)\):", text, re.MULTILINE):
        if name in found:
            found[name] = _type(kind.partition("*optional*")[0]) | None
    return found


def _type(text: str) -> Any:
    """Return what an annotation such as `dict[str, Any] | str | None` says, or a docstring's `int` or `list[int]`."""
    text = re.sub(r"dict\[[^]]*\]", "dict", text)
    kinds = tuple(_KINDS[name] for name in re.findall(r"(?:list\[)*\w+\]*", text) if name in _KINDS)
    return functools.reduce(operator.or_, kinds) if {*kinds} - {None} else Any


def _body(file: str, name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigError("transformers is not installed: pip install transformers")
    path = Path(spec.origin).parent / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise ConfigError(f"{path}: has no class {name}. Install a version of transformers named in constraints.txt.")
