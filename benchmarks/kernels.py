"""Compiles the GPU kernels for several architectures, without a GPU: registers, spilled bytes and shared memory of each.

Of those that read tensors, also the instructions that an element takes, read in the machine code of an NVIDIA GPU.

Run, with `pip install '.[gpu-tests]'`: python benchmarks/kernels.py [--all]
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from measure import versions, write
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reducers.kernels.digests import NANS
from reducers.kernels.parts import Runs
from reducers.kernels.triton import accumulate, best, bins, digest, join, many, sketch, sweep, weigh
from reducers.kernels.triton.arguments import DTYPES, bytes_of, swept_dtype

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
if triton.__version__ < "3.5":
    del TARGETS["gfx942"]  # it brings no linker for AMD
POINTERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "u8"}
FAMILIES = {
    "Mean": "count,nonfinite,sum",
    "Sum": "count,nonfinite,exact",
    "Extremes": "count,nonfinite,min,max",
    "Norm": "count,nonfinite,squares",
    "Norm(p=1)": "count,nonfinite,magnitudes",
    "Norm(p=inf)": "count,nonfinite,peak",
    "Activity": "count,nonfinite,active",
    "Moments": "count,nonfinite,mean,m2",
    "Moments(order=3)": "count,nonfinite,mean,m2,m3",
    "Moments(order=4)": "count,nonfinite,mean,m2,m3,m4",
    "Summary": "count,mean,m2,min,max,zeros,nan,inf",
}
BINNED = {"Histogram(bins=64)": 65, "Histogram(bins=1000)": 1001, "Quantile": (5, (-126, 128)), "Quantile(low, high)": (3, (-3, 6))}
"""The number of edges; or the mantissa bits, and the exponents of `low` and `high`."""
BEST = {"TopK(k=10)": 10, "TopK(k=32)": 32}
HASHED = {"Digest": 0, "Sketch": 256, "Sketch(k=4096)": 4096}
"""The number of sums; 0 for hashes."""
HASHED |= {f"{name}, of parts": buckets for name, buckets in HASHED.items()}

MASKED = {f"{name}, masked": name for name in FAMILIES}
WEIGHTED = {"WeightedMean": ("nonfinite", "weight", "sum"), "WeightedMoments": ("nonfinite", "weight", "squares", "mean", "m2")}
WEIGHTED |= {f"{name}, of samples": columns for name, columns in WEIGHTED.items()}
LAYOUTS = ("everything", "last axis kept", "channels kept", "not contiguous", "beyond 2**31", "many tensors")
COMMON = (torch.float32, torch.bfloat16)
Row = dict[str, Any]


def layouts(dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Tensors on the meta device, which take no memory, and the axes to reduce; no axes: many such tensors at once."""
    x = torch.empty(64, 256, 56, 56, dtype=dtype, device="meta")
    return {
        "everything": (x, (0, 1, 2, 3)),
        "last axis kept": (x.view(-1, 1024), (0,)),
        "channels kept": (x, (0, 2, 3)),
        "not contiguous": (x[:, ::2, 1:, 3:].permute(3, 1, 2, 0), (0, 2)),
        "beyond 2**31": (torch.empty(1 << 20, 4097, dtype=dtype, device="meta"), (0, 1)),
        "many tensors": (x, ()),
    }


def launches(x: torch.Tensor, axes: tuple[int, ...], reducer: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The kernels that are launched for this reduction, joined with a state: name, kernel, and each argument by name.

    A mask is of the tokens, the positions of all axes but the last. Weights have the dtype of `x`, and lie as it
    does, or are of the samples, the positions of the first axis.
    """
    recorded: list[tuple[Any, dict[str, Any]]] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        names = kernel.arg_names
        return lambda *args, **kwargs: recorded.append((kernel, dict(zip(names, args, strict=False), **kwargs)))

    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    with patch.object(triton.JITFunction, "__getitem__", launcher):
        if reducer in WEIGHTED:
            of_samples = reducer.endswith("of samples")
            weights = x.new_empty(len(x), *[1] * (x.ndim - 1)).expand(x.shape) if of_samples else torch.empty_like(x)
            first = weigh.weighted_swept(x, weights, axes, WEIGHTED[reducer])
            recorded.clear()
            weigh.weighted_swept(x, weights, axes, WEIGHTED[reducer], first)
        elif reducer in BINNED:
            bin_launches(x, axes, shape, BINNED[reducer], recorded)
        elif reducer in HASHED:
            hash_launches(x, axes, reducer)
        elif reducer in BEST:
            best_launches(x, axes, shape, BEST[reducer])
        elif axes:
            sweep_launches(x, axes, shape, reducer, recorded)
        else:
            names, xs = {name: name for name in FAMILIES[reducer].split(",")}, [x] * 50
            (rows,), tables = many.swept_rows(xs, [(names, 0.5, {})], None)
            recorded.clear()
            many.swept_rows(xs, [(names, 0.5, rows)], tables)
    for kernel, arguments in recorded:
        ordered = {name: arguments.pop(name) for name in kernel.arg_names if name in arguments}
        name = "join_ready" if ordered.get("READY") else kernel.fn.__name__
        yield name, kernel, {**ordered, **arguments}


def sweep_launches(x: torch.Tensor, axes: tuple[int, ...], shape: list[int], reducer: str, recorded: list[Any]) -> None:
    mask = torch.empty((*x.shape[:-1], 1), dtype=torch.bool, device="meta").expand(x.shape) if reducer in MASKED else None
    columns, dtype = FAMILIES[MASKED.get(reducer, reducer)], swept_dtype(x, mask)
    partials = sweep.new_partials(x, axes, columns, mask)
    due = torch.empty((), dtype=torch.int32, device="meta")
    sweep.sweep_into(x, partials, axes, columns, 0.5, due, mask)
    state = join.join_partials(partials, shape, columns, dtype, [])
    recorded.pop()
    join.join_partials(partials, shape, columns, dtype, state)
    if mask is None:
        slots = torch.empty((32, *partials.shape), dtype=torch.int64, device="meta")
        each = join.each_joined(slots, columns, dtype, 0, 32)
        join.join_partials(each, shape, columns, dtype, state, 0, 32, ready=True)
        _, parts, kept = partials.shape
        accumulate._join_launch(columns, dtype, parts, kept)(
            "meta", (torch.empty(16, dtype=torch.int64, device="meta"), partials), 0
        )


def bin_launches(x: torch.Tensor, axes: tuple[int, ...], shape: list[int], of: Any, recorded: list[Any]) -> None:
    tiles = bins.plan(x, axes)
    assert tiles is not None
    if isinstance(of, int):
        narrow = x.dtype.itemsize <= (4 if x.dtype.is_floating_point else 2)
        bounds = torch.empty(of, dtype=torch.float32 if narrow else torch.float64, device="meta")
        bits, first, number = 0, 0, of + 2
    else:
        bounds, (bits, (first, end)) = None, of
        number = 2 * (end - first << bits) + 3
    state = bins._start(x, shape, number, bounds is None, first, [])
    recorded.pop()
    before = [*state[:3], *state[4:]]  # without the table of the extremes
    state = bins._start(x, shape, number, bounds is None, first, before)
    bins._count(x, tiles, state, bounds, bits, first)


def best_launches(x: torch.Tensor, axes: tuple[int, ...], shape: list[int], k: int) -> None:
    tiles = best.plan(x, axes)
    assert tiles is not None
    table, nonfinite = best._choose(x, tiles, k, True)
    state = [torch.empty((*shape, k), dtype=dtype, device="meta") for dtype in (x.dtype, *(torch.int64,) * 3)]
    seen, ids = torch.empty((), dtype=torch.int64, device="meta"), torch.empty(64, dtype=torch.int64, device="meta")
    left_out = torch.empty(shape, dtype=torch.int64, device="meta")
    best._rank(x, table, nonfinite, shape, k, True, ids, [bytes_of(state[0]), *state[1:], seen, left_out])


def hash_launches(x: torch.Tensor, axes: tuple[int, ...], reducer: str) -> None:
    """Of a whole tensor, or if an axis is kept of stacked ones; or of the second half of each of 64 rows."""
    xs = x[None] if len(axes) == x.ndim else x[: 1 << 10]
    length = xs[0].numel()
    runs = Runs(64, length // 64, length // 64, length // 32) if reducer.endswith("of parts") else Runs(1, length)
    if k := HASHED[reducer]:
        sketch.sketched(xs, k, runs)
    else:
        hashes = digest.hashed(xs, runs, NANS.get(x.dtype, (0, 0, 0)), (1 << 62, 1 << 61))
        assert hashes is not None
        state = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in ((2,), (2,), ())]
        digest.absorbed(hashes, state, (2**60 + 3, 2**60 + 7), (2**60 + 5, 2**60 + 9))


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
        aligned = isinstance(value, torch.Tensor) and not parameters[name].do_not_specialize_on_alignment
        if aligned or (special and value % 16 == 0):
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


def machine_code(binary: Any) -> str:
    """The machine code of a kernel for an NVIDIA GPU as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


def loops(code: str, innermost: bool = False) -> list[list[str]]:
    """The instructions of each loop in machine code, or of those without another in them.

    A loop is what lies between a branch backwards and where it leads.
    """
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1])
    places = ((place, re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)) for place, line in enumerate(instructions))
    ranges = [(labels[branch[1]], place) for place, branch in places if branch and labels.get(branch[1], place) < place]
    if innermost:
        ranges = [one for one in ranges if not any(one != other and one[0] <= other[0] <= other[1] <= one[1] for other in ranges)]
    return [instructions[start : place + 1] for start, place in ranges]


def spills_in_loops(binary: Any) -> int:
    """How many instructions of the innermost loops read or write a register that was spilled; 0 of GPUs other than NVIDIA's."""
    found = loops(machine_code(binary), innermost=True) if "cubin" in binary.asm else []
    return sum(bool(re.search(r"\b(?:LDL|STL)\b", line)) for loop in found for line in loop)


def of_an_element(kernel: Any, arguments: dict[str, Any], dtype: torch.dtype, target: str = "sm_90") -> dict[str, Any]:
    """What a kernel takes for an element of a full tile: instructions, the bytes of its widest load, and barriers in any loop."""
    return _of_an_element(compiled(kernel, dict(arguments), TARGETS[target]), arguments, dtype)


def _of_an_element(binary: Any, constants: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    code = machine_code(binary)
    found = loops(code)
    loads = re.compile(r"\bLDG\.E(?:\.\w+)*?(?:\.(128|64))?\b(?!\.)")

    def loads_of(loop: list[str]) -> tuple[int, int]:
        return sum("LDG" in line for line in loop), len(loop)

    # What reads a whole tile is the loop with the most loads; its branches all count as taken. Kernels that hash have a second one,
    # for tiles that are not whole.
    reading = [loop for loop in found if loads_of(loop)[0]]
    quick = max(reading, key=loads_of) if "UNROLL" in constants else reading[0]
    widths = [int(load[1] or 32) // 8 for line in quick if (load := loads.search(line))]
    return {
        "instructions an element": len(quick) / _elements_of_a_thread(constants, dtype),
        "bytes of a load": max(widths),
        "barriers in loops": sum("BAR" in line for loop in found for line in loop if len(loop) > 1),
    }


def _elements_of_a_thread(constants: Mapping[str, Any], dtype: torch.dtype) -> int:
    """How many elements of a tile a thread has."""
    if "UNROLL" in constants:
        return int(constants["UNROLL"] * constants["VECTOR"])
    if "WORDS" in constants:
        return int(constants["TOGETHER"] * constants["WORDS"] * 8 // dtype.itemsize // (32 * constants["num_warps"]))
    octets = 1 if constants["RUNS"] else constants["TOGETHER"]
    return int(octets * 8 * constants["WIDTH"] // (32 * constants["num_warps"]))


def rows(reducers: Iterable[str], dtypes: Iterable[torch.dtype], where: Iterable[str], targets: Iterable[str]) -> Iterator[Row]:
    """The resources of the kernels of these reducers, dtypes and layouts, for these targets."""
    for reducer, dtype, layout, target in itertools.product(reducers, dtypes, where, [one for one in targets if one in TARGETS]):
        x, axes = layouts(dtype)[layout]
        for name, kernel, arguments in launches(x, axes, reducer):
            binary = compiled(kernel, dict(arguments), TARGETS[target])
            element = _of_an_element(binary, arguments, dtype) if counts_elements(name, reducer, dtype, target) else {}
            found = {**resources(binary), "spills in loops": spills_in_loops(binary), **element}
            of = {
                "kernel": name,
                "reducer": reducer,
                "dtype": str(dtype).removeprefix("torch."),
                "layout": layout,
                "target": target,
            }
            yield {**of, **found}


def counts_elements(kernel: str, reducer: str, dtype: torch.dtype, target: str) -> bool:
    """Whether instructions are counted: of tiles that are read quickly, which those under a mask are not."""
    quickly = (kernel == "sweep" and reducer in FAMILIES) or kernel in ("hash_parts", "sketch_parts")
    return quickly and target == "sm_90" and dtype in COMMON


def usual_rows() -> Iterator[Row]:
    """Every reducer in the dtypes and layouts that networks have most."""
    where = ("everything", "last axis kept", "channels kept")
    yield from rows((*FAMILIES, "Summary, masked", *WEIGHTED, *BINNED, *BEST), COMMON, where, TARGETS)
    yield from rows(HASHED, COMMON, where[:2], TARGETS)


def all_rows() -> Iterator[Row]:
    """Every reducer and layout in the dtypes that networks have; every other dtype for the kernels that do most."""
    own = (*MASKED, *WEIGHTED, *BINNED, *BEST)  # which take no many tensors at once
    yield from rows(FAMILIES, COMMON, LAYOUTS, TARGETS)
    yield from rows(own, COMMON, LAYOUTS[:-1], TARGETS)
    others = [dtype for dtype in DTYPES if dtype not in COMMON]
    most = ("Mean", "Summary", "Moments(order=4)")
    few = ("everything", "last axis kept")
    yield from rows(most, others, (*few, "many tensors"), TARGETS)
    yield from rows(HASHED, DTYPES, ("everything", "last axis kept"), TARGETS)
    yield from rows((*(f"{name}, masked" for name in most), *WEIGHTED, *BINNED, *BEST), others, few, TARGETS)


def most(found: Iterable[Row]) -> list[Row]:
    """The most that any layout and dtype needs, by reducer, kernel and target, with how many were compiled."""
    same: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        same.setdefault((row["reducer"], row["kernel"], row["target"]), []).append(row)
    needed = ("registers", "spilled", "spills in loops", "shared", "instructions an element", "barriers in loops")
    return [
        {
            "reducer": reducer,
            "kernel": kernel,
            "target": target,
            "compiled": len(rows),
            **{key: max(row[key] for row in rows if key in row) for key in needed if any(key in row for row in rows)},
        }
        for (reducer, kernel, target), rows in same.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every dtype and layout, which takes an hour")
    table = []
    for row in all_rows() if parser.parse_args().all else usual_rows():
        print(*row.values(), flush=True)
        table.append(row)
    write("kernels", rows=most(table), versions=versions("triton"))
