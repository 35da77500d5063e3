"""Lives in which the kernels of GPUs, by Triton's interpreter, reduce the tensors of a CPU.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, like tests/reducers/kernels/test_triton.py.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from lives import Life, some

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from recorders.ring import ring
from reducers.kernels import counting, digests, dispatch, failing, sketches, waiting
from reducers.kernels.triton import lanes, tiling

TABLES = (
    *(dispatch.SWEEPS, dispatch.ROWS, dispatch.WEIGHTED, counting.BINS, counting.BEST),
    *(digests.DIGESTS, sketches.SKETCHES, waiting.SLOTS),
)
# A table is tried with a state that was never written, which may hold any bits: the interpreter warns of some of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reducers take the kernels for CPU tensors, of which small ones have several parts."""
    for table in TABLES:
        monkeypatch.setitem(table, "cpu", table["cuda"])
    monkeypatch.setattr(failing, "_failed", [])
    monkeypatch.setattr(lanes, "_LANES", 4)
    monkeypatch.setattr(lanes, "_EACH", 4)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 2)


@pytest.mark.parametrize("seed", some(8, 40))
def test_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones. In every other one most observations wait as partial results, of which few fit."""
    if seed % 2:
        monkeypatch.setattr(ring.Copies, "largest", 8)
        for room in (ring.PARTIAL, *ring.PARTIAL_ON.values()):
            monkeypatch.setattr(room, "most", 3)
    Life(seed, accuracy=1e-6).live(moments=10)  # kernels of GPUs add a few neighbours in float32
    assert failing._failed == []
