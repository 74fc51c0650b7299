"""Imports go down the layers only, and no file or function grows out of sight."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cmexam_tune"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "sample" not in path.parts)
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
ORDER = ("base", "domain", "machinery", "programs")
BASE = {"__init__", "cli", "config", "errors", "files", "foreign", "jsonl", "schema", "settings", "strict", "variants"}
MACHINERY = {"families", "tuning", "training", "runs"}
HEAVY = {"torch", "transformers", "peft", "deepspeed", "accelerate"}
SLOW = HEAVY | {"datasets", "jieba", "sacrebleu", "rouge_score", "evaluate", "pandas", "openpyxl", "numpy", "scipy"}
MAX_FILE, MAX_FUNCTION, MAX_PACKAGE = 300, 50, 9000
"""Lines of a file and of a function; lines of code (no docstrings, comments, blank lines) of the package."""


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def layer(path: Path) -> str:
    top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if top in BASE:
        return "base"
    if top in MACHINERY:
        return "machinery"
    functions = {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}
    return "programs" if "main" in functions or top == "upstream" else "domain"


LAYERS = {path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): layer(path) for path in FILES}


def imported(path: Path, everywhere: bool = True) -> set[str]:
    """Return imported names; without `everywhere` only those that importing the module imports."""
    module = tree(path)
    found: set[str] = set()
    stack: list[ast.AST] = list(module.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += ast.iter_child_nodes(node)
    return found


def own(name: str) -> str | None:
    """Return the layer of an imported module of this package."""
    inside = name.removeprefix("cmexam_tune.")
    if inside == name:
        return None
    return LAYERS.get(inside) or LAYERS.get(f"{inside}.__init__")


def test_something_is_checked() -> None:
    assert len(FILES) > 20
    assert {layer for layer in LAYERS.values()} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_down(path: Path) -> None:
    level = ORDER.index(layer(path))
    up = [name for name in imported(path) if (its := own(name)) is not None and ORDER.index(its) > level]
    assert not up, f"{path.name} is {ORDER[level]} and imports from above: {up}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_torch_stays_in_the_machinery(path: Path) -> None:
    where = layer(path)
    if where == "machinery":
        variant = path.parent.name == "tuning" and not path.name.startswith("_")
        heavy = imported(path, everywhere=False) if variant else set()
    else:
        heavy = imported(path, everywhere=where == "domain")
    assert not {name.split(".")[0] for name in heavy} & HEAVY


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_size(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE, f"{lines} lines"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION, f"{node.name} has {length} lines"


def code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in layout]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code)


def test_size_of_the_package() -> None:
    assert sum(code_lines(path) for path in FILES) <= MAX_PACKAGE


@pytest.mark.parametrize("program", ["preprocess", "stats", "evaluate", "reproduce"])
def test_light_programs_import_nothing_slow(program: str) -> None:
    code = f"import sys, cmexam_tune.{program}; print(*(set(sys.modules) & {SLOW!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.split() == []


def test_no_vendored_shortcuts() -> None:
    assert not (PACKAGE / "utils.py").exists()
    calls = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]
    assert calls == []
