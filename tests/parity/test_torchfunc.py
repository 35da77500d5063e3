"""The recorders of torchfunc beside ours, with their own classes: `pip install '.[parity]'`, or these tests skip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardInputMonitor, BackwardMonitor, ForwardInputMonitor, ForwardMonitor, Monitor, Recorder, load
from reducers import Fold, Sum, Whole

SEEDS = range(3)
same = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture
def theirs() -> Any:
    return pytest.importorskip("torchfunc.hooks.recorders")


class Tupled(nn.Linear):
    """torchfunc iterates over what a module returns: over a tuple, as here, or over the rows of a lone tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


class Net(nn.Sequential):
    """Three layers that return tuples; the module between the second and the third contains one."""

    def __init__(self) -> None:
        super().__init__(Tupled(3, 4), Tupled(4, 4), nn.Sequential(Tupled(4, 2)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        (x,) = self[0](x)
        (x,) = self[1](x.relu())
        (x,) = self[2](x.relu())
        return x


FORWARD = {"ForwardPre": ForwardInputMonitor, "ForwardInput": ForwardInputMonitor, "ForwardOutput": ForwardMonitor}
BACKWARD = {"BackwardInput": BackwardInputMonitor, "BackwardOutput": BackwardMonitor}


def stream(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(4)]


def observed(monitor: Monitor) -> list[Tensor]:
    """What a monitor with `Whole` or `Fold` recorded: a list of observations."""
    found = monitor.peek()
    if isinstance(found, dict) and set(found) == {"0"} and monitor.states.keys() == {"0"}:
        found = found["0"]  # the path of the leaf
    return list(found.values()) if isinstance(found, dict) else [found]


def agree(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.row("ForwardPre, ForwardInput", "ForwardOutput", "condition=", "reduction=", "no reduction (a list)", "recorder[i]")
@same
@pytest.mark.parametrize("kind", FORWARD)
@pytest.mark.parametrize("summed", [False, True], ids=["list", "reduction"])
def test_forward_recorders(theirs: Any, kind: str, seed: int, summed: bool) -> None:
    torch.manual_seed(seed)
    net, calls = Net(), 0

    def condition() -> bool:
        return calls != 1

    there = getattr(theirs, kind)(condition=condition, reduction=torch.add if summed else None).modules(net, types=Tupled)
    ours = Recorder(FORWARD[kind](Fold(torch.add) if summed else Whole(), condition=condition)).modules(net, types=Tupled)
    for x in stream(seed):
        net(x)
        calls += 1
    for index in range(3):
        agree(observed(ours[index]), [there[index]] if summed else there[index])
    assert len(observed(ours[0])) == (1 if summed else 3)


legacy = pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")


@pytest.mark.row("BackwardInput", "BackwardOutput")
@legacy
@same
@pytest.mark.parametrize("kind", BACKWARD)
def test_backward_recorders(theirs: Any, kind: str, seed: int) -> None:
    net = nn.Sequential(nn.Tanh())  # their hooks, which PyTorch has replaced, are right on modules of one operation only
    there = getattr(theirs, kind)().children(net)
    ours = Recorder(BACKWARD[kind](Whole())).children(net)
    for x in stream(seed):
        net(x.requires_grad_()).square().sum().backward()
    agree(observed(ours[0]), there[0])


@legacy
@same
def test_their_backward_recorders_mix_up_layers(theirs: Any, seed: int) -> None:
    net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    there = theirs.BackwardOutput().children(net)
    ours = Recorder(BackwardMonitor(Whole())).children(net)
    net(stream(seed)[0].requires_grad_()).square().sum().backward()
    # The gradient of the second layer comes first, and opens the list that the first layer then appends to.
    assert len(there.data) == 1
    agree([*observed(ours["1"]), *observed(ours["0"])], there[0])


@pytest.mark.row("modules, children with types, indices")
@same
@pytest.mark.parametrize("method", ["modules", "children"])
@pytest.mark.parametrize("criteria", [{}, {"types": Tupled}, {"indices": (1, 2)}], ids=["all", "types", "indices"])
def test_selections(theirs: Any, seed: int, method: str, criteria: dict[str, Any]) -> None:
    torch.manual_seed(seed)
    net = Net()
    there = getattr(theirs.ForwardPre(reduction=torch.add), method)(net, **criteria)
    ours = getattr(Recorder(ForwardInputMonitor(Fold(torch.add))), method)(net, **criteria)
    for x in stream(seed):
        net(x)
    assert len(there) == len(ours)
    agree([observed(monitor)[0] for monitor in ours.values()], list(there))


def test_types_and_indices_together_select_everything_there(theirs: Any) -> None:
    net = Net()
    assert len(theirs.ForwardInput().modules(net, types=Tupled, indices=(1,))) == len(list(net.modules()))
    assert list(Recorder(ForwardInputMonitor(Whole())).modules(net, types=Tupled, indices=(1,))) == ["0"]


@pytest.mark.row("iteration, len, remove", "samples(i), iter_samples()")
@same
def test_iteration_counts_and_removal(theirs: Any, seed: int) -> None:
    net = nn.Sequential(nn.Identity(), nn.Identity())
    there = theirs.ForwardInput(reduction=torch.add).children(net)
    ours = Recorder(ForwardInputMonitor(Fold(torch.add))).children(net)
    xs = stream(seed)
    for x in xs:
        net(x)
    assert len(ours) == len(there) == 2
    agree([monitor.peek() for monitor in ours.values()], list(there))
    assert list(ours.samples.values()) == list(there.iter_samples()) == [4, 4]
    assert ours.samples[1] == there.samples(1) == 4
    agree([ours.remove(1).peek()], [there.remove(1)])
    assert len(ours) == len(there) == 1
    net(xs[0])
    assert ours.samples[0] == there.samples(0) == 5


@pytest.mark.row("apply, apply_sample")
@same
def test_apply_has_no_effect_there_and_changes_results_here(theirs: Any, seed: int) -> None:
    net = nn.Sequential(nn.Identity())
    there = theirs.ForwardInput(reduction=torch.add).children(net)
    ours = Recorder(ForwardInputMonitor(Sum("b c -> b c"))).children(net)
    for x in stream(seed):
        net(x)
    before = there[0].clone()
    seen: list[tuple[Any, int]] = []

    def mean(total: Tensor, samples: int) -> Tensor:
        seen.append((total, samples))
        return total / samples

    double: Callable[[Tensor], Tensor] = lambda total: total * 2  # noqa: E731
    there.apply(double)
    there.apply_sample(mean)
    assert torch.equal(there[0], before)  # what the functions return is dropped
    ours.apply(double).apply_sample(mean)
    agree([ours[0].peek()], [before * 2 / 4])
    assert [samples for _, samples in seen] == [4, 4]


@pytest.mark.row("save(path, mkdir=True)")
@same
def test_saved_files(theirs: Any, seed: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Identity(), nn.Tanh())
    there = theirs.ForwardInput(reduction=torch.add).children(net)
    ours = Recorder(ForwardInputMonitor(Fold(torch.add))).children(net)
    for x in stream(seed):
        net(x)
    there.save(tmp_path / "theirs", mkdir=True)
    ours.save(tmp_path / "ours")
    loaded = load(tmp_path / "ours")
    agree([loaded[index].peek() for index in range(2)], [torch.load(tmp_path / "theirs" / f"{index}.pt") for index in range(2)])


@pytest.mark.row("torchfunc.hooks.registrators, which register any hook")
@same
def test_functions_that_only_look_are_called_alike(seed: int) -> None:
    registrators = pytest.importorskip("torchfunc.hooks.registrators")
    net = Net()
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    there = registrators.Forward(lambda module, inputs, outputs: theirs.append(outputs[0].norm())).modules(net, types=Tupled)

    def look(outputs: tuple[Tensor, ...]) -> Tensor:
        ours.append(outputs[0].norm())
        return ours[-1]

    recorder = Recorder(ForwardMonitor(Whole(), op_=look)).modules(net, types=Tupled)
    for x in stream(seed):
        net(x)
    agree(ours, theirs)
    agree(list(recorder[1].peek().values()), theirs[1::3])
    assert len(there) == len(recorder) == 3
