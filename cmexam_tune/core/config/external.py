"""Names and types of the keys that belong to transformers, read from its source: importing it takes seconds."""

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import ConfigError

_SCALARS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}


@functools.cache
def training() -> Mapping[str, Any]:
    """Return the fields of `transformers.TrainingArguments` with their types (Any: more than one scalar fits)."""
    found: dict[str, Any] = {}
    for node in _body("training_args.py", "TrainingArguments"):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first, *rest = (part.strip() for part in ast.unparse(node.annotation).split("|"))
            scalar = _SCALARS.get(first, Any)
            found[node.target.id] = scalar if not rest else scalar | None if rest == ["None"] else Any
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
    for name, kind in re.findall(r"^ +(\w+):? \(`(\w+)`(?:, [^)]*)?\):", text, re.MULTILINE):
        if name in found and kind in _SCALARS:
            found[name] = _SCALARS[kind] | None
    return found


def _body(file: str, name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigError("transformers is not installed: pip install transformers")
    path = Path(spec.origin).parent / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    raise ConfigError(f"{path}: has no class {name}. Install a version of transformers named in constraints.txt.")
