"""For doctests: kernels are left out if their compiler is not installed, and each test draws the same numbers in every run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["reducers/kernels/triton/*.py"]


@pytest.fixture(autouse=True)
def _numbers_drawn_alike(request: pytest.FixtureRequest) -> None:
    """Seeds a doctest, so that it passes always or never."""
    if isinstance(request.node, pytest.DoctestItem):
        torch.manual_seed(0)
