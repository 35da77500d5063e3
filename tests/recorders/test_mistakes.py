"""Mistakes that other systems of this kind are known for, each shown not to be made here (lenses: `test_lenses.py`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardMonitor,
    CallMonitor,
    DifferenceMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    SelectionError,
    StateMonitor,
    Stream,
    TargetError,
    attached,
    detach_all,
    load,
)
from recorders.capture.switching import hooks_in
from reducers import Collect, Fold, Last, Max, Mean, Min, Moments, Norm, Summary


def test_torchfunc_types_and_indices_together_selected_everything() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    assert list(Recorder(ForwardMonitor(Mean())).children(net, types=nn.ReLU, indices=(0, 1, 2))) == ["1"]


def test_torchfunc_layers_were_mixed_when_they_ran_in_another_order() -> None:
    net = nn.ModuleDict({"last": nn.Linear(3, 1), "first": nn.Linear(2, 3)})
    recorder = Recorder(ForwardMonitor(Collect())).children(net)
    for _ in range(2):
        net["last"](net["first"](torch.ones(4, 2)))
    assert [tuple(monitor.peek().shape) for monitor in recorder.values()] == [(8, 1), (8, 3)]


def test_torchfunc_remove_left_stale_indices() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    recorder = Recorder(ForwardMonitor(Last())).children(net)
    recorder.remove(0)
    net(torch.ones(1, 2))
    assert [tuple(recorder[i].peek().shape) for i in range(2)] == [(1, 4), (1, 5)]


def test_torchfunc_a_second_selection_restarted_at_zero() -> None:
    encoder, decoder = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 2))
    recorder = Recorder(ForwardMonitor(Last())).children(encoder, prefix="encoder").children(decoder, prefix="decoder")
    decoder(encoder(torch.ones(1, 2)))
    assert {name: tuple(value.shape) for name, value in recorder.compute().items()} == {"encoder.0": (1, 3), "decoder.0": (1, 2)}


def test_torchfunc_apply_did_nothing() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(Fold(torch.add))).modules(layer)
    layer(torch.ones(1))
    layer(torch.ones(1))
    recorder.apply(lambda data: data * 10).apply_sample(lambda data, samples: data / samples)
    assert recorder.compute()[""].tolist() == [10.0]


def test_torchfunc_and_inferno_kept_the_autograd_graph() -> None:
    layer = nn.Linear(2, 2)
    monitors = [ForwardMonitor(Collect(), layer), ForwardMonitor(Fold(torch.add), layer), StateMonitor(Last(), "weight", layer)]
    layer(torch.ones(1, 2))
    layer(torch.ones(1, 2))
    assert not any(value.requires_grad for monitor in monitors for value in monitor.state.values())


def test_inferno_one_reducer_was_shared_by_all_monitors_of_a_partialconstructor() -> None:
    make = ForwardMonitor.partialconstructor(Mean())
    layers = [nn.Identity(), nn.Identity()]
    monitors = [make(None, layer) for layer in layers]
    layers[0](torch.zeros(1))
    layers[1](torch.ones(1))
    assert [monitor.peek().item() for monitor in monitors] == [0.0, 1.0]


def test_inferno_op_was_dropped_by_partialconstructor() -> None:
    norm = nn.BatchNorm1d(1)
    monitor = DifferenceMonitor.partialconstructor(Last(), op_=lambda after, before: after * 0 + 42)("running_mean", norm)
    norm(torch.randn(4, 1))
    assert monitor.peek().tolist() == [42.0]


def test_inferno_the_difference_of_a_buffer_changed_in_place_was_zero() -> None:
    norm = nn.BatchNorm1d(1, momentum=1.0)
    monitor = DifferenceMonitor(Last(), "running_mean", norm)
    norm(torch.tensor([[2.0], [4.0]]))
    assert monitor.peek().tolist() == [3.0]


def test_inferno_none_as_zero_raised() -> None:
    class Lazy(nn.Module):
        value = None

        def forward(self, x: torch.Tensor) -> None:
            self.value = x

    net = Lazy()
    monitor = DifferenceMonitor(Last(), "value", net)
    net(torch.tensor([3.0]))
    assert monitor.peek().tolist() == [3.0]


def test_inferno_a_monitor_bound_to_no_variable_died_silently() -> None:
    layer = nn.Identity()
    seen: list[float] = []
    ForwardMonitor(Mean(), layer, filter_=lambda output, inputs: seen.append(output.item()) or True)  # type: ignore[func-returns-value]
    layer(torch.tensor(1.0))
    layer(torch.tensor(2.0))
    assert seen == [1.0, 2.0]


def test_inferno_a_smaller_last_batch_raised() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Moments("b c -> c"), layer)
    data = torch.randn(10, 3)
    for batch in data.split(4):
        layer(batch)
    torch.testing.assert_close(monitor.peek()["mean"], data.double().mean(0))


def test_composer_the_maximum_was_a_mean_of_maxima() -> None:
    state = Max().update(Max().update({}, torch.tensor([1.0, 9.0])), torch.tensor([3.0]))
    assert Max().compute(state) == 9.0


def test_torchmetrics_merging_the_means_two_and_four_gave_two() -> None:
    mean = Mean()
    assert mean.compute(mean.merge(mean.update({}, torch.tensor([2.0])), mean.update({}, torch.tensor([4.0])))) == 3.0


def test_torchmetrics_replacing_nan_overwrote_the_callers_tensor() -> None:
    x = torch.tensor([float("nan"), 1.0])
    for reducer in (Mean(), Summary(), Min(), Norm(), Moments()):
        reducer.update({}, x)
    assert x.isnan().tolist() == [True, False]


def test_baukit_accumulated_in_float16() -> None:
    ones = torch.ones(100_000, dtype=torch.float16)
    assert Mean().compute(Mean().update({}, ones)) == 1.0
    assert Norm().compute(Norm().update({}, torch.full((4,), 300.0, dtype=torch.float16))) == 600.0


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


CHOOSING: dict[str, Callable[[nn.Module], object]] = {
    "every_step": lambda net: Recorder(ForwardMonitor(Mean(), every_step=10)).modules(net),
    "steps": lambda net: Recorder(grad=ParameterGradientMonitor(Mean(), steps=range(5, 9))).modules(net),
    "budget": lambda net: Recorder(ForwardMonitor(Mean()), budget=0.5).modules(net),
    "alone": lambda net: ForwardMonitor(Mean(), net, every_step=10),
}


@pytest.mark.parametrize("how", CHOOSING)
def test_a_clock_that_stands_still_is_told_of_once(how: str) -> None:
    net = _net()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    _kept = CHOOSING[how](net)
    _step(net, optimizer, micro_batches=4)
    net(torch.ones(2, 3))
    with pytest.warns(RecordingWarning, match=r"stands at step 0 still.*attach\(optimizer\), or recorder\.step\(\)") as found:
        _step(net, optimizer)
    assert [Path(warning.filename).name for warning in found] == [Path(__file__).name]
    _step(net, optimizer)  # a second warning would be an error


def test_no_optimizer_step_no_warning_of_the_clock() -> None:
    """Micro-batches, evaluation, calibration, checkpointing and modules called twice are no second step."""
    shared = nn.Linear(3, 3)
    net = nn.Sequential(shared, shared, nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = Recorder(ForwardMonitor(Mean(), every_step=10)).modules(net)
    for _ in range(3):
        checkpoint(net, torch.ones(2, 3), use_reentrant=False).sum().backward()
        optimizer.zero_grad()
    optimizer.step()
    net.eval()(torch.ones(2, 3))
    with torch.no_grad():
        net.train()(torch.ones(2, 3))
    recorder.step()
    _step(net, optimizer)


def test_steps_of_other_nets_and_closures_are_no_second_step() -> None:
    net, other = _net(), _net()
    _kept = Recorder(ForwardMonitor(Mean(), every_step=10)).modules(net)
    _step(other, torch.optim.SGD(other.parameters(), lr=0.1))
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(torch.rand(2, 3)).square().sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    with pytest.warns(RecordingWarning, match="stands at step 0 still"):
        optimizer.step(closure)


@pytest.mark.parametrize("by_hand", [False, True])
def test_clocks_that_advance_are_not_told_of_and_keep_no_hook(by_hand: bool) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net)
    if not by_hand:
        recorder.attach(optimizer)
    for _ in range(3):
        _step(net, optimizer)
        if by_hand:
            recorder.step()
    assert (recorder.samples[0], recorder.clock.step) == (2, 3)
    recorder.deregister()
    assert hooks_in(net) == []


def test_in_a_compiled_net_a_standing_clock_and_all_monitors_are_found() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = Recorder(ForwardMonitor(Mean(), every_step=2)).modules(net)
    run = torch.compile(net, backend="eager", fullgraph=True)
    _step(run, optimizer, micro_batches=2)
    with pytest.warns(RecordingWarning, match="stands at step 0 still"):
        _step(run, optimizer)
    assert len(attached(run)) == detach_all(run) == 5
    _step(run, optimizer)
    assert {*recorder.samples.values()} == {3}
    assert attached(net) == []


def test_monitors_without_steps_put_nothing_else_on_a_net() -> None:
    net = _net()
    Recorder(ForwardMonitor(Mean())).modules(net)
    assert [len(hooks_in(module)) for module in net.modules()] == [1] * 5


@pytest.mark.parametrize(
    "use",
    [
        lambda recorder: recorder.__enter__(),
        lambda recorder: recorder.register(),
        lambda recorder: recorder.compute(),
        lambda recorder: recorder.report(),
        lambda recorder: recorder.plan(torch.ones(2, 3)),
        lambda recorder: recorder.save("never"),
        lambda recorder: recorder.save_in_background("never"),
        lambda recorder: recorder.apply(torch.sqrt),
    ],
)
def test_a_recorder_without_subrecorders_says_so(use: Callable[[Recorder], object]) -> None:
    with pytest.raises(SelectionError, match=r"select modules first, as in recorder\.modules\(net\)"):
        use(Recorder(ForwardMonitor(Mean())))
    with Recorder(loss=CallMonitor(Mean())) as recorder:  # which has one at once
        assert recorder.compute() == {}


def test_a_cell_that_is_run_again_is_told_of_and_all_its_monitors_are_found() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def cell() -> Recorder:
        out, value = ForwardMonitor(Mean(), every_step=2), ParameterMonitor(Mean(), when="call")
        return Recorder(out=out, grad=ParameterGradientMonitor(Mean()), value=value).modules(net)

    first = cell().attach(optimizer)
    with pytest.warns(RecordingWarning, match=r"an equal recorder is on these 11 places already.*detach_all\(net\)") as found:
        second = cell().attach(optimizer)
    assert [warning.filename for warning in found] == [__file__]
    _step(net, optimizer)  # then `out` is not due, and its hooks are out
    expected = {id(recorder[name]) for name in ("out/0", "grad/0", "value/0") for recorder in (first, second)}
    assert {id(one.monitor) for one in attached(net) if one.place == "0"} == expected
    assert "0: ForwardMonitor 'out/0' on Linear, 1 recorded" in map(repr, attached(net))
    del second
    assert detach_all(net) == 22
    assert attached(net) == []
    assert not any(hooks_in(module) for module in net.modules())
    _step(net, optimizer)
    assert {name for name, monitor in first.items() if monitor.samples == 1} == set(first)
    assert first.clock.step == 2
    cell()  # nothing is there any more
    assert len(attached(net)) == 11


def test_recorders_that_differ_are_not_told_of() -> None:
    net = _net()
    Recorder(ForwardMonitor(Mean())).modules(net, leaves=True)
    Recorder(ForwardMonitor(Mean())).modules(net).deregister()  # of which one place is new
    Recorder(ForwardMonitor(Max())).modules(net).deregister()
    Recorder(ForwardMonitor(Max())).modules(net)  # the one before is off


def test_each_warning_points_at_the_line_of_the_user(tmp_path: Path) -> None:
    net = _net()
    loss = CallMonitor(Mean("a b c ->"))
    never = Recorder(ForwardMonitor(Mean().postmap(lambda x: 1 / 0))).modules(net)
    damaged = Recorder(loss=CallMonitor(Mean())).push("loss", 1.0).save(tmp_path / "damaged")
    next(damaged.rglob("*.safetensors")).write_bytes(b"")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    Recorder(
        out=ForwardMonitor(Mean("a b c ->")),
        grad=BackwardMonitor(Mean("a b c ->")),
        step=ParameterMonitor(Mean("a b c ->")),
        off=ForwardInputMonitor(Mean("a b c ->"), on_error="disable"),
    ).modules(net, names="0")
    with Stream(tmp_path / "stream") as stream:
        pass
    made: dict[str, Callable[[], object]] = {
        "push": lambda: loss.push(torch.ones(2)),
        "forward": lambda: net(torch.ones(2, 3)),
        "backward": lambda: net(torch.ones(2, 3)).sum().backward(),
        "step": optimizer.step,
        "save": lambda: never.save(tmp_path / "run"),
        "load": lambda: load(damaged, damaged="skip"),
        "stream": lambda: stream.put("x", torch.ones(2, 3)),
    }
    for what, make in made.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make()
        assert {warning.filename for warning in found} == {__file__}, what


def test_the_net_itself_has_one_spelling() -> None:
    net = _net()
    recorder = Recorder(ForwardMonitor(Mean())).modules(net, names=["(net)", "0"])
    net(torch.ones(2, 3))
    recording = recorder.snapshot()
    assert recorder["(net)"] is recorder[""]
    assert "(net)" in recording
    assert recording["(net)"].samples == recording.samples["(net)"] == 1
    assert [str(row).partition(":")[0] for row in (*recorder.report().rows, *recorder.plan().rows)] == ["(net)", "0"] * 2
    assert next(iter(recording.rows_shown()[1]))[0][0] == "(net)"
    with pytest.raises(SelectionError, match=r"there are \['\(net\)', '0'\]"):
        recording["1"]
    recorder["(net)"] = ForwardMonitor(Max(), net)
    assert recorder[""].reducer == Max()
    assert "(net)" not in Recorder(ForwardMonitor(Mean())).modules(net, exclude="(net)")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"names": 0}, "names=0: give names, globs such as 'encoder.*' or compiled"),
        ({"exclude": 0}, "exclude=0: give names, globs .* or module classes"),
        ({"types": 0}, "types=0: give a module class or several"),
        ({"where": 0}, "where=0: give a function of name and module"),
        ({"groups": 0}, r"groups=0: give the name of a group or several, of \['out'\]"),
        ({"indices": 0.5}, "indices=0.5: give one whole number or several"),
        ({"indices": ["0"]}, "give one whole number or several"),
    ],
)
def test_a_criterion_of_the_wrong_type_says_what_it_is(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Recorder(out=ForwardMonitor(Mean())).modules(_net(), **given)


def test_a_misspelled_name_gets_a_suggestion() -> None:
    net = _net()
    with pytest.raises(TargetError, match="no attribute 'running_meen'; did you mean 'running_mean'"):
        StateMonitor(Last(), "running_meen", net[1])
    for monitors in ({}, {"out": ForwardMonitor(Mean())}):  # also if other groups have something to watch
        with pytest.raises(SelectionError, match="did you mean 'running_mean'"):
            Recorder(state=StateMonitor(Last(), "running_meen"), **monitors).modules(net)
    with pytest.raises(SelectionError, match="did you mean 'weight'"):
        Recorder(ParameterMonitor(Mean(), "weigth")).modules(net)
    with pytest.raises(SelectionError, match=r"no group \['ouput'\]; did you mean 'output'\? there are \['output'\]"):
        Recorder(output=ForwardMonitor(Mean())).modules(net, groups="ouput")
    with pytest.raises(SelectionError, match="did you mean 'output/0'"):
        Recorder(output=ForwardMonitor(Mean())).modules(net)["ouput/0"]
    Recorder(out=ForwardMonitor(Mean()), state=StateMonitor(Last(), "running_mean")).modules(nn.ReLU())  # no mistake


@pytest.mark.parametrize("kind", [StateMonitor, DifferenceMonitor, ParameterMonitor, ParameterGradientMonitor])
def test_a_name_before_the_reducer_is_told_in_words(kind: type[Monitor]) -> None:
    with pytest.raises(TargetError, match=f"{kind.__name__} .*got Mean"):
        kind("weight", Mean())  # type: ignore[arg-type]
