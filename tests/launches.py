"""What an update costs on a GPU, counted without one: launches, temporaries, waits and allocations, with fake CUDA tensors.

Fake tensors have shapes, strides and devices, but no numbers. So an update of fake CUDA tensors makes the calls that it would make
on a GPU, and what would look at a number raises. Kernels in Triton take them here, and are not launched. Run
`python tests/launches.py` from the root, with triton installed, for a table of all reducers; `--plain` shows them without the
kernels by Triton.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from reducers.distributions import histogram

__all__ = ["Counted", "counted", "fake_kernels", "fake_recording", "recorded", "recorded_steps"]

ALLOCATES = {"aten.empty.memory_format", "aten.empty_strided.default", "aten.new_empty.default", "aten.empty_like.default"}
FREE = {"aten.detach.default", "aten.lift_fresh.default", "aten.alias.default", "aten.is_pinned.default", "prim.device.default"}
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.bincount.default",
    "aten.is_nonzero.default",
}


@dataclass
class Counted:
    """What one update called.

    Attributes:
        launches: calls that start work on the device: operators but views and allocations, and kernels.
        temporaries: tensors of at least as many elements as the observation that were made.
        waits: calls for which the host waits for the device.
        allocations: tensors whose memory was asked for.
        largest: the number of elements of the largest of these.
        names: the operators and kernels that were launched, in order.
    """

    launches: int = 0
    temporaries: int = 0
    waits: int = 0
    allocations: int = 0
    largest: int = 0
    names: list[str] = field(default_factory=list)


class _Counter(TorchDispatchMode):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.counted = Counted()

    def __enter__(self) -> Any:
        _counters.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _counters.remove(self)
        super().__exit__(*error)

    def launched(self, name: str) -> None:
        self.counted.launches += 1
        self.counted.names.append(name)

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call(*args, **(kwargs or {}))
        self._count(call, args, kwargs or {}, found)
        return found

    def _count(self, call: Any, args: Any, kwargs: Any, found: Any) -> None:
        name = str(call)
        tensors = [value for value in torch.utils._pytree.tree_leaves(found) if isinstance(value, Tensor)]
        given = {id(value) for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        there = [value for value in tensors if value.device.type == "cuda"]
        touched = there or [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if name in WAITS or (name == "aten._to_copy.default" and not there and not kwargs.get("non_blocking")):
            self.counted.waits += any(value.device.type == "cuda" for value in touched)
        if name in FREE or call.is_view or not any(value.device.type == "cuda" for value in touched):
            return
        new = [value for value in there if id(value) not in given]
        self.counted.allocations += len(new)
        self.counted.largest = max([self.counted.largest, *(value.numel() for value in new)])
        self.counted.temporaries += sum(value.numel() >= self.elements for value in new)
        if name not in ALLOCATES:
            self.launched(name)


_counters: list[_Counter] = []  # those that count now


@contextlib.contextmanager
def fake_kernels() -> Iterator[None]:
    """Kernels in Triton take fake tensors; a launch is counted by the name of the kernel, and nothing else happens."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    from reducers.kernels.triton import launching, sweep

    def note(kernel: Any) -> None:
        for counter in _counters:
            counter.launched(kernel.fn.__name__)

    with (
        patch("reducers.kernels.failing._CLASSES", (FakeTensor,)),
        patch.object(FakeTensor, "data_ptr", lambda x: 0),
        patch.object(sweep, "_is_alone", lambda: True),
        patch.object(launching.Launch, "__call__", lambda launch, *args, **kwargs: note(launch.kernel)),
        patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: note(kernel)),
    ):
        yield


class _WithoutGuards(TorchFunctionMode):
    """Brackets, `copy_` and `~` by operators: what Python calls for them needs a CUDA device, even for fake tensors."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            return _at(*args)
        if function is Tensor.__setitem__:
            part, value = _at(args[0], args[1]), args[2]
            return _copied(part, value) if isinstance(value, Tensor) else part.fill_(value)
        if function is Tensor.copy_:
            return _copied(*args)
        if function is Tensor.__invert__:
            return torch.bitwise_not(args[0])
        return function(*args, **(kwargs or {}))


def _copied(x: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_.default(x, value, non_blocking)


def _at(x: Tensor, index: Any) -> Tensor:
    """`x[index]` for slices, numbers, None, dots and tensors."""
    index = index if isinstance(index, tuple) else (index,)
    named = sum(part is not None and part is not Ellipsis for part in index)
    if any(part is Ellipsis for part in index):
        dots = next(place for place, part in enumerate(index) if part is Ellipsis)
        index = (*index[:dots], *(slice(None),) * (x.ndim - named), *index[dots + 1 :])
    axis, tensors = 0, {}
    for part in index:
        if part is None:
            x = x.unsqueeze(axis)
        elif isinstance(part, slice):
            if part != slice(None):
                x = torch.ops.aten.slice.Tensor(x, axis, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            tensors[axis] = part
        else:
            x = torch.select(x, axis, part)
            axis -= 1
        axis += 1
    return torch.ops.aten.index.Tensor(x, [tensors.get(axis) for axis in range(x.ndim)]) if tensors else x


def counted(
    update: Callable[..., dict[str, Tensor]],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    second: torch.dtype | None = None,
) -> Counted:
    """Return what the second of two updates costs, with observations of these shapes.

    Args:
        second: the dtype of all but the first, such as a mask.

    Raises:
        DataDependentOutputException, DynamicOutputShapeException: the update looks at numbers, for which the host would wait.
    """
    # What a reducer keeps of its constants was made before, and is no fake tensor; of edges, the first of the two updates makes it.
    kept = patch.object(histogram, "_make_bounds", lru_cache(histogram._make_bounds))
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutGuards(), fake_kernels(), kept:
        dtypes = [dtype, *(second or dtype for _ in shapes[1:])]
        xs = [torch.empty(shape, dtype=kind, device="cuda") for shape, kind in zip(shapes, dtypes, strict=True)]
        state = update({}, *xs)
        with _Counter(max(x.numel() for x in xs)) as counter:
            update(state, *xs)
    return counter.counted


def recorded(reducer: Any, calls: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Counted]:
    """Return what each of several calls of a layer costs, with a `ForwardMonitor` on it; its outputs have these shapes."""
    from recorders import ForwardMonitor

    layer = torch.nn.Identity()
    monitor = ForwardMonitor(reducer, layer)
    found = []
    with fake_recording():
        xs = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        for _ in range(calls):
            with _Counter(max(x.numel() for x in xs)) as counter:
                layer(xs[0] if len(xs) == 1 else xs)
            found.append(counter.counted)
    assert (monitor.samples, monitor.last_error) == (calls, None)
    return found


def recorded_steps(reducer: Any, layers: int, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> list[Counted]:
    """Return what each step costs, in which so many layers are called once; each has a `ForwardMonitor`."""
    from recorders import ForwardMonitor

    net = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(layers)])
    monitors = [ForwardMonitor(reducer, layer) for layer in net]
    found = []
    with fake_recording():
        xs = {dtype: torch.empty(shape, dtype=dtype, device="cuda") for dtype in dtypes}
        for dtype in dtypes:
            with _Counter(xs[dtype].numel()) as counter:
                net(xs[dtype])
            found.append(counter.counted)
    assert {(monitor.samples, monitor.last_error) for monitor in monitors} == {(len(dtypes), None)}
    return found


@contextlib.contextmanager
def fake_recording() -> Iterator[None]:
    """Makes monitors record fake tensors, which they leave out, inside modes, such as the one that counts."""
    changes: dict[str, Any] = {
        "recorders.monitors.record.Tensor": FakeTensor,
        "recorders.monitors.record.why_no_numbers": lambda tensors: "",
        "recorders.monitors.record.is_plain_moment": lambda x: True,
        "recorders.capture.hooks.outside_modes": _called,
        "recorders.capture.context.outside_modes": _called,
        "recorders.capture.operands.Tensor": FakeTensor,
        "recorders.monitors.buffer.Tensor": FakeTensor,
    }
    with contextlib.ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_WithoutGuards())
        stack.enter_context(fake_kernels())
        yield


def _called(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def table() -> str:
    """A row for each reducer of `cases.py`, of what an update of a big observation costs."""
    from cases import CASES

    lines = [f"{'reducer':80} launches temporaries waits allocations"]
    for case in CASES:
        shape = (1 << 16, *case.trailing)
        dtype = torch.float32 if case.takes_floats else torch.int64
        try:
            found = counted(case.reducer.update, shape, dtype=dtype)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            lines.append(f"{case!s:.80}  waits for {error.func}")
        except Exception as error:
            lines.append(f"{case!s:80.80} {type(error).__name__}: {str(error).splitlines()[0]:.60}")
        else:
            row = (found.launches, found.temporaries, found.waits, found.allocations)
            lines.append(f"{case!s:80.80} " + " ".join(f"{number:8}" for number in row))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    if "--plain" in sys.argv:
        from reducers.kernels import counting, digests, dispatch, sketches

        dispatch.SWEEPS.clear()
        dispatch.WEIGHTED.clear()
        counting.BINS.clear()
        counting.BEST.clear()
        digests.DIGESTS.clear()
        sketches.SKETCHES.clear()
    print(table())
