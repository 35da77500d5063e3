"""How exact moments, covariance, alignment and singular values are: measured errors beside the bounds that are promised.

Run: python benchmarks/accuracy_moments.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from measure import write
from torch import Tensor

from reducers import (
    CKA,
    Covariance,
    CrossCovariance,
    Mean,
    MinibatchCKA,
    Moments,
    Norm,
    Reducer,
    State,
    condition_number,
    correlation,
    effective_rank,
    eigenvalues,
    participation_ratio,
    singular_values,
)

ROWS = 20_000
Array = np.ndarray[Any, Any]


def samples(name: str, shape: tuple[int, ...]) -> Tensor:
    rng = np.random.default_rng(0)
    drawn = {
        "normal": lambda: rng.normal(size=shape),
        "mean 1e4, std 1": lambda: 1e4 + rng.normal(size=shape),
        "mean 1e7, std 1": lambda: 1e7 + rng.normal(size=shape),
        "log-normal": lambda: rng.lognormal(size=shape),
        "Student t, 3 degrees": lambda: rng.standard_t(3, size=shape),
        "integers 0 to 255": lambda: rng.integers(0, 256, size=shape),
    }[name]()
    return torch.from_numpy(np.asarray(drawn, np.float32))


DATA = ("normal", "mean 1e4, std 1", "mean 1e7, std 1", "log-normal", "Student t, 3 degrees", "integers 0 to 255")


def left(reducer: Reducer, states: list[State]) -> State:
    merged = states[0]
    for state in states[1:]:
        merged = reducer.merge(merged, state)
    return merged


def right(reducer: Reducer, states: list[State]) -> State:
    merged = states[-1]
    for state in states[-2::-1]:
        merged = reducer.merge(state, merged)
    return merged


def balanced(reducer: Reducer, states: list[State]) -> State:
    while len(states) > 1:
        states = [left(reducer, states[i : i + 2]) for i in range(0, len(states), 2)]
    return states[0]


TREES: dict[str, Callable[[Reducer, list[State]], State]] = {"left": left, "right": right, "balanced": balanced}


def states_of(reducer: Reducer, xs: tuple[Tensor, ...], parts: int) -> list[State]:
    size = -(-xs[0].shape[0] // parts)
    return [reducer.update({}, *part) for part in zip(*(x.split(size) for x in xs), strict=True)]


def relative(got: Any, exact: Any) -> float:
    """Largest absolute error over the largest absolute value."""
    exact = np.asarray(exact, np.longdouble)
    return float(np.abs(np.asarray(got, np.longdouble) - exact).max() / np.abs(exact).max())


def wide(x: Tensor) -> Array:
    return x.double().numpy().astype(np.longdouble)


def moments(x: Array) -> dict[str, Any]:
    rest = x - x.mean()
    m2 = (rest**2).mean()
    return {
        "mean": x.mean(),
        "var": (rest**2).sum() / (len(x) - 1),
        "skewness": (rest**3).mean() / m2**1.5,
        "kurtosis": (rest**4).mean() / m2**2 - 3,
    }


def covariance(x: Array, y: Array) -> Array:
    return (x - x.mean(0)).T @ (y - y.mean(0)) / (len(x) - 1)


def alignment(x: Array, y: Array) -> Any:
    xx, xy, yy = (np.square(covariance(*pair)).sum() for pair in ((x, x), (x, y), (y, y)))
    return xy / np.sqrt(xx * yy)


def unbiased_hsic(x: Array, y: Array) -> Any:
    """Song et al. 2012, eq. 5, by Gram matrices with zeros on their diagonals."""
    n = len(x)
    k, l = (rest @ rest.T * (1 - np.eye(n)) for rest in (x - x.mean(0), y - y.mean(0)))  # noqa: E741
    return ((k * l).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(0) @ l.sum(1))) / (n * (n - 3))


def unbiased_alignment(pairs: list[tuple[Array, Array]]) -> Any:
    xy, xx, yy = (np.sum([unbiased_hsic(pair[a], pair[b]) for pair in pairs]) for a, b in ((0, 1), (0, 0), (1, 1)))
    return xy / np.sqrt(xx * yy)


def worst(measure: Callable[[Mapping[str, Tensor]], float], reducer: Reducer, xs: tuple[Tensor, ...]) -> float:
    """The largest error over one pass and every merge tree of 1, 7 and 1,000 parts."""
    errors = [measure(reducer.compute(reducer.update({}, *xs)))]  # type: ignore[arg-type]
    for parts in (7, 1000):
        states = states_of(reducer, xs, parts)
        errors += [measure(reducer.compute(tree(reducer, states))) for tree in TREES.values()]  # type: ignore[arg-type]
    return max(errors)


def drift(reducer: Reducer, xs: tuple[Tensor, ...], keys: tuple[str, ...]) -> float:
    """The largest difference between one pass and 1,000 parts merged in any tree."""
    once: Any = reducer.compute(reducer.update({}, *xs))
    states = states_of(reducer, xs, 1000)
    merged: list[Any] = [reducer.compute(tree(reducer, states)) for tree in TREES.values()]
    return max(relative(result[key].numpy(), once[key].numpy()) for result in merged for key in keys)


def promised(name: str) -> float:
    """The bound on relative errors: a mean in float64 is good to some eps, of which the distances from it inherit |mean| / std."""
    far = {"mean 1e4, std 1": 1e4, "mean 1e7, std 1": 1e7}.get(name, 0.0)
    return float(1e-12 + 10 * np.finfo(np.float64).eps * far)


class Table:
    """The rows, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, data: str, error: float, bound: float, against: str) -> None:
        self.rows.append({"what": what, "data": data, "error": error, "bound": bound, "against": against})
        print(f"{what:44} {data:36} {error:9.1e}  bound {bound:7.0e}  {'ok' if error <= bound else 'ABOVE'}")


def of_moments(table: Table, name: str) -> None:
    x = samples(name, (ROWS,))
    exact = moments(wide(x))

    def error(key: str) -> float:
        # what is about zero, as the skewness of a normal sample, has no relative error
        size = 1.0 if key in ("skewness", "kurtosis") and abs(exact[key]) < 1 else float(exact[key])
        return worst(lambda got: abs(float((got[key].item() - exact[key]) / size)), Moments(order=4), (x,))

    for key in ("mean", "var"):
        table.add(f"Moments(order=4): {key}", name, error(key), promised(name), "longdouble")
    for key in ("skewness", "kurtosis"):
        table.add(f"Moments(order=4): {key}", name, error(key), promised(name), "longdouble, absolute below 1")


def at_once(table: Table, name: str) -> None:
    """Big float32 observations, which are summed in float32 about their centre, in eager mode; and as a compiler is given them."""
    x = samples(name, (1 << 12, 512))
    exact = wide(x)
    mean, var = exact.mean(), ((exact - exact.mean()) ** 2).sum() / (exact.size - 1)
    lifts = {"": Moments().update, ", compiled": torch.compile(Moments().update, backend="aot_eager")}
    for how, update in lifts.items():
        got = Moments().compute(update({}, x))
        off = abs(got["mean"].item() - mean) / np.sqrt(var)
        table.add(f"Moments of 2 million at once{how}: mean", name, float(off), 1e-6, "longdouble; in standard deviations")
        table.add(f"Moments of 2 million at once{how}: var", name, relative(got["var"], var), 1e-6, "longdouble")
    for reducer, known in ((Mean(), mean), (Norm(), np.sqrt((exact**2).sum()))):
        got = reducer.compute(reducer.update({}, x))
        size = np.abs(exact).mean() if isinstance(reducer, Mean) else known
        table.add(f"{type(reducer).__name__} of 2 million at once", name, float(abs(got.item() - known) / size), 1e-6, "longdouble")


def of_norms(table: Table) -> None:
    """Long vectors of equal numbers, which are rounded in one direction: ours against the float32 norm of PyTorch."""
    x = torch.full((1 << 24,), 0.1)
    known = np.sqrt(np.longdouble(x.numel())) * np.longdouble(x[0].item())
    got = {"Norm": Norm().compute(Norm().update({}, x)), "torch.linalg.vector_norm, for comparison": torch.linalg.vector_norm(x)}
    for what, value in got.items():
        bound = 1e-6 if what == "Norm" else 1.0
        table.add(what, "16 million times 0.1", float(abs(value.item() - known) / known), bound, "construction")


def of_pairs(table: Table, name: str) -> None:
    both = samples(name, (ROWS, 9))
    both[:, 1:] += both[:, :-1] - both[:, :-1].mean()
    x, y = both[:, :5], both[:, 5:]
    exact = covariance(wide(x), wide(x))
    error = worst(lambda got: relative(got["covariance"], exact), Covariance(), (x,))
    table.add("Covariance", name, error, promised(name), "longdouble")
    across = covariance(wide(x), wide(y))
    largest = np.abs(exact).max()
    error = worst(lambda got: float(np.abs(got["covariance"].numpy() - across).max() / largest), CrossCovariance(), (x, y))
    table.add("CrossCovariance", name, error, promised(name), "longdouble, relative to the largest variance")
    aligned = alignment(wide(x), wide(y))
    error = worst(lambda got: relative(got["cka"], aligned), CKA(), (x, y))
    table.add("CKA", name, error, promised(name), "longdouble")
    few = x[:300], y[:300]
    fair = unbiased_alignment([(wide(few[0]), wide(few[1]))])
    error = worst(lambda got: abs(float(got["cka"].item() - fair)), CKA(unbiased=True), few)
    table.add("CKA(unbiased=True)", f"{name}, 300 rows", error, promised(name), "longdouble Gram matrices, absolute")
    small = unbiased_alignment([(wide(few[0][i : i + 20]), wide(few[1][i : i + 20])) for i in range(0, 300, 20)])
    estimated: Any = MinibatchCKA().compute(left(MinibatchCKA(), states_of(MinibatchCKA(), few, 15)))
    error = abs(float(estimated["cka"].item() - small))
    table.add("MinibatchCKA", f"{name}, 15 batches of 20", error, promised(name), "longdouble Gram matrices, absolute")


def of_parts(table: Table) -> None:
    x, y = samples("log-normal", (ROWS, 6)).double(), samples("normal", (ROWS, 4)).double()
    tried: list[tuple[Reducer, tuple[Tensor, ...], tuple[str, ...]]] = [
        (Moments(order=4), (x,), ("var", "skewness", "kurtosis")),
        (Covariance(), (x,), ("mean", "covariance")),
        (CrossCovariance(), (x, x + y[:, :1]), ("covariance",)),
        (CKA(), (x, x[:, :4] + y), ("cka",)),
        (CKA(unbiased=True), (x, x[:, :4] + y), ("cka",)),
    ]
    for reducer, xs, keys in tried:
        name = type(reducer).__name__ + ("(unbiased=True)" if getattr(reducer, "unbiased", False) else "")
        table.add(f"{name}, 1,000 parts", "log-normal, float64", drift(reducer, xs, keys), 1e-12, "the same reducer in one pass")
    for p in (1.0, 2.0, 3.5):
        power = (np.abs(wide(x)) ** p).sum() ** (1 / p)
        norm: Any = Norm(p=p).compute(Norm(p=p).update({}, x))
        table.add(f"Norm(p={p:g})", "log-normal", relative(norm, power), 1e-13, "longdouble")


def of_spectra(table: Table) -> None:
    turn = torch.linalg.qr(samples("normal", (64, 64)).double())[0]
    spectrum = torch.logspace(0, -6, 64, dtype=torch.float64)
    matrix, known = turn @ spectrum.diag() @ turn.T, spectrum.numpy()
    shares = known / known.sum()
    data = "64 known values from 1 to 1e-6"
    table.add("eigenvalues", data, relative(eigenvalues(matrix), known), 1e-13, "construction")
    table.add(
        "effective_rank", data, relative(effective_rank(matrix), np.exp(-(shares * np.log(shares)).sum())), 1e-12, "definition"
    )
    table.add("participation_ratio", data, relative(participation_ratio(matrix), 1 / (shares**2).sum()), 1e-13, "definition")
    table.add("singular_values", data, relative(singular_values(matrix), known), 1e-13, "construction")
    table.add("condition_number", data, relative(condition_number(matrix), 1e6), 1e-9, "construction; rounding times condition")
    x = samples("log-normal", (ROWS, 6))
    exact = covariance(wide(x), wide(x))
    scale = np.sqrt(np.diag(exact))
    got = Covariance().postmap(correlation).compute(Covariance().update({}, x))
    table.add("correlation", "log-normal", relative(got, exact / scale / scale[:, None]), 1e-12, "longdouble")


def main() -> None:
    table = Table()
    for name in DATA:
        of_moments(table, name)
        at_once(table, name)
        of_pairs(table, name)
    of_norms(table)
    of_parts(table)
    of_spectra(table)
    what = "largest relative error over one pass and left, right and balanced merges of 7 and of 1,000 parts of 20,000 rows"
    write("accuracy_moments", what=what, rows=table.rows)
    above = [row for row in table.rows if not row["error"] <= row["bound"]]
    if above:
        raise SystemExit(f"above their bounds: {above}")


if __name__ == "__main__":
    main()
