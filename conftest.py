"""Leaves kernels out when the doctests of the packages are collected, if the compiler that they import is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["reducers/kernels/triton/*.py"]
