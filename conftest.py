"""Seeds all tests; leaves out kernels when the doctests of the packages are collected, if their compiler is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["reducers/kernels/triton/*.py"]


@pytest.fixture(autouse=True)
def _numbers_drawn_alike() -> None:
    """Seeds each test, so that it passes always or never."""
    torch.manual_seed(0)
