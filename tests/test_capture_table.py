"""The table of hazards names tests that are there, and every row of it has one."""

from __future__ import annotations

import ast
import re

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "capture.md").read_text()
GATE = "## Which observations are recorded"  # a section whose table is of questions, not of hazards
HAZARDS = PAGE[: PAGE.index(GATE)] + PAGE[PAGE.index("## Calls and names") :]
ROWS = [line for line in HAZARDS.splitlines() if line.startswith("|") and not line.startswith(("| hazard", "|---"))]


def there() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.update(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return found


def test_every_test_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 50
    assert named <= there()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_says_what_happens_here_and_names_a_test(row: str) -> None:
    hazard, _, here, tests = (cell.strip() for cell in row.strip("|").split("|"))
    assert hazard
    assert here
    assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", tests)
