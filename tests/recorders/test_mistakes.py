"""Mistakes that other systems of this kind are known for, each shown not to be made here (lenses: `test_lenses.py`)."""

from __future__ import annotations

import torch
from torch import nn

from recorders import DifferenceMonitor, ForwardMonitor, Recorder, StateMonitor
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
