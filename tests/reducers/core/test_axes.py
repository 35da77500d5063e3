"""Patterns: against einops itself, and the errors that name pattern and shape."""

from __future__ import annotations

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reducers import Mean, PatternError, Sum
from reducers.core.patterns import arrange

X4 = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)

FITTING = [
    ("b c h w -> c", X4),
    ("b c h w -> h c", X4),
    ("b c h w -> b c h w", X4),
    ("b c h w -> w h c b", X4),
    ("b c h w ->", X4),
    ("b ... -> ...", X4),
    ("b ... w -> w ...", X4),
    ("... -> ...", X4),
    ("... ->", torch.tensor(3.0)),
    ("b c h w -> (c h)", X4),
    ("b c h w -> (h c) b", X4),
    ("b c h w -> (b c h w)", X4),
    ("b ... w -> (w ...)", X4),
    ("... -> (...)", X4),
    ("b ... -> b (...)", X4),
    ("b ... -> b", torch.ones(3)),
    ("b c h w -> 1 c", X4),
    ("... w -> w 1", X4),
    ("b c h w -> ()", X4),
    ("b 1 w -> w", torch.ones(2, 1, 3)),
    ("b 1 ... c -> c", torch.ones(2, 1, 3, 4, 5)),
    ("b ... 1 -> ...", torch.ones(2, 3, 1)),
    ("b () c -> c", torch.ones(2, 1, 3)),
]


@pytest.mark.parametrize(("pattern", "x"), FITTING, ids=[pattern for pattern, _ in FITTING])
def test_reduces_as_einops_does(pattern: str, x: torch.Tensor) -> None:
    arranged, axes = arrange(x, pattern)
    assert axes
    assert torch.equal(arranged.sum(dim=axes), einops.reduce(x, pattern, "sum"))


@settings(max_examples=60)
@given(data=st.data())
def test_any_plain_pattern_is_a_view(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    kept = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
    x = torch.randint(0, 100, tuple(data.draw(st.integers(1, 4)) for _ in names))
    pattern = f"{' '.join(names)} -> {' '.join(kept)}"
    arranged, axes = arrange(x, pattern)
    assert arranged.data_ptr() == x.data_ptr()
    assert torch.equal(arranged.sum(dim=axes), einops.reduce(x, pattern, "sum"))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("b c", "no '->'"),
        ("b -> c", r"keeps \['c'\]"),
        ("b c -> c ...", r"keeps \['...'\]"),
        ("b b -> b", "duplicate"),
        ("b c -> c -> b", "malformed"),
        ("b _c -> _c", "malformed"),
        ("b 3 w -> w", "give it a name"),
        ("b c -> 3 c", "give it a name"),
        ("b (c d) -> c", "only the right side"),
    ],
)
def test_malformed_patterns_are_refused_at_once(pattern: str, told: str) -> None:
    with pytest.raises(PatternError, match=told):
        Mean(pattern)


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(PatternError, match="got int 3"):
        Mean(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [("b c -> c", (2,)), ("b c -> c", (2, 3, 4)), ("b c ... -> c", (2,)), ("b 1 -> b", (2, 2)), ("b c h -> (b c)", (2, 3))],
)
def test_a_shape_that_does_not_fit_is_named(pattern: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(PatternError) as caught:
        Sum(pattern).update({}, torch.ones(shape))
    assert str(shape) in str(caught.value)
    assert pattern in str(caught.value)
