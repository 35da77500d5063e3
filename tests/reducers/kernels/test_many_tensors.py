"""Many tensors in two launches, by Triton's interpreter on CPU tensors: against float64, around the borders of tiles and parts.

Run with triton (extra `gpu-tests`) and TRITON_INTERPRET=1, in a process of their own: the variable changes what triton compiles.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import laws
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton (extra gpu-tests) and TRITON_INTERPRET=1", allow_module_level=True)

from reducers import Moments, Norm, Product, Summary
from reducers.execution.rows import RowSweep, swept_dtypes
from reducers.kernels import dispatch
from reducers.kernels.axes import fills_memory
from reducers.kernels.triton import lanes, many
from reducers.kernels.triton.arguments import DTYPES
from reducers.kernels.triton.many import AddressTables, row_dtypes, swept_rows
from reducers.kernels.triton.sweep import sweep_many

ALL = {name: name for name in ("count", "mean", "m2", "m3", "m4", "min", "max", "zeros", "nan", "inf")}
TILE, PART = 64, 128  # numbers of a tile, and of a part
SIZES = (1, 2, TILE - 1, TILE, TILE + 1, PART, PART + 1, 4 * PART, 4 * PART + 1, 9 * TILE + 7)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors have many tiles, and at most four parts of two tiles or more."""
    monkeypatch.setattr(lanes, "_LANES", TILE // 8)
    monkeypatch.setattr(lanes, "_EACH", 8)
    monkeypatch.setattr(lanes, "_PART_TILES", PART // TILE)
    monkeypatch.setattr(lanes, "MOST_PARTS", 4)


def drawn(kind: str, *shape: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    flat = x.view(-1)
    if kind == "holes":
        flat[::7], flat[::11], flat[::13], flat[::5] = torch.nan, torch.inf, -torch.inf, 0
    fills = {"offset": lambda: flat.add_(1e4), "nothing finite": lambda: flat.fill_(torch.nan), "constant": lambda: flat.fill_(0.1)}
    fills |= {"huge": lambda: flat.mul_(1e37), "tiny": lambda: flat.mul_(1e-34)}
    fills.get(kind, lambda: flat)()
    return x


def reference(xs: Sequence[Tensor]) -> dict[str, float]:
    """Everything that the kernels compute of all elements of the tensors, by plain operations in float64."""
    wide = torch.cat([x.double().reshape(-1) for x in xs])
    clean = wide[wide.isfinite()]
    mean = clean.mean() if len(clean) else torch.zeros(())
    distance = clean - mean
    found = {
        "count": len(clean),
        "mean": mean,
        **{f"m{power}": (distance**power).sum() for power in (2, 3, 4)},
        "min": clean.min() if len(clean) else math.inf,
        "max": clean.max() if len(clean) else -math.inf,
        "zeros": (wide == 0).sum(),
        "nan": wide.isnan().sum(),
        "inf": wide.isinf().sum(),
        "sum": clean.sum(),
        "exact": clean.sum(),
        "magnitudes": clean.abs().sum(),
        "squares": clean.square().sum(),
        "active": (clean.abs() > 0.5).sum(),
        "peak": clean.abs().max() if len(clean) else 0.0,
        "lean": (distance.abs() ** 3).sum(),  # how exact m3 can be
    }
    return {name: float(value) for name, value in found.items()}


def assert_row(found: Mapping[str, Tensor], row: int, *xs: Tensor) -> None:
    """Errors are below a millionth: of the mean in standard deviations, of sums in the sum of what is added."""
    exact = reference(xs)
    std = math.sqrt(exact["m2"] / max(exact["count"], 1))
    narrow = all(x.dtype.is_floating_point and x.dtype is not torch.float64 for x in xs)
    scale = {"mean": std + 1e-12 * abs(exact["mean"]), "m3": exact["lean"], "sum": exact["magnitudes"]}
    for name, values in found.items():
        value, wanted = float(values[row]), exact[name]
        if name in ("mean", "m2", "m3", "m4", "sum", "magnitudes", "squares"):
            allowed = scale.get(name, abs(wanted))
            bound = 1e-6 * allowed if narrow else 1e-11 * (allowed + abs(wanted) + std)
            assert abs(value - wanted) <= bound, (name, row, value, wanted)
        elif name == "exact":
            assert abs(value - wanted) <= 1e-12 * exact["magnitudes"], (name, row, value, wanted)
        else:
            assert value == wanted, (name, row, value, wanted)


def swept(xs: Sequence[Tensor | None], columns: Mapping[str, str] = ALL, state: Mapping[str, Tensor] | None = None) -> Any:
    (found,), _ = swept_rows(xs, [(columns, 0.5, state or {})], None)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_dtypes_and_sizes_are_as_exact_as_promised(dtype: torch.dtype) -> None:
    xs = [drawn("holes", size) for size in (SIZES if dtype is torch.float32 else (1, 2, TILE + 1, PART + 1))]
    xs = [x.to(dtype) if dtype.is_floating_point else x.mul(3).nan_to_num(1, 2, 3).to(dtype) for x in xs]
    found = swept([*xs[:2], torch.empty(0, dtype=dtype), *xs[2:]])
    assert {key: value.dtype for key, value in found.items()} == row_dtypes(ALL, dtype)
    assert all(value.shape == (len(xs) + 1,) and value.is_contiguous() for value in found.values())
    assert {key: int(found[key][2]) for key in ("count", "mean", "m4", "zeros", "nan", "inf")} == dict.fromkeys(
        ("count", "mean", "m4", "zeros", "nan", "inf"), 0
    )
    for row, x in enumerate(xs):
        assert_row(found, row + (row >= 2), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_that_break_careless_sums(dtype: torch.dtype) -> None:
    kinds = ("normal", "offset", "holes", "nothing finite", "constant", *(("huge", "tiny") if dtype is torch.float32 else ()))
    xs = [drawn(kind, 150).to(dtype) for kind in kinds]
    found = swept(xs)
    for row, x in enumerate(xs):
        assert_row(found, row, x)
    assert float(found["m2"][kinds.index("constant")]) == 0


@pytest.mark.parametrize("total", ["sum", "exact", "magnitudes", "squares", "active", "peak"])
def test_totals(total: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool):
        xs = [drawn("holes", size) for size in (3, 200)]
        xs = [x.to(dtype) if dtype.is_floating_point else x.mul(40).nan_to_num(0, 0, 0).to(dtype) for x in xs]
        found = swept(xs, {"count": "count", total: total})
        for row, x in enumerate(xs):
            assert_row(found, row, x)


def test_any_order_of_the_axes_gaps_and_places_in_memory() -> None:
    x = drawn("normal", 4, 6, 5, 3)
    bucket = drawn("holes", 300)
    xs = [
        x,
        x.permute(3, 1, 0, 2),
        x.contiguous(memory_format=torch.channels_last),
        x[:, ::2, 1:],  # with gaps
        x[0, :1].expand(6, 5, 3),
        bucket[1:3],  # views of one piece of memory, as DDP makes of gradients
        bucket[3:200],
        torch._neg_view(x),
        torch.nn.Parameter(x[0]),
    ]
    assert [fills_memory(x) for x in xs] == [True, True, True, False, False, True, True, True, True]
    found = swept(xs)
    for row, each in enumerate(xs):
        assert_row(found, row, each.detach())


def test_rows_are_joined_with_those_from_before_and_others_stay_as_they_are() -> None:
    columns = {**ALL, "peak": "peak"}
    first = [drawn("normal", 10), drawn("holes", 300), drawn("nothing finite", 5), torch.full((200,), 3e38)]
    xs = [x.double() ** (1 if row < 3 else 5) for row, x in enumerate(first)]  # the square of the last is infinite
    before = swept(xs, columns)
    later = [drawn("offset", 70).double(), drawn("nothing finite", 3).double(), drawn("normal", 8).double(), None]
    kept = {key: value.clone() for key, value in before.items()}
    after = swept(later, columns, before)
    laws.same_bits(before, kept)
    for row, (x, y) in enumerate(zip(xs, later, strict=True)):
        if y is not None:
            assert_row(after, row, x, y)
    laws.same_bits({key: value[3] for key, value in after.items()}, {key: value[3] for key, value in before.items()})
    assert all(after[key].data_ptr() != before[key].data_ptr() for key in after)


def test_equal_tensors_give_equal_bits_whatever_is_beside_them() -> None:
    x, y, z = drawn("holes", 300), drawn("normal", 3), drawn("offset", 600)
    alone, among, again = swept([x]), swept([z, y, x.clone()]), swept([z, y, x.clone()])
    laws.same_bits(among, again)
    laws.same_bits({key: value[2] for key, value in among.items()}, {key: value[0] for key, value in alone.items()})


def test_offsets_beyond_32_bits() -> None:
    x = torch.empty(2**31 + 5000, dtype=torch.int8)  # only the pages that are touched take memory
    x[2**31 + 100 : 2**31 + 103] = torch.tensor([1, 2, -6])
    partials = torch.empty((4, 1, 1), dtype=torch.int64)
    addresses, cuts = torch.tensor([x.data_ptr()]), torch.tensor([0, 2**31 + 100, 3, 0, 1])
    sweep_many(x, partials, "count,min,max,exact", 0.0, addresses, cuts, False)
    assert partials.flatten().tolist() == [3, -6, 2, -3]


@given(st.lists(st.one_of(st.integers(0, 40), st.integers(0, 40 * PART)), min_size=1, max_size=8))
def test_parts_hold_every_element_once_and_are_of_about_equal_length(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "MOST_PARTS", 4)
        patch.setattr(lanes, "_LANES", TILE // 8)
        patch.setattr(lanes, "_EACH", 8)
        patch.setattr(lanes, "_PART_TILES", PART // TILE)
        count, table = lanes.cut_many(lengths, torch.float32)
        owners, firsts, sizes = (table[place * count : (place + 1) * count] for place in range(3))
        starts, numbers = table[3 * count : 3 * count + len(lengths)], table[3 * count + len(lengths) :]
        assert len(numbers) == len(lengths)
        assert sum(numbers) == count
        for row, (length, start, number) in enumerate(zip(lengths, starts, numbers, strict=True)):
            mine = range(start, start + number)
            assert number <= 4
            assert [owners[part] for part in mine] == [row] * number
            stops = [firsts[part] + sizes[part] for part in mine]
            assert [*(firsts[part] for part in mine), length] == [0, *stops]
            assert all(0 < sizes[part] <= max(PART, -(-length // (4 * TILE)) * TILE) for part in mine)
        assert lanes.cut_many([*lengths, 999], torch.float32)[1][: len(owners)] == owners  # others are not cut anew


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what was copied to the device."""
    lengths: list[int] = []
    send = many._sent

    def noted(values: Sequence[int], *rest: Any) -> Tensor:
        lengths.append(len(values))
        return send(values, *rest)

    monkeypatch.setattr(many, "_sent", noted)
    return lengths


def test_only_what_changed_is_copied_to_the_device(sent: list[int]) -> None:
    xs, others = ([drawn(kind, size) for size in (10, 300, 5)] for kind in ("normal", "offset"))
    columns = [{"count": "count", "squares": "squares"}, {"count": "count", "sum": "sum"}]
    states: list[Any] = [{}, {}]
    tables, seen = None, [[], [], []]  # type: ignore[var-annotated]

    def step(*tensors: Tensor | None) -> list[int]:
        nonlocal states, tables
        sent.clear()
        states, tables = swept_rows(tensors, [(names, 0.0, state) for names, state in zip(columns, states, strict=True)], tables)
        for before, x in zip(seen, tensors, strict=True):
            before += [] if x is None else [x]
        return list(sent)

    assert step(*xs) == [3 * 5 + 2 * 3, 3]  # how tensors are cut, and where they are: once for all statistics
    assert step(*xs) == []
    assert step(*others) == [3]  # gradients that were made anew
    assert step(xs[0], None, xs[2]) == [3]
    assert step(*others) == [3]
    longer = drawn("normal", 700)
    assert step(xs[0], longer, None) == [3 * 6 + 2 * 3, 3]
    assert step(xs[0], None, xs[2]) == [3]  # the second is as long as it was
    for row, tensors in enumerate(seen):
        for state in states:
            assert_row(state, row, *tensors)


def test_an_interrupt_while_addresses_are_sent_leaves_none_that_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = [drawn("normal", 100)], [drawn("offset", 100)]
    columns = {"count": "count", "sum": "sum"}
    _, tables = swept_rows(xs, [(columns, 0.0, {})], None)
    send = many._sent

    def interrupted(*args: Any) -> Tensor:
        send(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(many, "_sent", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swept_rows(ys, [(columns, 0.0, {})], tables)
    (found,), _ = swept_rows(xs, [(columns, 0.0, {})], tables)
    assert_row(found, 0, *xs)


def test_a_reducer_made_of_several_sweeps_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    monkeypatch.setitem(dispatch.ROWS, "cpu", dispatch.ROWS["cuda"])
    reducer = Product(norm=Norm(), more=Product(moments=Moments(order=4), summary=Summary())).postmap(lambda result: result)
    xs: list[Tensor | None] = [drawn("offset", size) for size in (3, 400)]
    assert xs[0] is not None
    dtypes = swept_dtypes(reducer, xs[0])
    sweep = RowSweep()
    rows = sweep.update(reducer, sweep.update(reducer, {}, xs) or {}, xs)
    assert rows is not None
    assert {key: value.dtype for key, value in rows.items()} == dtypes
    for row, x in enumerate(xs):
        assert x is not None
        wanted = reducer.update(reducer.update({}, x.double()), x.double())
        assert rows.keys() == wanted.keys()
        for key, value in wanted.items():
            allowed = 3e-6 * float(wanted["more/moments/m2"]) ** 1.5 if key.endswith("m3") else 1e-30
            torch.testing.assert_close(rows[key][row].double(), value.double(), rtol=1e-6, atol=allowed)


def test_what_has_no_kernel_is_left_to_others(without_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reducers.kernels.failing._failed", [])
    assert swept_dtypes(Norm(), torch.ones(3)) is None  # on a CPU
    monkeypatch.setitem(dispatch.ROWS, "cpu", dispatch.ROWS["cuda"])
    assert swept_dtypes(Norm(), torch.ones(3)) is not None
    assert swept_dtypes(Norm(p=3), torch.ones(3)) is None
    assert swept_dtypes(Norm(), torch.ones(3, dtype=torch.complex64)) is None


def test_tables_are_made_anew_on_another_stream(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [drawn("normal", 10)]
    tables = AddressTables.of(xs, None)
    assert AddressTables.of(xs, tables) is tables
    monkeypatch.setattr(many, "_stream", lambda x: 7)
    other = AddressTables.of(xs, tables)
    assert other is not tables
    assert other.cuts.data_ptr() != tables.cuts.data_ptr()
    assert len(sent) == 4
