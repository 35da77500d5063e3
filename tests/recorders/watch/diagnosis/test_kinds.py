"""Every kind of finding has a planted case, in which it is found; and a healthy training has none of them."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis.planted import CASES, planted
from recorders.watch.diagnosis.causes import CAUSES, KINDS
from recorders.watch.diagnosis.explaining import ORDER
from recorders.watch.diagnosis.finding import Finding


def test_a_healthy_training_has_no_finding() -> None:
    assert planted("").run() == []


@pytest.mark.parametrize("kind", CASES)
def test_a_planted_case_is_found(kind: str) -> None:
    found = planted(kind).run()
    assert kind in {one.kind for one in [*found, *found.notices]}, found


def test_every_kind_has_a_case_and_a_place_in_the_order() -> None:
    assert set(CASES) == set(KINDS) - {"left-range"}
    assert sorted(kind for kinds in ORDER for kind in kinds) == sorted(KINDS)


def test_every_cause_that_a_kind_names_is_known_and_has_a_remedy() -> None:
    assert {cause for kind in KINDS.values() for cause in kind.causes} <= set(CAUSES)
    for cause in CAUSES.values():
        assert cause.text
        assert cause.remedy


def test_a_finding_says_all_that_is_known() -> None:
    (first, *_) = planted("not-cleared").run()
    assert isinstance(first, Finding)
    assert (first.kind, first.layer, first.cause, first.severity) == ("not-cleared", "optimizer", "gradients-not-cleared", "error")
    assert "Likely: gradients are never cleared. Try: optimizer.zero_grad()" in str(first)
