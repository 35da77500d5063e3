"""The pattern "channels" in monitors: resolved when they are placed, and what is said if a pattern takes tokens for channels."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
    StateMonitor,
    TargetError,
    load,
)
from reducers import (
    EMA,
    Activity,
    Collect,
    Covariance,
    FirstNonfinite,
    GroupBy,
    Histogram,
    Idle,
    Masked,
    Mean,
    Moments,
    Norm,
    PerObservation,
    Product,
    Quantile,
    Reducer,
    Summary,
    TopK,
    Window,
)


def tokens() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.LayerNorm(6))


NESTED: list[tuple[Reducer, Reducer]] = [
    (Product(a=Mean("channels"), b=Moments()), Product(a=Mean("... c -> c"), b=Moments())),
    (Masked(Mean("channels")), Masked(Mean("... c -> c"))),
    (GroupBy(Mean("channels"), groups=2), GroupBy(Mean("... c -> c"), groups=2)),
    (PerObservation(Mean("channels"), Summary()), PerObservation(Mean("... c -> c"), Summary())),
    (Window(Mean("channels"), 3), Window(Mean("... c -> c"), 3)),
    (Covariance("channels"), Covariance("... c -> c")),
    (TopK("channels", k=2), TopK("... c -> c", k=2)),
    (Mean("channels").postmap(torch.sqrt), Mean("... c -> c").postmap(torch.sqrt)),
    (Mean("channels").premap(torch.abs), Mean("... c -> c").premap(torch.abs)),
]


@pytest.mark.parametrize(("given", "wanted"), NESTED, ids=lambda reducer: type(reducer).__name__)
def test_reducers_inside_others_are_resolved(given: Reducer, wanted: Reducer) -> None:
    monitor = ForwardMonitor(given, nn.Linear(2, 3))
    assert monitor.reducer == monitor.buffer.reducer == wanted
    assert monitor.constructor.reducer == wanted


@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor, BackwardMonitor])
def test_outputs_inputs_and_gradients_have_the_axis_of_the_layer(kind: Callable[..., Monitor]) -> None:
    conv = nn.Conv2d(2, 3, 1)
    monitor, last = kind(Mean("channels"), conv), kind(Mean("channels")).register(nn.Linear(2, 3))
    assert (monitor.reducer, last.reducer) == (Mean("b c ... -> c"), Mean("... c -> c"))
    conv(torch.ones(4, 2, 5, 5, requires_grad=True)).sum().backward()
    assert monitor.peek().shape == (2 if kind is ForwardInputMonitor else 3,)


def test_a_recording_holds_the_resolved_pattern_and_merges(tmp_path: Path) -> None:
    net = tokens()
    runs = []
    for _ in range(2):
        with Recorder(ForwardMonitor(Activity("channels"))).modules(net, leaves=True) as recorder:
            net(torch.randn(3, 5, 8))
        recorder.save(tmp_path / str(len(runs)))
        runs.append(load(tmp_path / str(len(runs))))
        assert "pattern='... c -> c'" in str(recorder.plan(torch.ones(3, 5, 8)))
    assert {part.reducer for run in runs for part in run.values()} == {Activity("... c -> c")}
    merged = runs[0].merge(runs[1])
    assert merged["1"].samples == 2
    assert merged["1"].peek()["rate"].shape == (6,)
    again = Recorder(ForwardMonitor(Activity("channels"))).modules(net, leaves=True)
    assert list(again.resume(tmp_path / "0")) == list(runs[0])


def test_equal_monitors_share_a_place_and_added_ones_know_the_net() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    recorder = Recorder(a=ForwardMonitor(Mean("channels")), b=ForwardMonitor(Mean("b c ... -> c"))).modules(net)
    assert recorder.aliases == {"b": "a", "b/0": "a/0", "b/1": "a/1"}
    recorder.add("mine", ForwardMonitor(Moments("channels")), net[1])
    assert recorder["mine"].reducer == Moments("b c ... -> c")


def test_a_module_that_holds_its_owner_has_channels() -> None:
    net = tokens()
    net[1].owner = net
    recorder = Recorder(ForwardMonitor(Mean("channels"))).modules(net, types=nn.LayerNorm)
    net[2](torch.ones(2, 6))
    assert recorder[0].peek().shape == (6,)


def test_compiled_graphs_record_channels() -> None:
    net = tokens()
    recorder = Recorder(ForwardMonitor(Mean("channels"))).modules(torch.compile(net, backend="eager", fullgraph=True))
    for x in torch.randn(2, 3, 5, 8):
        torch.compile(net, backend="eager", fullgraph=True)(x)
    assert {name: tuple(monitor.peek().shape) for name, monitor in recorder.items()} == dict.fromkeys(recorder, (6,))
    assert recorder["1"].reducer == Mean("... c -> c")


@pytest.mark.parametrize(
    "make",
    [
        lambda: CallMonitor(Mean("channels")),
        lambda: ParameterMonitor(Product(a=Mean("channels"))),
        lambda: StateMonitor(Mean("channels"), "weight"),
    ],
)
def test_what_is_no_layer_has_no_channels(make: Callable[[], Any]) -> None:
    with pytest.raises(TargetError, match=r"'channels' is an axis of what a layer .* write the pattern"):
        make()


def test_tokens_taken_for_channels_warn_once_a_recorder() -> None:
    net = tokens()
    recorder = Recorder(ForwardMonitor(Product(active=Activity(), stats=Summary()))).modules(net)
    with pytest.warns(RecordingWarning, match="counts tokens as channels; use the pattern 'channels'") as told:
        net(torch.randn(3, 5, 8))
    net(torch.randn(3, 5, 8))
    assert len(told) == 1
    assert recorder["0"].samples == 2
    with pytest.warns(RecordingWarning, match=r"Linear keeps axis 1 of shape \(3, 5, 6\)"):
        ForwardMonitor(Mean("b c d -> c"), net[0])
        net(torch.randn(3, 5, 8))


@pytest.mark.parametrize("pattern", ["b t d -> t", "b c -> c", "... c -> c", "... ->", "b ... c -> c", "channels"])
def test_other_patterns_and_shapes_do_not_warn(pattern: str) -> None:
    layer = nn.Linear(8, 6)
    monitor = ForwardMonitor(Mean(pattern), layer)
    mapped = ForwardMonitor(Mean("b c ... -> c"), layer, op_=lambda output: output.transpose(1, -1))
    fine = ForwardMonitor(PerObservation(Mean("b c ... -> c").premap(lambda x: x.mT), Summary("b c ... -> c")), layer)
    layer(torch.randn(3, 8) if pattern == "b c -> c" else torch.randn(3, 5, 8))
    assert (monitor.samples, mapped.samples, fine.samples) == (1, 1, 1)


def test_a_convolution_without_a_batch_warns() -> None:
    conv = nn.Conv2d(1, 2, 1)
    monitor = ForwardMonitor(Mean("channels"), conv)
    with pytest.warns(RecordingWarning, match="without a batch"):
        conv(torch.ones(1, 5, 5))
    assert monitor.samples == 1


def test_an_axis_that_nobody_tells_is_the_second_and_warns_if_it_matters() -> None:
    net = nn.Sequential(nn.ReLU())
    alone, recorder = ForwardMonitor(Mean("channels"), net[0]), Recorder(ForwardMonitor(Mean("channels"))).modules(net)
    assert alone.reducer == recorder["0"].reducer == Mean("b c ... -> c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.ones(2, 3))
    recorder.deregister()
    other = Recorder(ForwardMonitor(Mean("channels"))).modules(net)
    with pytest.warns(RecordingWarning, match=r"use the pattern '... c -> c', or say .*register_channel_axis\(") as told:
        net(torch.ones(2, 3, 4))
    assert len(told) == 1
    assert other["0"].peek().shape == (3,)


class Shared(nn.Module):
    """One ReLU and one dropout in places of 4, 6 and 4 channels, or each with modules of its own."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 4)])
        acts = [nn.ReLU() for _ in range(3)]
        self.acts = nn.ModuleList(acts if apart else [acts[0]] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(x))
        return x


EVERYTHING: dict[str, Reducer] = {
    "mean": Mean("channels"),
    "summary": Summary("channels"),
    "activity": Activity("channels"),
    "moments": Moments("channels", order=4),
    "covariance": Covariance("channels"),
    "quantile": Quantile("channels"),
    "histogram": Histogram("channels", bins=8, low=-1.0, high=1.0),
    "ema": EMA("channels", alpha=0.5),
    "window": Window(Mean("channels"), 2),
    "norms": PerObservation(Norm("channels"), Collect()),
    "product": Product(stats=Summary("channels"), idle=Idle("channels"), first=FirstNonfinite("channels"), all=Mean()),
}


same = partial(torch.testing.assert_close, equal_nan=True, rtol=0, atol=0)


def watched(kind: Callable[..., Monitor], apart: bool, run: Callable[[nn.Module], Any], look: bool = False) -> Recorder:
    net = Shared(apart)
    recorder = Recorder(**{name: kind(reducer, on_error="raise") for name, reducer in EVERYTHING.items()})
    recorder.modules(net, types=nn.ReLU)
    runs = run(net)
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        runs(torch.randn(5, 3, generator=generator)).sum().backward()
        if look:
            recorder.compute()
    return recorder


@pytest.mark.parametrize("kind", [ForwardMonitor, ForwardInputMonitor, BackwardMonitor])
@pytest.mark.parametrize(
    "run", [lambda net: net, partial(torch.compile, backend="aot_eager", fullgraph=True)], ids=["eager", "graph"]
)
def test_a_layer_of_several_places_has_a_leaf_for_each_number_of_channels(kind: Any, run: Any) -> None:
    found, apart = (watched(kind, one, run) for one in (False, True))
    for name in EVERYTHING:
        second = apart[f"{name}/acts.1"].compute()
        leaves = found[f"{name}/acts.0"].compute()
        assert [*leaves] == ["", "6 channels"]
        same(leaves["6 channels"], second, rtol=1e-13, atol=1e-15)  # they wait, and are joined, in other pieces
        assert found[f"{name}/acts.0"].samples == 120
    assert all(not row.skipped and row.error is None for row in found.report().rows)
    same(watched(kind, False, run, look=True).compute(), found.compute())


def test_leaves_of_numbers_of_channels_are_saved_merged_copied_and_gone_on_with(tmp_path: Path) -> None:
    found = watched(ForwardMonitor, False, lambda net: net)
    found.save(tmp_path / "run")
    loaded = load(tmp_path / "run")
    same(loaded.compute(), found.compute())
    twice = loaded.merge(load(tmp_path / "run"))
    (leaf,) = (twice["summary/acts.0"].compute()[path] for path in ("6 channels",))
    assert leaf["count"].tolist() == [400] * 6
    net = Shared(False)
    again = Recorder(**{name: ForwardMonitor(reducer) for name, reducer in EVERYTHING.items()}).modules(net, types=nn.ReLU)
    again.resume(tmp_path / "run")
    net(torch.ones(5, 3))
    leaves = again["summary/acts.0"].compute()
    assert [leaves[path]["count"].tolist() for path in leaves] == [[410] * 4, [205] * 6]
    same(copy.deepcopy(again).compute(), again.compute())


def test_lengths_of_sequences_are_no_numbers_of_channels() -> None:
    net = nn.Identity()
    monitor = ForwardMonitor(Mean("... c -> c"), net)
    for length in range(1, 10):
        net(torch.ones(2, length))
    assert [*monitor.compute()] == ["", *(f"{length} channels" for length in range(2, 10))]
    with pytest.warns(RecordingWarning, match="keeps shape"):
        net(torch.ones(2, 10))
    assert monitor.samples == 9


def test_a_layer_with_channels_of_its_own_and_other_patterns_have_one_leaf() -> None:
    layer, places = nn.Linear(3, 3), nn.ReLU()
    with Recorder(layer=ForwardMonitor(Mean("b t -> t"))).modules(places) as recorder:
        places(torch.ones(2, 3))
        with pytest.warns(RecordingWarning, match="keeps shape"):
            places(torch.ones(2, 4))
    assert recorder["layer"].compute().shape == (3,)
    monitor = ForwardMonitor(Mean("... c -> c"), layer)
    assert not monitor.buffer.by_channels


class Lossy(nn.Module):
    """Returns its loss beside its logits, as a model of Hugging Face does, and has a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": self.criterion(logits, y), "logits": logits}


@pytest.mark.parametrize(
    "run", [lambda net: net, partial(torch.compile, backend="aot_eager", fullgraph=True)], ids=["eager", "graph"]
)
def test_a_loss_has_no_channels_and_is_left_out_with_a_reason(run: Any) -> None:
    net = Lossy()
    kinds = {"out": ForwardMonitor(Mean("channels")), "grad": BackwardMonitor(Mean("channels"))}
    recorder = Recorder(**kinds, health=ForwardMonitor(Product(mean=Mean("channels"), all=Mean()))).modules(net)
    compiled = run(net)
    for _ in range(3):
        compiled(torch.randn(5, 3), torch.randint(4, (5,)))["loss"].backward()
    assert [*recorder["out"].compute()] == ["logits"]
    rows = {row.name: row for row in recorder.report().rows}
    assert rows["out"].skipped == {"leaf 'loss': it is a number, and the pattern keeps an axis": 3}
    for name in ("out/criterion", "grad/criterion", "health/criterion"):
        assert rows[name].skipped == {"it is a number, and the pattern keeps an axis": 3}
    assert "leaf 'loss': it is a number, and the pattern keeps an axis" in rows["grad"].skipped
    assert [row.error for row in rows.values()] == [None] * 9


def test_a_number_of_a_layer_with_channels_and_of_a_reducer_without_is_as_before() -> None:
    layer = nn.Linear(3, 4)
    monitor = ForwardMonitor(Mean("channels"), layer, op_=lambda output, inputs: output.mean())
    with pytest.warns(RecordingWarning, match="needs at least 1 axes"):
        layer(torch.ones(2, 3))
    assert monitor.samples == 0
    loss = nn.CrossEntropyLoss()
    total = ForwardMonitor(Mean(), loss)
    loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert total.samples == 1


class Squeezed(nn.Module):
    """Returns one number for each sample, by modules whose channels no layer before them tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act, self.criterion = nn.Parameter(torch.ones(3)), nn.Sigmoid(), nn.BCELoss(reduction="none")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses: Tensor = self.criterion(self.act((x * self.weight).sum(-1)), y)
        return losses.mean()


@pytest.mark.parametrize(
    "run", [lambda net: net, partial(torch.compile, backend="aot_eager", fullgraph=True)], ids=["eager", "graph"]
)
def test_one_number_for_each_sample_has_no_channels_and_is_left_out_with_a_reason(run: Any) -> None:
    net = Squeezed()
    kinds = {"out": ForwardMonitor(Mean("channels")), "grad": BackwardMonitor(Mean("channels"))}
    recorder = Recorder(**kinds, all=ForwardMonitor(Mean())).modules(net, types=(nn.Sigmoid, nn.BCELoss))
    compiled = run(net)
    for _ in range(3):
        compiled(torch.randn(5, 3), torch.ones(5)).backward()
    rows = {row.name: row for row in recorder.report().rows}
    for name in ("out/act", "out/criterion", "grad/act", "grad/criterion"):
        assert rows[name].skipped == {"it is one number for each sample, and the pattern keeps channels": 3}
    assert recorder["all/act"].samples == 3
    assert [row.error for row in rows.values()] == [None] * 6
