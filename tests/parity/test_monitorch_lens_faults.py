"""Where lenses of monitorch and ours differ on purpose: layers left out, errors in the training, wrong names and orders there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parity_monitorch import Kept, same_lines, watch_both
from torch import Tensor, nn

from recorders import Inspector, lenses
from recorders.errors import SelectionError

theirs = pytest.importorskip("monitorch.lens")

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # theirs, on the first layer

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_layers_that_lack_a_parameter_or_contain_modules(seed: int) -> None:
    """They leave out a layer that lacks one of the names, with the other too; modules that contain others count in both."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
            self.inside = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = self.inside(x) * self.weight + self.bias
            return scaled

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), Block()).double()

    kept, our = watch_both(seed, lambda _: [theirs.ParameterNorm()], [lenses.ParameterNorm()], make=make, shape=(3,))
    assert list(kept.lines[1]["Weight Norm"]) == ["0", "1"]
    assert [(chart.title, chart.layers) for chart in our.charts[:2]] == [
        ("Weight Norm", ("0", "1", "1.inside")),
        ("Bias Norm", ("0", "1")),
    ]
    same_lines(kept, our, "Weight Norm")
    same_lines(kept, our, "Bias Norm")


@pytest.mark.parametrize("seed", SEEDS)
def test_what_raises_there(seed: int) -> None:
    """A layer that never ran, at the tick; a smaller batch, in the backward."""

    class Sleeper(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x  # type: ignore[no-any-return]

    def with_sleeper() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), Sleeper(nn.ReLU())).double()

    with pytest.raises(KeyError):
        watch_both(seed, lambda _: [theirs.OutputActivation()], [], make=with_sleeper, shape=(3,))
    _, our = watch_both(seed, lambda _: [], [lenses.OutputActivation()], make=with_sleeper, shape=(3,))
    assert our.charts[0].layers == ("1", "2.0")
    assert "Output Activation/2.0" not in our.timeline.at(0)

    with pytest.raises(RuntimeError, match="must match"):
        watch_both(seed, lambda _: [theirs.OutputGradientGeometry()], [], sizes=(6, 6, 4))
    _, our = watch_both(seed, lambda _: [], [lenses.OutputGradientGeometry()], sizes=(6, 6, 4))
    rows = our.timeline.at(0)
    assert (rows["Output Gradient Norm/0"]["count"], rows["Output Gradient Correlation/0"]["count"]) == (3, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_shown_wrong_there(seed: int) -> None:
    """One name is taken letter by letter; layers are turned round in every epoch; a lens that finds nothing is silent."""
    both: Any = [lambda _: [theirs.ParameterNorm(parameters="bias")], [lenses.ParameterNorm(parameters="bias")]]
    kept, our = watch_both(seed, *both, epochs=1)
    assert [tag for tag in kept.tags if "Comparison" not in tag] == ["B Norm", "I Norm", "A Norm", "S Norm"]
    assert our.charts[0].title == "Bias Norm"

    both = [lambda _: [theirs.OutputGradientGeometry()], [lenses.OutputGradientGeometry()]]
    kept, our = watch_both(seed, *both, sizes=(6, 6))
    orders = [tuple(tags["Output Gradient Norm"]) for tags in kept.lines.values()]
    assert orders == [("0", "2", "3", "5", "6"), ("6", "5", "3", "2", "0"), ("0", "2", "3", "5", "6")]
    assert our.charts[0].layers == orders[0]

    kept, _ = watch_both(seed, lambda _: [theirs.OutputNorm(activation=False)], [], epochs=1)
    assert kept.lines[1]["Output Norm"] == {}
    with pytest.raises(SelectionError, match="there are"):
        watch_both(seed, lambda _: [], [lenses.OutputNorm(activation=False)], epochs=1)


def test_kinds_of_modules_are_those_of_monitorch() -> None:
    from monitorch.lens import module_distinction as kinds
    from torch.nn import modules

    made = {"Softmax": {"dim": 0}, "LogSoftmax": {"dim": 0}, "Softmin": {"dim": 0}, "Threshold": {"threshold": 0.0, "value": 0.0}}
    activations = [kind(**made.get(kind.__name__, {})) for kind in kinds._ACTIVATION]
    assert len(activations) > 25
    assert not any(lenses.not_activation("", module) for module in activations)
    others = [
        modules.Linear(1, 1),
        modules.MultiheadAttention(2, 1),
        modules.BatchNorm1d(1),
        modules.Identity(),
        *(kind() for kind in kinds._DROPOUT),
    ]
    assert all(lenses.not_activation("", module) and not kinds.isactivation(module) for module in others)
    selects = lenses.OutputActivation(activation=False).where
    assert [selects("", module) for module in others] == [kinds.isdropout(module) for module in others]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_update_after_epochs_that_are_left_out(seed: int) -> None:
    """Theirs is the change since the last step that it saw, in all the epochs between."""
    from monitorch.inspector import PyTorchInspector

    torch.manual_seed(seed)
    net, kept, weights = nn.Linear(2, 1, bias=False).double(), Kept(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: Any = {"parameters": ("weight",), "compute_correlation": False}
    there = PyTorchInspector(
        [theirs.ParameterUpdateGeometry(optimizer, **options)], visualizer=kept, module=net, is_active_fn=lambda epoch: epoch != 2
    )
    here = Inspector(net, lenses.ParameterUpdateGeometry(**options), active=lambda epoch: epoch != 1)
    for _ in range(3):
        for _ in range(2):
            weights.append(net.weight.detach().clone())
            optimizer.zero_grad()
            net(torch.randn(4, 2, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        there.tick_epoch()
        here.tick_epoch()
    weights.append(net.weight.detach().clone())
    steps = [float((after - before).norm()) for before, after in itertools.pairwise(weights)]
    assert here.timeline.at(2)["Weight Update Norm/(Linear)"]["mean"] == pytest.approx((steps[4] + steps[5]) / 2, abs=1e-9)
    jump = float((weights[5] - weights[2]).norm())
    assert kept.lines[3]["Weight Update Norm"][""]["mean"] == pytest.approx((jump + steps[5]) / 2, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_subclasses_count_and_so_do_all_metrics_if_none_is_named(seed: int) -> None:
    class Mine(nn.Linear):
        pass

    options: Any = {"activation": False, "include": (nn.Linear,)}
    both: Any = [theirs.OutputNorm(**options), theirs.LossMetrics()], [lenses.OutputNorm(**options), lenses.LossMetrics()]
    kept, our = watch_both(
        seed,
        lambda _: both[0][:1],
        both[1],
        make=lambda: nn.Sequential(Mine(3, 2), nn.Linear(2, 2)).double(),
        shape=(3,),
        epochs=1,
        before_tick=lambda our: our.push_metric("speed", 1.0),
    )
    assert list(kept.lines[1]["Output Norm"]) == ["1"]
    assert [chart.layers for chart in our.charts if chart.title in ("Output Norm", "Metrics")] == [("0", "1"), ("speed",)]
    both[0][1].introduce_tags(kept)
    assert "Metrics" not in kept.tags


def test_condition_numbers_are_in_no_release_of_monitorch() -> None:
    assert not hasattr(theirs, "ParameterCond")
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.diag(torch.tensor([10.0, 1.0])))
    inspector = Inspector(net, lenses.ParameterCond())
    inspector.tick_epoch()
    assert inspector.timeline.at(0)["Weight Condition Number/(Linear)"]["mean"] == pytest.approx(10.0)
    assert torch.linalg.cond(net.weight.detach(), -2).item() == pytest.approx(0.1)
