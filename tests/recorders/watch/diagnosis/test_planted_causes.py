"""The faults that the benchmark plants name their causes by words that findings have."""

from __future__ import annotations

import pytest

from recorders.watch.diagnosis.causes import CAUSES


def test_causes_of_planted_faults_are_words_of_findings() -> None:
    pytest.importorskip("sklearn")
    from benchmarks.diagnosis.cases import GENERAL, LAST, LATER, MORE, PROGRAMS

    programs = (*PROGRAMS.values(), *MORE.values(), *LATER.values(), *LAST.values())
    faults = [*GENERAL.values(), *(fault for one in programs for fault in one.faults.values())]
    assert len(faults) >= 620
    for fault in faults:
        assert set(fault.causes) <= set(CAUSES), fault.name
        assert fault.causes
    assert {fault.category for fault in faults} == {"optimisation", "architecture", "data", "state"}
