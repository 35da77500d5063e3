"""What a mask shows of a big tensor gives what it gives with what is hidden made NaN, in less."""

from __future__ import annotations

import laws
import pytest
import torch
from torch import Tensor

import reducers.core.statistic
import reducers.kernels.masks
from reducers import Count, Masked, Max, Mean, Moments, Norm, Product, Reducer, Sparsity, Sum, Summary
from reducers.kernels.masks import can_compact

SHAPE = (6, 40, 64)
PATTERNS = ("... ->", "b t d -> d", "b t d -> t", "b t d -> b", "b t d -> d t", "b t d -> (t d)")


def mask_of(kind: str) -> Tensor:
    drawn = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) < 0.6
    return {
        "elements": drawn,
        "tokens": drawn[..., :1],
        "samples": drawn[:, :1, :1],
        "the same tokens of all": drawn[:1, :, :1],
        "features": drawn[:1, :1],
        "nothing": torch.zeros(SHAPE, dtype=torch.bool),
        "all": torch.ones(1, 1, 1, dtype=torch.bool),
    }[kind]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", ["elements", "tokens", "samples", "the same tokens of all", "features", "nothing", "all"])
def test_what_is_shown_gives_what_nan_in_place_of_the_hidden_gives(
    kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: dict[str, Reducer] = {kind.__name__: kind(pattern) for kind in (Count, Sum, Mean, Max, Norm, Moments, Summary, Sparsity)}
    masked = Masked(Product(**parts))
    monkeypatch.setattr(reducers.kernels.masks, "PIECE", 1 << 12)
    xs = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) + 2 for seed in (2, 3)]
    xs[1][2, 3, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 0.0])
    mask = mask_of(kind)

    def taken() -> object:
        state = {}
        for x in xs:
            state = masked.update(state, x, mask)
        return masked.compute(state)

    quick = taken()
    monkeypatch.setattr(reducers.core.statistic, "can_compact", lambda *_: False)
    laws.close(quick, taken(), rtol=1e-6, atol=1e-6)


def test_masks_along_kept_axes_integers_and_few_elements_are_left_to_nan() -> None:
    x, tokens = torch.randn(SHAPE), mask_of("tokens").expand(SHAPE)
    assert can_compact(x, tokens, (0, 1))
    assert can_compact(x, mask_of("elements"), (0, 1, 2))
    assert not can_compact(x, tokens, (0, 2))
    assert not can_compact(x, mask_of("features").expand(SHAPE), (0, 1))
    assert not can_compact(x.long(), tokens, (0, 1))
    assert not can_compact(x[:1], tokens[:1], (0, 1))


def test_what_is_taken_out_is_never_as_big_as_the_observation() -> None:
    x, mask = torch.randn(1 << 14, 256), (torch.rand(1 << 14, 1) < 0.9)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        Masked(Summary("b d -> d")).update({}, x, mask)
    assert max(event.cpu_memory_usage for event in profile.events()) <= 8e6
