"""The GPU kernels as a compiler sees them: built for three architectures without a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paths import ROOT
from profiled import calls_of

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs triton (extra gpu-tests), not interpreted", allow_module_level=True)

import triton

from reducers.kernels.triton import launching
from reducers.kernels.triton.arguments import DTYPES

sys.path.append(str(ROOT / "benchmarks"))
import kernels


def assert_no_spills(rows: Any) -> None:
    """No loop over a tensor spills a register.

    Outside, the assembler of NVIDIA may put one or two aside, so that one more program finds room; and three in what joins, whose
    loop is over observations that waited.
    """
    table = list(rows)
    assert table
    for row in table:
        joins = row["kernel"].startswith("join")
        assert joins or not row["spills in loops"], row
        assert row["spilled"] <= (0 if row["target"] == "gfx942" else 24 if joins else 16), row
    assert all(0 < row["registers"] <= 255 for row in table)


@pytest.mark.parametrize("target", kernels.TARGETS)
@pytest.mark.parametrize("reducer", kernels.FAMILIES)
def test_every_family_compiles_without_spills(reducer: str, target: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (torch.float32,), ("last axis kept",), (target,)))


@pytest.mark.parametrize("target", kernels.TARGETS)
@pytest.mark.parametrize("reducer", ["Summary, masked", *kernels.WEIGHTED])
def test_masks_and_weights_compile_without_spills(reducer: str, target: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (torch.float32,), ("everything", "last axis kept"), (target,)))


@pytest.mark.parametrize("reducer", kernels.BINNED)
def test_counts_of_bins_compile_without_spills(reducer: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (torch.float32,), ("everything", "channels kept"), ("sm_90", "gfx942")))


@pytest.mark.parametrize("reducer", kernels.BEST)
def test_choices_of_the_best_compile_without_spills(reducer: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (torch.float32,), ("last axis kept", "channels kept"), ("sm_90", "gfx942")))


@pytest.mark.parametrize("target", kernels.TARGETS)
@pytest.mark.parametrize("reducer", kernels.HASHED)
def test_digests_and_sketches_compile_without_spills(reducer: str, target: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (torch.float32, torch.bfloat16), ("everything",), (target,)))


@pytest.mark.parametrize("reducer", kernels.HASHED)
def test_digests_and_sketches_of_all_dtypes_and_rows_compile_without_spills(reducer: str) -> None:
    assert_no_spills(kernels.rows((reducer,), DTYPES, ("everything",), ("sm_90",)))
    assert_no_spills(kernels.rows((reducer,), (torch.float32,), ("last axis kept",), ("sm_90",)))


@pytest.mark.parametrize("layout", ["everything", "last axis kept", "channels kept"])
@pytest.mark.parametrize("dtype", kernels.COMMON, ids=str)
@pytest.mark.parametrize(("reducer", "most"), [("Summary", 24), ("Mean", 8), ("Norm", 8), ("Moments(order=4)", 24)])
def test_an_element_takes_few_instructions_and_no_lane_waits_for_another(
    reducer: str, most: int, dtype: torch.dtype, layout: str
) -> None:
    """In the machine code for an H100, where the memory brings an element of float32 in the time of 38 instructions."""
    x, axes = kernels.layouts(dtype)[layout]
    _, kernel, arguments = next(kernels.launches(x, axes, reducer))
    found = kernels.of_an_element(kernel, arguments, dtype)
    assert found["instructions an element"] <= most
    assert found["barriers in loops"] == 0
    # If features are kept a lane has four of them at most, since each has sums of its own in registers.
    assert found["bytes of a load"] == (4 * dtype.itemsize if layout == "last axis kept" else 16)


@pytest.mark.parametrize("dtype", kernels.COMMON, ids=str)
@pytest.mark.parametrize("reducer", ["WeightedMoments", "WeightedMoments, of samples"])
@pytest.mark.parametrize("layout", ["everything", "last axis kept"])
def test_weighted_sums_wait_for_no_other_lane_before_their_end(layout: str, reducer: str, dtype: torch.dtype) -> None:
    """Weights lie as the tensor does, or neighbours share each, and it is read once."""
    x, axes = kernels.layouts(dtype)[layout]
    _, kernel, arguments = next(kernels.launches(x, axes, reducer))
    loads = 2 * 2 * arguments["UNROLL"] * max(1, arguments["VECTOR"] * dtype.itemsize // 16)
    assert arguments["SHARED"] == (reducer != "WeightedMoments")
    ptx = kernels.compiled(kernel, arguments, kernels.TARGETS["sm_90"]).asm["ptx"]
    waits = [place.start() for place in re.finditer("bar.sync", ptx)]
    reads = [place.start() for place in re.finditer("ld.global", ptx)]
    assert sum(place < waits[0] for place in reads) == loads  # quickly: of two tensors, before the loop and in it
    carefully = [place for place in reads if place > waits[0]]
    assert carefully
    assert not any(carefully[0] < place < carefully[-1] for place in waits)


@pytest.mark.parametrize("dtype", kernels.COMMON, ids=str)
@pytest.mark.parametrize(
    ("reducer", "most"),
    [*(("Digest", 10), ("Digest, of parts", 20)), *(("Sketch", 20), ("Sketch(k=4096)", 21), ("Sketch, of parts", 36))],
)
def test_an_element_of_digests_and_sketches_takes_few_instructions(reducer: str, most: int, dtype: torch.dtype) -> None:
    x, axes = kernels.layouts(dtype)["everything"]
    of = {kernel.fn.__name__: (kernel, arguments) for _, kernel, arguments in kernels.launches(x, axes, reducer)}
    found = kernels.of_an_element(*(of.get("hash_parts") or of["sketch_parts"]), dtype)
    assert found["instructions an element"] <= most
    assert found["barriers in loops"] == 0
    if "hash_parts" in of:
        assert found["bytes of a load"] == 16


def test_the_bytes_of_a_word_are_reversed_by_two_instructions() -> None:
    """Compilers know them by how they are written, if a word is as it was read, and if its halves were changed."""
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.float64):
        x, axes = kernels.layouts(dtype)["everything"]
        _, kernel, arguments = next(kernels.launches(x, axes, "Digest"))
        words = arguments["TOGETHER"] * arguments["WORDS"] // (32 * arguments["num_warps"])
        code = kernels.loops(kernels.machine_code(kernels.compiled(kernel, arguments, kernels.TARGETS["sm_90"])), innermost=True)
        assert {sum("PRMT" in line and "0x123" in line for line in loop) for loop in code} == {2 * words}, dtype


@pytest.mark.parametrize("layout", ["everything", "last axis kept"])
@pytest.mark.parametrize("reducer", ["Summary", "Moments(order=4)", "Mean", "Norm(p=1)"])
def test_slots_joined_in_two_launches_are_computed_as_by_one(reducer: str, layout: str) -> None:
    """So bits are the same: sums over parts are of the same layouts, and as many products are rounded before they are added."""
    x, axes = kernels.layouts(torch.float32)[layout]
    code = {
        name: kernels.compiled(kernel, dict(arguments), kernels.TARGETS["sm_90"]).asm
        for name, kernel, arguments in kernels.launches(x, axes, reducer)
        if name in ("join", "join_each", "join_ready")
    }
    assert sums_over_parts(code["join"]["ttgir"]) == sums_over_parts(code["join_each"]["ttgir"]) != []
    assert sums_over_parts(code["join_ready"]["ttgir"]) == []
    one, each, slots = (double_operations(code[name]["ptx"]) for name in ("join", "join_each", "join_ready"))
    more = one - each - slots  # the compiler of Triton 3.4 computes one of four moments twice
    assert more in (Counter(), Counter(fma=1, add=1))
    assert one == each + slots + more


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A compiled kernel that is launched nowhere, and what each of its launches is given."""
    x, axes = kernels.layouts(torch.float32)["everything"]
    _, kernel, arguments = next(kernels.launches(x, axes, "Mean"))
    compiled, seen = kernels.compiled(kernel, dict(arguments), kernels.TARGETS["sm_90"]), list[Any]()
    compiled.module, compiled.function = object(), 7  # it is loaded
    setattr(compiled, "_run" if hasattr(type(compiled), "run") else "run", lambda *args: seen.append(args))
    there = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5))
    for module in (launching, triton.compiler.compiler):
        monkeypatch.setattr(module, "driver", there)
    return compiled, seen


class Kernel:
    """A kernel that is compiled already."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.compiled


@pytest.mark.parametrize("known", [True, False])
def test_a_launch_that_is_made_again_is_that_of_triton(
    known: bool, runs: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton.__version__.startswith(launching._RUNS)
    if not known:  # of a version that is not known, Triton's own launch is made
        monkeypatch.setattr(launching, "_RUNS", ())
    (compiled, seen), x = runs, torch.zeros(3)
    launch = launching.Launch(Kernel(compiled), (2, 3, 1), (4, 5), 8)
    launch("kind", (x, None), 9, times=2)  # is compiled
    seen.clear()
    launch("kind", (x, None), 9, times=2)
    compiled[2, 6, 1](x.data_ptr(), None, 4, 5, 9)
    ours, wanted = seen
    assert (*ours[:6], *ours[9:]) == (*wanted[:6], *wanted[9:])
    assert not known or ours[6:9] == (None, None, None)  # what hooks are told, and the hooks
    assert not known or calls_of(lambda: launch("kind", (x, None), 9)) <= 16


def test_a_hook_of_triton_is_told_of_each_launch(runs: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, seen = runs
    launch = launching.Launch(Kernel(compiled), (2, 3, 1), (), 8)
    for _ in range(2):
        launch("kind", (None,))
    assert seen.pop()[7] is None
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook := lambda told: None)
    launch("kind", (None,))
    assert seen.pop()[7] is hook


def sums_over_parts(code: str) -> list[str]:
    """The types of what is reduced, with their layouts."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", code, re.MULTILINE))
    types = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) ->', code, re.DOTALL)
    return sorted(re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), found) for found in types)


def double_operations(code: str) -> Counter[str]:
    """How many operations of each kind on float64 there are, such as products that are not rounded before they are added."""
    return Counter(re.findall(r"\b(fma|mul|add|sub|div)\.(?:rn\.)?f64", code))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_compiles_without_spills(dtype: torch.dtype) -> None:
    assert_no_spills(kernels.rows(("Summary",), (dtype,), ("everything",), ("sm_90",)))


@pytest.mark.parametrize("layout", kernels.LAYOUTS)
def test_every_layout_compiles_without_spills(layout: str) -> None:
    assert_no_spills(kernels.rows(("Summary",), (torch.bfloat16,), (layout,), ("sm_80",)))


@pytest.mark.parametrize("target", kernels.TARGETS)
def test_many_tensors_at_once_compile_without_spills(target: str) -> None:
    assert_no_spills(kernels.rows(("Norm", "Summary", "Moments(order=4)"), (torch.float32,), ("many tensors",), (target,)))


@pytest.mark.parametrize(
    ("reducer", "dtype", "layout"),
    [
        ("Moments", torch.float32, "not contiguous"),
        ("Moments(order=3)", torch.float32, "everything"),
        ("Mean, masked", torch.float64, "last axis kept"),
        ("WeightedMean", torch.float32, "beyond 2**31"),
    ],
)
def test_kernels_that_spilled_before_compile_without_spills(reducer: str, dtype: torch.dtype, layout: str) -> None:
    assert_no_spills(kernels.rows((reducer,), (dtype,), (layout,), ("sm_80",)))


@pytest.mark.long
def test_all_kernels_compile_without_spills() -> None:
    assert_no_spills(kernels.all_rows())


def test_neither_a_mask_nor_weights_are_read_by_the_kernels_without_them() -> None:
    """The kernel without a mask is the same code as if there were none: nothing of it is a parameter."""
    x, axes = kernels.layouts(torch.float32)["last axis kept"]
    names = {}
    for reducer in ("Summary", "Summary, masked"):
        _, kernel, arguments = next(kernels.launches(x, axes, reducer))
        binary = kernels.compiled(kernel, arguments, kernels.TARGETS["sm_90"])
        ptx = binary.asm["ptx"]
        names[reducer] = ptx.count(".param ."), ptx.count("ld.global.b8") + ptx.count("ld.global.u8")
    assert names["Summary"][0] < names["Summary, masked"][0]
    assert names["Summary"][1] == 0 < names["Summary, masked"][1]
