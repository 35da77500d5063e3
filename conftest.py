"""Leaves out kernels when the doctests of the packages are collected, if their compiler is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["reducers/kernels/triton/*.py"]
