"""Every notebook runs offline to its last assert, shows a plot and a table, and is listed in the cookbook's README."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

COOKBOOK = Path(__file__).resolve().parents[1] / "cookbook"
NOTEBOOKS = sorted(COOKBOOK.glob("*.ipynb"))
SECONDS = 600
"""A notebook takes under a minute on two quiet cores; this only ends one that hangs."""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_the_six_are_there_and_listed() -> None:
    assert [p.stem[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]
    listed = (COOKBOOK / "README.md").read_text(encoding="utf-8")
    assert all(f"]({path.name})" in listed for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_without_outputs_and_ends_in_asserts(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert code[-1].source.count("assert ") >= 3
    assert any("plt.show()" in cell.source for cell in code) and any("print(f" in cell.source for cell in code)


@pytest.mark.real
@pytest.mark.skipif(
    "CACHEGEN_RAG_NOTEBOOKS" not in os.environ, reason="make notebooks runs them (CACHEGEN_RAG_NOTEBOOKS=1)"
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": COOKBOOK}}
    )
    client.execute()
    kinds = {kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", {})}
    assert "image/png" in kinds, "it draws a plot"
