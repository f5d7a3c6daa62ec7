"""The notebooks run from top to bottom, on a CPU, with small settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docblocks import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_committed(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat, nbclient and ipykernel")
    client = pytest.importorskip("nbclient", reason="notebooks need nbformat, nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="notebooks need nbformat, nbclient and ipykernel")
    pytest.importorskip("torch", reason="the notebook trains with torch")
    pytest.importorskip("matplotlib", reason="the notebook draws with matplotlib")
    monkeypatch.setenv("GIGAMLP_NOTEBOOK", "small")
    notebook = nbformat.read(path, as_version=4)
    client.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert "quoted" in printed  # the article's figures stand beside ours
    assert "_fused" in printed
    accuracy = float(printed.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 98
    assert (tmp_path / "gigamlp-record.zip").is_file()
