"""Every reducer against the floor: one `update` on a 25 MB float32 activation, as a multiple of `x.sum()` in the same run.

Run: python benchmarks/floor.py
"""

from __future__ import annotations

from functools import partial

import torch
from measure import alternate, write

from reducers import Activity, Collect, Count, First, Last, Max, Mean, Min, Moments, Norm, Product, Quantile, Reducer, Sum, Summary

LAYOUTS = {
    "per tensor": ((64, 128, 768), "... ->"),
    "per feature": ((64, 128, 768), "b ... d -> d"),
    "per channel": ((32, 64, 56, 56), "b c ... -> c"),
}


def reducers(pattern: str) -> dict[str, Reducer]:
    kinds = (Count, Sum, Mean, Min, Max, Norm, Moments, Summary, Activity)
    each: dict[str, Reducer] = {kind.__name__: kind(pattern) for kind in kinds}
    each["Quantile"] = Quantile(pattern=pattern, low=1e-6, high=1e6)
    if pattern == "... ->":
        each.update(First=First(), Last=Last(), Collect=Collect())
    return {**each, "Product(Moments, Min, Max)": Product(moments=Moments(pattern), low=Min(pattern), high=Max(pattern))}


def main() -> None:
    rows = []
    for layout, (shape, pattern) in LAYOUTS.items():
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        functions = {"x.sum()": x.sum, **{name: partial(r.update, {}, x) for name, r in reducers(pattern).items()}}
        times = alternate(functions, seconds=0.5)
        floor = times["x.sum()"]["median"]
        for name, time in times.items():
            rows.append({"layout": layout, "reducer": name, "ms": time, "x floor": time["median"] / floor})
            print(f"{layout:12} {name:28} {time['median']:8.3f} ms  {time['median'] / floor:7.1f} x floor")
    write(
        "floor", rows=rows, what="one update of an empty state, float32, 25 MB; floor: x.sum() of the same tensor in the same run"
    )


if __name__ == "__main__":
    main()
