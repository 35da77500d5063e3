"""Fingerprints: what it lists of each observation is what Digest and Sketch say of it."""

from __future__ import annotations

import math

import pytest
import torch

from reducers import ArgumentError, Digest, Fingerprints, Sketch


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
