"""Kernels by device, and what happens if one fails: it is not used on that device any more, and one warning says so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from reducers.errors import warn_user
from reducers.kernels.locks import new_lock
from reducers.kernels.precision import has_memory

Tried = TypeVar("Tried")

PLAIN = "PyTorch's own operations do it, which takes longer"


class Kernels(dict[str, Callable[[], Any]]):
    """The kernels for one purpose, by type of device: functions that return a module of them, or None if there is none after all.

    Attributes:
        purpose: what the kernel does, as a user reads it: "the kernel that ...".
        instead: what is done on a device on which it failed.
    """

    def __init__(self, kernels: Mapping[str, Callable[[], Any]], purpose: str, instead: str = PLAIN) -> None:
        super().__init__(kernels)
        self.purpose, self.instead = purpose, instead


class Failure(NamedTuple):
    """A kernel that failed, and is not used on that device any more."""

    purpose: str
    device: torch.device
    message: str


_CLASSES = (Tensor, nn.Parameter)
_failed: list[Failure] = []
_failing = new_lock()


def in_triton(name: str) -> Callable[[], Any]:
    """Return what finds a module of `reducers.kernels.triton`; None without Triton, which comes with PyTorch for GPUs."""

    @cache
    def find() -> Any:
        try:
            return import_module(f"reducers.kernels.triton.{name}")
        except ImportError:
            return None

    return find


def found(kernels: Kernels, x: Tensor) -> Any:
    """Return the kernels for a tensor; None if its device has none or they have failed there, or a graph is being compiled.

    A tensor of another class, such as a fake one, may have no memory that a kernel could read: there are none for it.
    """
    find = kernels.get(x.device.type)
    if find is None or type(x) not in _CLASSES or torch.compiler.is_compiling() or given_up(kernels, x.device):
        return None
    return find()


def tried(kernels: Kernels, device: torch.device, kernel: Callable[..., Tried | None], *arguments: object) -> Tried | None:
    """Return what a kernel returns; None if it fails, such as without a C compiler: then it is not used on this device any more.

    If a tensor has no memory that a kernel could read, this says nothing of the kernel.

    Raises:
        torch.OutOfMemoryError, MemoryError, RuntimeError: there is no memory, which says nothing of the kernel.
    """
    try:
        return kernel(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if not all(has_memory(argument) for argument in arguments if isinstance(argument, Tensor)):
            return None  # it failed because of these, such as inside vmap
        _give_up(kernels, device, error)
        return None


def _give_up(kernels: Kernels, device: torch.device, error: Exception) -> None:
    """Use these kernels on this device no more, with one warning. A compiler that was interrupted is tried again."""
    if isinstance(error, InterruptedError) or (isinstance(error, subprocess.CalledProcessError) and error.returncode < 0):
        return
    reason = "".join(str(error).strip().splitlines()[:1])
    message = (
        f"the kernel that {kernels.purpose} failed on {device} and is not used there any more; "
        f"{kernels.instead}: {type(error).__name__}: {reason}"
    )
    with _failing:
        if given_up(kernels, device):  # another thread was first
            return
        _failed.append(Failure(kernels.purpose, device, message))
    warn_user(message, RuntimeWarning)


def given_up(kernels: Kernels, device: torch.device) -> bool:
    """Return whether these kernels have failed on this device."""
    return bool(_failed) and any(failure.purpose == kernels.purpose and failure.device == device for failure in _failed)


def has_failed(kernels: Kernels, device: str) -> bool:
    """Return whether these kernels have failed on a device of this type."""
    return any(failure.purpose == kernels.purpose and failure.device.type == device for failure in _failed)


def failures() -> list[str]:
    """Return, of each kernel that failed, which it is, on which device, and what is done instead."""
    return [failure.message for failure in _failed]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that there is no memory, as PyTorch, Python, CUDA's driver and the CPU's allocator do."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
