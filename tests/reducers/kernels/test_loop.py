"""The loop in C++ against float64: columns, layouts and dtypes, around the borders of its parts; and what it leaves to others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from looped import looped
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Extremes, Max, Mean, Min, Moments, Norm, Reducer, Sparsity, Sum, Summary
from reducers.kernels import dispatch
from reducers.kernels.cpp import library, sweeping
from reducers.kernels.cpp.task import task_of

pytestmark = pytest.mark.skipif(not library.in_order(), reason="no C++ compiler")

FAMILIES = [
    ("count", "mean", "m2", "min", "max", "zeros", "nan", "inf"),
    ("count", "mean", "m2"),
    ("count", "mean", "m2", "m3"),
    ("count", "mean", "m2", "m3", "m4"),
    ("m4", "min", "zeros"),
    ("count", "sum"),
    ("exact",),
    ("count", "squares"),
    ("count", "magnitudes"),
    ("count", "active"),
    ("min", "max"),
    ("count", "peak"),
    ("count",),
]
LAYOUTS: dict[str, tuple[Callable[[], Tensor], tuple[int, ...]]] = {
    "everything": (lambda: torch.randn(9, 31, 37), (0, 1, 2)),
    "a run longer than many parts": (lambda: torch.randn(70_001), (0,)),
    "last axis kept": (lambda: torch.randn(7, 51, 83), (0, 1)),
    "more columns than a part has": (lambda: torch.randn(19, 4_099), (0,)),
    "many rows of few columns": (lambda: torch.randn(9_000, 9), (0,)),
    "channels kept": (lambda: torch.randn(5, 6, 17, 19), (0, 2, 3)),
    "channels last": (lambda: torch.randn(5, 16, 9, 11).contiguous(memory_format=torch.channels_last), (0, 2, 3)),
    "first and last kept": (lambda: torch.randn(3, 70, 2, 21), (1, 2)),
    "rows kept": (lambda: torch.randn(300, 65), (1,)),
    "rows with gaps": (lambda: torch.randn(40, 130)[:, 3:-4], (0, 1)),
    "transposed": (lambda: torch.randn(80, 33).t(), (0,)),
    "one position": (lambda: torch.randn(1, 77), (0, 1)),
    "all kept but an axis of one": (lambda: torch.randn(1, 77), (0,)),
    "more axes than two": (lambda: torch.randn(2, 3, 4, 5, 6, 9)[:, :, ::2], (0, 2, 4)),
}
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "mean 1e4": lambda x: x + 1e4,
    "zeros": lambda x: torch.where(x > 0.5, x, torch.zeros_like(x)),
    "not finite": lambda x: torch.where(x > 1.2, torch.nan, torch.where(x < -1.5, -torch.inf, x)),
    "nothing finite": lambda x: torch.where(x > 0, torch.nan, torch.inf),
    "begins with NaN": lambda x: torch.where(torch.arange(x.numel()).view(x.shape) < x.numel() // 2, torch.nan, x),
    "equal": lambda x: torch.full_like(x, 0.1),
    "huge": lambda x: x.sign() * 3e38,
    "tiny": lambda x: x * 1e-40,
}


def reference(x: Tensor, axes: tuple[int, ...], mask: Tensor | None, threshold: float) -> dict[str, Tensor]:
    wide = x.double()
    there = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    good = there & wide.isfinite()
    count = good.sum(axes)
    filled = torch.where(good, wide, 0.0)
    mean = filled.sum(axes, keepdim=True) / good.sum(axes, keepdim=True).clamp(min=1)
    low, high = torch.where(good, wide, torch.inf).amin(axes), torch.where(good, wide, -torch.inf).amax(axes)
    return {
        "count": count,
        "mean": mean.squeeze(axes),
        "m2": torch.where(good, (wide - mean).square(), 0.0).sum(axes),
        "m3": torch.where(good, (wide - mean).pow(3), 0.0).sum(axes),
        "m4": torch.where(good, (wide - mean).pow(4), 0.0).sum(axes),
        "min": low.to(x.dtype),
        "max": high.to(x.dtype),
        "zeros": (good & (wide == 0)).sum(axes),
        "nan": (there & wide.isnan()).sum(axes),
        "inf": (there & wide.isinf()).sum(axes),
        "sum": filled.sum(axes),
        "exact": filled.sum(axes),
        "squares": filled.square().sum(axes),
        "magnitudes": filled.abs().sum(axes),
        "active": (filled.abs() > threshold).sum(axes),
        "peak": filled.abs().amax(axes),
    }


def check(x: Tensor, axes: tuple[int, ...], mask: Tensor | None = None, threshold: float = 0.5) -> None:
    wanted = reference(x, axes, mask, threshold)
    scale = (wanted["squares"] / wanted["count"].clamp(min=1)).sqrt()
    for family in FAMILIES:
        found = looped(x, axes, {name: name for name in family}, threshold, mask)
        assert found is not None
        for name, value in found.items():
            assert value.dtype == wanted[name].dtype
            assert value.shape == wanted[name].shape
            assert value.is_contiguous()
            assert value.untyped_storage().nbytes() == value.nbytes
            if name in ("mean", "sum", "exact"):
                size = scale * (wanted["count"] if name != "mean" else 1)
                assert ((value - wanted[name]).abs() <= 1e-12 * size).all(), (family, name)
            elif name == "m2":
                floor = 1e-22 * wanted["count"] * scale.square()  # rounding of the reference, if the mean is far from 0
                assert ((value - wanted[name]).abs() <= 1e-9 * wanted[name] + floor).all(), (family, name)
            elif name in ("m3", "m4"):
                power = int(name[1])
                spread = wanted["m2"] * (wanted["m2"] / wanted["count"].clamp(min=1)) ** (power / 2 - 1)
                floor = 1e-15**power * wanted["count"] * scale**power  # as above
                bound = 1e-9 * (wanted["m4"] if power == 4 else spread.maximum(wanted["m3"].abs())) + floor
                assert ((value - wanted[name]).abs() <= bound).all(), (family, name)
            elif value.dtype is torch.float64 and name != "peak":
                torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=0)
            else:
                assert torch.equal(value, wanted[name]), (family, name)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_column(layout: str, data: str) -> None:
    make, axes = LAYOUTS[layout]
    x = make()
    check(x.copy_(DATA[data](x)), axes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("data", ["normal", "not finite", "tiny"])
@pytest.mark.parametrize("layout", ["everything", "last axis kept", "channels kept"])
def test_narrow_floats(layout: str, data: str, dtype: torch.dtype) -> None:
    make, axes = LAYOUTS[layout]
    check(DATA[data](make() * (1e33 if data == "tiny" and dtype is torch.float16 else 1)).to(dtype), axes)


def test_every_float16() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    check(x, (0,))
    check(x.view(-1, 1)[:, :].expand(-1, 1).reshape(2**13, 8), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("data", ["normal", "zeros", "not finite", "nothing finite", "begins with NaN", "mean 1e4"])
@pytest.mark.parametrize("share", [0.7, 0.01, 0.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks(layout: str, share: float, data: str) -> None:
    make, axes = LAYOUTS[layout]
    x = make()
    x.copy_(DATA[data](x))
    mask = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool).copy_(torch.rand(x.shape) < share)
    check(x, axes, mask)


def test_masks_of_other_strides() -> None:
    x = torch.randn(6, 50, 40)
    tokens = (torch.rand(6, 50, 1) < 0.5).expand_as(x)
    features = (torch.rand(40) < 0.5).expand_as(x)
    for mask in (tokens, features):
        for axes in ((0, 1, 2), (0, 1), (2,), (0,)):
            check(x, axes, mask)


@pytest.mark.parametrize("size", [1, 2, 8, 15, 16, 17, 4095, 4096, 4097, 32_767, 32_768, 32_769, 65_537])
def test_sizes_around_blocks_and_parts(size: int) -> None:
    for x, axes in ((torch.randn(size), (0,)), (torch.randn(size, 17), (0,)), (torch.randn(3, size), (1,))):
        if task_of(tuple(x.shape), x.stride(), axes, None) is not None:
            check(x, axes)


def test_threads_do_not_change_a_bit(at_several_threads: Callable[[Callable[[], Any]], list[Any]]) -> None:
    x, columns = torch.randn(40, 50, 96) * 100, {name: name for name in FAMILIES[0]}
    found = at_several_threads(lambda: [looped(x, axes, columns) for axes in ((0, 1, 2), (0, 1), (2,))])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert all(torch.equal(one[key], two[key]) for key in columns)


def test_the_order_of_a_big_outlier_does_not_matter() -> None:
    """The centre is an element, so it is at most sqrt(count) standard deviations from the mean."""
    x = torch.randn(100_000)
    for place in (0, 50_000):
        x[place] = 1e8
        check(x, (0,))
        x[place] = 0


REDUCERS = [Mean(), Sum(), Min(), Max(), Extremes(), Norm(), Norm(p=1), Norm(p=float("inf")), Moments(), Summary(), Sparsity()]


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_reducers_without_a_compiler_give_the_same(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [torch.randn(20, 30, 40), torch.randn(50, 600), torch.randn(40, 500).bfloat16()]
    mask = torch.rand(20, 30, 40) < 0.5

    def states() -> list[Any]:
        masked = reducer.update_masked({}, xs[0], mask)
        return [*(reducer.update({}, x) for x in xs), reducer.update(reducer.update({}, xs[0]), xs[1]), masked]

    found = states()
    monkeypatch.setattr(dispatch, "loop_plan", lambda *_: None)
    for one, other in zip(found, states(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            torch.testing.assert_close(value, other[key], rtol=1e-6, atol=1e-6 * 20_000 if key == "sum" else 1e-6)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the loop."""
    made: list[Any] = []
    run = sweeping.LoopPlan.run
    monkeypatch.setattr(sweeping.LoopPlan, "run", lambda plan, x, *rest: made.append(x.shape) or run(plan, x, *rest))
    return made


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_an_update_is_one_call(reducer: Reducer, calls: list[Any]) -> None:
    reducer.update({}, torch.randn(100, 100))
    reducer.update({}, torch.randn(4, 8))
    reducer.update({}, torch.randn(2, 3))  # the neighbours are too few
    assert calls == [(100, 100), (4, 8)]


def test_what_has_no_memory_of_its_own_is_left_to_others() -> None:
    x, columns = torch.randn(100, 100), {"count": "count", "sum": "sum"}
    with FakeTensorMode() as mode:
        assert looped(mode.from_tensor(x), (0, 1), columns) is None
        assert looped(torch.empty(100, 100), (0, 1), columns) is None
    assert looped(torch.empty(100, 100, device="meta"), (0, 1), columns) is None
    assert looped(x.to_sparse(), (0, 1), columns) is None
    assert looped(x.double(), (0, 1), columns) is None
    assert looped(x, (0, 1), {"m5": "m5"}) is None
    assert looped(x, (0, 1), {"sum": "sum", "magnitudes": "magnitudes"}) is None
    parameter = looped(nn.Parameter(x), (0, 1), columns)
    assert parameter is not None
    assert not parameter["sum"].requires_grad


def test_negated_views() -> None:
    """PyTorch negates the elements of an imaginary part when they are read, into memory of other strides."""
    for x, axes in ((torch.randn(40, 130)[:, 3:-4], (0, 1)), (torch.randn(300, 65).T, (1,)), (torch.randn(9, 31, 37), (0, 2))):
        negative = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert negative.is_neg()
        for view in (negative, torch._neg_view(-x)):
            check(view, axes)
            check(view, axes, torch.rand_like(view.resolve_neg()) < 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [0.1, 0.5, 0.5 - 1e-12, 1e-8, 1e-50, 1e300, float("inf")])
def test_a_threshold_is_compared_as_in_plain_calls(eps: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = torch.arange(10_000, dtype=torch.int32) - 5_000
    near = torch.tensor(min(eps, 3e4), dtype=dtype).view(torch.int32 if dtype is torch.float32 else torch.int16)
    x = (near + steps).to(near.dtype).view(dtype)
    counts = [Sparsity(eps=eps).update({}, x)]
    monkeypatch.setattr(dispatch, "loop_plan", lambda *_: None)
    counts += [Sparsity(eps=eps).update({}, x), Sparsity(eps=eps).lift(x, (0,))]
    for other in counts[1:]:
        assert torch.equal(counts[0]["active"], other["active"])


def test_a_monitor_in_a_graph_reads_big_tensors_by_the_loop() -> None:
    """No code for them in the graph, the numbers of eager mode, and not one bit of the training differs."""

    def trained(record: bool, run: bool) -> tuple[list[Tensor], Recorder | None, list[str]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))
        monitors = {"out": ForwardMonitor(Summary()), "grad": BackwardMonitor(Moments("b c -> c"))}
        recorder = Recorder(**monitors).modules(net, leaves=True) if record else None
        nodes: list[str] = []

        def keep(graph: Any, inputs: Any) -> Any:
            nodes.extend(str(node.target) for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        forward: Any = torch.compile(net, backend=backend, fullgraph=True) if run else net
        for _ in range(2):
            forward(torch.randn(700, 32)).square().mean().backward()
        return [parameter.grad for parameter in net.parameters() if parameter.grad is not None], recorder, nodes

    plain, _, _ = trained(record=False, run=True)
    eager, wanted, _ = trained(record=True, run=False)
    compiled, recorder, nodes = trained(record=True, run=True)
    assert all(map(torch.equal, plain, compiled))
    assert len(eager) == len(compiled)
    assert not {"reducers.loop.default", "aten.amin.default", "aten.where.self"}.intersection(nodes)
    assert recorder is not None
    assert wanted is not None
    for name, monitor in recorder.items():
        assert monitor.samples == wanted[name].samples > 0
        for key, value in monitor.compute().items():
            torch.testing.assert_close(value, wanted[name].compute()[key], rtol=1e-5, atol=1e-6)


HELD = """
import torch
from reducers import Mean
torch.set_num_threads(2)

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

for shape, pattern in (((16, 1 << 20), "b c -> c"), ((1 << 20, 16), "b c -> b"), ((4096, 4096), "b c -> c")):
    x, mean = torch.ones(shape), Mean(pattern)
    mean.update({}, x[: 1 << 12, : 1 << 12])
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is now what is held
    before = peak()
    state = mean.update({}, x)
    print(round(peak() - before - sum(value.nbytes for value in state.values()) / 2**20))
"""


@pytest.mark.slow
def test_no_table_is_as_big_as_the_observation() -> None:
    """Of 64 MB: positions that one part has are written at once, and a table of parts has 8 MB at most."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs to reset the peak of memory")
    command = [sys.executable, "-c", HELD]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert all(int(megabytes) <= 12 for megabytes in found), found


FORKED = """
import os, torch
from reducers import Summary
torch.set_num_threads(2)
x = torch.randn(1 << 20)
whole = Summary().update({}, x)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as a worker of a data loader does
    again = Summary().update({}, x)
    os._exit(0 if all(torch.equal(again[key], whole[key]) for key in whole) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
def test_a_forked_process_of_one_thread_reads_by_the_loop() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.split() == ["0"]
