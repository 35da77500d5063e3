"""Compiles the GPU kernels for several architectures, without a GPU: registers, spilled bytes and shared memory of each.

Run, with `pip install '.[gpu-tests]'`: python benchmarks/kernels.py
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from measure import versions, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reducers.kernels.triton import accumulating, launch

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
POINTERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "u8"}
FAMILIES = {
    "Mean": "count,sum",
    "Sum": "exact",
    "Extremes": "min,max",
    "Norm": "count,squares",
    "Norm(p=1)": "count,magnitudes",
    "Norm(p=inf)": "count,peak",
    "Activity": "count,active",
    "Moments": "count,mean,m2",
    "Moments(order=3)": "count,mean,m2,m3",
    "Moments(order=4)": "count,mean,m2,m3,m4",
    "Summary": "count,mean,m2,min,max,zeros,nan,inf",
}


LAYOUTS = ("everything", "last axis kept", "channels kept", "not contiguous", "beyond 2**31")
COMMON = (torch.float32, torch.bfloat16)
Row = dict[str, Any]


def layouts(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Tensors on the meta device, which take no memory, and the axes to reduce."""
    x = torch.empty(64, 256, 56, 56, dtype=dtype, device="meta")
    return {
        "everything": (x, (0, 1, 2, 3)),
        "last axis kept": (x.view(-1, 1024), (0,)),
        "channels kept": (x, (0, 2, 3)),
        "not contiguous": (x[:, ::2, 1:, 3:].permute(3, 1, 2, 0), (0, 2)),
        "beyond 2**31": (torch.empty(1 << 20, 4097, dtype=dtype, device="meta"), (0, 1)),
    }


def launches(x: torch.Tensor, axes: tuple[int, ...], columns: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The kernels that are launched for this reduction, joined with a state: name, kernel, and each argument by name."""
    recorded: list[tuple[Any, dict[str, Any]]] = []

    class Launcher:
        def __init__(self, kernel: Any, traced: bool) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            names = self.kernel.arg_names
            return lambda *args, **kwargs: recorded.append((self.kernel, dict(zip(names, args, strict=False), **kwargs)))

    before, launch._launcher = launch._launcher, Launcher  # type: ignore[assignment]
    try:
        partials = launch.new_partials(x, axes, columns)
        due = torch.empty((), dtype=torch.int32, device="meta")
        shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
        launch._sweep(x, partials, axes, columns, 0.5, due, False)
        state = launch._join(partials, shape, columns, x.dtype, [], None, False)
        recorded.pop()
        launch._join(partials, shape, columns, x.dtype, state, due, False)
        accumulating._join_in_place(torch.empty(16, dtype=torch.int64, device="meta"), partials, columns, x.dtype, 0)
    finally:
        launch._launcher = before
    for kernel, arguments in recorded:
        yield kernel.fn.__name__, kernel, arguments


def compiled(kernel: Any, arguments: dict[str, Any], target: GPUTarget) -> Any:
    """The kernel compiled as the launch would have it: constants known, and multiples of 16 known as such."""
    warps = arguments.pop("num_warps")
    parameters = {parameter.name: parameter for parameter in kernel.params}
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(arguments.items()):
        special = isinstance(value, int) and not parameters[name].do_not_specialize
        if parameters[name].is_constexpr or value is None or (special and value == 1):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{POINTERS.get(value.dtype) or ('u8' if value.dtype is torch.uint8 else f'i{8 * value.itemsize}')}"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options={"num_warps": warps})


def resources(binary: Any) -> dict[str, int]:
    """Registers and spilled bytes a thread, shared bytes a block, as the compiled object says."""
    found = {"shared": binary.metadata.shared}
    if "cubin" in binary.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
        numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
        return {**found, "registers": int(numbers["REG"]), "spilled": int(numbers["STACK"]) + int(numbers["LOCAL"])}
    pattern = r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)"
    numbers = {name: int(value) for name, value in re.findall(pattern, binary.asm["amdgcn"])}
    spilled = 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]) + numbers["private_segment_fixed_size"]
    return {**found, "registers": numbers["vgpr_count"], "spilled": spilled}


def rows(reducers: Iterable[str], dtypes: Iterable[torch.dtype], where: Iterable[str], targets: Iterable[str]) -> Iterator[Row]:
    """The resources of the kernels of these reducers, dtypes and layouts, for these targets."""
    for reducer, dtype, layout, target in itertools.product(reducers, dtypes, where, targets):
        x, axes = layouts(dtype)[layout]
        for name, kernel, arguments in launches(x, axes, FAMILIES[reducer]):
            found = resources(compiled(kernel, arguments, TARGETS[target]))
            of = {
                "kernel": name,
                "reducer": reducer,
                "dtype": str(dtype).removeprefix("torch."),
                "layout": layout,
                "target": target,
            }
            yield {**of, **found}


def all_rows() -> Iterator[Row]:
    """Every reducer and layout in the dtypes that networks have; every other dtype for the kernels that do most."""
    yield from rows(FAMILIES, COMMON, LAYOUTS, TARGETS)
    others = [dtype for dtype in launch.DTYPES if dtype not in COMMON]
    yield from rows(("Mean", "Summary", "Moments(order=4)"), others, ("everything", "last axis kept"), TARGETS)


def most(found: Iterable[Row]) -> list[Row]:
    """The most that any layout and dtype needs, by reducer, kernel and target, with how many were compiled."""
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        same.setdefault((row["reducer"], row["kernel"], row["target"]), []).append(row)
    needed = ("registers", "spilled", "shared")
    return [
        {
            "reducer": reducer,
            "kernel": kernel,
            "target": target,
            "compiled": len(rows),
            **{key: max(row[key] for row in rows) for key in needed},
        }
        for (reducer, kernel, target), rows in same.items()
    ]


if __name__ == "__main__":
    table = []
    for row in all_rows():
        print(*row.values(), flush=True)
        table.append(row)
    write("kernels", rows=most(table), versions=versions("triton"))
