"""Inside the user's torch.compile: one graph, no breaks, no recompiles, the numbers of eager mode, and no mark on the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Recorder,
    RecordingWarning,
)
from reducers import EMA, Collect, Count, Last, Max, Mean, Moments, Product, Quantile, Sum

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own, as it looks at any tensor


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler: None) -> None:
    torch.manual_seed(0)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (6, 4)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    convolutions = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)), (2, 3, 8, 8)


def transformer() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)


def everything(net: nn.Module) -> Recorder:
    statistics = Product(moments=Moments(), last=Last(), ema=EMA(alpha=0.3))
    return Recorder(
        out=ForwardMonitor(statistics),
        inp=ForwardInputMonitor(statistics),
        back=BackwardMonitor(statistics),
        into=BackwardInputMonitor(statistics),
        saliency=BackwardMonitor(Sum(), op_=lambda gradient, output: gradient * output),
    ).modules(net)


def train(call: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> None:
    for batch in batches:
        torch.autograd.backward(call(batch).square().sum())


def compiled_once() -> None:
    """One graph was made, whole, and never again."""
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]


def near(given: object, wanted: object) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
def test_forwards_and_gradients_are_one_graph_with_the_numbers_of_eager_mode(
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]],
) -> None:
    net, shape = make()
    recorder = everything(net)
    batches = [torch.randn(shape) for _ in range(5)]
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    train(compiled, batches)
    compiled_once()
    samples, results = list(recorder.samples.values()), recorder.compute()
    recorder.reset()
    train(net, batches)
    assert samples == list(recorder.samples.values())
    assert {count for count in samples if count} == {5}
    near(results, recorder.compute())


def test_a_hundred_steps_compile_nothing_anew() -> None:
    net, shape = mlp()
    recorder = everything(net)
    train(torch.compile(net, backend="aot_eager", fullgraph=True), (torch.randn(shape) for _ in range(100)))
    compiled_once()
    assert set(recorder.samples.values()) == {100, 0}  # nothing asks for the gradient of the batch itself
    assert [name for name, monitor in recorder.items() if not monitor.samples] == ["into", "into/0"]


@pytest.mark.slow
def test_fused_by_inductor_the_numbers_are_the_same() -> None:
    net, shape = cnn()
    recorder = Recorder(out=ForwardMonitor(Quantile()), back=BackwardMonitor(Moments())).modules(net, types=nn.Conv2d)
    batches = [torch.randn(shape) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, about the machine
        train(torch.compile(net, fullgraph=True), batches)
    compiled_once()
    results = recorder.compute()
    assert list(recorder.samples.values()) == [3] * 4
    recorder.reset()
    train(net, batches)
    near(results, recorder.compute())


def test_a_function_that_the_user_compiled_is_called_in_eager_nets_and_in_graphs() -> None:
    def logarithm(x: Tensor) -> Tensor:
        return (x.abs() + 1).log()

    compiled = torch.compile(logarithm, backend="aot_eager", dynamic=True)
    net, shape = mlp()
    functions = {
        "premap": ForwardMonitor(Moments().premap(compiled)),
        "op": ForwardMonitor(Moments(), op_=compiled),
        "plain": ForwardMonitor(Moments().premap(logarithm)),
    }
    for run in (net, torch.compile(net, backend="aot_eager")):
        recorder = Recorder(**functions).modules(net, leaves=True)
        with recorder:
            for rows in (4000, 4000, 5, 7):
                run(torch.randn(rows, *shape[1:]))
        assert set(recorder.samples.values()) == {4}
        for leaf in ("0", "1", "2"):
            near([recorder[f"{way}/{leaf}"].peek() for way in ("premap", "op")], [recorder[f"plain/{leaf}"].peek()] * 2)


def test_the_training_itself_is_the_same_to_the_bit() -> None:
    def trained(recorded: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net, shape = cnn()
        if recorded:
            Recorder(out=ForwardMonitor(Moments()), back=BackwardMonitor(Moments())).modules(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        compiled = torch.compile(net, backend="aot_eager")
        for _ in range(3):
            optimizer.zero_grad()
            train(compiled, [torch.randn(shape)])
            optimizer.step()
        return [*net.parameters(), *net.buffers()]

    for bare, watched in zip(trained(False), trained(True), strict=True):
        assert torch.equal(bare, watched)


def test_two_forwards_may_come_before_their_backwards() -> None:
    """Where the graph wrote a State in place, the second backward would find changed what the first one saved."""
    net, shape = mlp()
    monitor = BackwardMonitor(Collect(), net.get_submodule("0"))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    first, second = compiled(torch.randn(shape)), compiled(torch.randn(shape))
    monitor.clear()
    second.sum().backward()
    first.sum().backward()
    compiled_once()
    assert monitor.samples == 2


def test_another_shape_costs_one_graph_more() -> None:
    net, _ = mlp()
    recorder = Recorder(out=ForwardMonitor(Mean("b c -> c")), back=BackwardMonitor(Count())).modules(net)
    train(torch.compile(net, backend="aot_eager", fullgraph=True), [torch.randn(rows, 4) for rows in (6, 5, 3, 6, 7)])
    assert counters["stats"]["unique_graphs"] == 2
    assert set(recorder.samples.values()) == {5}
    assert recorder["back/1"].peek() == 27 * 5


def test_states_that_grow_and_statistics_with_an_order_are_as_in_eager_mode() -> None:
    layer = nn.Linear(2, 2)
    net = nn.Sequential(layer, nn.Tanh(), layer)  # called twice in each graph
    recorder = Recorder(all=ForwardMonitor(Collect()), last=ForwardMonitor(Last()), back=BackwardMonitor(Collect())).modules(net)
    batches = [torch.randn(3, 2) for _ in range(3)]
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    train(compiled, batches[:1])
    train(net, batches[1:2])
    train(compiled, batches[2:])
    compiled_once()
    results = recorder.compute()
    recorder.reset()
    train(net, batches)
    near(results, recorder.compute())


def test_every_counts_inside_a_graph() -> None:
    net, shape = mlp()
    recorder = Recorder(out=ForwardMonitor(Mean(), every=3), back=BackwardMonitor(Mean(), every=2)).modules(net, names="0")
    train(torch.compile(net, backend="aot_eager", fullgraph=True), (torch.randn(shape) for _ in range(7)))
    compiled_once()
    assert list(recorder.samples.values()) == [3, 4]
    assert recorder["out/0"].counts == {"calls": 7, "not due (every)": 4}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False))
        return out


def test_checkpointing_inside_a_graph_counts_nothing_twice() -> None:
    net = Checkpointed()
    recorder = Recorder(out=ForwardMonitor(Moments()), back=BackwardMonitor(Moments())).modules(net)
    batches = [torch.randn(5, 4) for _ in range(3)]
    train(torch.compile(net, backend="aot_eager", fullgraph=True), batches)
    compiled_once()
    assert set(recorder.samples.values()) == {3}
    results = recorder.compute()
    recorder.reset()
    train(net, batches)
    near(results, recorder.compute())


def test_transforms_inside_a_graph_are_left_out_and_not_broken() -> None:
    net = nn.Linear(3, 2)
    recorder = Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(net)
    x = torch.randn(4, 3)
    for function in (torch.vmap(net), torch.func.grad(lambda x: net(x).sum())):
        torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
    assert list(recorder.samples.values()) == [0, 0]


@pytest.mark.slow
def test_states_made_in_inference_mode_and_under_autocast_are_as_any() -> None:
    net, shape = mlp()
    recorder = Recorder(ForwardMonitor(Product(mean=Mean(), last=Last()))).modules(net)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(shape))
    assert not any(value.is_inference() for monitor in recorder.values() for value in monitor.state.values())
    net(torch.randn(shape))
    assert set(recorder.samples.values()) == {2}


def test_an_empty_batch_is_an_observation_of_nothing() -> None:
    monitor = ForwardMonitor(Mean(), layer := nn.ReLU())
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(0, 2))
    compiled(torch.ones(3, 2))
    assert (monitor.samples, monitor.peek()) == (2, 1)


def test_kept_axes_that_change_are_told_once_and_do_not_break_the_program() -> None:
    monitor = ForwardMonitor(Mean("b c -> c"), layer := nn.ReLU())
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 4))
    with pytest.warns(RecordingWarning, match=r"ForwardMonitor on ReLU: StateMismatchError.*keeps shape \(4,\)"):
        assert compiled(torch.ones(2, 5)).shape == (2, 5)
    assert monitor.samples == 1
    assert monitor.counts["errors"] == 1


def test_a_leaf_is_hooked_once_outside_of_the_graph() -> None:
    prompt, layer = nn.Parameter(torch.ones(1, 3)), nn.Linear(3, 3)
    monitor = BackwardInputMonitor(Count("b c ->"), layer)
    train(torch.compile(nn.Sequential(layer), backend="aot_eager"), [prompt] * 4)
    assert monitor.samples == 4
    assert len(prompt._backward_hooks or {}) == 1


def test_a_leaf_in_a_graph_that_must_be_one_is_left_out_and_breaks_nothing() -> None:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.prompt, x * self.prompt

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompted = Prompted()

        def forward(self, x: Tensor) -> Tensor:
            prompt, y = self.prompted(x)
            return prompt + y

    net = Net()
    monitor = BackwardMonitor(Count(), net.prompted)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with pytest.warns(RecordingWarning, match="without fullgraph=True"):
        train(compiled, [torch.ones(2, 3)] * 3)
    assert {path: int(count) for path, count in monitor.peek().items()} == {"1": 18}
    assert monitor.counts["errors"] == 3
    torch.testing.assert_close(net.prompted.prompt.grad, torch.full((2, 3), 24.0))


def test_the_output_of_another_graph_is_watched_inside_this_one() -> None:
    monitor = BackwardInputMonitor(Collect(), layer := nn.Linear(3, 2))
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager", fullgraph=True)
    prompt = torch.ones(2, 3, requires_grad=True)
    for _ in range(3):
        compiled(prompt * 1).sum().backward()
    assert monitor.samples == 3
    near(monitor.peek()[:2], layer.weight.detach().sum(0).expand(2, 3))


def test_nothing_is_recorded_after_the_hooks_are_off() -> None:
    net, shape = mlp()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(net) as recorder:
        train(compiled, [torch.randn(shape)])
    train(compiled, [torch.randn(shape)])
    assert set(recorder.samples.values()) == {1}


def test_what_is_pushed_inside_a_graph_is_recorded() -> None:
    loss = CallMonitor(Mean())

    def step(x: Tensor) -> Tensor:
        loss.push(x.sum())
        return x * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for value in (1.0, 4.0):
        compiled(torch.full((2,), value))
    compiled_once()
    assert (loss.samples, loss.peek()) == (2, 5)


def test_a_gradient_that_arrives_after_the_hooks_are_off_is_not_recorded() -> None:
    net, shape = mlp()
    recorder = Recorder(BackwardMonitor(Mean())).modules(net)
    out = torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(shape))
    recorder.deregister()
    out.sum().backward()
    assert set(recorder.samples.values()) == {0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_a_second_model_does_not_run_the_graph_of_the_first_one() -> None:
    first, second = Block(), Block()
    x = torch.randn(2, 3)
    torch.compile(first, backend="aot_eager")(x)
    recorder = Recorder(ForwardMonitor(Max())).modules(second, leaves=True)
    compiled = torch.compile(second, backend="aot_eager")
    compiled(x)
    assert recorder.samples["layer"] == 1


def test_hooks_put_on_after_the_graph_was_made_record_from_the_next_call_on() -> None:
    net = Block()
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(2, 3)
    compiled(x)
    recorder = Recorder(out=ForwardMonitor(Max()), back=BackwardMonitor(Max())).modules(net, leaves=True)
    compiled(x).sum().backward()
    assert list(recorder.samples.values()) == [1, 1]


def test_hooks_that_go_off_and_on_between_compiled_calls_record_again() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    recorder = Recorder(out=ForwardMonitor(Count()), grad=BackwardMonitor(Count())).children(net, types=nn.Linear)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")

    def run(calls: int, size: int = 4) -> None:
        for _ in range(calls):
            compiled(torch.randn(size, 3)).sum().backward()

    seen = []
    for _ in range(3):
        with recorder:
            run(2)
        seen.append(list(recorder.samples.values()))
        run(3)  # off
        run(2, size=7)  # off, and compiled anew for another shape
        net(torch.randn(4, 3)).sum().backward()  # off, and not compiled
        assert not any(monitor.registered for monitor in recorder.values())
        assert list(recorder.samples.values()) == seen[-1]
    assert seen == [[2] * 4, [4] * 4, [6] * 4]
    assert recorder["out/0"].peek() == 6 * 4 * 3
    other = nn.Linear(3, 3)
    recorder["out/0"].register(other)  # elsewhere: nothing of it is left in the first module
    other(torch.ones(1, 3))
    net(torch.ones(1, 3))
    run(2)  # its graphs still hold what was the monitor's
    assert recorder.samples["out/0"] == 7


class Meeting(nn.Module):
    """One module that hands on what it is given, three times: one tensor, one changed in place, an alias, the graph's input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.same = kind, nn.Linear(3, 3), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(x if self.kind == "given" else self.first(x))
        if self.kind == "changed in place":
            y.mul_(2)
        if self.kind == "alias":
            y = y.view_as(y)
        z = self.same(y)
        out: Tensor = (z * z).sum() + self.same(z).sum()
        return out


@pytest.mark.parametrize("kind", ["same", "changed in place", "alias", "given"])
@pytest.mark.parametrize("op_", [None, lambda gradient, seen: gradient * seen], ids=["bare", "op"])
def test_a_tensor_met_again_in_a_graph_is_recorded_as_often_as_in_eager_mode(kind: str, op_: Callable[..., Tensor] | None) -> None:
    net = Meeting(kind)
    recorder = Recorder(back=BackwardMonitor(Collect(), op_=op_), into=BackwardInputMonitor(Collect(), op_=op_))
    recorder.modules(net, names="same")
    batches = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]

    def run(call: Callable[[Tensor], Tensor]) -> tuple[list[int], object]:
        recorder.reset()
        for batch in batches:
            torch.autograd.backward(call(batch * 1))
        return list(recorder.samples.values()), recorder.compute()

    samples, results = run(torch.compile(net, backend="aot_eager", fullgraph=True))
    compiled_once()
    wanted, expected = run(net)
    assert samples == wanted == [3 if kind in ("same", "given") else 6] * 2
    near(results, expected)


class Box:
    """As a key-value cache, it is made in the forward and gets attributes there, one after the other."""

    def __init__(self) -> None:
        self.size = 0

    def put(self, x: Tensor) -> Tensor:
        self.kept, self.size = x, self.size + 1
        return self.kept * self.size


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        box = Box()
        return box.put(self.second(box.put(self.first(x))))


def test_objects_that_are_changed_between_modules_keep_their_graph_whole() -> None:
    net = Boxed()
    recorder = Recorder(
        out=ForwardMonitor(Moments()),
        back=BackwardMonitor(Moments()),
        op=BackwardMonitor(Moments(), op_=lambda gradient, output: gradient * output),
        filter=ForwardMonitor(Moments(), filter_=lambda output, inputs: bool(output.isfinite().all())),
    ).modules(net)
    batches = [torch.randn(2, 3) for _ in range(2)]
    with torch._dynamo.config.patch(wrap_top_frame=True):
        train(torch.compile(net, backend="aot_eager", fullgraph=True), batches)
    compiled_once()
    assert set(recorder.samples.values()) == {2}
    results = recorder.compute()
    recorder.reset()
    train(net, batches)
    near(results, recorder.compute())


class Asking(Mean):
    """A reducer that looks at numbers, as no graph can, and at each observation as a whole."""

    @property
    def divisible(self) -> bool:
        return False

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
        return super().lift(x if x.sum().item() > 0 else -x, axes)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_gradient_that_cannot_be_lifted_in_the_graph_is_recorded_when_it_runs(backend: str) -> None:
    net, shape = mlp()
    recorder = Recorder(asks=BackwardMonitor(Asking()), back=BackwardMonitor(Mean(), every=2)).modules(net, types=nn.Linear)
    batches = [torch.randn(shape) for _ in range(3)]
    train(torch.compile(net, backend=backend, fullgraph=True), batches)
    compiled_once()
    assert list(recorder.samples.values()) == [3, 3, 2, 2]
    results = recorder.compute()
    recorder.deregister()
    train(torch.compile(net, backend=backend, fullgraph=True), batches)
    assert list(recorder.samples.values()) == [3, 3, 2, 2]
    recorder.register()
    recorder.reset()
    train(net, batches)
    near(results, recorder.compute())


class Both(nn.Module):
    """Returns what it also makes something else of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        return hidden, hidden.square().sum()


class Regional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.both, self.head = nn.ModuleList([Block(), Block()]), Both(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        hidden, penalty = self.both(x)
        out: Tensor = self.head(hidden).square().sum() + penalty
        return out

    def compile_parts(self) -> None:
        for part in [*self.blocks, self.both]:
            part.compile(backend="aot_eager")


def test_layers_compiled_apart_are_recorded_and_the_report_tells_what_is_partial() -> None:
    statistics = Product(moments=Moments(), last=Last())
    net = Regional()
    kinds = {"out": ForwardMonitor(statistics), "back": BackwardMonitor(statistics), "into": BackwardInputMonitor(statistics)}
    recorder = Recorder(**kinds).modules(net, exclude=nn.ModuleList)
    batches = [torch.randn(2, 3) for _ in range(3)]
    train(net, batches)
    wanted = {name: monitor.snapshot() for name, monitor in recorder.items()}
    assert [row.name for row in recorder.report().rows if "a compiled graph returned it" in row.reason] == []
    recorder.reset()
    net.compile_parts()
    train(net, batches)
    partial = [row.name for row in recorder.report().rows if "a compiled graph returned it" in row.reason]
    assert partial == ["back/both", "into/head"]  # one tensor, that its graph squares
    for name, monitor in recorder.items():
        assert monitor.samples == wanted[name].samples
        if name not in partial:
            near(monitor.snapshot().leaves(), wanted[name].leaves())
    part = recorder["into/head"].peek()["last"]
    assert not torch.allclose(part, wanted["into/head"].peek()["last"])
    assert counters["stats"]["unique_graphs"] == 3  # one a part


def test_what_the_outermost_module_returns_is_recorded_or_told_by_the_report() -> None:
    net = Both()
    recorder = Recorder(BackwardMonitor(Last())).modules(net, depth=0)
    x = torch.randn(2, 3)

    def run(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        torch.autograd.backward(call(x)[1])

    run(torch.compile(net, backend="aot_eager"))
    row = recorder.report().rows[0]
    assert row.skipped == {"all uses are inside its compiled graph, its hook is not": 1}
    assert "torch._dynamo.config.wrap_top_frame = True" in row.reason
    torch._dynamo.reset()
    recorder.reset()
    with torch._dynamo.config.patch(wrap_top_frame=True):
        run(torch.compile(net, backend="aot_eager"))
    assert recorder[""].peek().keys() == {"0", "1"}
    near(recorder[""].peek()["0"], 2 * net.layer(x).detach())


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "layer by layer"])
def test_hooks_that_were_off_before_the_first_compiled_call_record_once_they_are_on(parts: bool) -> None:
    net = Regional()
    recorder = Recorder(out=ForwardMonitor(Max()), back=BackwardMonitor(Max())).modules(net, leaves=True)
    recorder.deregister()
    if parts:
        net.compile_parts()
    call = net if parts else torch.compile(net, backend="aot_eager")
    x = torch.randn(2, 3)
    call(x).backward()
    recorder.register()
    call(x).backward()
    assert not recorder.report().silent


class Breaks(nn.Module):
    """A net whose forward cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.norm(x)
        torch._dynamo.graph_break()
        found: Tensor = self.last(x)
        return found


def test_hooks_are_not_compiled_if_a_whole_step_is_and_its_forward_breaks() -> None:
    def graphs_and_recorder(recorded: bool) -> tuple[int, Recorder]:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        recorder = Recorder(
            out=ForwardMonitor(Moments()),
            inp=ForwardInputMonitor(Moments()),
            back=BackwardMonitor(Moments()),
            into=BackwardInputMonitor(Moments()),
            saliency=BackwardMonitor(Sum(), op_=torch.mul),
        ).modules(net := Breaks())
        if not recorded:
            recorder.deregister()

        @torch.compile(backend="eager")
        def step(x: Tensor) -> None:
            net(x).square().mean().backward()

        for rows in (4, 4, 5, 6):
            step(torch.randn(rows, 4, requires_grad=True))
        return counters["stats"]["unique_graphs"], recorder

    (without, _), (graphs, recorder) = graphs_and_recorder(False), graphs_and_recorder(True)
    assert graphs == without
    assert {row.samples for row in recorder.report().rows} == {4}
