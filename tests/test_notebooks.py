"""The notebooks run from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest
import real_data

ROOT = Path(__file__).resolve().parents[1]
REAL = real_data.find("val.csv").parent
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
    assert [path.name for path in found] == ["cmb.ipynb", "cmexam.ipynb", "quickstart.ipynb"]
    for path in found:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs], path.name


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
