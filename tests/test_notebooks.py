"""The notebooks run, and print what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text(cell: Any) -> str:
    """What a cell prints and returns, without colours; no pictures, no warnings."""
    found = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            found.append(output["text"])
        elif output["output_type"] == "execute_result" or "text/html" in output.get("data", {}):
            found.append(output["data"]["text/plain"])
    plain = "\n".join("".join(one) for one in found)  # a file has lists of lines
    return re.sub(r"\x1b\[\d*m", "", plain)


def pictures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_keeps_its_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert len(notebook["cells"]) <= 25
    assert path.stat().st_size < 250_000
    outputs = [output["output_type"] for cell in code_cells(notebook) for output in cell["outputs"]]
    assert "error" not in outputs
    assert sum(map(pictures, code_cells(notebook))) > 0
    for cell in code_cells(notebook):
        assert text(cell) or "print(" not in re.sub(r"^(?:    |def ).*", "", "".join(cell["source"]), flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are equal, and numbers but for what machines round otherwise. `jupyter execute --inplace` writes new outputs."""
    for needed in ("ipykernel", "matplotlib_inline", "nbclient"):
        pytest.importorskip(needed)
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    kept, run = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(code_cells(kept), code_cells(run), strict=True):
        shown, printed = text(before), text(after)
        assert NUMBER.sub("#", shown).split() == NUMBER.sub("#", printed).split()
        numbers = [[float(number) for number in NUMBER.findall(each)] for each in (shown, printed)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.002)
        assert pictures(before) == pictures(after)
