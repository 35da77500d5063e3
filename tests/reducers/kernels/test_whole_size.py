"""Every kernel on tensors of four million elements, by Triton's interpreter, with the plans that production makes.

The other tests of kernels make tiles and parts small, and so do not see a limit that a plan has and a kernel has not. Nothing is
patched here. Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from reducers.kernels import digests, sketches
from reducers.kernels.parts import Runs
from reducers.kernels.triton.accumulate import accumulate, new_accumulators, new_handle, point, statistics
from reducers.kernels.triton.best import best_elements
from reducers.kernels.triton.bins import binned_by_bits, binned_by_edges
from reducers.kernels.triton.digest import hashed
from reducers.kernels.triton.gpu_slots import slots_for
from reducers.kernels.triton.many import swept_rows
from reducers.kernels.triton.sketch import sketched
from reducers.kernels.triton.sweep import swept
from reducers.kernels.triton.weigh import weighted_swept

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUMBER = 1 << 22
SUMMARY = {name: name for name in ("count", "mean", "m2", "min", "max", "zeros", "nan", "inf")}
KEPT: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "nothing kept": ((NUMBER,), (0,)),
    "few features": ((NUMBER // 2, 2), (0,)),
}


@cache
def numbers(*shape: int) -> Tensor:
    """Numbers that rise, so that none of the parts is like the others."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    x.view(-1).add_(torch.linspace(1, 9, x.numel()))
    x.view(-1)[::1001] = 0
    return x


def summary(x: Tensor, axes: tuple[int, ...], there: Tensor | None = None) -> dict[str, Tensor]:
    wide = x.double()
    there = torch.ones_like(wide, dtype=torch.bool) if there is None else there
    count, clean = there.sum(axes, keepdim=True), torch.where(there, wide, 0.0)
    mean = clean.sum(axes, keepdim=True) / count
    return {
        "count": count.squeeze(axes),
        "mean": mean.squeeze(axes),
        "m2": torch.where(there, wide - mean, 0.0).square().sum(axes),
        "min": torch.where(there, wide, torch.inf).amin(axes),
        "max": torch.where(there, wide, -torch.inf).amax(axes),
        "zeros": (there & (wide == 0)).sum(axes),
        "nan": torch.zeros_like(count).squeeze(axes),
        "inf": torch.zeros_like(count).squeeze(axes),
    }


def assert_close(found: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor]) -> None:
    assert found is not None
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if name in ("mean", "m2", "sum", "weight", "squares"):
            torch.testing.assert_close(value.double(), wanted[name].double(), rtol=1e-6, atol=0)
        else:
            assert value.double().equal(wanted[name].double()), name


@pytest.mark.parametrize("kept", KEPT)
def test_no_element_is_left_out(kept: str) -> None:
    shape, axes = KEPT[kept]
    x = numbers(*shape)
    assert_close(swept(x, axes, SUMMARY), summary(x, axes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_no_element_is_left_out_in_other_dtypes(dtype: torch.dtype) -> None:
    x = numbers(NUMBER).to(dtype)
    found = swept(x, (0,), {"count": "count", "sum": "exact", "max": "max"})
    assert_close(found, {"count": torch.tensor(NUMBER), "sum": x.double().sum(), "max": x.amax()})


@pytest.mark.parametrize("column", ["squares", "active"])
def test_no_element_is_left_out_of_totals(column: str) -> None:
    x = numbers(NUMBER)
    found = swept(x, (0,), {"sum": column}, 5.0)
    assert_close(found, {"sum": x.double().square().sum() if column == "squares" else (x.abs() > 5).sum()})


@pytest.mark.parametrize("kept", KEPT)
def test_no_element_is_left_out_under_a_mask(kept: str) -> None:
    """A mask of numbers, and one of rows, which is not as the tensor lies in memory; of few more tiles than there are parts."""
    (rows, *rest), axes = KEPT[kept]
    x = numbers(rows // 4 + 3000, *rest)
    mask = x > 5 if not rest else (torch.arange(len(x)) % 3 != 1).unsqueeze(1).expand(x.shape)
    wanted = summary(x, axes, mask)
    found = swept(x, axes, {"count": "count", "mean": "mean"}, 0.0, None, mask)
    assert_close(found, {name: wanted[name] for name in ("count", "mean")})


@pytest.mark.parametrize("kept", KEPT)
def test_no_element_is_left_out_of_weighted_sums(kept: str) -> None:
    shape, axes = KEPT[kept]
    x, weights = numbers(*shape), numbers(*shape).abs().flip(0)
    heavy, wide = weights.double(), x.double()
    weight, sums = heavy.sum(axes), (heavy * wide).sum(axes)
    wanted = {"nonfinite": torch.zeros_like(weight, dtype=torch.int64), "weight": weight, "sum": sums}
    assert_close(weighted_swept(x, weights, axes, ("nonfinite", "weight", "sum")), wanted)


PIECES = {
    "whole": Runs(1, NUMBER),
    "parts of two tiles, the last of which is not whole": Runs(1, 3 * NUMBER // 2 + 77),
    "from within a block": Runs(1, NUMBER, 2 * NUMBER + 777),
    "of many rows": Runs(1 << 7, NUMBER >> 7, 640, 1 << 17),
}
"""Of these runs consists what is hashed and sketched."""


@pytest.mark.parametrize("piece", PIECES)
def test_no_bit_is_left_out_of_a_digest(piece: str) -> None:
    runs = PIECES[piece]
    x = numbers(runs.number * runs.length)[None]
    found = hashed(x, runs, digests.NANS[x.dtype], [3, 5])
    assert found is not None
    assert found.equal(digests._of_elements(x, runs) + torch.tensor([3, 5]))


@pytest.mark.parametrize("piece", PIECES)
def test_no_element_is_left_out_of_a_sketch(piece: str) -> None:
    """One element is not finite, so of one part each is looked at."""
    runs = PIECES[piece]
    x = numbers(runs.number * runs.length).clone()[None]
    x[0, NUMBER // 3] = torch.inf
    found, wanted = sketched(x, 256, runs), sketches._sketched(x, 256, runs)
    assert found is not None
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-7)


def test_no_element_is_left_out_of_bins() -> None:
    (shape, axes), bounds = KEPT["nothing kept"], torch.linspace(-2, 12, 15)
    x = numbers(*shape)
    found = binned_by_edges(x, axes, bounds, None)
    assert found is not None
    assert found["counts"][:16].equal(torch.bucketize(x, bounds, right=True).bincount(minlength=16))
    assert found["counts"][16] == 0


def test_no_element_is_left_out_of_bins_by_bits() -> None:
    shape, axes = KEPT["few features"]
    x = numbers(*shape)
    found = binned_by_bits(x, axes, 3, (-10, 10), None)
    assert found is not None
    assert found["counts"].sum(-1).tolist() == [NUMBER // 2] * 2
    assert found["min"].equal(x.amin(axes))
    assert found["max"].equal(x.amax(axes))


@pytest.mark.parametrize("kept", KEPT)
def test_no_element_is_left_out_of_the_best(kept: str) -> None:
    shape, axes = KEPT[kept]
    x = numbers(*shape).flip(0).contiguous()  # the greatest first, so that the interpreter leaves most tiles at once
    found = best_elements(x, x, axes, 2, True, None, None)
    assert found is not None
    wanted = x.topk(2, dim=0).values.movedim(0, -1)
    assert found["value"].equal(wanted)
    assert x.view(-1)[found["position"]].equal(wanted)


def test_no_element_of_many_tensors_is_left_out() -> None:
    xs = [numbers(length) for length in (1, NUMBER, 5, 4096 * 8 + 1)]
    (found,), _ = swept_rows(xs, [(SUMMARY, 0.0, {})], None)
    wanted = [summary(x, (0,)) for x in xs]
    assert_close(found, {name: torch.stack([row[name] for row in wanted]) for name in SUMMARY})


SUM = {"count": "count", "sum": "sum"}


def test_no_element_is_left_out_of_slots() -> None:
    x = numbers(NUMBER)
    slots = slots_for(x, (0,), SUM, 0.0)
    assert slots is not None
    table = torch.empty((1, *slots._one), dtype=torch.int64)
    assert slots.write(table, x, 0)
    assert_close(slots.join(table, {}, 0, 1), {"count": torch.tensor(NUMBER), "sum": x.double().sum()})


def test_no_element_is_left_out_of_accumulators() -> None:
    x, names = numbers(NUMBER), ",".join(SUM)
    handle, missed = new_handle(CPU)
    words = new_accumulators(x, (0,), names)
    point(handle, 0, words)
    accumulate(x, (0,), names, 0.0, handle, 0)
    assert missed.item() == 0
    assert_close(statistics(words, SUM, [], x.dtype), {"count": torch.tensor(NUMBER), "sum": x.double().sum()})
