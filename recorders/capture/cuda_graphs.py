"""Whether a CUDA graph is captured now: what runs then runs once for Python, and again for the device at every replay.

A hook that recorded would count one observation, and write the same memory at each replay. So an observation is left out then, and
counted by its reason. Those of compiled graphs are added by kernels that replays repeat: see `handles.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from recorders._torch import at_start_of_cuda

IN_CUDA_GRAPH = "in a CUDA graph that was captured"

CAPTURES: list[Callable[[], bool]] = []
"""Empty until CUDA is in use, so that nothing is called for CPUs; then a function that says whether the current stream is captured.

Ask `CAPTURES and CAPTURES[0]()`.
"""


def _is_captured() -> bool:
    # A forked process cannot use CUDA, and is told so by `is_initialized`.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


at_start_of_cuda(lambda: CAPTURES.append(_is_captured))
