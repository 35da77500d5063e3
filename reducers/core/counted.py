"""How states say how many elements were left out because they are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reducers.core.fields import Add, Field
from reducers.state import Result, State

NONFINITE = "nonfinite"  # a key of the state
COUNTS: Mapping[str, Field] = {"count": Add("count"), NONFINITE: Add(NONFINITE)}
"""The fields of what `counts_of` returns: the numbers of finite and of other elements."""


def nothing_to_nan(result: Result, state: State) -> Result:
    """Return a sum, or what is made of one, with NaN for elements of which none was finite; if there were none it stays 0."""
    assert isinstance(result, Tensor)
    if not (result.is_floating_point() or result.is_complex()):
        return result
    return torch.where((state["count"] == 0) & (state[NONFINITE] > 0), torch.nan, result)


def uncounted(state: State) -> State:
    """Return what `lift`, `join` and `read` know of."""
    return {key: value for key, value in state.items() if key != NONFINITE}
