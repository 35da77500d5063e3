"""A kernel that fails is not used on that device any more, one warning says so, and all others go on."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from recorders import ForwardMonitor
from reducers import Moments
from reducers.kernels import counting, digests, dispatch, failing, sketches, waiting
from reducers.kernels.cpp.loop_slots import LoopSlots
from reducers.kernels.failing import Kernels, failures, found, given_up, tried

ALL: dict[str, Kernels] = {
    "sweep": dispatch.SWEEPS,
    "rows": dispatch.ROWS,
    "weighted": dispatch.WEIGHTED,
    "bins": counting.BINS,
    "best": counting.BEST,
    "slots": waiting.SLOTS,
    "digests": digests.DIGESTS,
    "sketches": sketches.SKETCHES,
}
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
with FakeTensorMode():
    ON = {device: torch.empty(1, device=device) for device in (FIRST, SECOND)}


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has failed, and there is something for each purpose on a GPU, also without Triton."""
    monkeypatch.setattr(failing, "_failed", [])
    monkeypatch.setattr(failing, "_CLASSES", (Tensor, FakeTensor))
    for kernels in ALL.values():
        monkeypatch.setitem(kernels, "cuda", lambda: broken)


def broken(*_: Any) -> Any:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")


@pytest.mark.parametrize("name", ALL)
def test_what_fails_is_off_for_that_kernel_and_that_device_only(name: str) -> None:
    kernels = ALL[name]
    with pytest.warns(RuntimeWarning, match=f"the kernel that {kernels.purpose} failed on cuda:0 .*{kernels.instead}: ") as seen:
        assert tried(kernels, FIRST, broken) is None
        assert tried(kernels, FIRST, broken) is None
    assert len(seen) == 1
    assert failures() == [str(seen[0].message)]
    assert "Runtime" in failures()[0]
    assert "Please" not in failures()[0]
    assert found(kernels, ON[FIRST]) is None
    assert found(kernels, ON[SECOND]) is not None
    assert [other for other in ALL if found(ALL[other], ON[FIRST]) is None] == [name]


def test_purposes_are_told_apart() -> None:
    assert len({kernels.purpose for kernels in ALL.values()}) == len(ALL)


def test_a_tensor_without_memory_says_nothing_of_a_kernel() -> None:
    def reads(x: Tensor) -> Tensor:
        assert tried(dispatch.SWEEPS, FIRST, Tensor.data_ptr, x) is None
        return x

    torch.vmap(reads)(torch.ones(2, 3))
    torch.func.grad(lambda x: reads(x).sum())(torch.ones(3))
    assert failures() == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
        SystemExit(),
    ],
    ids=repr,
)
def test_no_memory_and_interrupts_say_nothing_of_a_kernel(error: BaseException) -> None:
    def fails() -> Any:
        raise error

    for kernels in ALL.values():
        with pytest.raises(type(error)):
            tried(kernels, FIRST, fails)
    assert failures() == []


@pytest.mark.parametrize("error", [subprocess.CalledProcessError(-2, "gcc"), InterruptedError()], ids=repr)
def test_a_compiler_that_was_interrupted_is_tried_again(error: Exception) -> None:
    def fails() -> Any:
        raise error

    assert tried(dispatch.SWEEPS, FIRST, fails) is None
    assert not given_up(dispatch.SWEEPS, FIRST)


def test_two_threads_that_find_it_broken_warn_once() -> None:
    together = Barrier(2)

    def fails() -> Any:
        together.wait()
        broken()

    with pytest.warns(RuntimeWarning) as seen, ThreadPoolExecutor(2) as threads:
        assert [task.result() for task in [threads.submit(tried, dispatch.SWEEPS, FIRST, fails) for _ in range(2)]] == [None, None]
    assert len(seen) == 1


def test_graphs_use_the_sweep_unless_it_failed_on_a_device_of_that_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ALL.values():
        if kernels is not dispatch.SWEEPS:
            with pytest.warns(RuntimeWarning):
                tried(kernels, FIRST, broken)
    monkeypatch.setitem(dispatch.SWEEPS, "cuda", lambda: None)
    assert not failing.has_failed(dispatch.SWEEPS, "cuda")
    with pytest.warns(RuntimeWarning):
        tried(dispatch.SWEEPS, SECOND, broken)
    assert failing.has_failed(dispatch.SWEEPS, "cuda")
    assert not failing.has_failed(dispatch.SWEEPS, "cpu")


def test_slots_of_a_cpu_that_fail_leave_the_kernels_of_a_gpu_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("odd")

    monitor = ForwardMonitor(Moments("b c -> c"), layer := nn.Identity())
    xs: list[Tensor] = [torch.full((300, 400), float(value)) for value in range(4)]
    monkeypatch.setattr(LoopSlots, "write", fails)
    with pytest.warns(RuntimeWarning, match="keeps observations in slots failed on cpu .* joined to its state at once") as seen:
        for x in xs:
            layer(x)
        assert monitor.samples == 4
    assert ["Triton" in str(one.message) for one in seen] == [False]
    assert monitor.peek()["mean"].tolist() == [1.5] * 400
    assert [name for name in ALL if found(ALL[name], ON[FIRST]) is None] == []
    assert found(dispatch.ROWS, xs[0]) is not None
