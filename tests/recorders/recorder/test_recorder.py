"""Recorder: mapping, life cycle, sharing, results, merging."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from profiled import calls_of
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    MergeError,
    OptimizerMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    Recorder,
    SelectionError,
    StateMonitor,
    TargetError,
    load,
)
from reducers import Collect, Count, Fold, Last, Max, Mean, Product, Sum, TopK


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_mapping_by_name_and_by_index_in_order() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor(Mean()), inp=ForwardInputMonitor(Mean())).modules(model, types=nn.Linear)
    assert list(recorder) == ["out/0", "out/2", "inp/0", "inp/2"]
    assert len(recorder) == 4
    assert recorder[0] is recorder["out/0"]
    assert recorder[-1] is recorder["inp/2"]
    assert recorder["out/2"].name == "out/2"
    assert "out/0" in recorder
    assert "out/1" not in recorder
    for wrong in ("out/1", 4, -5):
        with pytest.raises(SelectionError, match="no subrecorder"):
            recorder[wrong]


def test_short_form_names_are_the_modules_own() -> None:
    recorder = Recorder(ForwardMonitor(Mean())).modules(net())
    assert list(recorder) == ["", "0", "1", "2"]


def test_hooks_are_on_from_selection_and_off_after_the_block() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count())).modules(model, types=nn.ReLU)
    model(torch.ones(1, 3))
    with recorder as same:
        assert same is recorder
        model(torch.ones(1, 3))
    model(torch.ones(1, 3))
    assert recorder.samples[0] == 2
    assert not model[1]._forward_hooks
    with pytest.raises(RuntimeError, match="the user's"), recorder:
        model(torch.ones(1, 3))
        raise RuntimeError("the user's")
    assert recorder.samples[0] == 3
    assert not model[1]._forward_hooks


def test_removing_one_leaves_the_others_data_and_indices_right() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Collect())).modules(model, leaves=True)
    x = torch.randn(2, 3)
    model(x)
    removed = recorder.remove(1)
    torch.testing.assert_close(removed.peek(), torch.relu(model[0](x)).detach())
    model(x)
    assert removed.samples == 1
    assert list(recorder) == ["0", "2"]
    assert list(recorder.samples.values()) == [3, 2]  # the first also saw the call of this test
    torch.testing.assert_close(recorder[1].peek()[:2], model(x).detach())
    recorder.remove("0")
    assert list(recorder) == ["2"]


def test_execution_order_does_not_mix_layers() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) + self.first(x).sum()

    model = Backwards()
    recorder = Recorder(ForwardMonitor(Last())).children(model)
    model(torch.ones(1, 2))
    assert [tuple(monitor.peek().shape) for monitor in recorder.values()] == [(1, 2), (1, 5)]


def test_equal_monitors_share_one_capture_under_both_names() -> None:
    model = net()
    recorder = Recorder(a=ForwardMonitor(Mean()), b=ForwardMonitor(Mean()), c=ForwardMonitor(Max())).modules(model, types=nn.ReLU)
    assert list(recorder) == ["a/1", "c/1"]
    assert recorder["b/1"] is recorder["a/1"]
    assert len(model[1]._forward_hooks) == 2
    recorder.modules(model, types=nn.ReLU)
    assert len(recorder) == 2
    assert len(model[1]._forward_hooks) == 2


def test_monitors_of_two_whole_nets_are_kept_apart_by_prefix() -> None:
    def rate(optimizer: torch.optim.Optimizer) -> float:
        return float(optimizer.param_groups[0]["lr"])

    nets = {"generator": net(), "critic": net()}
    recorder = Recorder(None, rate=OptimizerMonitor(Last(), op_=rate))
    for name, one in nets.items():
        recorder.modules(one, prefix=name)
    for scale, one in enumerate(nets.values(), 1):
        one(torch.ones(1, 3)).sum().backward()
        torch.optim.SGD(one.parameters(), float(scale)).step()
    assert {name: monitor.peek().item() for name, monitor in recorder.items()} == {"rate/generator": 1.0, "rate/critic": 2.0}


def test_two_nets_are_kept_apart_by_prefix() -> None:
    teacher, student = net(), net()
    recorder = Recorder(ForwardMonitor(Count())).modules(teacher, types=nn.ReLU, prefix="teacher")
    recorder.modules(student, types=nn.ReLU, prefix="student")
    assert list(recorder) == ["teacher.1", "student.1"]
    with pytest.raises(SelectionError, match=r"'teacher.1' is taken by another module.*prefix="):
        recorder.modules(net(), types=nn.ReLU, prefix="teacher")
    assert len(recorder) == 2


def test_groups_choose_which_kinds_go_where() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor(Mean()), weights=ParameterMonitor(Mean()), grad=ParameterGradientMonitor(Mean()))
    recorder.modules(model, leaves=True, groups="out").modules(model, types=nn.Linear, groups=("grad",))
    recorder.parameters(model, names="2.*", groups="weights")
    assert list(recorder) == ["out/0", "out/1", "out/2", "grad/0", "grad/2", "weights/2.weight", "weights/2.bias"]
    with pytest.raises(SelectionError, match=r"no group \['ouput'\]; did you mean 'out'\? there are \['out', 'weights', 'grad'\]"):
        recorder.modules(model, groups="ouput")
    with pytest.raises(SelectionError, match=r"\['ForwardMonitor'\] watch modules.*groups="):
        recorder.parameters(model)


def test_a_selection_that_fails_half_way_adds_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    recorder = Recorder(StateMonitor(Last(), "weight"))
    with pytest.raises(TargetError, match="'weight' is parametrized"):
        recorder.modules(model)
    assert len(recorder) == 0
    assert not model[0]._forward_hooks
    assert list(recorder.modules(model, names="0")) == ["0"]
    assert len(model[0]._forward_hooks) == 1


def test_modules_without_the_attribute_are_passed_by_and_none_left_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert list(Recorder(StateMonitor(Last(), "running_mean")).modules(model)) == ["1"]
    with pytest.raises(SelectionError, match=r"anything to watch for StateMonitor\(Last\(.*\), 'runing_mean'\)"):
        Recorder(StateMonitor(Last(), "runing_mean")).modules(model)


def test_pushed_values_are_subrecorders_too() -> None:
    recorder = Recorder(out=ForwardMonitor(Mean()), loss=CallMonitor(Mean()))
    recorder["loss"].push(3.0)
    assert recorder.compute() == {"loss": 3.0}
    recorder.modules(net(), types=nn.ReLU)
    assert list(recorder) == ["loss", "out/1"]


def test_compute_has_what_was_recorded_and_reset_forgets_it() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Product(n=Count(), top=Max()))).modules(model, types=nn.Linear)
    model[0](torch.ones(2, 3))
    results = recorder.compute()
    assert list(results) == ["0"]
    assert results["0"]["n"] == 8
    assert recorder.reset().compute() == {}
    model(torch.ones(2, 3))
    assert list(recorder.samples.values()) == [1, 1]


def test_apply_refuses_what_is_no_function() -> None:
    recorder = Recorder(loss=CallMonitor(Sum())).push("loss", 1.0)
    for call in (recorder.apply, recorder.apply_sample):
        with pytest.raises(TypeError, match="apply needs a function of a result; got 5"):
            call(5)
    assert recorder["loss"].compute() == 1


def test_apply_and_apply_sample_do_apply() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Fold(torch.add))).modules(model, types=nn.ReLU)
    x = torch.randn(2, 3)
    for _ in range(4):
        out = torch.relu(model[0](x))
        model(x)
    seen = []
    recorder.apply_sample(lambda data, samples: data / samples).apply(lambda data: (seen.append(1), data.abs())[1])
    torch.testing.assert_close(recorder.compute()["1"], out.detach())
    assert seen


def test_merge_and_resume(tmp_path: object) -> None:
    torch.manual_seed(1)
    model = net()
    data = torch.randn(10, 4, 3)

    def record(batches: Tensor, recorder: Recorder) -> Recorder:
        with recorder:
            for batch in batches:
                model(batch)
        return recorder

    def fresh() -> Recorder:
        return Recorder(ForwardMonitor(Product(mean=Mean("b c -> c"), all=Collect()))).modules(model, leaves=True)

    whole = record(data, fresh())
    first = record(data[:6], fresh())
    first.save(f"{tmp_path}/run")
    resumed = fresh().merge(load(f"{tmp_path}/run"))
    first.deregister()
    record(data[6:], resumed)
    assert list(resumed.samples.values()) == [10, 10, 10]
    for name, result in whole.compute().items():
        for part in ("mean", "all"):
            assert resumed.compute()[name][part].equal(result[part])
    with pytest.raises(MergeError, match=r"only this recorder has \['0', '1', '2'\], only the other \['x.0'"):
        fresh().merge(Recorder(ForwardMonitor(Mean())).modules(net(), leaves=True, prefix="x"))


def test_a_merge_that_does_not_fit_changes_nothing() -> None:
    left, right = nn.Sequential(nn.Identity(), nn.Linear(3, 3)), nn.Sequential(nn.Identity(), nn.Linear(3, 5))
    recorders = []
    for model in (left, right):
        recorders.append(Recorder(ForwardMonitor(Mean("b c -> c"))).children(model))
        model(torch.ones(2, 3))
    before = [monitor.state for monitor in recorders[0].values()]
    with pytest.raises(MergeError, match=r"'1'.*keeps shape"):
        recorders[0].merge(recorders[1])
    for monitor, state in zip(recorders[0].values(), before, strict=True):
        assert monitor.state.keys() == state.keys()
        assert all(monitor.state[key] is state[key] for key in state)


def test_parameters_ticked_by_the_recorder() -> None:
    model = net()
    recorder = Recorder(ParameterMonitor(Count(), when="tick")).modules(model, types=nn.Linear)
    recorder.tick().tick()
    assert list(recorder.samples.values()) == [2, 2]


def test_a_recorder_pickles_and_copies_with_its_data_and_without_its_hooks() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor(Sum()), loss=CallMonitor(Mean())).modules(model, types=nn.Linear)
    model(torch.ones(1, 3))
    doubles = [pickle.loads(pickle.dumps(recorder)), copy.deepcopy(recorder), copy.copy(recorder)]
    total = recorder.compute()["out/0"]
    model(torch.ones(1, 3))
    assert recorder.samples["out/0"] == 2
    for double in doubles:
        assert list(double) == list(recorder)
        assert double.compute()["out/0"] == total
        assert double.samples["out/0"] == 1
        double.modules(net(), types=nn.ReLU)
        assert "out/1" in double


def test_a_copy_takes_nothing_from_the_recorder_that_it_is_of() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(TopK(k=1), given="ids")).modules(layer)
    copied = copy.copy(recorder)
    with recorder.given(ids=[1, 2]):
        layer(torch.ones(2, 1))
    assert (recorder.samples[0], copied.samples[0]) == (1, 0)
    with copied.modules(nn.Identity(), prefix="other"):
        assert (len(recorder), len(copied)) == (1, 2)


def test_a_recorder_keeps_no_model_alive_and_no_model_needs_the_cycle_collector() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor(Mean()), grad=BackwardMonitor(Mean()), weights=ParameterGradientMonitor(Mean())).modules(
        model
    )
    model(torch.ones(1, 3)).sum().backward()
    dead = [weakref.ref(module) for module in model.modules()]
    gc.disable()
    try:
        del model
        assert [ref() for ref in dead] == [None] * 4
    finally:
        gc.enable()
    assert recorder.samples["out/0"] == 1
    recorder.register()
    assert "nothing" in str(recorder.report())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recorder(), "give one monitor"),
        (lambda: Recorder(ForwardMonitor(Mean()), out=ForwardMonitor(Mean())), "give one monitor"),
        (lambda: Recorder(Mean()), r"needs a monitor, such as ForwardMonitor\(Mean\(\)\)"),
        (lambda: Recorder(out=ForwardMonitor), r"write ForwardMonitor\(Mean\(\)\), not ForwardMonitor"),
        (lambda: Recorder(ForwardMonitor(Mean(), nn.Identity())), "already sits on one"),
    ],
)
def test_mistakes_at_construction_say_what_to_do(make: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()  # type: ignore[operator]


def test_a_recipe_serves_as_a_prototype() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor.partialconstructor(Count(), eval_update=False)).modules(model, types=nn.ReLU)
    model(torch.ones(1, 3))
    model.eval()(torch.ones(1, 3))
    assert recorder.samples["out/1"] == 1


def test_training_is_the_same_bit_for_bit_with_everything_recorded() -> None:
    def train(recorded: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if recorded:
            _kept = Recorder(
                out=ForwardMonitor(Mean()),
                grad=BackwardMonitor(Mean()),
                weights=ParameterGradientMonitor(Mean()),
                loss=CallMonitor(Mean()),
            ).modules(model)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    bare, recorded = train(False), train(True)
    assert all(bare[key].equal(recorded[key]) for key in bare)


def test_reset_keeps_the_functions_given_to_apply() -> None:
    recorder = Recorder(loss=CallMonitor(Sum())).apply(lambda result: -result)
    assert recorder.push("loss", 2.0).compute() == {"loss": -2.0}
    assert recorder.reset().compute() == {}
    assert recorder.push("loss", 3.0).compute() == {"loss": -3.0}


@pytest.mark.parametrize("enabled", [True, False])
def test_selecting_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    usual = gc.isenabled()
    gc.enable() if enabled else gc.disable()
    try:
        net = nn.Sequential(nn.Linear(2, 2))
        recorder = Recorder(ForwardMonitor(Count())).modules(net)
        assert gc.isenabled() is enabled
        with pytest.raises(SelectionError):
            recorder.modules(nn.Sequential(nn.Linear(2, 2)), names="0")  # a name that is taken
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if usual else gc.disable()


def test_add_puts_a_copy_on_one_module_under_a_name() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count())).modules(model, types=nn.ReLU)
    extra = ForwardMonitor.partialconstructor(Mean())
    assert recorder.add("head", extra, model[2]).add("loss", CallMonitor(Sum())) is recorder
    model(torch.ones(1, 3))
    recorder.push("loss", torch.tensor(2.0))
    assert {name: monitor.samples for name, monitor in recorder.items()} == {"1": 1, "head": 1, "loss": 1}
    assert recorder["head"].clock is recorder.clock
    recorder.add("again", extra, model[2])  # an equal monitor is there already
    assert recorder.aliases == {"again": "head"}
    assert recorder.report().silent == ()


def test_add_refuses_a_name_that_is_taken_and_a_monitor_without_a_module() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count())).modules(model, types=nn.ReLU)
    with pytest.raises(SelectionError, match=r"recorder.add\('1', \.\.\.\): the name is taken"):
        recorder.add("1", ForwardMonitor(Mean()), model[2])
    with pytest.raises(SelectionError, match="needs the module to put ForwardMonitor"):
        recorder.add("x", ForwardMonitor(Mean()))
    with pytest.raises(TypeError, match=r"recorder.add\('x', \.\.\.\) needs a monitor and got the class"):
        recorder.add("x", ForwardMonitor, model[2])  # type: ignore[arg-type]
    assert list(recorder) == ["1"]
    assert not model[2]._forward_hooks


def test_setting_an_item_takes_a_monitor_in_as_it_is_and_replaces_another() -> None:
    model = net()
    recorder = Recorder(ForwardMonitor(Count())).modules(model, types=nn.Linear)
    mine = ForwardMonitor(Mean(), model[1])
    model(torch.ones(1, 3))
    old = recorder["0"]
    recorder["0"] = mine
    model(torch.ones(1, 3))
    assert list(recorder) == ["0", "2"]
    assert recorder["0"] is mine
    assert (mine.samples, old.samples, mine.name) == (2, 1, "0")
    assert not model[0]._forward_hooks
    with pytest.raises(SelectionError, match="in this recorder already, as '0'"):
        recorder["other"] = mine
    with pytest.raises(TypeError, match="needs a text and a monitor"):
        recorder["other"] = Mean()  # type: ignore[assignment]


def test_deleting_an_item_takes_its_hooks_off_and_aliases_with_it() -> None:
    model = net()
    shared = nn.Sequential(model[0], model[0])
    recorder = Recorder(ForwardMonitor(Count())).children(shared)
    assert recorder.aliases == {"1": "0"}
    with pytest.raises(SelectionError, match="another name of '0'"):
        recorder["1"] = CallMonitor(Mean())
    del recorder["1"]
    assert (len(recorder), recorder.aliases) == (0, {})
    assert not model[0]._forward_hooks


def test_find_gives_the_subrecorders_on_a_module() -> None:
    model = net()
    recorder = Recorder(out=ForwardMonitor(Mean()), inp=ForwardInputMonitor(Mean())).modules(model, types=nn.Linear)
    assert recorder.find(model[2]) == {"out/2": recorder["out/2"], "inp/2": recorder["inp/2"]}
    assert recorder.find(torch.nn.DataParallel(model[2])).keys() == {"out/2", "inp/2"}
    assert recorder.find(model[1]) == {}


def test_a_plan_asks_for_the_random_state_of_no_device_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a device was asked"))
    model = nn.Dropout()
    recorder = Recorder(ForwardMonitor(Sum())).modules(model)
    before = torch.get_rng_state()
    assert recorder.plan(torch.ones(2, 3)).rows[0].shapes == {"": (2, 3)}
    assert torch.equal(before, torch.get_rng_state())


def test_monitors_of_modules_outside_the_net_are_planned_reported_and_saved(tmp_path: Path) -> None:
    model, other = net(), nn.Linear(3, 1)
    recorder = Recorder(ForwardMonitor(Count())).modules(model, types=nn.ReLU).add("other", ForwardMonitor(Sum()), other)
    assert [row.name for row in recorder.plan(torch.ones(1, 3)).rows] == ["1", "other"]
    model(torch.ones(1, 3))
    other(torch.ones(1, 3))
    assert [row.reason for row in recorder.report().rows] == ["", ""]
    recorder.save(tmp_path / "run")
    assert load(tmp_path / "run")["other"].samples == 1
    alone = Recorder(loss=CallMonitor(Sum())).add("only", ForwardMonitor(Last()), other)
    assert alone.plan(torch.ones(2, 3)).rows[1].shapes == {"": (2, 1)}


def test_adding_one_by_one_costs_the_same_however_many_there_are() -> None:
    """The two hundredth took ten times the calls of the first: similar names were looked for, and all modules compared."""
    recorder, layers = Recorder(ForwardMonitor(Mean())), [nn.Identity() for _ in range(200)]
    costs = []
    for at, layer in enumerate(layers):
        if at in (20, 199):
            costs.append(calls_of(partial(recorder.add, f"layer.{at}", ForwardMonitor(Mean()), layer)))
        else:
            recorder.add(f"layer.{at}", ForwardMonitor(Mean()), layer)
    assert costs[0] == costs[1]
    recorder.add("again", ForwardMonitor(Mean()), layers[7])
    assert recorder.aliases == {"again": "layer.7"}
    recorder.remove("layer.7")
    recorder.add("new", ForwardMonitor(Mean()), layers[7])
    assert recorder.aliases == {}
    assert recorder["new"].module is layers[7]
    own = nn.Identity()
    again = copy.deepcopy(recorder).add("own", ForwardMonitor(Mean()), own).add("alias", ForwardMonitor(Mean()), own)
    assert again.aliases == {"alias": "own"}


def test_an_error_within_a_property_is_told_as_it_is() -> None:
    class Own(Recorder):
        @property
        def loudest(self) -> str:
            return self.subrecorders.loudest  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(AttributeError, match="'Own' object has no attribute 'subrecorders'"):
        Own(ForwardMonitor(Mean())).loudest  # noqa: B018
