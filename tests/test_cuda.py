"""What holds on a GPU: run with one, `pytest tests/test_cuda.py`. Without one the file is skipped.

RECORDERS_TEST_DEVICE=cpu runs on the CPU what needs no call of CUDA, to see that the tests themselves are sound.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from lives import Life, some
from on_device import adam, batches, everything, made, train
from paths import ROOT
from torch import Tensor, nn

if not torch.cuda.is_available() and os.environ.get("RECORDERS_TEST_DEVICE") != "cpu":
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.append(str(ROOT / "benchmarks"))
from gpu_kernels import REDUCERS
from gpu_timing import kernels_of, without_waits

from recorders import BackwardMonitor, ForwardMonitor, Recorder, RecordingWarning, load
from recorders._torch import CAPTURES_IN_GRAPHS
from recorders.ring.ring import Copies
from reducers import (
    Covariance,
    Digest,
    Fingerprints,
    Histogram,
    Mean,
    Norm,
    PerObservation,
    Product,
    Reducer,
    Sketch,
    Statistic,
    Summary,
    TensorPart,
    WeightedMean,
    WeightedMoments,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products of matrices are not deterministic on a GPU

KIND = os.environ.get("RECORDERS_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.cuda
on_gpu = pytest.mark.skipif(KIND != "cuda", reason="calls CUDA itself")
SWEPT = [case for case in CASES if isinstance(case.reducer, Statistic) and case.reducer.columns]
BIG = 1 << 20
SUMMARY = "count,mean,m2,min,max,zeros,nan,inf"
WHOLE: dict[str, Reducer] = {
    "Summary": Summary(),
    "Norm": Norm(),
    "Histogram": Histogram(bins=100, low=-50.0, high=50.0),
}


@pytest.fixture
def device() -> torch.device:
    return torch.device(KIND)


@pytest.fixture
def never_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Makes a block in which it raises if the host waits for the device."""
    return without_waits if KIND == "cuda" else nullcontext


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def observations(case: Case, dtype: torch.dtype, kind: str, rows: int = 3000) -> list[Tensor]:
    """Three observations on the CPU: of several tiles, with numbers far from zero, or with some that are not finite."""
    generator = torch.Generator().manual_seed(len(kind))
    found = []
    for size in (rows, rows, rows) if case.same_shape else (rows, rows // 3, 1):
        shape = (size, *case.trailing)
        if not dtype.is_floating_point:
            found.append(torch.randint(0, 6, shape, generator=generator).to(dtype))
            continue
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind == "far from zero":
            x += 1e4
        if kind == "not finite":
            flat = x.view(-1)
            flat[::7], flat[3::11], flat[5::13], flat[::5] = torch.nan, torch.inf, -torch.inf, 0
        found.append(x.to(dtype))
    return found


def there(xs: list[Tensor], device: torch.device) -> list[Tensor]:
    return [x.to(device) for x in xs]


def back(result: Any) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in laws.flat(result).items()}


@pytest.mark.parametrize("kind", ["plain", "far from zero", "not finite"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_the_cpu(case: Case, kind: str, device: torch.device) -> None:
    dtype = case.dtypes[0]
    xs = observations(case, dtype, kind)
    state = laws.run(case.reducer, there(xs, device))
    assert {value.device.type for value in state.values()} <= {KIND}
    laws.close(back(case.reducer.compute(state)), back(case.reducer.compute(laws.run(case.reducer, xs))), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("case", SWEPT, ids=str)
def test_every_dtype_gives_what_it_gives_on_the_cpu(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in case.dtypes:
        pytest.skip("the reducer does not take this dtype")
    xs = observations(case, dtype, "plain")
    state = laws.run(case.reducer, there(xs, device))
    laws.close(back(case.reducer.compute(state)), back(case.reducer.compute(laws.run(case.reducer, xs))), rtol=1e-6, atol=1e-6)
    again = laws.run(case.reducer, there(xs, device))
    laws.same_bits(state, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", ["plain", "not finite"])
@pytest.mark.parametrize(("axis", "at"), [(0, 7), (1, 8), (1, 33), (2, 192), (2, 333)])
def test_parts_join_to_what_the_whole_gives_on_the_cpu(
    axis: int, at: int, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    shape = (16, 96, 768)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(axis)).abs()
    if kind == "not finite":
        x.view(-1)[::1001], x.view(-1)[5::1003] = torch.nan, -torch.inf
    x = x.nan_to_num(0, 0, 0).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    parts = [
        (TensorPart(shape, tuple(start * (one == axis) for one in range(3))), x.narrow(axis, start, size).to(device))
        for start, size in ((0, at), (at, shape[axis] - at))
    ]
    digest, sketch = Digest(), Sketch()
    one, other = (digest.of_part(part).update({}, piece) for part, piece in parts)
    laws.same_bits(back(digest.join_parts(one, other)), back(digest.update({}, x)))
    one, other = (sketch.of_part(part).update({}, piece) for part, piece in parts)
    laws.close(back(sketch.merge(one, other)), back(sketch.update({}, x)), rtol=1e-12, atol=1e-9)


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": lambda weights: weights,
    "tokens": lambda weights: weights[..., :1],
    "tokens, far apart": lambda weights: weights.view(16, -1, 16)[:, :256, :1],
    "samples": lambda weights: weights[:, :1, :1],
    "features": lambda weights: weights[:1, :1],
    "turned": lambda weights: weights.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize(
    ("pattern", "dtype"), [("... ->", torch.float32), ("... d -> d", torch.bfloat16), ("b t d -> b t", torch.float32)], ids=str
)
@pytest.mark.parametrize("how", WEIGHTS)
def test_weights_of_any_layout_give_what_they_give_on_the_cpu(
    how: str, pattern: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Of full tiles and of others, with all finite, and with some that are not."""
    for features in (96, 75):
        generator = torch.Generator().manual_seed(features)
        x, drawn = (
            (torch.randn(16, 256, features, generator=generator) + 100).to(dtype),
            torch.rand(16, 256, features, generator=generator),
        )
        weights = torch.where(drawn < 0.2, 0, drawn).to(dtype)
        holes = x.clone()
        holes.view(-1)[::1001] = torch.nan
        for observed in (x, holes):
            given = [WEIGHTS[how](one).expand(x.shape) for one in (weights.to(device), weights)]
            for reducer in (WeightedMean(pattern), WeightedMoments(pattern)):
                found = reducer.compute(reducer.update({}, observed.to(device), given[0]))
                laws.close(back(found), back(reducer.compute(reducer.update({}, observed, given[1]))), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "reducer", [Digest(), PerObservation(Digest()), Fingerprints(), PerObservation(Norm()), Summary("b c -> c")], ids=str
)
def test_what_waits_on_a_device_has_the_results_of_the_cpu(reducer: Reducer, device: torch.device) -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(reducer, layer, on_error="raise")
    xs = [torch.randn(rows, 1001, generator=torch.Generator().manual_seed(rows)) for rows in (7, 64, 300) for _ in range(35)]
    xs[3][0, :5], xs[50][1, 7] = torch.nan, torch.inf
    for number, x in enumerate(xs):
        layer(x.to(device))
        if number % 40 == 9:
            monitor.peek()
    found, wanted = (back(reducer.compute(state)) for state in (monitor.state, laws.run(reducer, xs)))
    digests = [name for name, value in wanted.items() if value.dtype is torch.int64]
    laws.same_bits({name: found[name] for name in digests}, {name: wanted[name] for name in digests})
    laws.close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_update_makes_the_host_wait(
    case: Case, device: torch.device, never_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    x = observations(case, case.dtypes[0], "not finite")[0].to(device)
    state = case.reducer.update(case.reducer.update({}, x), x)  # compiles, and makes what the reducer keeps of its constants
    with never_waiting():
        new = case.reducer.update(state, x)
    assert state.keys() <= new.keys() or case.grows


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_recorded_training_has_the_bits_of_the_bare_one(device: torch.device, autocast: bool, deterministic: None) -> None:
    bare, net = made(device), made(device)
    wanted = train(bare, adam(bare), batches(device), autocast=autocast)
    optimizer = adam(net)
    recorder = everything(net, optimizer)
    losses = train(net, optimizer, batches(device), autocast=autocast)
    assert [torch.equal(a, b) for a, b in zip(losses, wanted, strict=True)] == [True] * 4
    assert [name for name, value in net.state_dict().items() if not torch.equal(value, bare.state_dict()[name])] == []
    assert {row.name for row in recorder.report().silent} <= {"into/conv"}  # nothing else recorded nothing
    assert set(recorder.samples.values()) == {4}


def test_no_step_of_a_recorded_training_makes_the_host_wait(
    device: torch.device, never_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    net, xs = made(device), batches(device, 8)
    optimizer = adam(net)
    recorder = everything(net, optimizer)
    train(net, optimizer, xs[:4])
    recorder.compute()
    with never_waiting():
        train(net, optimizer, xs[4:])
    assert set(recorder.samples.values()) == {8}


@on_gpu
@pytest.mark.parametrize("case", SWEPT, ids=str)
def test_a_cuda_graph_holds_an_update(case: Case) -> None:
    first, x, other = (observations(case, case.dtypes[0], kind)[0].cuda() for kind in ("plain", "far from zero", "not finite"))
    state = case.reducer.update({}, first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.reducer.update(state, x)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = case.reducer.update(state, x)
    for seen in (x.clone(), other):
        x.copy_(seen)
        graph.replay()
        laws.same_bits(held, case.reducer.update(state, seen))


@on_gpu
@pytest.mark.parametrize("size", [64, BIG])
def test_eager_hooks_leave_out_what_a_cuda_graph_captures(size: int) -> None:
    layer, x = nn.ReLU(), torch.randn(size, device="cuda")
    recorder = Recorder(ForwardMonitor(Summary())).modules(layer)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = layer(x).double().mean()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    x.fill_(7)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(recorder[0].peek()["mean"], wanted, rtol=1e-6, atol=0)
    (row,) = recorder.report().rows
    assert (row.samples, row.calls, dict(row.skipped)) == (1, 2, {"in a CUDA graph that was captured": 1})
    assert "reduce-overhead" in row.reason


@on_gpu
@pytest.mark.parametrize("size", [64, BIG])
def test_what_is_called_on_a_stream_is_reduced_on_it(size: int) -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Summary())).modules(layer)
    right = torch.randn(size, device="cuda")
    layer(right)  # compiles
    recorder.reset()
    x, side = torch.full((size,), torch.nan, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: who reads before, reads NaN
        x.copy_(right)
        layer(x)
        states = recorder[0].states
    torch.cuda.current_stream().wait_stream(side)
    laws.close(Summary().compute(states[""]), Summary().compute(Summary().update({}, right)), rtol=1e-12)


@pytest.mark.skipif(KIND != "cuda" or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_net_over_several_devices_is_recorded_on_each() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    layers = [nn.Linear(64, 64).to(device) for device in devices]
    recorder = Recorder(ForwardMonitor(Summary("b c -> c"))).modules(nn.ModuleList(layers), types=nn.Linear)
    for layer, device in zip(layers, devices, strict=True):  # cuda:0 is the current device all the time
        x = torch.randn(4096, 64, device=device)
        y = layer(x).detach()
        monitor = next(iter(recorder.find(layer).values()))
        assert {value.device for value in monitor.state.values()} == {device}
        laws.close(back(monitor.peek()), back(Summary("b c -> c").compute(Summary("b c -> c").update({}, y.cpu()))), rtol=1e-6)


def test_memory_that_runs_out_loses_one_observation_and_nothing_else(device: torch.device) -> None:
    calls = []

    def huge(x: Tensor) -> tuple[Tensor]:
        calls.append(x)
        return (torch.empty(1 << 50, dtype=torch.uint8, device=x.device) if len(calls) == 2 else x,)

    bare, net = made(device), made(device)
    wanted = train(bare, adam(bare), batches(device))
    recorder = Recorder(out=ForwardMonitor(Mean(), map_=huge), features=ForwardMonitor(Norm())).modules(net, names="down")
    with pytest.warns(RecordingWarning, match="down"):
        losses = train(net, adam(net), batches(device))
    torch.testing.assert_close(losses, wanted)
    assert [recorder["out/down"].samples, recorder["features/down"].samples] == [3, 4]
    expected = laws.run(Mean(), [calls[0].detach(), calls[2].detach(), calls[3].detach()])
    laws.close(recorder["out/down"].peek(), Mean().compute(expected), rtol=1e-6)


def test_a_state_that_does_not_fit_into_memory_leaves_the_training_as_it_is(device: torch.device) -> None:
    layer = nn.Identity()
    recorder = Recorder(big=ForwardMonitor(Covariance()), mean=ForwardMonitor(Mean())).modules(layer)
    x = torch.ones(2, BIG, device=device, requires_grad=True)  # 8 TB of covariances
    with pytest.warns(RecordingWarning, match="big"):
        layer(x).sum().backward()
        recorder.compute()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    assert recorder["mean"].peek().item() == 1.0


@on_gpu
@pytest.mark.parametrize("pattern", ["... ->", "b d -> d", "b d -> b"])
@pytest.mark.parametrize("name", REDUCERS)
def test_a_recorded_call_launches_two_kernels(name: str, pattern: str) -> None:
    layer, x = nn.Identity(), torch.randn(4096, 768, device="cuda")
    recorder = Recorder(ForwardMonitor(REDUCERS[name](pattern))).modules(layer)

    def several() -> None:
        for _ in range(100):
            layer(x)
        assert recorder[0].states

    several()
    try:
        names = kernels_of(several)
    except RuntimeError as problem:
        pytest.skip(f"needs a GPU whose kernels can be counted: {problem}")
    assert 100 <= len(names) <= 2.2 * 100, sorted(set(names))


def test_what_is_saved_from_a_gpu_loads_and_goes_on_there(device: torch.device, tmp_path: Path, deterministic: None) -> None:
    xs = batches(device, 4)
    net, other = made(device), made(device)
    optimizer, another = adam(net), adam(other)
    whole = everything(net, optimizer)
    train(net, optimizer, xs[:2])
    whole.save(tmp_path / "half")
    halves = load(tmp_path / "half")
    laws.same_bits(back(halves.compute()), back(whole.compute()))
    assert {value.device.type for value in laws.flat(halves.compute()).values()} == {"cpu"}

    resumed = everything(other, another).resume(tmp_path / "half")
    other.load_state_dict(net.state_dict())
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, xs[2:])
    train(other, another, xs[2:])
    laws.same_bits(resumed.compute(), whole.compute())
    assert {value.device.type for value in laws.flat(resumed.compute()).values()} == {KIND}
    assert set(resumed.samples.values()) == {4}


@pytest.mark.parametrize("seed", some(30, 200))
def test_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other one most observations wait as partial results."""
    if seed % 2:
        monkeypatch.setattr(Copies, "largest", 8)
    Life(seed, device=KIND, most=(100, 3000)[seed % 3 == 0], accuracy=1e-6).live()


@on_gpu
@pytest.mark.parametrize("columns", [SUMMARY, "count,mean,m2,m3,m4", "count,nonfinite,squares", "count,nonfinite,min,max"])
def test_a_replayed_graph_adds_to_accumulators(columns: str) -> None:
    """What compiled graphs launch for a monitor, captured and replayed."""
    from reducers.kernels.triton.accumulate import accumulate, new_accumulators, new_handle, point, statistics
    from reducers.kernels.triton.sweep import swept

    names = {name: name for name in columns.split(",")}
    xs = [torch.randn(5000, 96, device="cuda") + number for number in range(4)]
    x = xs[0].clone()
    (handle, missed), words = new_handle(x.device), new_accumulators(x, (0,), columns)
    point(handle, 3, words)
    accumulate(x, (0,), columns, 0.5, handle, 3)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate(x, (0,), columns, 0.5, handle, 3)
    for other in xs[1:]:
        x.copy_(other)
        graph.replay()
    handle[:1].fill_(0)  # off: nothing is added
    graph.replay()
    state: dict[str, Tensor] | None = None
    for seen in xs:
        state = swept(seen, (0,), names, 0.5, state)
    assert state is not None
    assert (int(words[0]), int(missed)) == (4, 0)
    # Another kernel joins them, whose multiplications and additions the compiler may contract in another way.
    laws.close(back(statistics(words, names, [96], x.dtype)), back(state), rtol=1e-14)


@on_gpu
@pytest.mark.parametrize("name", WHOLE)
def test_no_element_of_a_tensor_beyond_32_bits_is_left_out(name: str) -> None:
    """2**32 and some numbers, each part unlike the others; beside PyTorch's float64, piece by piece."""
    number = (1 << 32) + 3 * 4096 + 5
    if torch.cuda.mem_get_info()[0] < 6 * number:
        pytest.skip("needs 26 GB of memory on the device")
    x = torch.empty(number, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for index, piece in enumerate(x.split(1 << 28)):
        piece.normal_(index % 7, 1 + index, generator=generator)
    reducer = WHOLE[name]
    found = back(reducer.compute(reducer.update({}, x)))
    total, squares, low, high = 0.0, 0.0, math.inf, -math.inf
    for piece in x.split(1 << 27):
        wide = piece.double()
        total, squares = total + wide.sum().item(), squares + wide.square().sum().item()
        low, high = min(low, wide.min().item()), max(high, wide.max().item())
    mean = total / number
    wanted = {
        "/mean": mean,
        "/var": squares / number - mean**2,
        "/min": low,
        "/max": high,
        "": math.sqrt(squares),
    }
    for key in wanted.keys() & found.keys():
        assert found[key].item() == pytest.approx(wanted[key], rel=1e-6), key
    for counts in found.keys() & {"/counts"}:
        assert int(found[counts].sum() + found["/under"] + found["/over"]) == number


@pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="needs torch 2.13, in whose graphs monitors record")
def test_with_reduce_overhead_the_numbers_are_those_of_eager_mode(device: torch.device, fresh_compiler: None) -> None:
    reducer = Product(summary=Summary(), mean=Mean("b ... c -> c"))

    def recorded(net: nn.Module) -> Recorder:
        return Recorder(out=ForwardMonitor(reducer), back=BackwardMonitor(reducer)).modules(net, leaves=True)

    bare, plain, net = made(device), made(device), made(device)
    eager, inside = recorded(plain), recorded(net)
    call = torch.compile(net, mode="reduce-overhead", fullgraph=True)

    def marked(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        y: Tensor = call(x)
        return y

    def descent(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=1e-2)  # AdamW would make steps of the rounding of gradients that are 0

    train(plain, descent(plain), batches(device, 6))
    wanted = train(bare, descent(bare), batches(device, 6))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")  # of the compiler, about the machine
        losses = train(net, descent(net), batches(device, 6), marked)
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)
    assert set(inside.samples.values()) == {6}
    laws.close(back(inside.compute()), back(eager.compute()), rtol=1e-3, atol=1e-4)
