"""Masked: a reducer over the elements that a mask given beside them marks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from reducers.combinators.wrapper import InputWrapper
from reducers.core.inputs import observation_with
from reducers.core.states import to_device
from reducers.state import State

__all__ = ["Masked"]


@dataclass(frozen=True)
class Masked(InputWrapper):
    """The inner reducer over the elements where a mask, the second input, is True: padding tokens stay out.

    `masked.update(s, x, mask) == reducer.update(s, x[mask])` for one that reduces everything, with no shape that depends on data.
    The mask is bool, or not zero where elements count; its axes are the first ones of x, and those it lacks, or has with length 1,
    are repeated: `[batch, time]` beside `[batch, time, features]`. Elements masked out become NaN, which statistics keep out, so
    integers are taken as float64, except by reducers that count whole numbers.

    Args:
        reducer: a reducer with a pattern, or a product of such.

    Raises:
        ReducerTypeError: `reducer` is none, or takes observations whole, or there is no mask.
        ArgumentError: the shape of the mask does not fit.

    >>> import torch
    >>> from reducers import Mean
    >>> mean = Masked(Mean("b t d -> d"))
    >>> x, mask = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]])
    >>> mean.compute(mean.update({}, x, mask))
    tensor([2., 3.], dtype=torch.float64)
    """

    def update(self, state: State, *xs: Tensor) -> State:
        x, mask = observation_with(self, xs, "mask")
        return self.reducer.update_masked(to_device(state, x.device), x, (mask != 0).expand(x.shape))
