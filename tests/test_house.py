"""The house: packages import only those above them, none in a circle, no room is too big, and tests lie as packages do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

# Each may import those above it. Imports that are deferred, and those for types alone, count as imports.
ORDER = {
    "reducers": [
        "errors",
        "_torch",
        "state",
        "kernels",
        "core",
        "statistics",
        "distributions",
        "multivariate",
        "exemplars",
        "temporal",
        "combinators",
    ],
    "recorders": [
        "errors",
        "_torch",
        "recordings",
        "ring",
        "capture",
        "graphs",
        "schedule",
        "monitors",
        "recorder",
        "streams",
        "watch",
        "integrations",
        "",
        "cli",
    ],
}

TESTS = ROOT / "tests"
SPANNING = {
    "test_capture_table.py",
    "test_cookbook.py",
    "test_cuda.py",
    "test_docs.py",
    "test_docs_reducers.py",
    "test_examples.py",
    "test_golden.py",
    "test_gpu_benchmark.py",
    "test_house.py",
    "test_memory.py",
    "test_plain_pytorch.py",
    "test_project.py",
    "test_real_networks.py",
}
"""Files at the top of tests/: what they test is both packages, the documents, or PyTorch itself."""


def modules(package: str) -> dict[str, Path]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of the packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in known else node.module for name in found]
        else:
            continue
        for name in found:
            if f"{name}.__init__" in known:
                yield f"{name}.__init__"
            elif name in known:
                yield name


def graph() -> dict[str, set[str]]:
    files = {**modules("reducers"), **modules("recorders")}
    return {name: set(imported(path, set(files))) - {name} for name, path in files.items()}


def room(name: str) -> str:
    """The entry of its package's list that a module belongs to; "" for the package itself, which re-exports from all."""
    part = name.split(".")[1]
    return "" if part == "__init__" else part


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_those_above_them(package: str) -> None:
    order = ORDER[package]
    found = {name: others for name, others in graph().items() if name.startswith(f"{package}.")}
    assert {room(name) for name in found} | {""} == set(order) | {""}
    wrong = [
        f"{name} imports {other}"
        for name, others in found.items()
        for other in others
        if room(name) and other.startswith(f"{package}.")
        if room(other) not in order or order.index(room(other)) > order.index(room(name))
    ]
    assert wrong == []


def test_reducers_know_nothing_of_recorders() -> None:
    assert [
        name for name, others in graph().items() if name.startswith("reducers.") for o in others if o.startswith("recorders.")
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ORDER)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    left = {name: {other for other in others if other.startswith(package)} for name, others in graph().items()}
    left = {name: others for name, others in left.items() if name.startswith(package)}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


@pytest.mark.parametrize("package", ORDER)
def test_a_package_has_at_most_fourteen_entries_and_a_room_at_most_600_lines(package: str) -> None:
    entries = [entry.name for entry in (ROOT / package).iterdir() if entry.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 14
    assert {name: lines for name, path in modules(package).items() if (lines := len(path.read_text().splitlines())) > 600} == {}


def test_every_warning_points_at_the_line_of_the_user() -> None:
    files = [path for package in ORDER for path in modules(package).values() if "warnings.warn(" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in files] == [], "call reducers.errors.warn_user"


@pytest.mark.slow
def test_what_users_need_is_in_the_package() -> None:
    script = """
import sys, recorders, recorders.errors
found = {'rich', 'matplotlib', 'sklearn'} & set(sys.modules)
assert not found, found
missing = [name for name in (*recorders.errors.__all__, 'findings', 'overview', 'lenses', 'visualizers')
           if name not in recorders.__all__ or not hasattr(recorders, name)]
assert not missing, missing
recorders.lenses.OutputGradientGeometry, recorders.visualizers.TextVisualizer
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_private_apis_of_pytorch_are_used_in_one_package() -> None:
    private = re.compile(r"^(?!.*[\"'#`].*torch\._).*(?:from |import |\b)torch(?:\.\w+)*\._(?!foreach)", re.MULTILINE)
    found = [name for name, path in modules("recorders").items() if private.search(path.read_text())]
    assert {name.rpartition(".")[0] for name in found} == {"recorders._torch"}


def test_memory_of_tensors_is_taken_in_one_file() -> None:
    """Whoever reads or writes at the address of a tensor asks first whether there is memory: `stored.address` does."""
    taken = re.compile(r"data_ptr|from_address|untyped_storage|\._?storage\(")
    found = [name for name, path in modules("recorders").items() if taken.search(path.read_text())]
    # Handles are found by their address, at which nothing reads.
    assert sorted(found) == ["recorders.capture.accumulators", "recorders.recordings.stored"]


def test_every_test_file_lies_in_the_folder_of_what_it_tests() -> None:
    packages = {path.parent.relative_to(ROOT) for package in ORDER for path in (ROOT / package).rglob("__init__.py")}
    found = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {path.name for path in found if path.parent == Path()} == SPANNING
    assert {path.parent for path in found} - packages == {Path(), Path("faults"), Path("parity")}


def test_names_of_tests_have_fewer_than_80_characters() -> None:
    functions = [
        node.name
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(functions) > 500
    assert [name for name in functions if len(name) >= 80] == []


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []  # pytest cannot import both in one process
