"""Recording through a hook by the kernels themselves, interpreted, with CPU tensors in the place of those of a GPU.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, like tests/reducers/kernels/test_triton.py.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from typing import Any

import laws
import pytest
import torch
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from recorders import ForwardMonitor, Recorder
from recorders.ring import ring as codecs
from reducers import Mean, Moments, State, Statistic, Summary
from reducers.kernels import dispatch, waiting
from reducers.kernels.triton import lanes, tiling
from reducers.kernels.triton.gpu_slots import SlotTable

# A table is tried with a state that was never written, which may hold any bits: the interpreter warns of some of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")


@pytest.fixture(autouse=True)
def on_cpu(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitors take the kernels for CPU tensors; small tensors have two tiles, do not wait as they are, and three slots."""
    monkeypatch.setattr(lanes, "_LANES", 4)
    monkeypatch.setattr(lanes, "_EACH", 4)
    monkeypatch.setattr(tiling, "_MAX_PARTS", 2)
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    monkeypatch.setitem(dispatch.SWEEPS, "cpu", dispatch.SWEEPS["cuda"])
    monkeypatch.setitem(waiting.SLOTS, "cpu", waiting.SLOTS["cuda"])
    monkeypatch.setattr(codecs.Copies, "largest", 8)
    for room in (codecs.PARTIAL, *codecs.PARTIAL_ON.values()):
        monkeypatch.setattr(room, "most", 3)


def drawn(seed: int, *shape: int) -> Tensor:
    x = torch.randn(shape or (8, 3), generator=torch.Generator().manual_seed(seed)) + 1e4
    if seed % 3 == 1:
        x.view(-1)[::7], x.view(-1)[::11], x.view(-1)[::5] = torch.nan, -torch.inf, 0
    return x


def updated(reducer: Statistic, xs: list[Tensor]) -> State:
    state: State = {}
    for x in xs:
        state = reducer.update(state, x)
    return state


@pytest.mark.parametrize("reducer", [Summary(), Moments("b c -> c", order=4)], ids=str)
def test_observations_in_slots_have_the_bits_of_updates(reducer: Statistic) -> None:
    layer = nn.Identity()
    monitor, looked = (ForwardMonitor(reducer, layer) for _ in range(2))
    xs = [drawn(seed) for seed in range(7)]
    for number, x in enumerate(xs):
        layer(x)
        if number % 4 == 2:
            looked.peek()
        if number == 5:
            looked.snapshot()
    assert any(isinstance(ring.codec, codecs.PartialStates) for ring in monitor.buffer.stored.rings().values())
    wanted = updated(reducer, xs)
    for one in (monitor, looked):
        assert one.samples == 7
        laws.same_bits(one.state, wanted)


def test_merge_reset_pickle_and_state_dict_in_the_middle() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Summary("b c -> c"))).modules(nn.Sequential(layer), leaves=True)
    xs = [drawn(seed) for seed in range(6)]
    for x in xs[:3]:
        layer(x)
    held, again = recorder.state_dict(), pickle.loads(pickle.dumps(recorder))
    again.merge(recorder)
    assert again["0"].samples == 6
    for x in xs[3:]:
        layer(x)
    wanted = updated(Summary("b c -> c"), xs)
    laws.same_bits(recorder["0"].state, wanted)
    recorder.load_state_dict(held)
    for x in xs[3:]:
        layer(x)
    laws.same_bits(recorder["0"].state, wanted)
    recorder.reset()
    for x in xs[:3]:
        layer(x)
    laws.same_bits(recorder["0"].state, updated(Summary("b c -> c"), xs[:3]))


def test_two_leaves_of_different_shapes_and_dtypes() -> None:
    monitor = ForwardMonitor(Summary(), layer := nn.Identity())
    pairs = [(drawn(seed, 70), drawn(seed + 20, 9, 9).bfloat16()) for seed in range(4)]
    for pair in pairs:
        layer(pair)
    assert monitor.samples == 4
    for place in range(2):
        laws.same_bits(monitor.states[str(place)], updated(Summary(), [pair[place] for pair in pairs]))


def test_a_launch_that_fails_midway_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.")

    monitor = ForwardMonitor(Mean(), layer := nn.Identity())
    xs = [torch.full((50,), float(seed)) for seed in range(6)]
    for x in xs[:3]:
        layer(x)
    monkeypatch.setattr(SlotTable, "write", fails)
    with pytest.warns(RuntimeWarning, match="failed on .*, which takes longer: RuntimeError: Failed to find C compiler"):
        for x in xs[3:]:
            layer(x)
    assert (monitor.samples, monitor.peek(), monitor.last_error) == (6, 2.5, None)
