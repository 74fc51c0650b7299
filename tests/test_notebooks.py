"""The notebooks run from top to bottom."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import real_data

ROOT = Path(__file__).resolve().parents[1]
REAL = real_data.find("val.csv").parent
NOTEBOOKS = ["cmb.ipynb", "cmexam.ipynb", "quickstart.ipynb"]
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")


def run(name: str, folder: Path, epochs: int | None = None) -> list[Any]:
    """Return what a notebook shows; `epochs`: of each of its trainings."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    if epochs is not None:
        text, changes = re.subn(r"num_train_epochs=\d+", f"num_train_epochs={epochs}", nbformat.writes(notebook))
        assert changes == 3
        notebook = nbformat.reads(text, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in outputs if output.get("name") == "stderr"], "shown in red"
    return [output.data.get("text/html", "") for output in outputs if "data" in output]


@pytest.fixture(autouse=True)
def package_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_notebooks_are_committed_without_outputs() -> None:
    found = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert [path.name for path in found] == NOTEBOOKS
    for path in found:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs], path.name


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_takes_from_the_package_is_there(name: str) -> None:
    """Two of the three run only where all tests do."""
    cells = nbformat.read(ROOT / "notebooks" / name, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    tree = ast.parse(re.sub(r"(?m)^[%!].*", "", code))
    taken: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cmexam_tune"):
            for alias in node.names:
                module = importlib.import_module(str(node.module))
                taken[alias.asname or alias.name] = getattr(module, alias.name, None) or importlib.import_module(
                    f"{node.module}.{alias.name}"
                )
    assert taken
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = taken.get(node.value.id)
            assert not isinstance(owner, ModuleType) or hasattr(owner, node.attr), f"{owner} has no {node.attr}"


@pytest.mark.parametrize("epochs", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_quickstart(epochs: int | None, tmp_path: Path) -> None:
    shown = run("quickstart.ipynb", tmp_path, epochs)
    assert sum("<table>" in text for text in shown) >= 5
    assert "srcdoc=" in shown[-1]
    assert (tmp_path / "quickstart_out" / "head_bert" / "seed1" / "report" / "report.html").is_file()


@pytest.mark.slow
def test_cmexam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (REAL / "val.csv").is_file():
        monkeypatch.setenv("CMEXAM_DATA", str(REAL))
    monkeypatch.setenv("LIMIT", "16")
    shown = run("cmexam.ipynb", tmp_path)
    assert any("exact McNemar p" in text for text in shown)
    assert (tmp_path / "cmexam_out" / "report" / "report.html").is_file()


@pytest.mark.slow
def test_cmb(tmp_path: Path) -> None:
    shown = run("cmb.ipynb", tmp_path)
    assert any("majority of five" in text for text in shown)
    assert len(list((tmp_path / "cmb_out").glob("[0-4].jsonl"))) == 5
