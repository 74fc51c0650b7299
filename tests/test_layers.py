"""Imports go down the house only: a file at the top is a program, a folder is a part."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "cmexam_tune"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "sample" not in path.parts)
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]
# From the ground up: a part may import itself and what stands before it.
FLOORS = (
    "core",
    "config",
    "exams",
    "prompts",
    "evaluation",
    "rewards",
    "report",
    "models",
    "quality",
    "training",
    "inference",
    "interop",
    "cmb_clin",
    "programs",
)
MACHINERY = ("models", "training", "inference", "interop", "cmb_clin")
"""Parts whose files may import torch; all others are read by programs that start in a moment."""
SEAMS = (
    "exams",
    "models/families",
    "models/adapters",
    "training/objectives",
    "evaluation/scorers",
    "evaluation/metrics",
)
"""Folders of variants."""
VARIANTS = {path.stem for seam in SEAMS[1:4] for path in (PACKAGE / seam).iterdir()}
HEAVY = {"torch", "transformers", "peft", "deepspeed", "accelerate"}
SLOW = HEAVY | {"datasets", "jieba", "sacrebleu", "rouge_score", "evaluate", "pandas", "openpyxl", "numpy", "scipy"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def floor(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "programs"


def name_of(path: Path) -> str:
    return ".".join(("cmexam_tune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def imported(path: Path, everywhere: bool = True, typing: bool = False) -> frozenset[str]:
    """Return imported names; without `everywhere` only those that importing the module imports.

    With `typing` also what only type checkers see: a reader follows it too.
    """
    module = tree(path)
    found: set[str] = set()
    stack: list[ast.AST] = list(module.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from part import file` names the file; anything else is taken from the module itself.
            found |= names | ({node.module} if names - set(MODULES) else set())
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += ast.iter_child_nodes(node)
    return frozenset(found)


def own(path: Path, typing: bool = True) -> set[Path]:
    """Return the files of this package that a file imports."""
    modules = {MODULES[name] for name in imported(path, typing=typing) if name in MODULES}
    return modules - {path}


def test_something_is_checked() -> None:
    assert len(FILES) > 20
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(FLOORS), "a new part needs its place in FLOORS"


def test_only_programs_at_the_top() -> None:
    top = sorted(PACKAGE.glob("*.py"))
    for path in top:
        functions = {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}
        assert "main" in functions or path.name == "__init__.py", f"{path.name} is no program"


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without `__init__.py` can be imported from here, and is left out of the wheel."""
    assert [str(path.parent) for path in FILES if not (path.parent / "__init__.py").is_file()] == []


def test_every_part_says_what_it_is() -> None:
    for path in PACKAGE.glob("*/__init__.py"):
        words = ast.get_docstring(tree(path)) or ""
        assert "In: " in words and "Out: " in words and "Start reading" in words, path


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_go_down(path: Path) -> None:
    level = FLOORS.index(floor(path))
    up = [name_of(other) for other in own(path) if FLOORS.index(floor(other)) > level]
    assert not up, f"{path.name} is on the floor {floor(path)} and imports from above: {up}"


def test_no_circles() -> None:
    # A type that only checkers see may point back: nobody has to read the other file to follow the code.
    arrows = {path: own(path, typing=False) for path in FILES}
    # A part's face imports what it shows; a file of the part that names the part imports the face only.
    left = dict(arrows)
    while free := [path for path, to in left.items() if not to & set(left)]:
        for path in free:
            del left[path]
    assert not left, f"in circles: {sorted(name_of(path) for path in left)}"


def is_variant(path: Path) -> bool:
    """Whether a file belongs to a seam: it is found by its name and nobody imports it."""
    return any(path.is_relative_to(PACKAGE / seam) for seam in SEAMS)


def test_a_file_lives_where_it_is_used() -> None:
    """What nothing in its own part and exactly one other part imports belongs to that part. Programs are doors."""
    users: dict[Path, set[Path]] = {path: set() for path in FILES}
    for path in FILES:
        for other in own(path):
            users.setdefault(other, set()).add(path)
    lodgers = []
    for path in FILES:
        parts = {floor(user) for user in users[path]}
        if len(parts) == 1 and not parts & {floor(path), "programs"} and not is_variant(path):
            lodgers.append(f"{path.relative_to(PACKAGE)} is only used by {parts.pop()}/")
    assert not lodgers


def test_private_files_stay_in_their_part() -> None:
    for path in FILES:
        private = [name_of(other) for other in own(path) if other.stem.startswith("_") and other.stem != "__init__"]
        strangers = [name for name in private if not path.is_relative_to(MODULES[name].parent)]
        assert not strangers, f"{name_of(path)} imports {strangers}"


def test_no_two_files_share_a_name() -> None:
    """A traceback, a search and `from part import file` name a file by its last word."""
    names = Counter(path.name for path in FILES if path.name != "__init__.py" and not is_variant(path))
    assert [name for name, count in names.items() if count > 1] == []


def test_parameters_are_named() -> None:
    """A pair of unrelated things is two parameters; shapes, intervals and ranges of one kind may be tuples."""
    pairs = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                kinds = tuple_of(argument.annotation)
                if len(set(kinds)) > 1:
                    pairs.append(f"{path.relative_to(PACKAGE)}: {node.name}({argument.arg}: tuple of {kinds})")
    assert not pairs


def tuple_of(annotation: ast.expr | None) -> list[str]:
    """Return the types in `tuple[A, B]`; none for anything else, `tuple[A, ...]` included."""
    if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value) != "tuple":
        return []
    kinds = [ast.unparse(kind) for kind in getattr(annotation.slice, "elts", [])]
    return [] if "..." in kinds else kinds


def test_programs_call_functions_not_mains() -> None:
    for path in FILES:
        names = [name for name in imported(path) if name.endswith(".main") and name.startswith("cmexam_tune.")]
        assert path.name == "__main__.py" or not names, f"{path.name} imports {names}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_torch_stays_in_the_machinery(path: Path) -> None:
    where = floor(path)
    if where in MACHINERY:
        # Reading a config imports the tuning methods, and must not take seconds.
        heavy = imported(path, everywhere=False) if {"adapters", "objectives"} & {*path.parts} else set()
    else:
        heavy = imported(path, everywhere=where != "programs")
    assert not {name.split(".")[0] for name in heavy} & HEAVY


@pytest.mark.parametrize("program", ["preprocess", "stats", "evaluate", "reproduce"])
def test_light_programs_import_nothing_slow(program: str) -> None:
    code = f"import sys, cmexam_tune.{program}; print(*(set(sys.modules) & {SLOW!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("program", ["preprocess", "stats", "evaluate", "__main__"])
def test_programs_without_a_recipe_start_without_pydantic(program: str) -> None:
    code = f"import sys, cmexam_tune.{program}; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=True)
    assert done.stdout.strip() == "False"


def test_no_vendored_shortcuts() -> None:
    assert not (PACKAGE / "utils.py").exists()
    calls = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]
    assert calls == []


def test_every_import_is_declared() -> None:
    """What is imported stands in setup.py itself, and does not only come with the dependencies of something else."""
    declared = (PACKAGE.parent / "setup.py").read_text(encoding="utf-8").lower().replace("_", "-")
    names = {name.partition(".")[0] for path in FILES for name in imported(path)} - sys.stdlib_module_names
    distribution = {"yaml": "pyyaml", "modelscope_hub": "modelscope"}
    wanted = {distribution.get(name, name).replace("_", "-") for name in names - {"cmexam_tune"}}
    assert len(wanted) > 20
    assert sorted(name for name in wanted if not re.search(f"[\"']{name}", declared)) == []


def test_nobody_asks_for_the_name_of_a_family_or_method() -> None:
    """What differs between them is an attribute or a method of theirs, so that a user's own gets the right one."""
    asked = []
    for path in set(FILES) - {PACKAGE / "tiny.py"}:  # which builds one of each
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                names = {side.attr if isinstance(side, ast.Attribute) else ast.unparse(side) for side in sides}
                literal = any(isinstance(leaf, ast.Constant) and leaf.value in VARIANTS for leaf in ast.walk(node))
                if literal and names & {"family", "method", "objective"}:
                    asked.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not asked


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_docstrings_name_files_that_exist(path: Path) -> None:
    """`reading.py` in a module's docstring is a file beside it, or (`prompts/order.py`) one of the package."""
    for name in re.findall(r"`([\w/]+\.(?:py|yaml))`", ast.get_docstring(tree(path)) or ""):
        places = [path.parent / name, PACKAGE / name, PACKAGE.parent / name]
        assert name == "utils.py" or any(place.exists() for place in places), f"{name} is not there"  # lm-eval's
