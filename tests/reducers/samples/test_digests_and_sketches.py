"""Fingerprints: what it lists of each observation is what Digest and Sketch say of it."""

from __future__ import annotations

import math

import laws
import pytest
import torch

from reducers import ArgumentError, Digest, Fingerprints, Sketch, StateMismatchError, TensorPart


def test_each_entry_is_what_digest_and_sketch_say() -> None:
    fingerprints, digest, sketch = Fingerprints(k=128), Digest(), Sketch(k=128)
    xs = [torch.tensor([1.0, math.nan, -2.0]), torch.ones(5, 2, dtype=torch.bfloat16), torch.arange(7), torch.zeros(0)]
    state = fingerprints.init()
    for x in xs:
        state = fingerprints.update(state, x)
    found = fingerprints.compute(state)
    assert found["eps"].tolist() == [2**-23, 2**-7, 0.0]  # type: ignore[index,call-overload]
    assert found["nonfinite"].tolist() == [1, 0, 0]  # type: ignore[index,call-overload]
    for row, x in enumerate(xs[:3]):
        alone = sketch.compute(sketch.update({}, x))
        for key in ("sketch", "norm", "count"):
            assert torch.equal(found[key][row], alone[key])  # type: ignore[index,call-overload]
        assert found["digest"][row] == digest.compute(digest.update({}, x))["digest"]  # type: ignore[index,call-overload]


def test_a_number_of_projections_that_does_not_fit_is_named() -> None:
    with pytest.raises(ArgumentError, match="multiple of 64, and got 65"):
        Fingerprints(k=65)


@pytest.mark.parametrize("axis", [0, 1])
def test_fingerprints_of_parts_join_to_those_of_the_whole(axis: int) -> None:
    fingerprints, xs = Fingerprints(), torch.randn(3, 5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    xs[1, 2, 3] = math.nan
    parts = [fingerprints.of_part(TensorPart((5, 40), (2 * (axis == 0) * at, 2 * (axis == 1) * at))) for at in (0, 1)]
    sizes = (2, xs.shape[axis + 1] - 2)
    states = [laws.run(part, piece.unbind()) for part, piece in zip(parts, xs.split(sizes, axis + 1), strict=True)]
    joined = fingerprints.join_parts(states[0], states[1])
    whole = laws.run(fingerprints, xs.unbind())
    laws.close(fingerprints.compute(joined), fingerprints.compute(whole))
    fingerprints.check(joined)
    with pytest.raises(StateMismatchError, match="of one part there were 3 observations, of another 2"):
        fingerprints.join_parts(states[0], laws.run(parts[1], xs[:2].split(sizes, axis + 1)[1].unbind()))
