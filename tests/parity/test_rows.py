"""Every row of `docs/coming-from` is run beside the other library: `@pytest.mark.row(first cell)` says by which tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PAGES = ROOT / "docs" / "coming-from"


def rows(library: str) -> list[str]:
    """The first cells of the table of a library, without backticks."""
    cells = re.findall(r"^\| (.+?) \| ", (PAGES / f"{library}.md").read_text(), flags=re.MULTILINE)
    return [cell.replace("`", "") for cell in cells[1:]]


def marked(path: Path) -> Iterator[str]:
    """The rows that the tests of a file run."""
    for function in ast.walk(ast.parse(path.read_text())):
        for mark in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.row":
                yield from (ast.literal_eval(cell) for cell in mark.args)


@pytest.mark.parametrize("library", ["torchfunc", "inferno", "monitorch"])
def test_every_row_is_run_beside_the_other_library(library: str) -> None:
    run = {cell for path in Path(__file__).parent.glob(f"test_{library}*.py") for cell in marked(path)}
    assert set(rows(library)) - run == set(), "rows that no test runs"
    assert run - set(rows(library)) == set(), "tests of rows that the page no longer has"
