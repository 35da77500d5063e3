"""Seeds all tests; leaves out kernels when the doctests of the packages are collected, if their compiler is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["reducers/kernels/triton/*.py"]


@pytest.fixture(autouse=True)
def _numbers_drawn_alike() -> None:
    """Seeds each test, so that it passes always or never."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # it would keep the stack of the call, as text, for each kind of device that may come later
        torch.default_generator.manual_seed(0)
