"""Calibration: methods against brute force over all numbers, and one recording that serves tensors, channels, groups and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recorders import SelectionError, calibration, load, merge, presets
from recorders.recordings.recording import Recording
from recorders.watch.calibration import Distribution, Scheme, entropy, importance, minmax, mse, percentile, ranges, weight_ranges
from recorders.watch.calibration.distribution import pooled
from reducers import Quantile, affine_qparams
from reducers.errors import ArgumentError


def sample(seed: int, shape: tuple[int, ...] = (4000,)) -> Tensor:
    """Numbers of a random scale, centre and tail, in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    power, scale, centre = 1 + 2 * torch.rand(3, generator=generator)
    return x.sign() * x.abs() ** power * (10 ** (2 * scale - 4)) + (centre - 1) * (seed % 3) * 0.1


def of_quantile(x: Tensor, bits: int) -> tuple[Quantile, Distribution]:
    quantile = Quantile(bits=bits)
    return quantile, Distribution.of_quantile(quantile, quantile.update({}, x))


seeds = st.integers(0, 10_000)


@settings(max_examples=20)
@given(seeds, st.sampled_from([5, 7]), st.booleans())
def test_minmax_is_exact_and_percentiles_have_the_error_of_quantile(seed: int, bits: int, symmetric: bool) -> None:
    x = sample(seed)
    quantile, distribution = of_quantile(x, bits)
    assert [end.item() for end in minmax(distribution)] == [x.min().item(), x.max().item()]
    assert [end.item() for end in percentile(100)(distribution, 8, False)] == [x.min().item(), x.max().item()]
    low, high = percentile(98)(distribution, 8, symmetric)
    if symmetric:
        largest = np.quantile(x.double().abs().numpy(), 0.98, method="inverted_cdf")
        expected = [-largest, largest]
    else:
        expected = list(np.quantile(x.double().numpy(), [(1 - 0.98) / 2, (1 + 0.98) / 2], method="inverted_cdf"))
    assert [low.item(), high.item()] == pytest.approx(expected, rel=quantile.error * (1 + 1e-9))
    exact = percentile(98)(Distribution.of_tensor(x), 8, symmetric)
    assert [end.item() for end in exact] == pytest.approx(expected, rel=1e-12)


def errors(x: Tensor, bits: int, symmetric: bool, mass: Tensor | None = None) -> dict[tuple[float, float], float]:
    """The mean squared error of each of the 100 ranges, over all numbers."""
    low, high = x.min().double().clamp(max=0), x.max().double().clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    first, found = -(2 ** (bits - 1)), {}
    for number in range(1, 101):
        ends = low * (number / 100), high * (number / 100)
        scale, zero_point = affine_qparams(*ends, bits, symmetric=symmetric)
        level = (x.double() / scale.double()).round() + zero_point
        shown = (level.clamp(first, -first - 1) - zero_point) * scale.double()
        found[ends[0].item(), ends[1].item()] = ((shown - x.double()).square() * (1 if mass is None else mass)).mean().item()
    return found


@settings(max_examples=5)
@given(seeds, st.sampled_from([4, 8]), st.booleans())
def test_mse_finds_the_best_range_that_brute_force_finds(seed: int, bits: int, symmetric: bool) -> None:
    x = sample(seed)
    found = errors(x, bits, symmetric)
    best = min(found.values())
    low, high = mse(Distribution.of_tensor(x), bits, symmetric)
    assert found[low.item(), high.item()] == pytest.approx(best, rel=1e-9)
    quantile, distribution = of_quantile(x, 7)
    low, high = mse(distribution, bits, symmetric)
    error, rms = found[low.item(), high.item()], x.double().square().mean().sqrt().item()
    assert error**0.5 <= best**0.5 + 2 ** (1 - quantile.bits) * rms  # what its documentation promises
    assert error <= 1.05 * best  # what is usual


def by_the_book(x: Tensor, bits: int) -> float:
    """The clip of TensorRT's and ModelOpt's calibrators, step by step, from a histogram of all magnitudes."""
    bins, edges = np.histogram(x.abs().double().numpy(), bins=2048, range=(0, x.abs().max().item()))
    bins = bins.astype(float)
    bins[0] = bins[1]
    levels, found = 2 ** (bits - 1), []
    for kept in range(128, 2049):
        level = np.digitize(range(kept), np.linspace(0, kept, levels + 1)) - 1
        there = bins[:kept] != 0
        means = np.bincount(level, bins[:kept], levels) / np.bincount(level, there, levels).clip(1)
        shown = np.where(there, means[level], 0.0)
        actual = bins[:kept].copy()
        actual[-1] += bins[kept:].sum()
        p, q = actual / actual.sum(), shown / shown.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append(np.where(p > 0, p * np.log(p / q), 0.0).sum())
    least = min(found)
    return float(edges[128 + max(at for at, each in enumerate(found) if each <= least * (1 + 1e-9))])


@pytest.mark.parametrize("seed", [0, 1])
def test_entropy_clips_as_a_histogram_of_all_numbers_says(seed: int) -> None:
    x = sample(seed, (200_000,)).clamp(-4.0, 4.0)
    expected = by_the_book(x, 4)
    assert entropy(Distribution.of_tensor(x), 4).high.item() == pytest.approx(expected, rel=1e-6)
    assert entropy(of_quantile(x, 7)[1], 4).high.item() == pytest.approx(expected, rel=0.05)
    low, high = entropy(Distribution.of_tensor(x.abs()), 4, symmetric=False)
    assert (low.item(), high.item()) == (x.abs().min().item(), pytest.approx(expected, rel=1e-6))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


BATCHES = tuple(sample(seed, (16, 3, 8)) for seed in range(16))


def record(net: nn.Module, batches: tuple[Tensor, ...] = BATCHES, **options: object) -> Recording:
    with torch.inference_mode(), presets.calibration(**options).modules(net, types=nn.Linear) as recorder:  # type: ignore[arg-type]
        for batch in batches:
            net(batch)
    return recorder.snapshot()


def inputs(net: Net) -> dict[str, Tensor]:
    with torch.inference_mode():
        return {"first": torch.cat(BATCHES), "second": torch.cat([net.first(batch).relu() for batch in BATCHES])}


def test_one_recording_of_channels_serves_tensors_channels_and_groups(net: Net) -> None:
    recording = record(net, per_channel=True)
    assert list(recording) == ["input/first", "input/second", "output/first", "output/second"]
    for layer, x in inputs(net).items():
        groups = x.unflatten(-1, (-1, 4)).movedim(-2, 0).flatten(1)
        for per, rows in (("tensor", x.reshape(1, -1)), ("channel", x.flatten(0, 1).T), (4, groups)):
            low, high = ranges(recording, "input", Scheme(per=per))[layer]  # type: ignore[arg-type]
            assert (low.numel(), high.ndim) == (len(rows), int(per != "tensor"))
            assert low.reshape(-1).equal(rows.amin(1).double())
            assert high.reshape(-1).equal(rows.amax(1).double())


def test_big_inputs_are_recorded_by_channel_beside_their_squares(net: Net) -> None:
    """A `Quantile` is no column of the `Norm` beside it, of the same pattern, whose partial sums wait in slots."""
    x = sample(0, (4000, 8))
    recording = record(net, (x, 2 * x), per_channel=True)
    assert recording["input/first"].states[""]["values/counts"].sum(-1).tolist() == [8000] * 8
    squares, positions = importance(recording)["first"]
    torch.testing.assert_close(squares, 5 * x.double().square().sum(0), rtol=1e-12, atol=0)
    assert positions == 8000


def test_groups_and_tensors_of_less_memory_are_those_of_channels(net: Net) -> None:
    channels, groups, tensor = record(net, per_channel=True), record(net, group_size=2), record(net)
    for method in (minmax, percentile(99)):
        for per, less in ((2, groups), (4, groups), ("tensor", groups), ("tensor", tensor)):
            scheme = Scheme(per=per, method=method)  # type: ignore[arg-type]
            expected, found = ranges(channels, "input", scheme), ranges(less, "input", scheme)
            for layer, ends in expected.items():
                assert all(map(torch.equal, ends, found[layer]))
    assert all(each.squares.equal(importance(groups)[layer].squares) for layer, each in importance(channels).items())


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"group_size": 2}])
def test_eight_ranks_give_what_one_pass_gives_bit_for_bit(net: Net, tmp_path: Path, options: dict[str, object]) -> None:
    whole = record(net, **options)
    for rank in range(8):
        record(net, BATCHES[rank::8], **options).save(tmp_path / str(rank))
    merge([tmp_path / str(rank) for rank in range(8)]).save(tmp_path / "all")
    merged = load(tmp_path / "all")
    for name, part in whole.items():
        assert part.samples == merged[name].samples == len(BATCHES)
        for key, value in part.states[""].items():
            assert key == "squares/power" or value.equal(merged[name].states[""][key])
    again = importance(merged)
    for layer, (squares, positions) in importance(whole).items():
        torch.testing.assert_close(again[layer].squares, squares, rtol=1e-14, atol=0)
        assert again[layer].squares.float().equal(squares.float())
        assert again[layer].positions == positions == 16 * 16 * 3
    for method in (minmax, percentile(99), mse, entropy):
        found = ranges(merged, "input", Scheme(method=method))
        for layer, ends in ranges(whole, "input", Scheme(method=method)).items():
            assert all(map(torch.equal, ends, found[layer]))


def test_importance_is_the_sum_of_squares_and_leaves_out_what_is_not_finite(net: Net) -> None:
    for layer, x in inputs(net).items():
        squares, positions = importance(record(net))[layer]
        torch.testing.assert_close(squares, x.double().square().sum((0, 1)), rtol=1e-12, atol=0)
        assert positions == 16 * 16 * 3
    x = torch.tensor([[2.0] * 8, [2.0] * 7 + [torch.nan]])
    found = importance(record(nn.Sequential(net.first), (x,)))
    assert [(squares.tolist(), positions) for squares, positions in found.values()] == [([8.0] * 8, 2)]


@pytest.mark.parametrize("per", ["tensor", "channel", 4])
def test_weights_count_by_the_importance_of_their_inputs(net: Net, per: str | int) -> None:
    recording = record(net)
    found = weight_ranges(net, recording, Scheme(bits=4, per=per, method=mse, importance=True))  # type: ignore[arg-type]
    plain = weight_ranges(net, recording, Scheme(bits=4, per=per, method=mse))  # type: ignore[arg-type]
    assert any(not found[layer].low.equal(plain[layer].low) for layer in found)
    for layer, x in inputs(net).items():
        weight = net.get_submodule(layer).weight.detach()  # type: ignore[union-attr, operator]
        mass = x.double().square().mean((0, 1)).expand_as(weight)
        shape = {"tensor": (1, -1), "channel": (len(weight), -1)}.get(str(per), (-1, 4))
        ends = zip(*(end.reshape(-1).tolist() for end in found[layer]), strict=True)
        for row, of_row, each in zip(weight.reshape(shape), mass.reshape(shape), ends, strict=True):
            every = errors(row, 4, True, of_row)
            assert every[each] == pytest.approx(min(every.values()), rel=1e-9)


def test_pooling_is_exact(net: Net) -> None:
    x, quantile = sample(3, (50, 12)), Quantile("b c -> c")
    state = quantile.update({}, x)
    for size, pattern in ((3, "b g c -> g"), (12, "b g c -> g")):
        grouped = Quantile(pattern).update({}, x.reshape(50, -1, size))
        assert all(pooled(state, size)[key].equal(value) for key, value in grouped.items())
    whole = Quantile().update({}, x)
    assert all(pooled(state)[key].equal(value) for key, value in whole.items())
    assert all(pooled(whole)[key].equal(value) for key, value in whole.items())


def mistakes(net: nn.Module) -> Iterator[tuple[str, type[Exception], object]]:
    recording = record(net)
    inputs = {"input/first": recording["input/first"]}
    yield "no outputs of layers inside a net were recorded", SelectionError, lambda: ranges(inputs, "output")
    yield "tell no ranges per channel", ArgumentError, lambda: ranges(recording, "input", Scheme(per="channel"))
    yield "tell no ranges per 5", ArgumentError, lambda: ranges(record(net, per_channel=True), "input", Scheme(per=5))
    yield "no multiple of groups of 5", ArgumentError, lambda: weight_ranges(net, recording, Scheme(per=5))
    yield "no weight with rows", SelectionError, lambda: weight_ranges(nn.ModuleDict({"first": nn.ReLU()}), recording, Scheme())
    yield r"ranges\(side='outputs'\): choose 'input' or 'output'", ArgumentError, lambda: ranges(recording, "outputs")  # type: ignore[arg-type]
    yield r"needs a recorder or a recording; .* recorders.load\(path\)", TypeError, lambda: ranges("run")  # type: ignore[arg-type]
    yield r"recorders.load\(path\)", TypeError, lambda: calibration.to_imatrix("run", "x", {"a": "b"})  # type: ignore[arg-type]
    yield "a function as method", ArgumentError, lambda: Scheme(method="mse")  # type: ignore[arg-type]
    yield "percentage", ArgumentError, lambda: percentile(0)
    yield "2 to 11 bits", ArgumentError, lambda: entropy(Distribution.of_tensor(torch.ones(2)), 12)
    yield "positive number of channels", ArgumentError, lambda: Scheme(per=0)
    yield "bits", ArgumentError, lambda: Scheme(bits=1)
    yield "no zero point", ArgumentError, lambda: Scheme(float8=True, symmetric=False)
    yield "among integers", ArgumentError, lambda: Scheme(float8=True, method=mse)
    yield "a tensor has no finite numbers", ArgumentError, lambda: ranges(record(net, (torch.full((2, 8), torch.inf),)))
    yield "group_size", ArgumentError, lambda: presets.calibration(per_channel=True, group_size=2)
    yield "needs net", ArgumentError, lambda: calibration.to_modelopt(recording, "x", weights=Scheme())
    yield "needs net", ArgumentError, lambda: calibration.to_compressed_tensors(recording, "x", weights=Scheme())
    yield "nothing to write", ArgumentError, lambda: calibration.to_modelopt(recording, "x", inputs=None)
    yield "nothing to write", ArgumentError, lambda: calibration.to_compressed_tensors(recording, "x", inputs=None)
    yield "symmetric=True", ArgumentError, lambda: calibration.to_modelopt(recording, "x", inputs=Scheme(symmetric=False))
    yield "none per channel", ArgumentError, lambda: calibration.to_compressed_tensors(recording, "x", inputs=Scheme(per="channel"))
    yield "none for 4", ArgumentError, lambda: calibration.to_torchao(recording, "x", inputs=Scheme(bits=4))


def test_mistakes_are_named(net: Net) -> None:
    for message, kind, call in mistakes(net):
        with pytest.raises(kind, match=message):
            call()  # type: ignore[operator]
    other = Recording({"input/first": load_of_means(net)})
    with pytest.raises(SelectionError, match=r"presets\.calibration"):
        ranges(other)


def load_of_means(net: Net) -> object:
    from recorders import ForwardInputMonitor, Recorder
    from reducers import Mean

    with Recorder(input=ForwardInputMonitor(Mean())).modules(net, types=nn.Linear) as recorder:
        net(BATCHES[0])
    return recorder.snapshot()["input/first"]


class Places(nn.Module):
    """One activation function in places of 2 and 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.act = nn.Linear(4, 2), nn.Linear(2, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.wide(self.act(self.narrow(x))))


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_layer_of_several_places_has_one_range_of_all(per_channel: bool) -> None:
    net, x = Places(), torch.randn(50, 4)
    with presets.calibration(per_channel=per_channel).modules(net) as recorder:
        net(x)
    recording = recorder.snapshot()
    low, high = calibration.ranges(recording, "input")["act"]
    narrow = net.narrow(x)
    wide = net.wide(narrow.tanh())
    assert (low.item(), high.item()) == (min(narrow.min(), wide.min()).item(), max(narrow.max(), wide.max()).item())
    if per_channel:
        with pytest.raises(SelectionError, match=r"act has 2 tensors, \['', '8 channels'\]: calibration is of layers with one"):
            calibration.ranges(recording, "input", calibration.Scheme(per="channel"))


def test_entropy_at_8_bits_of_a_sparse_tail_is_within_a_third_of_all_numbers() -> None:
    for seed in range(3):
        x = torch.randn(50_000, generator=torch.Generator().manual_seed(seed)).exp()
        wanted = entropy(Distribution.of_tensor(x), 8).high.item()
        assert 0.95 * wanted <= entropy(of_quantile(x, 7)[1], 8).high.item() <= 4 / 3 * wanted


def test_channels_that_are_no_groups_and_layers_without_numbers_are_named() -> None:
    net = nn.Sequential(nn.Linear(8, 2))
    with presets.calibration(per_channel=True).modules(net, types=nn.Linear) as recorder:
        net(torch.randn(4, 8))
    with pytest.raises(ArgumentError, match="8 channels are no whole number of groups of 3"):
        ranges(recorder.snapshot(), "input", Scheme(per=3))
    with presets.calibration().modules(net, types=nn.Linear) as recorder:
        net(torch.randn(0, 8))
    with pytest.raises(SelectionError, match=r"input/0 has recorded no numbers: its inputs were empty"):
        ranges(recorder.snapshot(), "input")
