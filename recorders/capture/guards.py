"""Lifts in graphs that are compiled for many sizes: none may ask what a size is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

__all__ = ["without_new_guards"]

_symbols = logging.getLogger("torch.fx.experimental.symbolic_shapes")


@contextmanager
def without_new_guards(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Raises an error, in the graph that is being traced, if code asks what size a symbol of the tensors stands for.

    The answer would be a guard: the user's program would be compiled again for other sizes, and after some of them not at all. A
    backward that is compiled later can have no guards any more, and would be wrong for other sizes.
    """
    symbol: Any = next((size for tensor in tensors for size in tensor.shape if not isinstance(size, int)), None)
    if symbol is None:
        yield
        return
    _symbols.addFilter(_is_no_refusal)
    try:
        with symbol.node.shape_env.error_on_new_guards():
            yield
    finally:
        _symbols.removeFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Whether a message of PyTorch is not that of the error, which the user need not see."""
    return "failed during evaluate_expr" not in str(record.msg)
