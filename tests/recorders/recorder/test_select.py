"""Selection: criteria that all must hold, canonical names, aliases, and errors that list what there is."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recorders import ForwardMonitor, OptimizerMonitor, ParameterGradientMonitor, Recorder, SelectionError, TargetError
from reducers import Collect, Count, Mean


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = self.decoder[0]  # another name for the same module
        self.decoder[0].weight = self.encoder[0].weight  # and the same parameter in two modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.encoder(x)))


def names(**criteria: object) -> list[str]:
    recorder = Recorder(ForwardMonitor(Count())).modules(Net(), **criteria)  # type: ignore[arg-type]
    return list(recorder)


def test_modules_are_all_of_them_the_net_first_and_each_once() -> None:
    assert names() == ["", "encoder", "encoder.0", "encoder.1", "encoder.2", "decoder", "decoder.0", "decoder.1"]


def test_children_are_the_direct_ones_only() -> None:
    recorder = Recorder(ForwardMonitor(Count())).children(Net())
    assert list(recorder) == ["encoder", "decoder", "head"]


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ({"types": nn.Linear}, ["encoder.0", "encoder.2", "decoder.0"]),
        ({"types": (nn.ReLU, nn.Tanh)}, ["encoder.1", "decoder.1"]),
        ({"types": nn.Linear, "indices": (2, 3, 4)}, ["encoder.0", "encoder.2"]),
        ({"indices": -1}, ["decoder.1"]),
        ({"names": "encoder.*"}, ["encoder.0", "encoder.1", "encoder.2"]),
        ({"names": ["head", "encoder"]}, ["encoder", "decoder.0"]),
        ({"names": re.compile(r"\.[01]$")}, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        ({"leaves": True, "exclude": nn.Linear}, ["encoder.1", "decoder.1"]),
        ({"exclude": ["encoder*", nn.Tanh]}, ["", "decoder", "decoder.0"]),
        ({"depth": 1}, ["", "encoder", "decoder"]),
        ({"where": lambda name, module: isinstance(module, nn.Sequential)}, ["encoder", "decoder"]),
        ({"leaves": True, "names": "decoder.*", "types": nn.Linear}, ["decoder.0"]),
    ],
)
def test_criteria_all_must_hold(criteria: dict[str, object], expected: list[str]) -> None:
    assert names(**criteria) == expected


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ({"types": nn.Conv2d}, r"matches no module; there are 8 modules: \(net\), encoder,.*'Linear': 3"),
        ({"names": "encodr.0"}, r"no module named 'encodr.0'; did you mean 'encoder.0'"),
        ({"names": ["encoder.0", "absent"]}, "no module named 'absent'"),
        ({"names": re.compile("^x")}, "no module named /\\^x/"),
        ({"indices": (0, 99)}, r"no module at \[99\]: indices run from 0 to 7"),
        ({"types": nn.Linear, "indices": 0}, r"the selection \(types=.*Linear.*indices=0\) matches no module"),
    ],
)
def test_nothing_matched_is_an_error_that_lists_what_there_is(criteria: dict[str, object], message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        names(**criteria)


def test_wrong_kinds_of_criteria_are_said() -> None:
    with pytest.raises(TypeError, match="give a module class"):
        names(types="Linear")
    with pytest.raises(TypeError, match="give names, globs"):
        names(names=[nn.Linear])
    with pytest.raises(TargetError, match=r"torch.nn.Module is needed to select from; got list"):
        Recorder(ForwardMonitor(Count())).modules([nn.Linear(1, 1)])  # type: ignore[arg-type]


def test_aliases_are_names_of_the_same_subrecorder() -> None:
    net = Net()
    recorder = Recorder(out=ForwardMonitor(Count())).modules(net, types=nn.Linear)
    assert recorder.aliases == {"out/head": "out/decoder.0"}
    assert recorder["out/head"] is recorder["out/decoder.0"]
    net(torch.ones(1, 4))
    assert recorder.samples["out/head"] == 2  # it is called twice, and each call is counted once
    assert recorder.samples["out/encoder.0"] == 1


def test_a_further_name_is_not_given_to_another_module_without_a_word() -> None:
    first, second = Net(), Net()
    recorder = Recorder(ForwardMonitor(Count())).modules(first, names="decoder.0")
    assert recorder.modules(first, names="decoder.0").aliases == {"head": "decoder.0"}
    second.decoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    second.head = second.decoder[1]
    with pytest.raises(SelectionError, match=r"'head' is taken by another module: keep the two apart with prefix='...'"):
        recorder.modules(second, names="decoder.1")
    assert (list(recorder), recorder.aliases, second.head._forward_hooks) == (["decoder.0"], {"head": "decoder.0"}, {})
    recorder.modules(second, names="b.decoder.1", prefix="b")
    assert recorder.aliases == {"head": "decoder.0", "b.head": "b.decoder.1"}
    third = nn.ModuleDict({"decoder": nn.ModuleList([nn.Linear(1, 1), first.decoder[0]])})
    recorder.add("decoder.1", ForwardMonitor(Count()), nn.Linear(1, 1))
    with pytest.raises(SelectionError, match=r"'decoder.1' is taken by another module"):
        recorder.modules(third, names="decoder.1")


def test_parameters_by_name_with_tied_ones_once() -> None:
    net = Net()
    recorder = Recorder(ParameterGradientMonitor(Mean())).parameters(net, names="*weight")
    assert list(recorder) == ["encoder.0.weight", "encoder.2.weight"]
    assert recorder.aliases == {"decoder.0.weight": "encoder.0.weight", "head.weight": "encoder.0.weight"}
    net(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    torch.testing.assert_close(recorder["head.weight"].peek().float(), net.encoder[0].weight.grad.mean())
    assert list(recorder.samples.values()) == [1, 1]


def test_parameters_need_monitors_that_watch_them() -> None:
    with pytest.raises(SelectionError, match=r"\['ForwardMonitor'\] watch modules, not parameters"):
        Recorder(ForwardMonitor(Mean())).parameters(Net())


def test_modules_without_parameters_are_passed_by_and_none_left_is_an_error() -> None:
    recorder = Recorder(grad=ParameterGradientMonitor(Mean())).modules(Net(), leaves=True)
    assert list(recorder) == ["grad/encoder.0", "grad/encoder.2", "grad/decoder.0"]
    with pytest.raises(SelectionError, match=r"none of the 2 modules selected has anything to watch for ParameterGr"):
        Recorder(grad=ParameterGradientMonitor(Mean())).modules(Net(), types=(nn.ReLU, nn.Tanh))


def test_wrappers_leave_the_names_as_they_were() -> None:
    plain = list(Recorder(ForwardMonitor(Count())).modules(Net()))
    net = Net()
    net.encoder = checkpoint_wrapper(net.encoder)
    for wrapped in (torch.compile(net), nn.DataParallel(net), nn.DataParallel(torch.compile(net))):
        assert list(Recorder(ForwardMonitor(Count())).modules(wrapped).deregister()) == plain

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)  # a user's own name, not a wrapper's

    assert list(Recorder(ForwardMonitor(Count())).modules(Own())) == ["", "module"]


def test_a_module_inside_itself_ends() -> None:
    net = nn.Sequential(nn.Linear(1, 1))
    net.add_module("again", net)
    assert list(Recorder(ForwardMonitor(Count())).modules(net)) == ["", "0"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_modules_that_take_no_hooks_are_refused_with_the_way_to_leave_them_out() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU())
    with pytest.raises(TargetError, match=r"not supported on ScriptModules; leave it out with exclude=torch\.jit\.ScriptModule"):
        Recorder(ForwardMonitor(Mean())).modules(net)
    recorder = Recorder(ForwardMonitor(Mean())).modules(net, exclude=torch.jit.ScriptModule)
    net(torch.ones(1, 2))
    assert {name: monitor.samples for name, monitor in recorder.items()} == {"": 1, "1": 1}


def test_depth_counts_below_a_prefix_and_children_of_a_wrapper_are_those_of_the_net() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for depth, found in enumerate((["student"], ["student", "student.0", "student.1"])):
        with Recorder(ForwardMonitor(Count())).modules(net, depth=depth, prefix="student") as recorder:
            assert list(recorder) == found
    for wrapped in (net, nn.DataParallel(net), torch.compile(net, backend="eager")):
        with Recorder(ForwardMonitor(Count())).children(wrapped) as recorder:
            assert list(recorder) == ["0", "1"]


def test_what_watches_the_net_watches_what_a_wrapper_holds() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(rate=OptimizerMonitor(Collect(), op_=lambda optimizer: optimizer.param_groups[0]["lr"]))
    recorder.modules(torch.compile(net, backend="eager")).modules(nn.DataParallel(net))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(2):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert recorder.samples == {"rate": 2}
