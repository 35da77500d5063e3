"""What is asked of CUDA. See `recorders/_torch/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable

from reducers._torch import or_else

__all__ = ["at_start_of_cuda"]

# Calls a function when CUDA is first used, or now if it is in use: so nothing has to be asked before, in each call of a hook.
at_start_of_cuda: Callable[[Callable[[], object]], object] = or_else("torch.cuda._lazy_call", lambda call: call())
