"""The reducers of inferno beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from recorders import Cell
from reducers import (
    EMA,
    ArgumentError,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    CumulativeTrace,
    History,
    Last,
    Mean,
    NearestTrace,
    Product,
    Reducer,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    Scan,
    StateMismatchError,
    TimeSince,
)

pytestmark = [pytest.mark.parametrize("seed", range(3)), pytest.mark.usefixtures("float64")]


def spikes(seed: int, steps: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 3, (2, 4), generator=generator).double() for _ in range(steps)]


def same(ours: Any, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def positive(x: Tensor) -> Tensor:
    return x > 0


STEP = 0.5
MATCH = {"time_constant": 3.0, "step_time": STEP, "amplitude": 1.5, "target": 1.0, "tolerance": 0.1}
SCALED = {"time_constant": 3.0, "step_time": STEP, "amplitude": 0.25, "scale": 2.0}
THEIRS: dict[str, tuple[Any, ...]] = {  # the arguments of theirs after the step time
    "EMAReducer": (0.3,),
    "CAReducer": (),
    "PassthroughReducer": (),
    "EventReducer": (positive,),
    "NearestTraceReducer": (3.0, 1.5, 1.0, 0.1),
    "CumulativeTraceReducer": (3.0, 1.5, 1.0, 0.1),
    "ScaledNearestTraceReducer": (3.0, 0.25, 2.0, positive),
    "ScaledCumulativeTraceReducer": (3.0, 0.25, 2.0, positive),
    "ConditionalNearestTraceReducer": (3.0, 0.25, 2.0),
    "ConditionalCumulativeTraceReducer": (3.0, 0.25, 2.0),
}
OURS: dict[str, Reducer] = {
    "EMAReducer": EMA(alpha=0.3),
    "CAReducer": Mean("... -> ..."),
    "PassthroughReducer": Last(),
    "EventReducer": TimeSince(positive, STEP),
    "NearestTraceReducer": NearestTrace(**MATCH),
    "CumulativeTraceReducer": CumulativeTrace(**MATCH),
    "ScaledNearestTraceReducer": ScaledNearestTrace(criterion=positive, **SCALED),
    "ScaledCumulativeTraceReducer": ScaledCumulativeTrace(criterion=positive, **SCALED),
    "ConditionalNearestTraceReducer": ConditionalNearestTrace(**SCALED),
    "ConditionalCumulativeTraceReducer": ConditionalCumulativeTrace(**SCALED),
}
every = pytest.mark.parametrize("name", THEIRS)


def both(observe: Any, name: str, duration: float, inclusive: bool = True) -> tuple[Any, Cell]:
    theirs = getattr(observe, name)(STEP, *THEIRS[name], duration=duration, inclusive=inclusive)
    return theirs, Cell(History(OURS[name], STEP, duration, inclusive))


def feed(name: str, pair: tuple[Any, Cell], xs: list[Tensor]) -> None:
    for x in xs:
        inputs = (x, x > 1) if name.startswith("Conditional") else (x,)
        pair[0](*inputs)
        pair[1].push(*inputs)


@pytest.mark.row(
    "PassthroughReducer",
    "EMAReducer(step_time, alpha)",
    "CAReducer, the cumulative average",
    "NearestTraceReducer, CumulativeTraceReducer",
    "Scaled...TraceReducer, Conditional...TraceReducer",
    "reducer(x), peek, clear",
)
@every
def test_every_reducer(observe: Any, name: str, seed: int) -> None:
    theirs, ours = pair = both(observe, name, 0.0, False)
    for _ in range(2):
        assert theirs.peek() is None
        assert ours.peek() is None
        for x in spikes(seed):
            feed(name, pair, [x])
            same(ours.peek(), theirs.peek())
        theirs.clear()
        ours.clear()


@pytest.mark.row("reducer(x), peek, clear")
def test_push_of_theirs_stores_a_result(observe: Any, seed: int) -> None:
    theirs, ours = both(observe, "EMAReducer", 0.0)
    x, y = spikes(seed, 2)
    feed("EMAReducer", (theirs, ours), [x])
    theirs.push(y)  # without folding it; `Cell.push` is a call of theirs
    ours.push(y)
    same(theirs.peek(), y)
    same(ours.peek(), 0.3 * y + 0.7 * x)


@pytest.mark.row("EventReducer(step_time, criterion, initial)")
@pytest.mark.parametrize("initial", ["inf", "zero", "nan"])
def test_what_an_event_reducer_starts_with(observe: Any, initial: Any, seed: int) -> None:
    theirs, ours = observe.EventReducer(STEP, lambda x: x == 2, initial), Cell(TimeSince(lambda x: x == 2, STEP, initial))
    for x in spikes(seed):
        theirs(x)
        ours.push(x)
        torch.testing.assert_close(ours.peek(), theirs.peek(), rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.row("step_time, duration, inclusive of every reducer")
def test_how_many_results_are_kept(observe: Any, seed: int) -> None:
    for step, duration, inclusive in ((1.0, 0.0, True), (1.0, 3.0, False), (1.0, 3.0, True), (2.0, 3.0, False), (0.1, 1.1, True)):
        theirs = observe.PassthroughReducer(step, duration=duration, inclusive=inclusive)
        ours = Cell(History(Last(), step, duration, inclusive))
        for x in spikes(seed):
            theirs(x)
            ours.push(x)
        same(ours.dump(), theirs.dump())
    assert observe.PassthroughReducer(0.7, duration=4.9).data_.recordsz == 8  # 4.9 / 0.7 is a little more than 7 in floating point
    assert History(Last(), 0.7, 4.9).slots == 7


@pytest.mark.row(
    "reducer.latest, view(time, tolerance), dump(), clear(keepshape)",
    "interpolation that depends on the class of the reducer",
)
@every
def test_views_of_every_reducer(observe: Any, name: str, seed: int) -> None:
    theirs, ours = pair = both(observe, name, 2.0)
    feed(name, pair, spikes(seed))
    same(ours.latest(), theirs.latest)
    same(ours.dump(), theirs.dump())
    generator = torch.Generator().manual_seed(seed)
    times = 2.0 * torch.rand(2, 4, 6, generator=generator)
    times[..., 0] = torch.randint(0, 5, (2, 4), generator=generator) * STEP + 1e-8
    same(ours.view(times), theirs.view(times))
    same(ours.view(times[..., 1]), theirs.view(times[..., 1]))
    for tolerance in (1e-7, 0.1):
        for time in (0.0, 1.05, 2.0 + 5e-8, *times[0, 0].tolist()):
            same(ours.view(time, tolerance=tolerance), theirs.view(time, tolerance))
        same(ours.view(times, tolerance=tolerance), theirs.view(times, tolerance))
    for wrong in (-0.1, 2.1):
        with pytest.raises(ValueError):
            theirs.view(wrong)
        with pytest.raises(ArgumentError):
            ours.view(wrong)


@pytest.mark.row("reducer.latest, view(time, tolerance), dump(), clear(keepshape)")
@every
def test_clearing_may_keep_the_shape(observe: Any, name: str, seed: int) -> None:
    theirs, ours = pair = both(observe, name, 2.0)
    feed(name, pair, spikes(seed))
    theirs.clear(keepshape=True)
    ours.clear(keepshape=True)
    with pytest.raises(ValueError, match="shape"):
        feed(name, (theirs, Cell(Last())), [torch.ones(3)])
    with pytest.raises(StateMismatchError, match="shape"):
        feed(name, (lambda *_: None, ours), [torch.ones(3)])
    theirs.clear(keepshape=True)  # what failed was counted by the cumulative average
    feed(name, pair, spikes(seed + 1, 3))
    same(ours.dump(), theirs.dump()[:3])
    for holder in pair:
        holder.clear()
    feed(name, pair, [torch.ones(3)])
    same(ours.latest(), theirs.latest)


@pytest.mark.row("the fill value, which is shown for times before the first observation")
@every
def test_times_before_the_first_observation(observe: Any, name: str, seed: int) -> None:
    theirs, ours = pair = both(observe, name, 4.0)
    feed(name, pair, spikes(seed, 3))
    fill = math.inf if name == "EventReducer" else 0.0
    assert (theirs.dump()[3:] == fill).all()
    assert len(ours.dump()) == 3  # only what was observed
    times = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(seed)) * 4.0
    with pytest.raises(ArgumentError, match="3 results so far"):
        ours.view(times)
    seen, expected = ours.view(times, extrapolation=fill), theirs.view(times)
    decided = (times <= 1.0) | (times >= 1.5)  # in the step before the first observation they go from the fill value to it
    same(seen[decided], expected[decided])
    assert (seen[~decided] == fill).all()


INTERPOLATIONS = ("previous", "next", "nearest", "linear", "expdecay")


@pytest.mark.row("interpolations of inferno.functional")
@pytest.mark.parametrize("name", [*INTERPOLATIONS, "expratedecay"])
def test_interpolations_by_name_and_as_functions(observe: Any, name: str, seed: int) -> None:
    functional = pytest.importorskip("inferno.functional")
    theirs, ours = pair = both(observe, "PassthroughReducer", 2.0)
    feed("PassthroughReducer", pair, spikes(seed))
    constants = {"expdecay": {"time_constant": 3.0}, "expratedecay": {"rate_constant": 0.25}}.get(name, {})
    function = partial(getattr(functional, f"interp_{name}"), **constants)
    times = 2.0 * torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(seed))
    for time in (times, times[..., 0], 0.7, 0.75, 1.5):
        expected = theirs.data_.select(time, function)
        same(ours.view(time, function), expected)
        if name in INTERPOLATIONS:
            same(ours.view(time, name, **constants), expected)  # type: ignore[arg-type]


def folded(observe: Any) -> Any:
    """A reducer of theirs, derived from `FoldReducer`: the largest so far, which decays."""

    class Peak(observe.FoldReducer):  # type: ignore[misc]
        def fold(self, obs: Tensor, state: Tensor | None) -> Tensor:
            return peak(obs, state)

        def interpolate(self, prev_data: Tensor, next_data: Tensor, sample_at: Tensor, step_time: float) -> Tensor:
            return halfway(prev_data, next_data, sample_at, step_time)

    return Peak(STEP, 2.0, True)


def peak(x: Tensor, so_far: Tensor | None) -> Tensor:
    return x if so_far is None else torch.maximum(x, 0.75 * so_far)


def halfway(before: Tensor, after: Tensor, elapsed: Tensor, step_time: float) -> Tensor:
    return before + (after - before) * (elapsed / step_time) ** 2


@pytest.mark.row("FoldReducer, with fold(obs, state) and interpolate(...)")
def test_folds(observe: Any, seed: int) -> None:
    theirs, ours = folded(observe), Cell(History(Scan(peak), STEP, 2.0, True))
    for x in spikes(seed):
        theirs(x)
        ours.push(x)
        same(ours.peek(), theirs.peek())
    times = 2.0 * torch.rand(2, 4, generator=torch.Generator().manual_seed(seed))
    same(ours.view(times, halfway), theirs.view(times))
    same(ours.dump(), theirs.dump())


@pytest.mark.row("RecordReducer, with several records")
def test_several_records(observe: Any, seed: int) -> None:
    record = pytest.importorskip("inferno").RecordTensor

    class Both(observe.RecordReducer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(STEP, 2.0, True)
            for name in ("value", "square"):
                record.create(self, name, STEP, 2.0, torch.empty(0), inclusive=True)
            self.add_record("value", "square")

        def forward(self, x: Tensor) -> None:
            for name, result in (("value", x), ("square", x * x)):
                if getattr(self, name).ignored:
                    getattr(self, name).initialize(x.shape)
                getattr(self, name).push(result)

        clear = view = dump = peek = push = forward

    theirs, ours = Both(), Cell(History(Product(value=Last(), square=Last().premap(torch.square)), STEP, 2.0, True))
    for x in spikes(seed):
        theirs(x)
        ours.push(x)
    result: Any = ours.view(0.8, "linear")
    linear: Callable[..., Tensor] = pytest.importorskip("inferno.functional").interp_linear
    for name in ("value", "square"):
        same(result[name], getattr(theirs, name).select(0.8, linear))


@pytest.mark.row("complex numbers in traces")
@pytest.mark.parametrize("name", ["NearestTraceReducer", "CumulativeTraceReducer"])
def test_complex_amplitudes_and_targets(observe: Any, name: str, seed: int) -> None:
    theirs = getattr(observe, name)(STEP, 3.0, 1.5 - 2j, 1 + 1j)
    kind: Any = type(OURS[name])
    ours = Cell(kind(time_constant=3.0, step_time=STEP, amplitude=1.5 - 2j, target=1 + 1j))
    with pytest.warns(UserWarning, match="Complex modules"):
        theirs.to(torch.complex128)  # they would drop the imaginary part
    for x, y in zip(spikes(seed), spikes(seed + 10), strict=True):
        theirs(torch.complex(x, y))
        ours.push(torch.complex(x, y))
        same(ours.peek(), theirs.peek())
