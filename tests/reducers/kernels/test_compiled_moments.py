"""Moments inside compiled graphs against float64: 1e-6, whatever the mean, the magnitude and what is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from reducers.kernels.inductor import _rows, fused_moments

SHAPES = {
    "rows of the last axis": ((3, 64, 96), (0, 1, 2)),
    "a last axis that is cut": ((5, 3072), (0, 1)),
    "last axis kept": ((4, 128, 24), (0, 1)),
    "channels kept": ((4, 3, 14, 14), (0, 2, 3)),
    "an axis that cannot be cut": ((3, 197, 8), (0, 1)),
    "one row": ((100,), (0,)),
}
DATA: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": torch.randn,
    "mean 1e4": lambda shape: torch.randn(shape) + 1e4,
    "a first row of zeros": lambda shape: (
        (torch.randn(shape) + 1e4) * (torch.arange(shape[0]) > 0).view(-1, *[1] * (len(shape) - 1))
    ),
    "one element a thousand times the others": lambda shape: torch.where(torch.rand(shape) < 0.003, 1000.0, torch.randn(shape)),
    "huge": lambda shape: torch.randn(shape) * 1e37,
    "the largest there are": lambda shape: torch.randn(shape).sign() * 3.4e38,
    "tiny": lambda shape: torch.randn(shape) * 1e-34,
    "two values": lambda shape: (torch.rand(shape) < 0.3).float(),
    "not finite": lambda shape: torch.where(
        torch.rand(shape) < 0.2, torch.tensor([torch.nan, torch.inf, 0.0])[0], torch.randn(shape)
    ),
}


def check(found: dict[str, Tensor], x: Tensor, axes: tuple[int, ...]) -> None:
    wide, finite = x.double(), x.isfinite()
    count = finite.sum(axes)
    mean = torch.where(finite, wide, 0).sum(axes) / count.clamp(min=1)
    kept = mean.view([1 if axis in axes else size for axis, size in enumerate(x.shape)])
    m2 = torch.where(finite, (wide - kept).square(), 0).sum(axes)
    std = (m2 / count.clamp(min=1)).sqrt()
    assert torch.equal(found["count"], count)
    assert ((found["m2"] - m2).abs() <= 1e-6 * m2).all()
    assert ((found["mean"] - mean).abs() <= 1e-6 * std + 1e-15 * mean.abs()).all()
    assert torch.equal(found["zeros"], (x == 0).sum(axes))
    assert torch.equal(found["nan"], x.isnan().sum(axes))
    assert torch.equal(found["inf"], x.isinf().sum(axes))
    assert torch.equal(found["min"], torch.where(finite, x, torch.inf).amin(axes))
    assert torch.equal(found["max"], torch.where(finite, x, -torch.inf).amax(axes))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_exact_as_promised(shape: str, data: str) -> None:
    torch.manual_seed(0)
    sizes, axes = SHAPES[shape]
    x = DATA[data](sizes)
    found = fused_moments(x, axes, with_extremes=True)
    assert found is not None
    check(found, x, axes)


@pytest.mark.parametrize("shape", ["rows of the last axis", "last axis kept"])
def test_as_exact_if_it_is_compiled(shape: str) -> None:
    sizes, axes = SHAPES[shape]
    compiled: Any = torch.compile(lambda x: fused_moments(x, axes, with_extremes=True), dynamic=False)
    for data in ("normal", "mean 1e4", "one element a thousand times the others", "not finite"):
        torch.manual_seed(0)
        x = DATA[data](sizes)
        check(compiled(x), x, axes)


@pytest.mark.parametrize("value", [0.1, -3e38, 1e-40, 0.0])
def test_equal_numbers_have_themselves_as_the_mean_and_no_variance(value: float) -> None:
    x = torch.full((7, 300), value)
    found = fused_moments(x, (0, 1))
    assert found is not None
    assert found["mean"] == x.double()[0, 0]
    assert found["m2"] == 0


@given(st.lists(st.integers(1, 600), min_size=1, max_size=3), st.data())
def test_rows_hold_every_element_once(sizes: list[int], data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))))
    x = torch.empty(sizes, device="meta")
    cut = _rows(x, axes)
    if cut is not None:
        view, inner, outer = cut
        assert view.numel() == x.numel()
        assert inner + outer == tuple(sorted(inner)) + tuple(sorted(outer))
        assert view.sum((*inner, *outer)).shape == x.sum(axes).shape
        length = 1
        for axis in inner:
            length *= view.shape[axis]
        assert length <= 512


def test_a_graph_has_no_node_in_float64_of_the_size_of_the_tensor() -> None:
    """In float64 half as many numbers are computed at once."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep)
    torch.compile(lambda x: fused_moments(x, (0, 1), with_extremes=True), backend=backend, dynamic=False)(torch.randn(64, 256))
    values = [node.meta["val"] for node in graphs[0].graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert any(value.dtype is torch.float64 for value in values)
    assert not any(value.dtype is torch.float64 and value.numel() >= 64 * 256 for value in values)
