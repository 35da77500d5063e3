"""No tensor without elements reaches a pointer: every entrance to the loops in C++, each in a process that may die."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reducers.kernels.cpp import library

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

BEGIN = """
import math, torch
from torch import empty, ones
from reducers import *
SHAPES = [(0,), (0, 16), (16, 0), (0, 0), (3, 0, 5), (4, 16, 0), (0, 1), ()]
MADE = [ones(shape, dtype=dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16, torch.float16)]
EMPTY = [x for x in MADE if not x.numel()]
def axes(x):
    return [tuple(range(x.ndim)), *[(axis,) for axis in range(x.ndim)]]
"""

ENTRANCES = {
    "sweeping": """
from reducers.kernels.dispatch import sweep
columns = tuple((name, name) for name in ("count", "mean", "m2", "min", "max", "zeros", "nan", "inf"))
for x in MADE:
    for along in axes(x):
        if not along:
            continue
        for mask in (None, torch.ones_like(x, dtype=torch.bool)):
            found = sweep((columns, 0.0), x, along, {}, mask)
            assert x.numel() or found is None
""",
    "rows": """
from reducers.execution.rows import RowSweep
sweep, both = RowSweep(), Product(a=Summary(), b=Norm())
for reducer in (Summary(), Mean(), both):
    rows = sweep.update(reducer, {}, [ones(10), empty(0), empty(0, 3), ones(())])
    again = sweep.update(reducer, rows, [empty(0), ones(10), None, empty(3, 0)])
    counts = [value for key, value in again.items() if key.endswith("count")]
    assert [count.tolist() for count in counts] == [[10, 10, 0, 1]] * len(counts), counts
    alone = reducer.update({}, ones(10))
    for key, value in alone.items():
        assert again[key][0] == value
        assert again[key][1] == value, key
    only = sweep.update(reducer, {}, [empty(0), empty(0)])
    assert [value.tolist() for key, value in only.items() if key.endswith("count")] == [[0, 0]] * len(counts)
""",
    "slots": """
from reducers.kernels.cpp.loop_slots import slots_for
for x in EMPTY:
    assert Summary().slots_for(x) is None
    for along in axes(x):
        assert slots_for(x, along, {"sum": "sum", "count": "count"}, 0.0) is None
""",
    "reading": """
from recorders.graphs.reading import RowReader, read_parts_of
parts = read_parts_of(Summary(), "", ones(4, 4))
reader = RowReader([parts, parts])
for x in EMPTY:
    assert read_parts_of(Summary(), "", x) is None
    assert reader.layout([ones(4), x]) is reader.layout([x, ones(4)]) is None
assert reader.layout([ones(4), ones(4)]) == 0
""",
    "weighting": """
from reducers.kernels.cpp.weighting import looped_weights
for x in EMPTY:
    for along in axes(x):
        assert looped_weights(x, torch.ones_like(x, dtype=torch.float32), along, ("weight", "sum")) is None
for reducer in (WeightedMean(), WeightedMoments()):
    assert reducer.update({}, empty(0, 3), empty(0)) == {}
""",
    "binned": """
from reducers.kernels.cpp.binned import looped_bits, looped_edges
for x in EMPTY:
    for along in axes(x):
        assert looped_bits(x, along, 5, (-126, 128), {}) is None
        assert looped_edges(x, along, torch.tensor([0.0, 1.0]), None, {}) is None
        assert looped_edges(x, along, torch.tensor([0.0, 1.0]), (0.0, 1.0), {}) is None
""",
    "digests": """
from reducers.kernels.cpp.digest import looped_digests
from reducers.kernels.parts import Runs
for x in EMPTY:
    assert Digest().update({}, x) == {}
    assert Digest().update_all({}, x[None]) == {}
    assert Digest().update_all({}, ones(0, 3)) == {}
    for runs in (Runs(1, 0), Runs(1, 0, 5), Runs(3, 0, 5, 7)):
        assert looped_digests(x, max(1, len(x)), runs, (0, 0, 0), (0, 0)) == [0] * (2 * max(1, len(x)))
""",
    "sketches": """
from reducers.kernels.cpp.sketch import looped_sketches
from reducers.kernels.parts import Runs
from reducers.kernels.sketches import sketched
for x in EMPTY:
    assert Sketch().update({}, x) == {}
    assert Sketch().update_all({}, x[None]) == {}
    for xs in (x, x[None]):
        looped_sketches(xs, 64, Runs(3, 0, 5, 7))
        sums, facts = sketched(xs, 64)
        assert sums.shape == (len(xs), 64)
        assert not sums.any()
        assert facts.tolist() == [[0.0, 0.0, 0.0, math.inf, -math.inf]] * len(xs)
""",
    "reducers": """
from reducers.execution.stacked import lift_stacked
for pattern in ("... ->", "b ... -> b", "... d -> d"):
    bins = Histogram(pattern, bins=3, low=0.0, high=1.0)
    for reducer in (Summary(pattern), Mean(pattern), Quantile(pattern), bins, Norm(pattern)):
        for x in EMPTY:
            assert reducer.update({}, x) == {}
            assert reducer.update_all({}, x[None]) == {}
            assert reducer.update_masked({}, x, x > 0) == {}
            assert Masked(reducer).update({}, x, x > 0) == {}
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_no_empty_tensor_reaches_a_pointer(entrance: str) -> None:
    ran = subprocess.run([sys.executable, "-c", BEGIN + ENTRANCES[entrance]], capture_output=True, text=True)
    assert ran.returncode == 0, f"status {ran.returncode}: {ran.stderr[-2000:]}"
