"""Everybody who computes columns knows them by one table: the loops in C++, the kernels in Triton, and what plans both."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES

from reducers import Statistic
from reducers.kernels import columns
from reducers.kernels.columns import BINNED, COLUMNS, WEIGHTED, Needs, column_dtypes, joinable, needs_of
from reducers.kernels.cpp import task
from reducers.kernels.cpp.sweeping import needed_of

KERNELS = Path(columns.__file__).parent
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int8, torch.uint8, torch.bool)


def enumerated(name: str, file: str) -> list[str]:
    """Return the members of an enumeration in a source in C++."""
    found = re.search(rf"enum {name} \{{(.*?)\}}", (KERNELS / "cpp" / file).read_text(), re.DOTALL)
    assert found is not None, f"{file} has no enum {name}"
    return [member.strip() for member in found[1].split(",")]


def test_the_results_of_the_loops_are_the_columns() -> None:
    assert [name.removesuffix("_COUNT").lower() for name in enumerated("Result", "accumulate.h")] == [*task.RESULTS, "results"]
    assert [name.lower() for name in enumerated("Result", "weighting.cpp")] == [*WEIGHTED, "results"]
    assert [name.replace("LOW", "MIN").replace("HIGH", "MAX").lower() for name in enumerated("Result", "binned.cpp")] == [*BINNED]
    assert {column.result or name for name, column in COLUMNS.items()} == {*task.RESULTS}


def test_the_loops_add_up_what_columns_need() -> None:
    told = dict(member.split(" = ") for member in enumerated("What", "accumulate.h"))
    assert told.pop("SUMS") == "SUM_OF | SQUARES_OF"  # no need of its own
    assert {name.removesuffix("_OF"): int(bit) for name, bit in told.items()} == {need.name: need.value for need in Needs if need}
    for name, column in COLUMNS.items():
        assert needed_of((name,)) == column.needs


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_dtypes_follow_from_kinds(dtype: torch.dtype) -> None:
    names = tuple(COLUMNS)
    found = dict(zip(names, column_dtypes(names, dtype), strict=True))
    assert {name for name in names if found[name] is torch.int64} >= {"count", "nan", "inf", "zeros", "active", "nonfinite"}
    assert found["min"] is found["max"] is dtype
    assert found["sum"] is found["exact"] is (torch.float64 if dtype.is_floating_point else torch.int64)
    assert {found[name] for name in ("mean", "m2", "m3", "m4", "squares", "magnitudes", "peak")} == {torch.float64}
    assert column_dtypes(("weight", "nonfinite"), torch.float64) == (torch.float64, torch.int64)


def test_a_power_is_joined_with_those_below_it() -> None:
    assert joinable(("count", "min", "sum"))
    assert joinable(("m2", "mean", "count"))
    assert not joinable(("mean",))
    assert not joinable(("count", "m2"))
    assert not joinable(("count", "mean", "m2", "m4"))
    assert needs_of(("count", "m2", "min")) == Needs.SUM | Needs.SQUARES | Needs.EXTREMES


def test_every_reducer_names_columns_that_there_are_in_their_dtypes() -> None:
    x = torch.randn(6, 8)
    for case in CASES:
        if not isinstance(case.reducer, Statistic) or not isinstance(case.reducer.columns, dict) or not case.reducer.columns:
            continue
        assert COLUMNS.keys() >= {*case.reducer.columns.values()}, case.reducer
        try:
            state = case.reducer.update({}, x)
        except Exception:  # of other inputs
            continue
        named = tuple(case.reducer.columns.values())
        for key, dtype in zip(case.reducer.columns, column_dtypes(named, x.dtype), strict=True):
            assert state[key].dtype is dtype, (case.reducer, key)


def test_kernels_in_triton_have_an_output_for_each_column() -> None:
    pytest.importorskip("triton")
    from reducers.kernels.triton.arguments import are_computed
    from reducers.kernels.triton.join_kernel import OUTPUTS, join

    assert {*OUTPUTS} == {"total", *(name for name, column in COLUMNS.items() if not column.is_total)}
    assert [f"{name}_old" for name in OUTPUTS] == [name for name in join.arg_names if name.endswith("_old")]
    source = (KERNELS / "triton" / "sweep_kernel.py").read_text()
    totals = {name for name, column in COLUMNS.items() if column.is_total}
    assert {*re.findall(r'TOTAL [!=]= "(\w+)"', source)} == totals
    assert not are_computed({"sum", "squares"})  # two totals
    assert not are_computed({"nan"})
    assert not are_computed({"m2", "count"})
    assert not are_computed({"weight"})
    assert are_computed({"count", "mean", "m2", "sum", "zeros", "nan", "inf"})


def test_the_vocabulary_needs_no_kernel() -> None:
    imported = {name.split(".")[0] for name in re.findall(r"^(?:from|import) (\S+)", inspect.getsource(columns), re.MULTILINE)}
    assert imported <= {*sys.stdlib_module_names, "torch"}


def test_a_new_column_touches_four_files() -> None:
    """The table; for CPUs the sums and what they are found to be; for GPUs the kernel that reads. No other file knows their names.

    The first two powers, the extremes and the counts are what kernels are about; a column like those that are only here is a total.
    """
    python = [path for folder in ("cpp", "triton") for path in (KERNELS / folder).glob("*.py")]
    constants = {
        path.name: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)] for path in python
    }
    for name in ("magnitudes", "squares"):
        naming = {path for path, found in constants.items() if any(node.value == name for node in found)}
        assert naming - {"weigh.py"} == {"sweep_kernel.py"}, name  # those of weights are others
    sources = [path for path in (KERNELS / "cpp").iterdir() if path.suffix in (".h", ".cpp") and path.name != "weighting.cpp"]
    naming = {path.name for path in sources if re.search(r"\b(SQUARES|SQUARES_OF)\b", path.read_text())}
    assert naming == {"accumulate.h", "sweeping.cpp"}
