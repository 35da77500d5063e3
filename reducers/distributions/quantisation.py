"""Scale and zero point of a quantised tensor, from the range of its numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from reducers.errors import ArgumentError


def affine_qparams(
    low: Tensor | float, high: Tensor | float, bits: int = 8, *, symmetric: bool = False, signed: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point with which `round(x / scale) + zero_point` fits integers of so many bits.

    They are those that `MinMaxObserver` and `PerChannelMinMaxObserver` of `torch.ao.quantization` compute in `calculate_qparams`
    (scales of at least 1.2e-7, float32), in the shape of the range. The range is widened to hold zero. `Extremes`, `Min` and `Max`
    find a range, and so do the outer values of a `Quantile`.

    Args:
        low: the least number, or one for each channel.
        high: the greatest number, in the same shape.
        bits: of the integers, from 2 to 16.
        symmetric: whether zero lies in the middle, as usual for weights; else the range is used in full.
        signed: whether the integers run from `-2 ** (bits - 1)`, as in int8; else from 0, as in uint8.

    Returns:
        the scale, float32, and the zero point, int32, in the shape of `low` and `high`; `torch.fake_quantize_per_tensor_affine`
        and `torch.fake_quantize_per_channel_affine` take them.

    Raises:
        ArgumentError: a bound is not finite in float32, the shapes differ, `low` is above `high`, or there are no such integers.

    >>> import torch
    >>> scale, zero_point = affine_qparams(torch.tensor([-1.0, 0.0]), torch.tensor([1.55, 5.1]), bits=8, signed=False)
    >>> scale, zero_point
    (tensor([0.0100, 0.0200]), tensor([100,   0], dtype=torch.int32))
    """
    if type(bits) is not int or not 2 <= bits <= 16:
        raise ArgumentError(f"affine_qparams takes 2 to 16 bits and got {bits!r}")
    lows, highs = ((end if isinstance(end, Tensor) else torch.as_tensor(end, device="cpu")).detach().float() for end in (low, high))
    if lows.shape != highs.shape:
        raise ArgumentError(
            f"affine_qparams: low has the shape {tuple(lows.shape)} and high {tuple(highs.shape)}; they must be equal"
        )
    if wrong := int((~(lows.isfinite() & highs.isfinite() & (lows <= highs))).sum()):
        raise ArgumentError(
            f"affine_qparams: {wrong} of {lows.numel()} ranges are not finite in float32, or low is above high: low is "
            f"{lows.reshape(-1)[:4].tolist()}, high {highs.reshape(-1)[:4].tolist()}; were there no finite numbers to record?"
        )
    first = -(2 ** (bits - 1)) if signed else 0
    last = first + 2**bits - 1
    below, above = lows.clamp(max=0.0), highs.clamp(min=0.0)
    eps = torch.finfo(torch.float32).eps
    if symmetric:
        scale = (torch.maximum(-below, above) / ((last - first) / 2)).clamp(min=eps)
        # Observers round the middle of a range up if it has a dtype, and down if it is given as quant_min and quant_max.
        middle = 0 if signed else 2 ** (bits - 1) - (bits not in (8, 16))
        return scale, torch.full_like(scale, middle, dtype=torch.int32)
    scale = ((above - below) / (last - first)).clamp(min=eps)
    return scale, (first - (below / scale).round().to(torch.int32)).clamp(first, last)
