"""Where the project is, for tests at any depth."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[1]
