"""Presets: each is a recorder that is ready for a whole network."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recorders import Recorder, SelectionError, findings, load, presets
from recorders.errors import LensError
from reducers.errors import ArgumentError


class Net(nn.Module):
    """Blocks in a list, which nobody calls, and attention that returns its probabilities."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width)) for _ in range(2)])
        self.attention, self.head = nn.MultiheadAttention(width, 2, batch_first=True), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.attention(x, x, x)[0])
        return out


def train(net: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for x in torch.randn(steps, 16, 5, 8, generator=torch.Generator().manual_seed(0)):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_health_leaves_nothing_unexamined_and_names_planted_dead_units(net: Net, tmp_path: Path) -> None:
    nn.init.constant_(net.blocks[1][0].bias[2:4], -12.0)
    with presets.health().modules(net) as recorder:
        train(net)
    recorder.save(tmp_path / "run")
    for recorded in (recorder, load(tmp_path / "run")):
        found = findings(recorded)
        assert (list(found), found.unexamined) == ([], ())
        told = {notice.layer: notice.what for notice in found.notices}
        assert told["blocks.1.1"] == "2 of 8 units (2, 3) are dead: they were never active"
    assert "notice: blocks.1.1: 2 of 8 units (2, 3) are dead" in str(found)
    assert "notice: 2 of 8 units (2, 3) are dead" in repr(found)


@pytest.mark.parametrize("per_channel", [False, True])
def test_calibration_records_inputs_and_outputs_of_layers(per_channel: bool, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4))
    x = torch.randn(3, 5, 8)
    with presets.calibration(per_channel=per_channel).modules(net) as recorder:
        y = net(x).detach()
    recorder.save(tmp_path / "run")
    for found in (recorder, load(tmp_path / "run")):
        for name, tensor in (("input/0", x), ("output/0", y)):
            rows = tensor.flatten(0, 1) if per_channel else tensor.reshape(-1, 1)
            low, _, high = found[name].peek()["values"]
            assert low.equal(rows.amin(0).double().reshape(low.shape))
            assert high.equal(rows.amax(0).double().reshape(high.shape))
        torch.testing.assert_close(found["input/0"].peek()["squares"], x.double().flatten(0, 1).norm(dim=0))
    with pytest.raises(ArgumentError, match="bits"):
        presets.calibration(mantissa_bits=0)


def test_outliers_counts_features_of_every_layer(net: Net) -> None:
    with torch.no_grad():
        net.blocks[0][2].bias[3] = 50.0
    with torch.no_grad(), presets.outliers().modules(net.eval()) as recorder:
        net(torch.randn(4, 5, 8))
    features = recorder["blocks.0.2"].peek()["features"]
    assert (features["outliers"], features["features"]) == (1, 8)


def test_update_ratio_keeps_every_step_of_every_weight(net: Net) -> None:
    with presets.update_ratio().modules(net) as recorder:
        before = net.head.weight.detach().clone()
        train(net, steps=1)
        ratio = (net.head.weight - before).norm() / before.norm()
        train(net, steps=3)
    assert {name: len(monitor.peek()["ratio"]) for name, monitor in recorder.items()} == dict.fromkeys(recorder, 4)
    assert recorder["head"].peek()["ratio"][0].item() == pytest.approx(ratio.item(), rel=1e-6)


def test_gradient_noise_is_that_of_the_lens(net: Net) -> None:
    with presets.gradient_noise(batch_size=16).modules(net) as recorder:
        train(net)
    found = recorder["weight/head"].peek()
    assert found["count"] == 4
    if "mean" in found:
        assert found["mean"].item() == pytest.approx(16 * (found["noise"] / found["signal"]).item())
    with pytest.raises(LensError, match="batch_size"):
        presets.gradient_noise(batch_size=0)


@pytest.mark.parametrize("average", [True, False])
def test_attention_entropy_leaves_out_queries_that_a_mask_excludes(average: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(3, 5, 8), torch.tensor([[True] * 5, [True] * 2 + [False] * 3, [False] * 5])
    with torch.no_grad(), presets.attention_entropy(mask="mask").modules(attention) as recorder, recorder.given(mask=mask):
        rows = attention(x, x, x, average_attn_weights=average)[1]
    rows = rows[mask] if average else rows.movedim(1, 2)[mask]
    found = recorder[0].peek()
    assert found["count"] == rows[..., 0].numel() == 7 * (1 if average else 2)
    torch.testing.assert_close(found["mean"], torch.special.entr(rows.double()).sum(-1).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mask", [None, "mask"])
@pytest.mark.parametrize("average", [True, False])
def test_attention_entropy_of_each_head(average: bool, mask: str | None) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, real = torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([[5], [2], [1]])
    preset = presets.attention_entropy(mask, per_head=True)
    with torch.no_grad(), preset.modules(attention) as recorder, recorder.given(mask=real) if mask else nullcontext():
        rows = attention(x, x, x, average_attn_weights=average)[1]
    rows = (rows[:, None] if average else rows).movedim(1, 0)  # by head, batch, query, key
    wanted = torch.special.entr(rows.double()).sum(-1)
    wanted = wanted[:, real] if mask else wanted.flatten(1)
    found = recorder[0].peek()
    assert found["count"].tolist() == [wanted.shape[1]] * (1 if average else 2)
    torch.testing.assert_close(found["mean"], wanted.mean(1), rtol=1e-6, atol=0)


def test_attention_entropy_watches_attention_only(net: Net) -> None:
    with torch.no_grad(), presets.attention_entropy().modules(net.eval()) as recorder:
        net(torch.zeros(2, 5, 8))
    assert list(recorder) == ["attention"]
    assert recorder["attention"].peek()["mean"].item() == pytest.approx(torch.tensor(5.0).log().item(), rel=1e-6)
    with pytest.raises(SelectionError, match="has anything to watch"):
        presets.attention_entropy().modules(nn.Linear(2, 2))


def test_mup_coordinates_keep_the_size_of_each_step(net: Net) -> None:
    recorder: Recorder = presets.mup_coordinates().modules(net)
    x = torch.randn(2, 5, 8)
    sizes = [net(x * factor).abs().mean().item() for factor in (1, 2)]
    with torch.no_grad():
        net.eval()(x)
    assert recorder["head"].peek().tolist() == pytest.approx(sizes, rel=1e-5)
