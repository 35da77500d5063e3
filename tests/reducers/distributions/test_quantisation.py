"""Scales and zero points: those of the observers of torch.ao, and what they say of ranges that are none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

from reducers import ArgumentError, Extremes, affine_qparams

RANGES = [(-1.0, 2.0), (0.0, 0.0), (0.5, 3.0), (-3.0, -0.5), (-1e-9, 1e-9), (-1e30, 1e30), (1.0, 1.0), (-7.0, 0.0), (0.0, 1e-30)]
KINDS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "int8": (8, True, {"dtype": torch.qint8}),
    "uint8": (8, False, {"dtype": torch.quint8}),
    "int4": (4, True, {"dtype": torch.qint8, "quant_min": -8, "quant_max": 7}),
    "uint4": (4, False, {"dtype": torch.quint8, "quant_min": 0, "quant_max": 15}),
    "int16": (16, True, {"dtype": torch.int16}),
    "uint16": (16, False, {"dtype": torch.uint16}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_qparams_are_those_of_the_observers(kind: str, symmetric: bool) -> None:
    bits, signed, options = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(200, 2, generator=generator) * 10.0 ** torch.randint(-8, 8, (200, 1), generator=generator)
    ranges = torch.cat((torch.tensor(RANGES), drawn.sort(dim=1).values))
    scheme = "symmetric" if symmetric else "affine"
    observer = PerChannelMinMaxObserver(qscheme=getattr(torch, f"per_channel_{scheme}"), **options)
    observer(ranges)
    expected = observer.calculate_qparams()
    scale, zero_point = affine_qparams(*ranges.unbind(1), bits, symmetric=symmetric, signed=signed)
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
    assert torch.equal(scale, expected[0])
    assert torch.equal(zero_point.long(), expected[1].long())
    for one in ranges[:20]:
        with warnings.catch_warnings():
            observer = MinMaxObserver(qscheme=getattr(torch, f"per_tensor_{scheme}"), **options)
        observer(one)
        expected = observer.calculate_qparams()
        scale, zero_point = affine_qparams(*one.tolist(), bits, symmetric=symmetric, signed=signed)
        assert (scale.shape, scale.item(), zero_point.item()) == ((), expected[0].item(), expected[1].item())


def test_a_recorded_range_quantises_within_half_a_step() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    found = Extremes("b c -> c").compute(Extremes("b c -> c").update({}, x))
    scale, zero_point = affine_qparams(found["min"], found["max"], signed=False)
    fake = torch.fake_quantize_per_channel_affine(x, scale, zero_point, 1, 0, 255)
    assert ((fake - x).abs() <= scale / 2 * 1.001).all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0.0, float("inf")), {}, "1 of 1 ranges are not finite"),
        ((torch.tensor([0.0, float("nan")]), torch.ones(2)), {}, "1 of 2 ranges"),
        ((-1e300, 0.0), {}, "in float32"),
        ((2.0, 1.0), {}, "low is above high: low is"),
        ((torch.zeros(2), torch.ones(3)), {}, r"low has the shape \(2,\) and high \(3,\)"),
        ((0.0, 1.0), {"bits": 1}, "2 to 16 bits and got 1"),
        ((0.0, 1.0), {"bits": 8.0}, "2 to 16 bits"),
    ],
)
def test_what_is_no_range_is_an_error(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        affine_qparams(*arguments, **options)
