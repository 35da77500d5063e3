"""The kernel that counts bins in shared memory, as the compiler of NVIDIA makes it; what it counts is in `test_triton_bins.py`."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest
import torch
from paths import ROOT

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton (extra gpu-tests), not interpreted", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reducers.kernels.triton import bins
from reducers.kernels.triton.arguments import DTYPES
from reducers.kernels.triton.lanes import LanePlan

sys.path.append(str(ROOT / "benchmarks"))
import kernels

COMMON = (torch.float32, torch.bfloat16)
LAYOUTS = ("everything", "last axis kept", "channels kept", "not contiguous", "beyond 2**31")


def compiled(reducer: str, dtype: torch.dtype, layout: str, target: GPUTarget, patch: pytest.MonkeyPatch) -> Any:
    """The kernel as the launch would have it, with its limit of registers."""
    (x, axes), launched = kernels.layouts(dtype)[layout], []

    def launcher(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            launched.append((kernel, dict(zip(kernel.arg_names, args, strict=False), **constants)))

        assert grid == tiles.grid
        return launch

    def compile(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
        return made(source, target=target, options={**options, "maxnreg": registers})

    of, edges = kernels.BINNED[reducer], None
    bits, first, number = 0, 0, 0
    if isinstance(of, int):
        narrow = x.dtype.itemsize <= (4 if x.dtype.is_floating_point else 2)
        edges, number = torch.empty(of, dtype=torch.float32 if narrow else torch.float64, device="meta"), of + 2
    else:
        bits, (first, end) = of
        number = 2 * (end - first << bits) + 3
    patch.setattr(bins, "_takes_shared", lambda x: True)
    tiles = bins._tiles(x, axes, edges, first)
    assert isinstance(tiles, LanePlan)
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    results = [torch.empty((*shape, number), dtype=torch.int64, device="meta")]
    if edges is None:
        results += [torch.empty(shape, dtype=dtype, device="meta") for _ in range(2)]
        results += [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2)]
    patch.setattr(kernels.triton.JITFunction, "__getitem__", launcher)
    bins._count(x, tiles, results, edges, bits, first)
    ((kernel, arguments),) = launched
    registers, made = arguments.pop("maxnreg"), kernels.triton.compile
    ordered = {name: arguments.pop(name) for name in kernel.arg_names if name in arguments}
    patch.setattr(kernels.triton, "compile", compile)
    return kernels.compiled(kernel, {**ordered, **arguments}, target)


def assert_no_spills(reducer: str, dtype: torch.dtype, layout: str, target: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        binary = compiled(reducer, dtype, layout, kernels.TARGETS[target], patch)
    found = kernels.resources(binary)
    assert found["spilled"] == 0
    return binary.asm["ptx"], found["registers"]


@pytest.mark.parametrize("layout", ["everything", "last axis kept", "channels kept"])
@pytest.mark.parametrize("reducer", ["Histogram(bins=64)", "Quantile"])
def test_the_kernel_compiles_without_spills_for_as_many_programs_as_a_plan_has(reducer: str, layout: str) -> None:
    """Each element is counted by one instruction: those of the loop, and those of the loop that reads what is not full."""
    ptx, registers = assert_no_spills(reducer, torch.float32, layout, "sm_90")
    assert registers <= 128
    assert ptx.count("shared_counts[8192]") == 1
    assert ptx.count("red.shared.add.u32") == 16 + 4
    assert "ld.global.v4.b32" in ptx


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("reducer", kernels.BINNED)
def test_every_dtype_and_layout_compiles_without_spills(reducer: str, target: str) -> None:
    for dtype in DTYPES:
        for layout in LAYOUTS:
            assert_no_spills(reducer, dtype, layout, target)
