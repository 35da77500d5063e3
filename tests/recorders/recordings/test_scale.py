"""The model behind docs/scale.md; that it says exactly what ranks send is asserted in test_mesh.py, by four processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paths import ROOT


def benchmark(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return __import__(name)


def test_what_the_model_says_is_sent_is_what_arrives() -> None:
    model = benchmark("scale_model")
    assert model.sent(1, 1000) == (0, 0)
    for ranks in (2, 5, 24):
        everyone = model.sent(ranks, 1000)
        assert everyone.bytes - 48 * everyone.messages == (ranks - 1) * (465 + 1000)
        to_one = [model.sent(ranks, 1000, 0, rank) for rank in range(ranks)]
        assert sum(each.bytes - 48 * each.messages for each in to_one) == (ranks - 1) * (ranks * 465 + 1000)
    assert model.memory(24, 1000) > model.memory(8, 1000)


def test_the_measured_points_are_what_the_model_says() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())["rows"]
    assert {(row["ranks"], row["to"]) for row in rows} == {(ranks, to) for ranks in (1, 2, 4, 8, 16) for to in ("all", 0)}
    assert all(row["exact_on_all_ranks"] and row["bytes"] == row["modelled_bytes"] for row in rows)
