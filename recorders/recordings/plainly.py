"""Where states are made, outside of a graph or a hook: outside the modes of the user, whoever calls.

Otherwise they would be inference tensors, which later observations cannot update, or fake ones, or on a default device of the user.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from recorders._torch import without_modes

__all__ = ["plainly"]

P = ParamSpec("P")
R = TypeVar("R")


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `function` run without modes, those of PyTorch included.

    >>> import torch
    >>> with torch.inference_mode():
    ...     plainly(torch.ones)(2).is_inference()
    False
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = without_modes(partial(function, *args, **kwargs))
        return result

    return call
