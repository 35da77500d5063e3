"""What fired and what did not, and what will be recorded."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    SelectionError,
    findings,
)
from reducers import Collect, Count, History, Last, Mean, Product, State, Summary, Whole


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.direct = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(*[self.direct.forward(self.used(x))] * 3)[0]


def test_report_counts_calls_samples_and_what_was_left_out() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder = Recorder(ForwardMonitor(Count(), eval_update=False, every=2)).modules(net, leaves=True)
    for _ in range(4):
        net(torch.ones(1, 2))
    net.eval()(torch.ones(1, 2))
    row = recorder.report().rows[0]
    assert (row.name, row.monitor, row.module, row.calls, row.samples) == ("0", "ForwardMonitor", "Linear", 5, 2)
    assert row.skipped == {"not due (every)": 2, "not recorded in eval mode": 1}
    assert recorder.report().silent == ()
    assert "2 recorded of 5 calls" in str(recorder.report())


def test_report_tells_of_leaves_that_only_some_calls_have() -> None:
    class Varied(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return {"logits": x} if self.calls % 4 else {"logits": x, "loss": x} if self.calls == 4 else (x,)

    with Recorder(ForwardMonitor(Count())).modules(net := Varied()) as recorder:
        for _ in range(8):
            net(torch.ones(2))
    (row,) = recorder.report().rows
    assert (row.samples, row.calls) == (7, 8)
    assert row.reason == "calls differ in what they have: 'logits' in 7, 'loss' in 1, '0' in 1"


@pytest.mark.filterwarnings("ignore:ForwardMonitor")
def test_report_says_what_failed_though_other_observations_were_recorded() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder = Recorder(ForwardMonitor(Mean("b c -> c"))).modules(net, leaves=True)
    for width in (3, 3, 5):
        net[0] = nn.Linear(2, width)
        net(torch.ones(1, 2))
    (row,) = (row for row in recorder.report().rows if row.name == "1")
    assert (row.samples, row.skipped) == (2, {"errors": 1})
    assert row.error is not None
    assert row.reason == row.error
    assert str(row).endswith(row.error)


@pytest.mark.filterwarnings("ignore:CallMonitor")
def test_report_says_what_failed_and_that_calls_differ() -> None:
    recorder = Recorder(loss=CallMonitor(Count()))
    for value in ({"a": 1.0, "b": 2.0}, {"a": 1.0}, "none"):
        recorder.push("loss", value)
    (row,) = recorder.report().rows
    assert row.reason == f"{row.error}; calls differ in what they have: 'a' in 2, 'b' in 1"


def test_report_names_parameters_that_a_module_no_longer_has() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(one=ParameterMonitor(Count(), "weight"), all=ParameterMonitor(Count())).modules(net)
    for step in range(4):
        if step == 1:
            nn.utils.parametrizations.weight_norm(net[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    one, all_ = recorder.report().rows
    assert (one.samples, one.module) == (1, "ParametrizedLinear without weight")
    assert all_.samples == 4
    assert all_.reason == "calls differ in what they have: 'bias' in 4, 'weight' in 1"


def test_report_tells_of_dropout_that_fused_attention_passes_by() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout.p)

    with Recorder(ForwardMonitor(Count())).modules(net := Attention()) as recorder:
        net(torch.ones(1, 2, 2))
    assert "scaled_dot_product_attention" in recorder.report().silent[0].reason


def test_report_names_what_never_fired_with_the_likely_reason() -> None:
    net = Partly()
    recorder = Recorder(
        out=ForwardMonitor(Count()),
        grad=BackwardMonitor(Count()),
        weights=ParameterUpdateMonitor(Count()),
        loss=CallMonitor(Count()),
    ).modules(net, types=nn.Linear)
    net(torch.ones(1, 1, 2))
    silent = {row.name: row.reason for row in recorder.report().silent}
    assert "out/used" not in silent
    for name in ("out/unused", "out/direct", "out/attention.out_proj"):
        assert "never called, or only its .forward" in silent[name]
    assert "backward was not run" in silent["grad/used"]
    assert "never called" in silent["grad/unused"]
    assert "no optimizer step" in silent["weights/used"]
    assert silent["loss"] == "nothing was pushed"


def test_report_tells_of_switched_off_hooks_gates_and_failures() -> None:
    net = nn.Sequential(nn.Identity(), nn.Identity())
    off = Recorder(ForwardMonitor(Count())).children(net)
    off.deregister()
    chooses_steps = Recorder(ForwardMonitor(Count(), condition=lambda: False)).children(net)
    net(torch.ones(1))
    assert off.report().silent[0].reason.startswith("its hooks are off; while they were on, its module was never called")
    assert chooses_steps.report().silent[0].reason == "all calls were skipped"
    assert chooses_steps.report().silent[0].skipped == {"condition was false": 1}
    ticks = Recorder(ParameterMonitor(Count(), when="tick")).modules(nn.Linear(1, 1))
    assert ticks.report().silent[0].reason == "tick() was never called"


def test_plan_tells_names_shapes_and_state_sizes_without_computing() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    kinds = {
        "out": ForwardMonitor(Last()),
        "inp": ForwardInputMonitor(Summary("b c ... -> c")),
        "grad": BackwardMonitor(Summary()),
        "weights": ParameterGradientMonitor(Last()),
        "state": OptimizerStateMonitor(Last(), "exp_avg"),
        "loss": CallMonitor(Mean()),
    }
    recorder = Recorder(**kinds).modules(net, types=(nn.Conv2d, nn.BatchNorm2d))
    plan = recorder.plan(torch.ones(2, 1, 8, 8))
    rows = {row.name: row for row in plan.rows}
    assert list(rows) == list(recorder)
    assert rows["out/0"].shapes == {"": (2, 4, 6, 6)}
    assert rows["out/0"].state_bytes == 2 * 4 * 6 * 6 * 4
    assert rows["grad/1"].shapes == {"": (2, 4, 6, 6)}
    assert rows["weights/0"].shapes == {"weight": (4, 1, 3, 3), "bias": (4,)}
    assert rows["state/0"].state_bytes == (36 + 4) * 4
    assert rows["loss"].state_bytes is None
    assert plan.state_bytes == sum(row.state_bytes or 0 for row in plan.rows)
    assert "subrecorders" in str(plan)
    assert recorder.compute() == {}
    assert all(net.state_dict()[key].equal(value) for key, value in before.items())
    assert list(recorder.samples.values()) == [0] * len(recorder)
    net(torch.ones(2, 1, 8, 8)).sum().backward()
    for name in ("out/0", "inp/1", "grad/0"):
        real = sum(value.numel() * value.element_size() for value in recorder[name].state.values())
        assert rows[name].state_bytes == real


def test_plan_tells_which_states_grow_without_bound() -> None:
    kinds = {"all": ForwardMonitor(Whole()), "some": ForwardMonitor(Whole(last=3)), "both": ForwardMonitor(Product(c=Collect()))}
    net = nn.Linear(2, 2)
    plan = Recorder(**kinds).modules(net).plan(torch.ones(1, 2))
    assert [row.grows for row in plan.rows] == [True, False, True]
    assert [row.size for row in plan.rows] == [
        "grows by 8 bytes an observation, without bound",
        "8 bytes of state",
        "grows by 8 bytes an observation, without bound",
    ]
    assert "2 of them grow without bound: keep less with Whole(last=n)" in str(plan)


def test_plan_counts_the_free_slots_of_a_history() -> None:
    net = nn.Linear(2, 1000)
    recorder = Recorder(ForwardMonitor(History(Last(), duration=99.0))).modules(net)
    planned = recorder.plan(torch.ones(1, 2)).rows[0].state_bytes
    for _ in range(3):
        net(torch.ones(1, 2))
    slots = recorder[0].state["ring/value"]
    assert planned == slots.untyped_storage().nbytes() + 8
    assert planned >= 2 * slots.nbytes


def test_plan_asks_a_reducer_once_for_all_layers_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    update = Summary.update

    def counted(self: Summary, state: State, *xs: Tensor) -> State:
        asked.append(tuple(xs[0].shape))
        return update(self, state, *xs)

    monkeypatch.setattr(Summary, "update", counted)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)], nn.Linear(4, 2))
    recorder = Recorder(out=ForwardMonitor(Summary()), wide=ForwardMonitor(Summary("b c -> c"))).modules(net, types=nn.Linear)
    plan = recorder.plan(torch.ones(3, 4))
    assert asked == [(3, 4), (3, 4), (3, 2), (3, 2)]
    assert [row.error for row in plan.rows] == [None] * 42
    net(torch.ones(3, 4))
    for row in plan.rows:
        assert row.state_bytes == sum(value.nbytes for value in recorder[row.name].state.values())


def test_plan_shows_mistakes_before_they_happen() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(ForwardMonitor(Mean("b c h w -> c"))).children(net)
    row = recorder.plan(torch.ones(1, 2)).rows[0]
    assert row.error is not None
    assert "needs 4 axes" in row.error
    assert "will fail" in str(row)
    assert recorder.report().rows[0].error is None


def test_plan_without_inputs_knows_the_parameters_and_says_what_is_missing() -> None:
    net = nn.Linear(2, 3)
    recorder = Recorder(out=ForwardMonitor(Last()), weights=ParameterMonitor(Last())).modules(net)
    plan = recorder.plan()
    assert [row.state_bytes for row in plan.rows] == [None, (6 + 3) * 4]
    assert "example inputs" in plan.note


def test_plan_of_a_net_that_looks_at_its_data_says_so() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    net = Looks()
    recorder = Recorder(ForwardMonitor(Last())).modules(net)
    plan = recorder.plan(torch.ones(1))
    assert "cannot be run on shapes alone" in plan.note
    assert plan.rows[0].state_bytes is None


def test_report_tells_of_modules_that_left_the_net() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder = Recorder(out=ForwardMonitor(Mean()), loss=CallMonitor(Mean())).modules(net)
    net(torch.ones(1, 2))
    kept, net[0] = net[0], nn.Linear(2, 2)
    net(torch.ones(1, 2))
    told = {row.name: row.reason for row in recorder.report().rows}
    assert "call recorder.remove('out/0'), then select again" in told.pop("out/0")
    assert told == {"out": "", "out/1": "", "loss": "nothing was pushed"}
    del kept
    assert "select again" in str(recorder.report())
    recorder.remove("out/0")
    recorder.modules(net, names="0", groups="out")
    net(torch.ones(1, 2))
    assert [row.reason for row in recorder.report().rows if row.name != "loss"] == ["", "", ""]
    assert recorder["out/0"].samples == 1


def test_report_tells_of_containers_in_a_net_that_was_compiled_before() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    torch._dynamo.reset()
    compiled = torch.compile(Net(), backend="eager")
    compiled(torch.ones(1, 2))
    recorder = Recorder(ForwardMonitor(Mean())).modules(compiled)
    compiled(torch.ones(1, 2))
    told = {row.name: row.reason for row in recorder.report().silent}
    assert told["layers"] == "a container is never called, only the modules in it"
    assert recorder.samples["layers.0"] == 1  # what to do if they cannot be made again is told in `test_renewal.py`


def test_plan_disturbs_no_random_numbers() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape).to(x.device)

    net = Noisy()
    recorder = Recorder(ForwardMonitor(Last())).modules(net)
    before = torch.get_rng_state()
    assert recorder.plan(torch.ones(2)).rows[0].state_bytes == 8
    assert torch.equal(torch.get_rng_state(), before)


def test_plan_and_findings_leave_what_is_compiled_as_it_is() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    compiled = torch.compile(net, backend=backend)
    with Recorder(ForwardMonitor(Mean())).modules(net) as recorder:
        compiled(x)
        made = len(graphs)
        recorder.plan(x)
        findings(recorder, example=x)
        compiled(x)
    assert len(graphs) == made > 0


def test_plan_of_nets_that_keep_their_output_or_cannot_be_copied() -> None:
    class Keeps(nn.Module):
        def __init__(self, kept: object) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(2, 2), kept

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.layer(x)
            return self.kept

    net = Keeps(None)
    recorder = Recorder(ForwardMonitor(Last())).modules(net)
    kept = net(torch.ones(1, 2))
    assert [row.state_bytes for row in recorder.plan(torch.ones(1, 2)).rows] == [8, 8]
    assert net.kept is kept
    stubborn = Keeps(threading.Lock())
    plan = Recorder(ForwardMonitor(Last())).modules(stubborn).plan(torch.ones(1, 2))
    assert "cannot be copied" in plan.note


def test_plan_takes_named_tuples_and_mappings() -> None:
    class Batch(NamedTuple):
        x: Tensor
        more: UserDict[str, Tensor]

    class Net(nn.Module):
        def forward(self, batch: Batch) -> Tensor:
            return batch.x + batch.more["y"]

    net = Net()
    plan = Recorder(ForwardMonitor(Last())).modules(net).plan(Batch(torch.ones(3), UserDict(y=torch.ones(3))))
    assert (plan.note, plan.rows[0].state_bytes) == ("", 12)


def test_report_tells_of_modules_that_are_no_more() -> None:
    recorder = Recorder(ForwardMonitor(Mean())).modules(nn.Linear(2, 2))
    assert recorder.report().rows[0].reason.startswith("its module no longer exists: nothing else kept it alive; keep")


def test_report_after_a_block_tells_the_true_reason() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Recorder(BackwardMonitor(Count())).modules(net, types=nn.Linear) as recorder:
        net(torch.ones(1, 2))
    assert recorder.report().rows[0].reason == (
        "no gradient came: backward was not run, the loss does not use its output, or compiled autograd ran it"
    )
    with Recorder(ParameterUpdateMonitor(Count())).modules(net, types=nn.Linear) as recorder:
        net(torch.ones(1, 2)).sum().backward()
    reason = "its hooks are off; while they were on, no optimizer step changed its parameters"
    assert recorder.report().rows[0].reason == reason


@pytest.mark.parametrize("kind", [ForwardMonitor, BackwardMonitor])
def test_report_tells_that_a_net_was_only_traced(kind: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    recorder = Recorder(kind(Count())).modules(net, types=nn.Linear)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(net, torch.ones(1, 2), check_trace=False)
    traced(torch.ones(1, 2)).sum().backward()
    assert "torch.jit.trace" in recorder.report().rows[0].reason
    recorder.deregister()


def test_report_tells_that_a_forked_process_keeps_what_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    from recorders.recorder import report as module

    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(ForwardMonitor(Count())).modules(net, types=nn.Linear)
    monkeypatch.setattr(module, "_forks", set())
    assert "forked" not in recorder.report().rows[0].reason
    monkeypatch.undo()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert "it was called in a process that was forked" in recorder.report().rows[0].reason
    recorder.deregister()


def test_all_leaves_of_a_call_are_one_call() -> None:
    net = nn.LSTM(2, 3)
    recorder = Recorder(
        back=BackwardMonitor(Count()), out=ForwardMonitor(Count()), weights=ParameterGradientMonitor(Count(), when="accumulate")
    ).modules(net)
    for _ in range(4):
        output, (hidden, cell) = net(torch.randn(5, 1, 2))
        (output.sum() + hidden.sum() + cell.sum()).backward()
    assert {(row.samples, row.calls) for row in recorder.report().rows} == {(4, 4)}
    recorder.reset()
    output, _ = net(torch.randn(5, 1, 2))
    output.sum().backward()
    assert {(row.samples, row.calls) for row in recorder.report().rows} == {(1, 1)}
    recorder.deregister()


# Blocks


def test_the_hooks_stay_on_until_the_outermost_block_ends() -> None:
    net = nn.Sequential(nn.Identity())
    recorder = Recorder(ForwardMonitor(Count())).children(net)
    with recorder:
        with recorder as inner:
            assert inner is recorder
            net(torch.ones(1))
        net(torch.ones(1))
        with pytest.raises(ZeroDivisionError), recorder:
            raise ZeroDivisionError
        net(torch.ones(1))
        copied = copy.deepcopy(recorder)
    net(torch.ones(1))
    assert recorder[0].samples == 3
    assert not recorder[0].registered
    assert copied is not None
    with copied:
        pass
    with recorder:
        net(torch.ones(1))
    net(torch.ones(1))
    assert recorder[0].samples == 4


def test_a_block_of_one_thread_ends_no_block_of_another() -> None:
    net = nn.Sequential(nn.Identity())
    recorder = Recorder(ForwardMonitor(Count())).children(net)
    inside, left = threading.Barrier(2), threading.Barrier(2)

    def leave_first() -> None:
        with recorder:
            inside.wait()
        left.wait()

    thread = threading.Thread(target=leave_first)
    thread.start()
    with recorder:
        inside.wait()
        left.wait()
        thread.join()
        net(torch.ones(1))
    net(torch.ones(1))
    assert recorder[0].samples == 1


def test_a_block_that_cannot_begin_counts_for_nothing() -> None:
    recorder = Recorder(ForwardMonitor(Count()))
    with pytest.raises(SelectionError), recorder:
        pass
    net = nn.Sequential(nn.Identity())
    with recorder.children(net):
        net(torch.ones(1))
    assert not recorder[0].registered


def test_calls_of_other_steps_and_gradients_that_do_not_come_are_told() -> None:
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters())
    monitors = {"out": ForwardMonitor(Mean(), every_step=2), "gradient": BackwardMonitor(Mean())}
    recorder = Recorder(None, **monitors).modules(net).attach(optimizer)
    with recorder:
        for _ in range(4):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                net(torch.ones(3, 4))
    out, gradient = map(str, recorder.report().rows)
    assert "4 recorded of 4 calls (every 2 steps; in others its hooks are off)" in out
    assert "4 recorded of 8 calls; left out: 4 no gradient will come (no_grad)" in gradient


def test_gradients_that_nothing_accumulated_want_a_backward() -> None:
    net = nn.Linear(3, 2)
    with Recorder(ParameterGradientMonitor(Count(), when="accumulate")).modules(net) as recorder:
        torch.autograd.grad(net(torch.ones(1, 3)).sum(), list(net.parameters()))
        assert "no gradient was accumulated: call backward() while hooks are on" in str(recorder.report())


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_autograd_leaves_gradients_out_and_the_report_says_so() -> None:
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    kinds = {"output": BackwardMonitor(Count()), "accumulated": ParameterGradientMonitor(Count(), when="accumulate")}
    recorder = Recorder(**kinds, step=ParameterGradientMonitor(Count())).modules(net).attach(optimizer)
    compiled = torch.compile(nn.Sequential(net, nn.ReLU()), backend="aot_eager")
    with recorder, torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        compiled(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        reasons = [row.reason for row in recorder.report().rows]
    assert "or compiled autograd ran it" in reasons[0]
    assert "compiled autograd call no such hook" in reasons[1]
    assert recorder["step"].samples == 1
