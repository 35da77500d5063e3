"""The noise scale of gradients: that of the paper, by hand, and of a problem of which it is known."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from recorders import Inspector, LensError, lenses
from recorders.watch.lenses.noise import Scatter


def by_hand(gradients: Tensor) -> dict[str, float]:
    """McCandlish et al., equations A.2 and A.3, of gradients of steps [n, d]: a step is the small batch, all are the big one."""
    big, small = len(gradients), 1
    square_small, square_big = gradients.square().sum(1).mean(), gradients.mean(0).square().sum()
    signal = (big * square_big - small * square_small) / (big - small)
    noise = (square_small - square_big) / (1 / small - 1 / big)
    return {"noise": float(noise), "signal": float(signal), "mean": float(noise / signal)}


@pytest.mark.parametrize("batch_size", [None, 16])
def test_noise_scales_are_those_of_the_paper(batch_size: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with Inspector(net, lenses.GradientNoise(batch_size=batch_size)) as inspector:
        for _ in inspector.range(2):
            kept: dict[str, list[Tensor]] = {}
            for _ in range(6):
                optimizer.zero_grad()
                for _ in range(2):  # micro-batches
                    ((net(torch.randn(8, 5, dtype=torch.float64)) - 1).square().mean() / 2).backward()
                for name, parameter in net.named_parameters():
                    kept.setdefault(name, []).append(parameter.grad.flatten().clone())
                optimizer.step()
    row = inspector.timeline.at(1)
    places = {"Weight Gradient Noise Scale/0": "0.weight", "Bias Gradient Noise Scale/0": "0.bias"}
    places["Weight Gradient Noise Scale/2"] = "2.weight"
    assert row.keys() == places.keys()
    for name, parameter in places.items():
        wanted = by_hand(torch.stack(kept[parameter]))
        wanted["mean"] *= batch_size or 1
        assert row[name] == pytest.approx({**wanted, "count": 6, "nonfinite": 0}, rel=1e-9)


def test_the_scale_of_a_linear_regression_is_the_number_of_features_plus_one() -> None:
    """For x ~ N(0, 1), gradients x x'd have the mean d and the covariance |d|^2 + d d', of trace |d|^2 (features + 1)."""
    torch.manual_seed(0)
    features, batch_size = 9, 32
    net, truth = nn.Linear(features, 1, bias=False), torch.randn(1, features)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with Inspector(nn.Sequential(net), lenses.GradientNoise("weight", batch_size)) as inspector:
        for _ in range(1500):
            x = torch.randn(batch_size, features)
            optimizer.zero_grad()
            (0.5 * (net(x) - x @ truth.T).square().mean()).backward()
            optimizer.step()
        inspector.tick_epoch()
    row = inspector.timeline.at(0)["Weight Gradient Noise Scale/0"]
    distance = float((net.weight.detach() - truth).square().sum())
    assert row["mean"] == pytest.approx(features + 1, rel=0.05)
    assert row["signal"] == pytest.approx(distance, rel=0.05)  # its standard error is 1.3 %
    assert row["noise"] == pytest.approx(distance * (features + 1) / batch_size, rel=0.05)


def test_a_signal_below_noise_has_no_scale_and_what_is_not_finite_is_counted() -> None:
    net = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    given = [[[1.0, 1.0, 1.0]], [[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], [[1.0, 2.0, 2.0], [float("nan"), 1.0, 1.0], [3.0, 2.0, 2.0]]]
    with Inspector(nn.Sequential(net), lenses.GradientNoise("weight")) as inspector:
        for epoch in inspector.range(3):
            for gradient in given[epoch]:
                net.weight.grad = torch.tensor([gradient])
                optimizer.step()
    alone, noisy, partly = (inspector.timeline.at(tick)["Weight Gradient Noise Scale/0"] for tick in range(3))
    assert alone == {"count": 1, "nonfinite": 0}
    assert noisy == {"count": 2, "nonfinite": 0, "noise": 2.0, "signal": -1.0}
    assert partly == pytest.approx({"count": 2, "nonfinite": 1, "noise": 2.0, "signal": 11.0, "mean": 2 / 11})


def test_states_merge_in_any_grouping_and_start_with_nothing_finite() -> None:
    torch.manual_seed(0)
    scatter = Scatter()
    xs = [torch.full((4, 3), torch.inf), *(torch.randn(4, 3) + 1e3 for _ in range(7))]
    one_by_one: dict[str, Tensor] = {}
    for x in xs:
        one_by_one = scatter.update(one_by_one, x)
    parts = [scatter.merge_all([scatter.update({}, x) for x in group]) for group in (xs[:1], xs[1:4], xs[4:])]
    values = torch.stack(xs[1:]).double()
    for state in (one_by_one, scatter.merge(parts[0], scatter.merge(parts[1], parts[2])), scatter.merge_all(parts)):
        found = scatter.compute(state)
        assert (found["count"], found["nonfinite"]) == (7, 1)
        assert found["scatter"].item() == pytest.approx((values - values.mean(0)).square().sum().item(), rel=1e-9)
        assert found["square"].item() == pytest.approx(values.mean(0).square().sum().item(), rel=1e-12)


def test_far_means_beside_nothing_finite_and_numbers_of_8_bits_scatter_nothing() -> None:
    scatter = Scatter()
    for x in (torch.full((3,), 1e160, dtype=torch.float64), torch.ones(3).to(torch.float8_e4m3fn)):
        state = scatter.update(scatter.update({}, torch.full((3,), torch.nan)), x)
        assert scatter.compute(state)["scatter"] == 0
        assert scatter.compute(state)["count"] == scatter.compute(state)["nonfinite"] == 1


def test_the_lens_is_data_and_refuses_what_is_no_batch_size() -> None:
    lens = lenses.GradientNoise()
    assert pickle.loads(pickle.dumps(lens)).charts == lens.charts
    with pytest.raises(LensError, match="batch_size=0"):
        lenses.GradientNoise(batch_size=0)
