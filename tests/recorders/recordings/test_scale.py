"""The model behind docs/scale.md; that it says exactly what ranks send is asserted in test_hierarchy.py, by four processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paths import ROOT


def benchmark(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return __import__(name)


def test_the_model_of_one_dimension_is_that_of_its_parts() -> None:
    model = benchmark("scale_model")
    sizes = model.Sizes(states=1000, merged=3000)
    assert model.flat(1, sizes) == (0, 0)
    assert model.hierarchical((1, 1), sizes) == (0, 0)
    everything = [model.hierarchical((2, 3, 4), sizes, rank) for rank in range(24)]
    assert max(everything) == everything[0]
    payloads = sum(each.bytes for each in everything) - 48 * sum(each.messages for each in everything)
    groups = {4: 6, 3: 2, 2: 1}  # of so many ranks there are so many
    assert payloads == sum(many * (ranks - 1) * (ranks * 56 + 1000 + 16 + 3000) for ranks, many in groups.items())
    assert model.memory((24,), sizes) > model.memory((2, 3, 4), sizes)


def test_the_measured_points_are_what_the_model_says() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())["rows"]
    assert {tuple(row["shape"]) for row in rows} >= {(1,), (2,), (4,), (2, 2), (8,), (2, 4), (2, 2, 2)}
    assert all(row["exact_on_all_ranks"] and row["bytes"] == row["modelled_bytes"] for row in rows)
