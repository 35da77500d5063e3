"""Runs the loops in C++ on random tensors and compares them with PyTorch's calls in float64.

`test_sanitizers.py` runs it on a copy of the package whose loops look for errors of memory by themselves. By hand:
`PYTHONPATH=.:tests python tests/reducers/kernels/random_loops.py SECONDS SEED`.
"""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from looped import looped
from torch import Tensor

from reducers.kernels import digests, parts, sketches
from reducers.kernels.columns import COLUMNS, WEIGHTED, Needs
from reducers.kernels.cpp import library, threads
from reducers.kernels.cpp.binned import looped_bits, looped_edges
from reducers.kernels.cpp.digest import looped_digests
from reducers.kernels.cpp.loop_rows import swept_rows
from reducers.kernels.cpp.loop_slots import slots_for
from reducers.kernels.cpp.sketch import looped_sketches
from reducers.kernels.cpp.sweeping import call_for, task_for
from reducers.kernels.cpp.weighting import looped_weights

MOST = 1 << 17  # elements of a tensor
DTYPES = tuple(library.ELEMENTS)
GROUPS = (  # no launch adds both: magnitudes, and what is taken about a centre
    tuple(name for name, column in COLUMNS.items() if not column.needs & Needs.MAGNITUDES and name not in ("exact", "active")),
    ("count", "zeros", "min", "max", "magnitudes", "nonfinite"),
    ("count", "active", "min", "max", "mean", "m2"),
    ("squares", "nonfinite"),
    ("peak",),
    ("count", "nan", "inf"),
)


def sizes(pick: random.Random) -> list[int]:
    """Return the sizes of a tensor: most are small, and some have a run that several threads read, or many columns."""
    kind = pick.random()
    if kind < 0.1:
        found = [pick.randint(1, 6), pick.randint(4000, 60000)]
    elif kind < 0.2:
        found = [pick.randint(4000, 60000), pick.randint(1, 20)]
    elif kind < 0.35:
        found = [pick.randint(1, 9) for _ in range(pick.randint(3, 6))]
    else:
        found = [pick.choice((1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257)) for _ in range(pick.randint(1, 4))]
    while math.prod(found) > MOST:
        found[pick.randrange(len(found))] //= 2
        found = [max(1, size) for size in found]
    return found


def strided(pick: random.Random, shape: list[int], make: Callable[[list[int]], Tensor], expands: bool = True) -> Tensor:
    """Return a tensor of this shape of any strides, which ends where its memory does."""
    order = pick.sample(range(len(shape)), len(shape))
    stored, steps = [shape[axis] for axis in order], [1] * len(shape)
    for place in range(len(stored)):
        kind = pick.random()
        if expands and kind < 0.1:
            stored[place] = 1
        elif kind < 0.2 and math.prod(stored) * 2 <= 2 * MOST:
            steps[place] = 2
            stored[place] = stored[place] * 2 - pick.randint(0, 1)  # maybe without the element after the last one that is read
        elif kind < 0.3:
            steps[place] = 0  # a gap before the first
            stored[place] += 1
    base = make(stored).contiguous()
    for place, step in enumerate(steps):
        base = (
            base.narrow(place, 1, base.shape[place] - 1) if step == 0 else base[(slice(None),) * place + (slice(None, None, step),)]
        )
    back = [order.index(axis) for axis in range(len(shape))]
    found = base.permute(back).expand(shape)
    return found if pick.random() < 0.8 else found.contiguous()


def numbers(pick: random.Random, dtype: torch.dtype, shape: list[int], spoiled: float) -> Tensor:
    scale, shift = pick.choice((1e-3, 1.0, 30.0)), pick.choice((0.0, 0.0, 5.0, -300.0))
    x = torch.randn(shape).mul_(scale).add_(shift)
    if pick.random() < 0.3:
        x = x.relu()
    if spoiled:
        chances = torch.rand(shape)
        x[chances < spoiled] = math.nan
        x[(chances > 0.5) & (chances < 0.5 + spoiled)] = pick.choice((math.inf, -math.inf))
    return x.to(dtype)


def plain(x: Tensor, axes: tuple[int, ...], threshold: float, mask: Tensor | None) -> dict[str, Tensor]:
    """Return all columns by PyTorch's calls, and `scale`s: how large what is added up for the powers is."""
    wide = x.double()
    there = torch.ones_like(wide, dtype=torch.bool) if mask is None else mask
    good = there & wide.isfinite()
    clean = wide.where(good, 0.0)
    count = good.sum(axes)
    mean = clean.sum(axes) / count.clamp(min=1)
    placed = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    distance = (wide - mean.reshape(placed)).where(good, 0.0)
    low, high = wide.where(good, math.inf).amin(axes), wide.where(good, -math.inf).amax(axes)
    found = {"count": count, "mean": mean, "sum": clean.sum(axes), "squares": clean.square().sum(axes), "min": low, "max": high}
    found |= {f"m{power}": distance.pow(power).sum(axes) for power in (2, 3, 4)}
    found |= {"nan": (there & wide.isnan()).sum(axes), "inf": (there & wide.isinf()).sum(axes)}
    found |= {"zeros": (good & (wide == 0)).sum(axes), "magnitudes": clean.abs().sum(axes)}
    found |= {"active": (good & (wide.abs() > threshold)).sum(axes), "peak": torch.maximum(-low, high).clamp(min=0.0)}
    return found | {"nonfinite": found["nan"] + found["inf"], "scale": clean.abs().amax().reshape(())}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], elements: int, told: object) -> None:
    scale = float(wanted["scale"])
    for key, value in found.items():
        power = {"m2": 2, "squares": 2, "m3": 3, "m4": 4}.get(key, 1)
        size = 1 if key in ("mean", "min", "max", "peak") else elements
        slack = (
            0.0 if not value.is_floating_point() or key in ("min", "max", "peak") else 1e-12 * size * (2 * scale + 1e-30) ** power
        )
        close = torch.isclose(value.double(), wanted[key].double(), rtol=1e-9, atol=slack, equal_nan=True)
        assert close.all(), f"{key} of {told}: {value[~close][:4]} where {wanted[key][~close][:4]} is right"


class Runs:
    """Random calls of the loops, and how many of each were taken."""

    def __init__(self, seed: int) -> None:
        self.pick, self.taken = random.Random(seed), Counter[str]()
        torch.manual_seed(seed)

    def one(self) -> None:
        pick = self.pick
        torch.set_num_threads(pick.choice((1, 1, 2, 3, 5)))
        threads.pace.alone_until = 0.0  # or one thread does all for a while
        dtype, shape = pick.choice(DTYPES), sizes(pick)
        spoiled = pick.choice((0.0, 0.0, 0.01, 0.3, 0.5))
        x = strided(pick, shape, lambda stored: numbers(pick, dtype, stored, spoiled))
        axes = tuple(sorted(pick.sample(range(len(shape)), pick.randint(1, len(shape)))))
        told = (self.taken.total(), dtype, tuple(x.shape), x.stride(), axes, torch.get_num_threads())
        pick.choice((self.sweep, self.sweep, self.weigh, self.bins, self.rows, self.slots, self.digest, self.sketch))(x, axes, told)

    def sweep(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        names, pick = self.pick.choice(GROUPS), self.pick
        shown = pick.choice((0.0, 0.1, 0.9, 1.0))
        mask = None if pick.random() < 0.5 else strided(pick, [*x.shape], lambda stored: torch.rand(stored) < shown)
        columns = {name: name for name in names}
        found = looped(x, axes, columns, 0.5, mask)
        if found is None:
            return
        self.taken["masked" if mask is not None else "swept"] += 1
        wanted = plain(x, axes, 0.5, mask)
        compare(found, wanted, x.numel(), (told, None if mask is None else mask.stride()))
        if "mean" in names and x.shape[axes[0]] > 1:  # joined with what was before, in two parts
            cut = pick.randint(1, x.shape[axes[0]] - 1)
            one, other = x.narrow(axes[0], 0, cut), x.narrow(axes[0], cut, x.shape[axes[0]] - cut)
            masks = (
                (None, None) if mask is None else (mask.narrow(axes[0], 0, cut), mask.narrow(axes[0], cut, x.shape[axes[0]] - cut))
            )
            first = looped(one, axes, columns, 0.5, masks[0])
            both = None if first is None else looped(other, axes, columns, 0.5, masks[1], first)
            if both is not None:
                self.taken["joined"] += 1
                compare(both, wanted, x.numel(), ("joined", cut, told))

    def weigh(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        pick = self.pick
        kind = pick.choice(tuple(library.WEIGHTS))
        weights = strided(pick, [*x.shape], lambda stored: (torch.rand(stored) * pick.choice((1, 50))).to(kind))
        found = looped_weights(x, weights, axes, WEIGHTED)
        if found is None:
            return
        self.taken["weighted"] += 1
        wide, heavy = x.double(), weights.double()
        good = wide.isfinite() & heavy.isfinite()
        wide, heavy = wide.where(good, 0.0), heavy.where(good, 0.0)
        weight, total = heavy.sum(axes), (heavy * wide).sum(axes)
        mean = total / weight.where(weight > 0, 1.0)
        placed = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
        m2 = (heavy * (wide - mean.reshape(placed)).square()).sum(axes)
        wanted = {"weight": weight, "sum": total, "squares": heavy.square().sum(axes), "nonfinite": (~good).sum(axes)}
        del found["mean"]  # of no weight it is what it is
        compare(
            found,
            {**wanted, "m2": m2, "scale": (wide.abs().amax() + 1) * (heavy.amax() + 1)},
            x.numel(),
            (told, kind, weights.stride()),
        )

    def bins(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        pick = self.pick
        wide = x.float()
        if pick.random() < 0.5:
            bits, exponents = pick.choice(((1, (-3, 6)), (3, (-20, 20)), (5, (-126, 128))))
            if math.prod(size for axis, size in enumerate(x.shape) if axis not in axes) > 500:
                return
            found = looped_bits(x, axes, bits, exponents, {})
            if found is None:
                return
            self.taken["bits"] += 1
            finite = wide.isfinite()
            assert torch.equal(found["counts"].sum(-1), finite.sum(axes)), told
            assert torch.equal(found["nonfinite"], (~finite).sum(axes)), told
            again = looped_bits(x, axes, bits, exponents, found)
            assert again is not None
            assert torch.equal(again["counts"], 2 * found["counts"]), told
            return
        even = pick.random() < 0.5
        number = pick.randint(2, 70)
        bounds = torch.linspace(-2.0, 3.0, number) if even else torch.randn(number).sort().values
        found = looped_edges(x, axes, bounds, (-2.0, (number - 1) / 5.0) if even else None, {})
        if found is None:
            return
        self.taken["edges"] += 1
        place = torch.bucketize(wide.contiguous(), bounds, right=True).where(~wide.isnan(), number + 1)
        counted = torch.stack([(place == bin).sum(axes) for bin in range(number + 2)], -1)
        assert torch.equal(found["counts"], counted), (told, number, even)

    def rows(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        pick, columns = self.pick, {name: name for name in GROUPS[0]}
        dtype = x.dtype
        xs = [None if pick.random() < 0.2 else numbers(pick, dtype, sizes(pick), 0.01) for _ in range(pick.randint(1, 12))]
        xs.append(x)
        if pick.random() < 0.3:
            xs.append(x[:0])
        (found,), tables = swept_rows(xs, [(columns, 0.5, {})], None)
        (again,), _ = swept_rows(xs, [(columns, 0.5, found)], tables)
        self.taken["rows"] += 1
        for row, one in enumerate(xs):
            alone = torch.zeros(0, dtype=dtype) if one is None else one.reshape(-1)
            assert int(found["count"][row]) == int(alone.isfinite().sum()), told
            assert int(again["count"][row]) == 2 * int(found["count"][row]), told
            if len(alone):
                wanted = plain(alone, (0,), 0.5, None)
                compare({key: value[row] for key, value in found.items()}, wanted, len(alone), ("row", row, told))

    def slots(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        pick, columns = self.pick, {name: name for name in GROUPS[0]}
        found = slots_for(x, axes, columns, 0.5)
        if found is None:
            return
        number = pick.randint(1, 4)
        table = found.new_table(number, x.device)
        for slot in range(number):
            assert found.write(table, x, slot), told
        state = found.join(table, {}, 0, number)
        self.taken["slots"] += 1
        wanted = plain(x, axes, 0.5, None)
        assert torch.equal(state["count"], number * wanted["count"]), told
        for key in ("mean", "min", "max"):
            compare({key: state[key]}, wanted, x.numel(), ("slots", told))

    def digest(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        x = x.to(self.pick.choice((x.dtype, torch.float64, torch.float8_e5m2, torch.int32, torch.uint8, torch.bool)))
        runs = parts.Runs(1, x[0].numel(), 0, 0)
        found = looped_digests(x.contiguous(), len(x), runs, digests.NANS.get(x.dtype, (0, 0, 0)), (0, 0))
        assert found is not None, told
        self.taken["digests"] += 1
        wanted = [one % 2**64 for one in digests._of_words(x).flatten().tolist()]
        assert found == wanted, told
        whole = digests.digests(x[None])
        again = digests.digests(x.contiguous()[None])
        assert whole == again, told

    def sketch(self, x: Tensor, axes: tuple[int, ...], told: object) -> None:
        k = self.pick.choice((64, 128, 192, 256, 1024))
        x = x.to(self.pick.choice((x.dtype, x.dtype, torch.float64, torch.int16)))
        runs = parts.Runs(1, x[0].numel(), 0, 0)
        found = looped_sketches(x, k, runs)
        assert found is not None, told
        self.taken["sketches"] += 1
        flat = x.reshape(len(x), 1, -1)
        wanted = sketches._summed(flat, k, runs)
        slack = 1e-12 * float(wanted[1][:, 3:].nan_to_num(0, 0, 0).abs().amax() + 1e-30) * flat.shape[2]
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=slack), (told, k)
        assert torch.equal(found[1][:, [0, 1, 3, 4]], wanted[1][:, [0, 1, 3, 4]]), (told, k)


def planted() -> None:
    """Read beyond the end of a tensor."""
    x = torch.ones(1 << 10)
    call = call_for((1 << 12,), (1,), torch.float32, (0,), ("count", "sum"))
    assert call is not None
    results = [torch.zeros(1, dtype=dtype) for dtype in call.dtypes]
    task = task_for(call, torch.float32, 0.0, [result.data_ptr() for result in results])
    task.x = x.data_ptr()
    call.function(ctypes.byref(task), 1, 1)


def main(arguments: list[str]) -> None:
    print(library.state(), flush=True)
    if arguments[0] == "planted":
        planted()
        return
    runs, until = Runs(int(arguments[1])), time.monotonic() + float(arguments[0])
    while time.monotonic() < until:
        runs.one()
    print(json.dumps(runs.taken))


if __name__ == "__main__":
    main(sys.argv[1:])
