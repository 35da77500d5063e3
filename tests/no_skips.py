"""A skip is a failure if RECORDERS_NO_SKIPS is 1: in an environment that was made for a test, one that is skipped tests nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import TypeVar

import pytest

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)
EXCUSES = re.compile(r"\b(GPUs?|CUDA|device|torch|PyTorch|forks?|kill -9|pipes|POSIX|Linux|system|processor)\b|/(dev|proc)\b")
"""Words of the reasons that no package mends: another device, another torch, another system."""


def _strict(report: Report) -> Report:
    """The report as it is, or a failed one in place of a skip without an excuse."""
    skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")  # which an expected failure has
    if os.environ.get("RECORDERS_NO_SKIPS") == "1" and skipped and isinstance(report.longrepr, tuple):
        path, line, told = report.longrepr
        reason = told.removeprefix("Skipped: ")
        if reason.startswith("could not import") or not EXCUSES.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{path}:{line}: would be skipped, which RECORDERS_NO_SKIPS=1 forbids: {reason}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which mark what was expected to fail
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _strict((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file may be skipped as a whole, before there is a test of it."""
    return _strict((yield))
