"""The law of overrides for monitors: a method of a subclass is what counts, whatever waits, is reduced together or is in a graph.

What one update after another makes of each override is held in tests/reducers/core/test_overrides.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from overridden import one_more, overriding, same_state
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Monitor, ParameterGradientMonitor, Recorder
from recorders.graphs import ring
from recorders.graphs.ring import Share
from recorders.ring import ring as codecs
from recorders.ring.ring import Copies, PartialStates, Ring
from recorders.ring.rows import LeafRow
from reducers import EMA, Covariance, Histogram, Masked, Max, Mean, Moments, Norm, Product, Quantile, Reducer, State, Summary, TopK
from reducers.kernels.cpp import library

SIZES = {"small": (4, 3), "big": (2800, 3), "huge": (11000, 3)}  # wait in a buffer, in slots; not lifted in a graph
LAYERS = {"small": 5, "big": 2, "huge": 2}  # enough for small parameters to be the rows of a matrix
STEPS = 7  # the first one alone, three that fill what waits, and some that wait when the monitors are read

Wrap = Callable[[Reducer], Reducer]


def _as_it_is(reducer: Reducer) -> Reducer:
    return reducer


REDUCERS: dict[str, tuple[Reducer, Wrap]] = {
    "Mean": (Mean(), _as_it_is),
    "Mean of units": (Mean("b c -> c"), _as_it_is),
    "Summary": (Summary(), _as_it_is),
    "Moments": (Moments(), _as_it_is),
    "Norm": (Norm(), _as_it_is),
    "Max": (Max(), _as_it_is),
    "Quantile": (Quantile(), _as_it_is),
    "Histogram": (Histogram(bins=8, low=-2.0, high=2.0), _as_it_is),
    "TopK": (TopK(k=2), _as_it_is),
    "Covariance": (Covariance(), _as_it_is),
    "EMA": (EMA("b c -> c", alpha=0.3), _as_it_is),
    "Product": (Product(a=Mean()), _as_it_is),
    "Product of one": (Mean(), lambda reducer: Product(a=reducer)),
    "Premap": (Mean().premap(torch.sin), _as_it_is),
    "Premap of one": (Mean(), lambda reducer: reducer.premap(torch.sin)),
    "Postmap of one": (Summary(), lambda reducer: reducer.postmap(one_more)),
}
METHODS: dict[str, tuple[str, ...]] = {
    "update": ("update",),
    "update_all": ("update", "update_all"),  # both mark, so that it does not matter how many are reduced at once
    "lift": ("lift",),
    "lift_masked": ("lift_masked",),
    "join": ("join",),
    "merge": ("merge",),
    "read": ("read",),
    "compute": ("compute",),
}
KINDS: dict[str, type[Monitor]] = {"out": ForwardMonitor, "back": BackwardMonitor, "gradient": ParameterGradientMonitor}


def _positive(x: Tensor) -> Tensor:
    return x > 0


def updating_by_merge(own: Reducer, plain: Reducer) -> Reducer:
    """A subclass that keeps the law of `update` and `merge`, with the `merge` of `own`."""

    def update(self: Any, state: State, *xs: Tensor) -> State:
        return self.merge(state, plain.update({}, *xs))  # type: ignore[no-any-return]

    cls: Any = type(f"Merging{type(own).__name__}", (type(own),), {"update": update})
    return cls.from_fields(**{field.name: getattr(own, field.name) for field in fields(own)})  # type: ignore[arg-type,no-any-return]


def owns(name: str) -> dict[str, tuple[Reducer, Reducer]]:
    """For each method a reducer with one of its own, beside the one without."""
    reducer, wrap = REDUCERS[name]
    found = {}
    for method, overridden in METHODS.items():
        if not all(hasattr(reducer, one) for one in overridden):
            continue
        pair = overriding(reducer, *overridden), reducer
        if method == "lift_masked":
            if name == "Covariance":  # takes whole observations
                continue
            pair = pair[0].prefilter(_positive), pair[1].prefilter(_positive)
        if method == "merge" and name in ("Product", "Premap"):  # they update their parts
            pair = updating_by_merge(*pair), reducer
        found[method] = wrap(pair[0]), wrap(pair[1])
    return found


class _Layer(nn.Module):
    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class _Net(nn.Module):
    """Layers that return what they are given, and gradients that are given, too."""

    def __init__(self, size: tuple[int, ...], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(size) for _ in range(layers)])

    def forward(self, xs: Tensor, gradients: Tensor) -> Tensor:
        outputs = [layer(x) for layer, x in zip(self.layers, xs.unbind(), strict=True)]
        return (torch.stack(outputs) * gradients).sum()


def by_hand(reducer: Reducer, xs: list[Tensor]) -> tuple[Any, Any]:
    """The state and the result of one update after another."""
    state = reduce(reducer.update, xs, {})
    return state, {"": reducer.compute(state)}


def differ(one: Any, other: Any) -> bool:
    """Whether two states, or two results, stand for something else."""
    try:
        same_state(one, other, "")
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.fixture
def soon_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is full after three observations."""
    monkeypatch.setattr(ring, "MOST", 3)
    for room in (codecs.COPIES, codecs.PARTIAL, *codecs.PARTIAL_ON.values()):
        monkeypatch.setattr(room, "most", 3)


def check(reducers: dict[str, tuple[Reducer, Reducer]], size: str, backend: str = "") -> tuple[list[str], set[type]]:
    """What is wrong with each reducer on each monitor, and where observations waited."""
    torch._dynamo.reset()
    layers = 2 if backend else LAYERS[size]
    kinds = [kind for kind in KINDS if not backend or kind != "gradient"]  # the step of an optimizer is in no graph
    net = _Net(SIZES[size], layers)
    monitors = {f"{kind}_{name}": KINDS[kind](own) for kind in kinds for name, (own, _) in reducers.items()}
    recorder = Recorder(**monitors).modules(net, types=_Layer)
    run: Any = torch.compile(net, backend=backend, fullgraph=True) if backend else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    given = torch.randn(STEPS, 2, layers, *SIZES[size], generator=torch.Generator().manual_seed(0))
    for xs, gradients in given:
        optimizer.zero_grad()
        run(xs, gradients).backward()
        optimizer.step()
    pending = [one for monitor in recorder.values() for one in monitor.buffer.stored.pending.values()]
    waited: set[type] = {*map(type, pending)}
    waited |= {type(one.codec) for one in pending if isinstance(one, Ring)}
    wrong = []
    for name, (own, plain) in reducers.items():
        for kind, layer in product(kinds, range(layers)):
            monitor, path = recorder[f"{kind}_{name}/layers.{layer}"], "weight" if kind == "gradient" else ""
            seen = [*given[:, int(kind != "out"), layer]]
            found, wanted, unmarked = (monitor.states[path], {"": monitor.leaves()[path]}), by_hand(own, seen), by_hand(plain, seen)
            assert monitor.samples == STEPS
            assert any(map(differ, wanted, unmarked)), f"{name} marks nothing"
            wrong += [f"{kind} of layer {layer}, own {name}"] if any(map(differ, found, wanted)) else []
    return wrong, waited


@pytest.mark.parametrize("size", ["small", "big"])
def test_what_waits_goes_through_the_methods_of_a_subclass(size: str, soon_full: None) -> None:
    reducers = {f"{method}_{name}": one for name in ("Mean", "Summary") for method, one in owns(name).items()}
    wrong, waited = check(reducers, size)
    assert wrong == []
    assert waited >= {Copies, LeafRow} if size == "small" else waited >= {PartialStates}


@pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")
def test_a_graph_goes_through_the_methods_of_a_subclass(soon_full: None) -> None:
    """Those without a kernel get the tensors, and the operator reads the others in C++."""
    reducers = {method: owns("Mean")[method] for method in ("update", "lift", "merge", "update_all", "compute")}
    wrong, waited = check(reducers, "small", "aot_eager")
    assert wrong == []
    assert waited >= {Share, Copies}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("size", ["small", "big"])
def test_every_method_of_a_subclass_counts_on_every_monitor(
    size: str, name: str, soon_full: None, with_and_without_a_compiler: str
) -> None:
    assert check(owns(name), size)[0] == []


@pytest.mark.long
@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("size", ["small", "huge"])
def test_every_method_of_a_subclass_counts_in_a_graph(size: str, name: str, soon_full: None) -> None:
    assert check(owns(name), size, "aot_eager")[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mean", "Quantile"])
def test_every_method_of_a_subclass_counts_in_a_graph_without_a_compiler(name: str, soon_full: None, without_loops: None) -> None:
    assert check(owns(name), "small", "aot_eager")[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "big"])
def test_fused_by_inductor_every_method_of_a_subclass_counts(size: str, soon_full: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about the machine
        assert check(owns("Mean"), size, "inductor")[0] == []


class AbsMean(Mean):
    def update(self, state: State, *xs: Tensor) -> State:
        return super().update(state, *(x.abs() for x in xs))


@pytest.mark.parametrize("size", ["small", "big"])
def test_a_mean_of_magnitudes_is_none_of_numbers(size: str) -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(AbsMean(), layer)
    repeats = {"small": 1, "big": 3000}[size]
    for x in ([-0.5, 1.0, 0.1], [-0.2, 0.9, -0.8], [0.7, 0.3, -0.4], [0.6, -0.9, 0.2]):
        layer(torch.tensor(x).repeat(repeats))
    torch.testing.assert_close(monitor.peek(), torch.tensor(6.6 / 12, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_method_that_takes_several_is_called_for_what_waits() -> None:
    """It must find what one update after another finds, so only its calls tell."""
    seen: list[int] = []

    class Several(Mean):
        def update_all(self, state: State, xs: Tensor) -> State:
            seen.append(len(xs))
            return super().update_all(state, xs)

    layer = nn.Identity()
    monitor = ForwardMonitor(Several(), layer)
    for _ in range(4):
        layer(torch.ones(3))
    assert float(monitor.peek()) == 1
    assert sum(seen) == 3  # the first one does not wait


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["lift", "lift_masked", "update"])
def test_a_mask_given_with_an_observation_goes_through_the_methods_of_a_subclass(method: str, compiled: bool) -> None:
    torch._dynamo.reset()
    layer = nn.Tanh()
    own = Masked(overriding(Mean(), method))
    monitor = ForwardMonitor(own, layer, map_=lambda out, x: (out, x > 0))
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    xs = [torch.randn(4, 3) for _ in range(3)]
    for x in xs:
        run(x)
    expected = (torch.cat([x.tanh()[x > 0] for x in xs]).double() + 1).mean()
    torch.testing.assert_close(monitor.peek(), expected, rtol=1e-6, atol=0)
