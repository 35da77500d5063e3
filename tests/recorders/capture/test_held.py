"""Small observations wait to be reduced together: nobody can tell but by the time it takes."""

from __future__ import annotations

import gc
import pickle
from dataclasses import dataclass
from typing import ClassVar

import laws
import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Monitor, MonitorError, Recorder, RecordingWarning
from recorders.ring.ring import COPIES, Copies, Ring
from reducers import EMA, Collect, Last, Mean, Moments, Product, Quantile, State, Statistic, Summary

MOST = COPIES.most


@dataclass(frozen=True)
class Counted(Mean):
    """Counts how often something is reduced."""

    observed: ClassVar[list[int]] = []

    @property
    def divisible(self) -> bool:
        return True  # otherwise each observation is lifted by itself, as the class has a lift of its own

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        self.observed.append(x.numel())
        return super().lift(x, axes)


@dataclass(frozen=True)
class Picky(Statistic):
    """Takes no negative numbers."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> State:
        if x.amin() < 0:
            raise ValueError("negative")
        return {"sum": x.double().sum(dim=axes)}

    def join(self, a: State, b: State) -> State:
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: State) -> Tensor:
        return state["sum"]


def pending(monitor: Monitor) -> int:
    held = monitor.buffer.stored
    return sum(place.count - held.reduced.get(key, 0) for key, place in held.pending.items())


def test_small_observations_are_reduced_together() -> None:
    Counted.observed.clear()
    monitor = ForwardMonitor(Counted(), layer := nn.Identity())
    for value in range(1 + 10 * MOST):
        layer(torch.full((2, 3), float(value)))
    assert Counted.observed == [6] + [6 * MOST] * 10
    assert (monitor.samples, monitor.peek()) == (1 + 10 * MOST, 5 * MOST)


def test_whoever_looks_sees_all_of_them_at_any_moment() -> None:
    generator = torch.Generator().manual_seed(0)
    statistics = Product(summary=Summary("b c -> c"), ema=EMA("b c -> c", alpha=0.5), all=Collect())
    monitor = ForwardMonitor(statistics, layer := nn.Identity())
    state: State = {}
    for call in range(200):
        x = torch.randn(1 + call // 40 % 2, 3, generator=generator)
        state = statistics.update(state, x)
        layer(x)
        x.zero_()  # what was recorded is a copy
        assert monitor.samples == call + 1
        if call % 17 == 0:
            laws.close(monitor.peek(), statistics.compute(state), rtol=1e-12, atol=1e-12)
    laws.close(monitor.peek(), statistics.compute(state), rtol=1e-12, atol=1e-12)


def test_a_thousand_parts_merged_are_one_pass_to_twelve_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = ForwardMonitor(Summary(), one := nn.Identity())
    merged = ForwardMonitor(Summary())
    for part in range(1_000):
        own = ForwardMonitor(Summary(), layer := nn.Identity())
        for call in range(3):
            x = torch.randn(10_000 if part % 100 == call else 500, generator=generator) + 100  # some big, most small
            one(x)
            layer(x)
        merged.merge(own)
    assert merged.samples == whole.samples == 3_000
    laws.close(merged.peek(), whole.peek(), rtol=1e-12, atol=0)


def test_the_first_of_a_shape_is_reduced_at_once_so_that_mistakes_show_in_place() -> None:
    monitor = ForwardMonitor(Mean("b c -> c"), layer := nn.Identity())
    for _ in range(3):
        layer(torch.ones(2, 3))
    assert pending(monitor) == 2
    with pytest.warns(RecordingWarning, match=r"keeps shape \(3,\) .* met \(4,\)"):
        layer(torch.ones(2, 4))
    assert (monitor.samples, pending(monitor)) == (3, 0)


def test_one_that_cannot_be_reduced_is_left_out_alone() -> None:
    monitor = ForwardMonitor(Picky(), layer := nn.Identity())
    for value in (1.0, 2.0, -1.0, 3.0):
        layer(torch.full((2,), value))
    with pytest.warns(RecordingWarning, match=r"ForwardMonitor on Identity: ValueError: negative; operands: output 0: "):
        assert monitor.peek() == 12
    assert (monitor.samples, monitor.counts["errors"]) == (3, 1)


def test_an_error_to_be_raised_is_raised_once_and_the_other_observations_stay() -> None:
    monitor = ForwardMonitor(Picky(), layer := nn.Identity(), on_error="raise")
    for value in (1.0, -1.0, 2.0):
        layer(torch.full((2,), value))
    with pytest.raises(MonitorError, match=r"^ForwardMonitor .*ValueError: negative; operands: output 0: \(2,\) float32$"):
        layer(torch.ones(3))  # of another shape, before which the others are reduced
    assert (monitor.samples, monitor.peek()) == (3, 9)


def test_no_room_to_wait_in_costs_the_observation_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Copies, "new_memory", fails)
    monitor = ForwardMonitor(Mean(), layer := nn.Identity())
    layer(torch.ones(2))
    with pytest.warns(RecordingWarning, match="out of memory"):
        layer(torch.ones(2))
    assert (monitor.samples, monitor.counts["errors"]) == (1, 1)


def test_observations_with_several_tensors_wait_together() -> None:
    layer = nn.LSTM(3, 2)
    monitor = ForwardMonitor(Moments(), layer)
    for _ in range(5):
        layer(torch.randn(4, 3))
    assert pending(monitor) == 4
    assert {path: result["count"].item() for path, result in monitor.peek().items()} == {"0": 40, "1.0": 10, "1.1": 10}


def test_gradients_wait_too() -> None:
    monitor = BackwardMonitor(Mean(), layer := nn.Linear(2, 2))
    for _ in range(5):
        layer(torch.ones(1, 2)).sum().backward()
    assert pending(monitor) == 4
    assert (monitor.samples, monitor.peek()) == (5, 1)


@pytest.mark.parametrize("kind", [Last(), EMA(alpha=0.1), Mean().premap(torch.abs)], ids=["Last", "EMA", "Premap"])
def test_reducers_that_gain_nothing_do_not_wait(kind: Statistic) -> None:
    monitor = ForwardMonitor(kind, layer := nn.Identity())
    for _ in range(3):
        layer(torch.ones(2))
    assert pending(monitor) == 0


def test_what_waits_is_saved_merged_pickled_and_cleared(tmp_path: object) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Mean())).modules(nn.Sequential(layer), leaves=True)
    for value in (1.0, 2.0, 3.0):
        layer(torch.full((2,), value))
    assert recorder.save(f"{tmp_path}/run")
    layer(torch.full((2,), 4.0))
    twice = pickle.loads(pickle.dumps(recorder))
    twice.merge(recorder)
    assert (twice["0"].samples, twice["0"].peek()) == (8, 2.5)
    layer(torch.full((2,), 5.0))
    recorder.reset()
    assert (recorder["0"].samples, recorder["0"].peek()) == (0, None)


def test_big_observations_are_not_copied() -> None:
    for reducer in (Mean(), Quantile()):
        monitor = ForwardMonitor(reducer, layer := nn.Identity())
        for _ in range(3):
            layer(torch.ones(Copies.largest // 4 + 1))
        assert not any(isinstance(ring.codec, Copies) for ring in monitor.buffer.stored.rings().values())


@pytest.mark.slow
def test_the_memory_of_what_waits_is_bounded_for_one_monitor_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(COPIES, "together", together := 1 << 21)
    net = nn.Sequential(*[nn.Identity() for _ in range(500)])
    recorder = Recorder(ForwardMonitor(Mean())).children(net)
    for _ in range(2 * MOST):  # so often that each buffer was full once, and is of the size that it keeps
        net(torch.ones(512))
    places = [place for monitor in recorder.values() for place in monitor.buffer.stored.pending.values()]
    buffers = [rows.nbytes for ring in places if isinstance(ring, Ring) and ring._memory is not None for rows in ring._memory[0]]
    assert len(buffers) > 250
    assert max(buffers) <= COPIES.enough
    assert sum(buffers) <= 2 * together
    assert set(recorder.samples.values()) == {2 * MOST}
    del recorder, net, places
    gc.collect()
    assert not [ring for ring in COPIES.rings if ring.codec.size == 2048]
