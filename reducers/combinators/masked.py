"""Masked: a reducer over the elements that a mask selects."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reducers.combinators.wrapper import InputWrapper
from reducers.core.inputs import observation_with
from reducers.core.states import to_device
from reducers.kernels.masks import as_bool
from reducers.state import State


@dataclass(frozen=True)
class Masked(InputWrapper):
    """The inner reducer over the elements where a mask, the second input, is True; for example, to exclude padding tokens.

    If all axes are reduced, `masked.update(s, x, mask) == reducer.update(s, x[mask])`, but without data-dependent shapes. The mask
    is bool, or non-zero for True. Its axes are the leading axes of `x`, and it broadcasts over missing axes and axes of length 1:
    `[batch, time]` with `[batch, time, features]`. Masked elements become NaN, which statistics exclude; so integers are converted
    to float64, except by reducers that count integers.

    Ids and a payload, which `TopK` and `BottomK` take by themselves, are not passed on.

    Args:
        reducer: a reducer with a pattern, or a `Product` of such reducers.

    Returns:
        The result of the inner reducer.

    Raises:
        ReducerTypeError: `reducer` is not a reducer instance, or takes observations whole, or `update` is not given two tensors.
        ArgumentError: the mask does not broadcast to the observation.

    >>> import torch
    >>> from reducers import Mean
    >>> mean = Masked(Mean("b t d -> d"))
    >>> x, mask = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> mean.compute(mean.update({}, x, mask))
    tensor([2., 3.], dtype=torch.float64)
    """

    def update(self, state: State, *xs: Tensor) -> State:
        x, mask = observation_with(self, xs, "mask")
        return self.reducer.update_masked(to_device(state, x.device), x, as_bool(mask).expand(x.shape))
