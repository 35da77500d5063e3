"""Fixtures of tests beside inferno."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """The other library keeps what it computes in the default dtype."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


@pytest.fixture
def observe() -> Any:
    """Its monitors and reducers."""
    return pytest.importorskip("inferno.observe")
