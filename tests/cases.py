"""Every reducer with inputs it takes and a one-shot reference in float64: one row each, for the law suite to run over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import left_out
import numpy as np
import torch
from left_out import INTEGERS_ONLY, SHOWN, LeftOut
from names import name_of
from numpy.typing import NDArray
from references_distributions import (
    count_by_value,
    extreme,
    frequent,
    histogram,
    hyperloglog,
    per_unit,
    quantiles,
    reservoir,
)
from references_hashing import digest, fingerprints, sketch
from references_temporal import (
    differences,
    ema,
    first_nonfinite,
    grouped,
    idle,
    masked,
    positive,
    recurrence,
    scaled,
    time_since,
    trace,
    weighted,
    with_condition,
    with_labels,
    with_mask,
    with_weights,
)
from scipy import stats

from recorders.watch.lenses.noise import Scatter
from recorders.watch.lenses.norms import SampleNorms
from reducers import (
    CKA,
    EMA,
    Activity,
    BottomK,
    Collect,
    ConditionalCumulativeTrace,
    ConditionalNearestTrace,
    Count,
    CountByValue,
    Covariance,
    CrossCovariance,
    CumulativeTrace,
    Difference,
    Digest,
    DistinctCount,
    EveryNth,
    Extremes,
    Fingerprints,
    First,
    FirstNonfinite,
    Fold,
    Geometry,
    GroupBy,
    HeavyHitters,
    Histogram,
    History,
    Idle,
    Last,
    Masked,
    Max,
    Mean,
    Min,
    MinibatchCKA,
    Moments,
    NearestTrace,
    Norm,
    PerObservation,
    Postmap,
    Prefilter,
    Premap,
    Product,
    Quantile,
    Reducer,
    Reservoir,
    ScaledCumulativeTrace,
    ScaledNearestTrace,
    Scan,
    Sketch,
    Sparsity,
    Sum,
    Summary,
    TimeSince,
    TopK,
    WeightedMean,
    WeightedMoments,
    Whole,
    Window,
    correlation,
    effective_rank,
    intrinsic_dimension,
)

Array = NDArray[Any]
Observations = list[Array]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REAL = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        reducer: what is tested.
        reference: from all observations, as float64 or complex128 arrays, to the result.
        trailing: shape of an observation after its first axis, the batch.
        dtypes: what the observations may be made of.
        splittable: whether an observation may be cut along its batch axis without changing the result.
        same_shape: whether all observations need one shape.
        data: whether the reducer can be written as a recipe and as an expression, which functions cannot.
        grows: whether the state has a tensor for each observation, so that each update is compiled anew.
        merges: whether states of parts of a stream can be merged.
        left_out: from all observations to how many elements are left out because they are not finite; or why none are.
        graphs: how many graphs `torch.compile` may make of its update, over a dozen batches of different sizes.
    """

    reducer: Reducer
    reference: Callable[[Observations], Any]
    trailing: tuple[int, ...] = (3,)
    dtypes: tuple[torch.dtype, ...] = REAL
    splittable: bool = True
    same_shape: bool = False
    data: bool = True
    graphs: int = 4
    grows: bool = False
    merges: bool = True
    left_out: LeftOut = left_out.elements

    @property
    def takes_floats(self) -> bool:
        return any(dtype.is_floating_point for dtype in self.dtypes)

    def __str__(self) -> str:
        return name_of(self.reducer)


def sums(function: Callable[[Array], Any], keep: tuple[int, ...] = ()) -> Callable[[Observations], Any]:
    """As `units`, for what is 0 of no elements, and NaN of elements none of which is finite."""

    def of_a_unit(x: Array) -> Any:
        rest = x[np.isfinite(x)]
        return np.nan if len(x) and not len(rest) else function(rest)

    return units(of_a_unit, keep, finite=False)


def units(function: Callable[[Array], Any], keep: tuple[int, ...] = (), finite: bool = True) -> Callable[[Observations], Any]:
    """A reference that applies `function` to the finite elements of each unit (position of the axes to keep) of everything seen."""

    def reference(xs: Observations) -> Any:
        whole = np.moveaxis(np.concatenate(xs), keep, range(len(keep)))
        shape = whole.shape[: len(keep)]
        rows = whole.reshape(int(np.prod(shape)), -1)
        results = [function(row[np.isfinite(row)] if finite else row) for row in rows]
        if isinstance(results[0], dict):
            return {name: np.array([result[name] for result in results]).reshape(shape) for name in results[0]}
        return np.array(results).reshape(shape)

    return reference


def _or_nan(function: Callable[[Array], Any]) -> Callable[[Array], Any]:
    return lambda x: function(x) if len(x) else np.nan


def _ends(keep: tuple[int, ...] = ()) -> Callable[[Observations], Any]:
    return units(lambda x: {"min": _or_nan(np.min)(x), "max": _or_nan(np.max)(x)}, keep)


def _moments(x: Array, correction: float = 1) -> dict[str, Any]:
    enough = len(x) > correction
    var = (np.abs(x - x.mean()) ** 2).sum() / (len(x) - correction) if enough else np.nan
    return {"count": len(x), "mean": x.mean() if len(x) else np.nan, "var": var, "std": np.sqrt(var)}


def _shape(x: Array) -> dict[str, Any]:
    wide = x.astype(np.longdouble)
    flat = not len(x) or np.ptp(x) == 0
    skewness, kurtosis = (np.nan, np.nan) if flat else (stats.skew(wide), stats.kurtosis(wide))
    return {**_moments(x), "skewness": float(skewness), "kurtosis": float(kurtosis)}


def _norm(p: float, normalize: bool = False) -> Callable[[Array], Any]:
    def norm(x: Array) -> Any:
        if normalize and not len(x):
            return np.nan
        if p == np.inf:
            return np.abs(x).max(initial=0.0)
        power = np.count_nonzero(x) if p == 0 else (np.abs(x) ** p).sum()
        power = power / len(x) if normalize else power
        return power if p == 0 else power ** (1 / p)

    return norm


def _summary(xs: Observations, keep: tuple[int, ...] = ()) -> dict[str, Any]:
    def numbers(x: Array) -> dict[str, Any]:
        ends = (
            {"min": x.min(), "max": x.max(), "absmax": np.abs(x).max()}
            if len(x)
            else dict.fromkeys(("min", "max", "absmax"), np.nan)
        )
        moments = _moments(x)
        del moments["std"]
        return {**moments, **ends, "zeros": np.count_nonzero(x == 0)}

    whole = np.concatenate(xs)
    others = tuple(axis for axis in range(whole.ndim) if axis not in keep)
    return {
        **units(numbers, keep)(xs),
        "nan": np.isnan(whole).sum(axis=others),
        "inf": np.isinf(whole).sum(axis=others),
    }


def _activity(eps: float = 1e-8, death: bool = False) -> Callable[[Observations], dict[str, Array]]:
    def reference(xs: Observations) -> dict[str, Array]:
        def dead(x: Array) -> bool:
            return len(x) > 0 and not (np.abs(x) > eps).any()

        result = {
            "rate": units(_or_nan(lambda x: (np.abs(x) > eps).mean()), (1,))(xs),
            "dead": units(dead, (1,))(xs),
        }
        if death:
            seen = [units(len, (1,))([x]) > 0 for x in xs]
            shares = [units(dead, (1,))([x]).sum() / there.sum() for x, there in zip(xs, seen, strict=True) if there.any()]
            result["death"] = np.mean(shares) if shares else np.array(np.nan)
        return result

    return reference


def _geometry(inner: Callable[[Observations], Any], normalize: bool = False) -> Callable[[Observations], dict[str, Any]]:
    def reference(xs: Observations) -> dict[str, Any]:
        with np.errstate(invalid="ignore"):
            norms = [np.sqrt((x * x).sum()) for x in xs]
            lengths = [norm / np.sqrt(x.size) if normalize else norm for norm, x in zip(norms, xs, strict=True)]
            cosines = [
                np.clip((x * y).sum() / (np.maximum(norms[i], 1e-8) * np.maximum(norms[i + 1], 1e-8)), -1, 1)
                for i, (x, y) in enumerate(pairwise(xs))
                if x.shape == y.shape
            ]
        result = {"norm": inner([np.array(lengths)])}
        return {**result, "correlation": inner([np.array(cosines)])} if cosines else result

    return reference


def _finite_rows(*xs: Array) -> list[Array]:
    keep = np.logical_and.reduce([np.isfinite(x).all(axis=1) for x in xs])
    return [x[keep].astype(np.longdouble) for x in xs]


def _rest(x: Array) -> Array:
    """Rows about their mean; exactly zero for constant features."""
    return np.where(np.ptp(x, axis=0) == 0, 0, x - x.mean(axis=0)) if len(x) else x


def _covariances(x: Array, y: Array, correction: float) -> Array:
    freedom = len(x) - correction
    return np.asarray(_rest(x).T @ _rest(y) / freedom if freedom > 0 else np.full((x.shape[1], y.shape[1]), np.nan), np.float64)


def _center(x: Array) -> Array:
    return np.asarray(x.mean(axis=0) if len(x) else np.full(x.shape[1], np.nan), np.float64)


def _covariance(correction: float = 1) -> Callable[[Observations], dict[str, Any]]:
    def reference(xs: Observations) -> dict[str, Any]:
        whole = np.concatenate(xs)
        (x,) = _finite_rows(whole)
        return {
            "count": len(x),
            "mean": _center(x),
            "covariance": _covariances(x, x, correction),
            "nonfinite": len(whole) - len(x),
        }

    return reference


def _cross_covariance(xs: Observations) -> dict[str, Any]:
    whole = np.concatenate(xs)
    x, y = _finite_rows(whole[:, :2], whole[:, 2:])
    return {
        "count": len(x),
        "mean_x": _center(x),
        "mean_y": _center(y),
        "var_x": _covariances(x, x, 1).diagonal().copy(),
        "var_y": _covariances(y, y, 1).diagonal().copy(),
        "covariance": _covariances(x, y, 1),
        "nonfinite": len(whole) - len(x),
    }


def _correlation(xs: Observations) -> Array:
    c = _covariance()(xs)["covariance"]
    scale = np.sqrt(np.where(c.diagonal() == 0, np.nan, c.diagonal()))
    return c / scale / scale[:, None]


def _spectrum(xs: Observations) -> Array:
    """Shares of the variance along the principal axes, by singular values of the data."""
    x = _rest(_finite_rows(np.concatenate(xs))[0]).astype(np.float64)
    power = np.linalg.svd(x, compute_uv=False) ** 2 if len(x) > 1 else np.zeros(1)
    return power / power.sum()


def _effective_rank(xs: Observations) -> Any:
    shares = _spectrum(xs)
    return np.exp(stats.entropy(shares)) if np.isfinite(shares).all() else np.nan


def _dimension(threshold: float) -> Callable[[Observations], Any]:
    def reference(xs: Observations) -> Any:
        shares = _spectrum(xs)
        return 1 + np.argmax(np.cumsum(shares) >= threshold * (1 - 1e-12)) if np.isfinite(shares).all() else 0

    return reference


def _hsic(x: Array, y: Array) -> tuple[Any, Any]:
    """Song et al. 2012, eq. 5, as it is printed, and the size of its largest term."""
    n = len(x)
    k, l = (z @ z.T * (1 - np.eye(n)) for z in (_rest(x), _rest(y)))  # noqa: E741
    ones = np.ones(n)
    terms = [np.trace(k @ l), ones @ k @ ones * (ones @ l @ ones) / ((n - 1) * (n - 2)), -2 / (n - 2) * (ones @ k @ l @ ones)]
    return sum(terms) / (n * (n - 3)), max(map(abs, terms)) / (n * (n - 3))


def _alignment(xy: Any, xx: tuple[Any, Any], yy: tuple[Any, Any]) -> np.float64:
    enough = all(value > 1e-11 * scale for value, scale in (xx, yy))
    return np.float64(xy / np.sqrt(xx[0]) / np.sqrt(yy[0])) if enough else np.float64(np.nan)


def _cka(unbiased: bool) -> Callable[[Observations], dict[str, Any]]:
    def reference(xs: Observations) -> dict[str, Any]:
        whole = np.concatenate(xs)
        x, y = _finite_rows(whole[:, :2], whole[:, 2:])
        if unbiased:
            cka = _alignment(_hsic(x, y)[0], _hsic(x, x), _hsic(y, y)) if len(x) > 3 else np.nan
        else:
            k, l = (_rest(z) @ _rest(z).T for z in (x, y))  # noqa: E741
            cka = _alignment((k * l).sum(), ((k * k).sum(), 0), ((l * l).sum(), 0))
        return {"cka": cka, "count": len(x), "nonfinite": len(whole) - len(x)}

    return reference


def _minibatch_cka(xs: Observations) -> dict[str, Any]:
    kept = [_finite_rows(x[:, :2], x[:, 2:]) for x in xs]
    enough = [pair for pair in kept if len(pair[0]) > 3]
    sums = [np.sum([_hsic(pair[a], pair[b]) for pair in enough], axis=0) for a, b in ((0, 1), (0, 0), (1, 1))]
    return {
        "cka": _alignment(sums[0][0], sums[1], sums[2]) if enough else np.nan,
        "observations": len(enough),
        "skipped": len(xs) - len(enough),
        "nonfinite": sum(len(x) - len(pair[0]) for x, pair in zip(xs, kept, strict=True)),
    }


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors with the same rows out of one, for what reduces two."""
    return x[:, :2], x[:, 2:]


def larger_and_stacked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Associative, not commutative, and of any shapes: for `Fold`."""
    return torch.cat((a, b))


def spread(result: dict[str, torch.Tensor]) -> torch.Tensor:
    """Standard deviation in units of the mean's distance from zero, for `Postmap`."""
    return result["std"] / (1 + result["mean"].abs())


def shifted(x: torch.Tensor) -> torch.Tensor:
    """For `Premap`."""
    return x.double() + 1


def leaky(x: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
    """For `Scan`: depends on the order, and does not merge."""
    return 0.5 * so_far + x.double().mean(0) * so_far.abs()


def _sample_norms(xs: Observations) -> Array:
    rows = [np.concatenate([x[row].ravel() for x in xs]) for row in range(len(xs[0]))]
    return np.asarray([np.sqrt((row**2).sum()) if np.isfinite(row).all() else np.nan for row in rows])


def _scatter(xs: Observations) -> dict[str, Any]:
    finite = [x.astype(np.longdouble) for x in xs if np.isfinite(x).all()]
    mean = sum(finite) / len(finite) if finite else np.zeros_like(xs[0])
    scatter = sum(((x - mean) ** 2).sum() for x in finite)
    return {
        "count": len(finite),
        "nonfinite": len(xs) - len(finite),
        "scatter": np.float64(scatter),
        "square": np.float64((mean**2).sum()),
    }


def _third(xs: Observations) -> dict[str, Any]:
    return {"last": xs[::3][-1], "top": units(_or_nan(np.max))(xs[::3])}


_mean = _or_nan(np.mean)

CASES = (
    Case(Count("b c -> c"), units(len, (1,)), dtypes=REAL + COMPLEX),
    Case(Sum(), sums(np.sum), dtypes=REAL + COMPLEX),
    Case(Sum("b ... c -> c ..."), sums(np.sum, (2, 1)), trailing=(2, 3)),
    Case(Mean(), units(_mean), dtypes=REAL + COMPLEX),
    Case(Mean("b c h -> (c h)"), lambda xs: units(_mean, (1, 2))(xs).reshape(-1), trailing=(2, 3)),
    Case(Min("b c -> c"), units(_or_nan(np.min), (1,))),
    Case(Max("b ... -> ..."), units(_or_nan(np.max), (1, 2)), trailing=(2, 3)),
    Case(Extremes(), _ends()),
    Case(Extremes("b c h -> h c"), _ends((2, 1)), trailing=(3, 2)),
    Case(Norm(), sums(_norm(2)), dtypes=REAL + COMPLEX),
    Case(Norm("b c -> c", p=1, normalize=True), sums(_norm(1, True), (1,))),
    Case(Norm(p=0), sums(_norm(0))),
    Case(Norm("b c -> c", p=3.5), sums(_norm(3.5), (1,))),
    Case(Norm("b c -> c", p=float("inf"), normalize=True), sums(_norm(np.inf, True), (1,)), data=False),
    Case(Moments(), units(_moments), dtypes=REAL + COMPLEX),
    Case(Moments("b c h -> c", correction=0), units(lambda x: _moments(x, 0), (1,)), trailing=(3, 2)),
    Case(Moments(order=4), units(_shape)),
    Case(
        Moments("b c -> c", order=3),
        units(lambda x: {name: value for name, value in _shape(x).items() if name != "kurtosis"}, (1,)),
    ),
    Case(Summary(), _summary),
    Case(Summary("b c -> c"), lambda xs: _summary(xs, (1,))),
    Case(Summary(correction=0), lambda xs: {**_summary(xs), "var": units(lambda x: _moments(x, 0)["var"])(xs)}),
    Case(Activity(), _activity()),
    Case(Activity(eps=0.5, death=True), _activity(0.5, death=True), splittable=False),
    Case(Sparsity(), units(_or_nan(lambda x: (x == 0).mean())), dtypes=REAL + COMPLEX),
    Case(Sparsity("b c -> c", eps=0.5), units(_or_nan(lambda x: (np.abs(x) <= 0.5).mean()), (1,))),
    Case(Covariance(), _covariance(), left_out=left_out.by_rows),
    Case(
        Covariance("b c h -> c", correction=0),
        lambda xs: _covariance(0)([np.moveaxis(x, 1, 2).reshape(-1, 3) for x in xs]),
        (3, 2),
        left_out=left_out.by_rows,
    ),
    Case(
        Covariance("b c h -> (c h)"),
        lambda xs: _covariance()([x.reshape(-1, 4) for x in xs]),
        (2, 2),
        left_out=left_out.some(lambda x: x.reshape(len(x), -1), left_out.by_rows),
    ),
    Case(Postmap(Covariance(), correlation), _correlation, data=False, left_out=left_out.by_rows),
    Case(Postmap(Covariance(), effective_rank), _effective_rank, data=False, left_out=left_out.by_rows),
    Case(Postmap(Covariance(correction=0), intrinsic_dimension(0.9)), _dimension(0.9), data=False, left_out=left_out.by_rows),
    Case(Premap(CrossCovariance(), halves), _cross_covariance, (5,), data=False, left_out=left_out.by_rows),
    Case(Premap(CKA(), halves), _cka(unbiased=False), (5,), data=False, left_out=left_out.by_rows),
    Case(Premap(CKA(unbiased=True), halves), _cka(unbiased=True), (5,), data=False, left_out=left_out.by_rows),
    Case(Premap(MinibatchCKA(), halves), _minibatch_cka, (5,), splittable=False, data=False, left_out=left_out.by_rows),
    Case(Histogram(bins=8, low=-2.0, high=2.0), histogram(np.linspace(-2, 2, 9)), left_out=left_out.nan),
    Case(Histogram("b c -> c", edges=(-1.0, 0.0, 0.5, 50.0)), histogram([-1.0, 0.0, 0.5, 50.0], (1,)), left_out=left_out.nan),
    Case(Quantile(), quantiles((0.25, 0.5, 0.75), 5)),
    Case(
        Quantile("b c h -> h c", q=(0.1, 1.0), bits=3, low=0.2, high=40.0),
        quantiles((0.1, 1.0), 3, (2, 1), -3, 6),
        trailing=(3, 2),
    ),
    Case(Quantile("b c -> c", q=0.5, low=1e-60), quantiles(0.5, 5, (1,), -200)),
    Case(CountByValue(values=50), per_unit(count_by_value(50), ()), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(CountByValue("b c -> c", values=4), per_unit(count_by_value(4), (1,)), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(DistinctCount(), units(lambda x: hyperloglog(x, 12)), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(DistinctCount("b c -> c", bits=4), units(lambda x: hyperloglog(x, 4), (1,)), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(HeavyHitters(k=4), per_unit(frequent(4), ()), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(HeavyHitters("b c -> c", k=3, bits=8), per_unit(frequent(3), (1,)), dtypes=INTEGERS, left_out=INTEGERS_ONLY),
    Case(TopK(k=2), extreme(2, True), splittable=False),
    Case(TopK("b c h -> h c", k=5), extreme(5, True, (2, 1)), trailing=(3, 2), dtypes=FLOATS, splittable=False),
    Case(BottomK("b c -> c", k=3), extreme(3, False, (1,)), dtypes=FLOATS, splittable=False),
    Case(Reservoir(k=4, seed=7), reservoir(4, 7), dtypes=(torch.float64,), splittable=False, left_out=SHOWN),
    Case(Digest(), digest, dtypes=(torch.float64, torch.complex128), splittable=False, left_out=SHOWN),
    Case(Sketch(k=64), sketch(64), dtypes=REAL + COMPLEX, splittable=False),
    Case(Sketch(k=128), sketch(128), trailing=(50, 3), splittable=False),
    Case(Fingerprints(), fingerprints, dtypes=(torch.float64, torch.complex128), splittable=False, graphs=8, left_out=SHOWN),
    Case(First(), lambda xs: xs[0], dtypes=REAL + COMPLEX, splittable=False, left_out=SHOWN),
    Case(Last(), lambda xs: xs[-1], dtypes=REAL + COMPLEX, splittable=False, left_out=SHOWN),
    Case(Fold(larger_and_stacked), np.concatenate, data=False, left_out=SHOWN),
    Case(Fold(torch.maximum), lambda xs: np.maximum.reduce(xs), splittable=False, same_shape=True, data=False, left_out=SHOWN),
    Case(Collect(), np.concatenate, dtypes=REAL + COMPLEX, graphs=8, left_out=SHOWN),
    Case(
        Whole(), lambda xs: {str(i): x for i, x in enumerate(x for x in xs if x.size)}, splittable=False, grows=True, left_out=SHOWN
    ),
    Case(
        Whole(last=2),
        lambda xs: {str(i): x for i, x in list(enumerate(x for x in xs if x.size))[-2:]},
        splittable=False,
        grows=True,
        left_out=SHOWN,
    ),
    Case(Geometry(), _geometry(_summary), splittable=False, left_out=left_out.norms),
    Case(
        Geometry(Collect(), normalize=True),
        _geometry(lambda xs: xs[0], normalize=True),
        splittable=False,
        graphs=12,
        left_out=SHOWN,
    ),
    Case(
        Geometry(Mean(), correlation=False),
        lambda xs: {"norm": _geometry(units(_mean))(xs)["norm"]},
        splittable=False,
        left_out=left_out.norms,
    ),
    Case(
        Product(mean=Mean("b c -> c"), deep=Product(all=Collect(), top=Max())),
        lambda xs: {
            "mean": units(_mean, (1,))(xs),
            "deep": {"all": np.concatenate(xs), "top": units(_or_nan(np.max))(xs)},
        },
        graphs=8,
    ),
    Case(Premap(Mean(), shifted), lambda xs: units(_mean)([x + 1 for x in xs]), data=False),
    Case(
        Postmap(Moments(), spread),
        units(lambda x: _moments(x)["std"] / (1 + np.abs(_moments(x)["mean"]))),
        data=False,
    ),
    Case(EMA(alpha=0.3), ema(0.3), splittable=False, same_shape=True),
    Case(EMA("b c -> c", alpha=0.9), ema(0.9, batch_mean=True), splittable=False),
    Case(
        NearestTrace(time_constant=2.0, amplitude=1.5, target=0.0, tolerance=0.5),
        trace(lambda h: 1.5 if abs(h) <= 0.5 else None, 2.0, nearest=True),
        splittable=False,
        same_shape=True,
        left_out=SHOWN,
    ),
    Case(
        NearestTrace(time_constant=torch.tensor([[0.5, 2.0, 3.0]]), amplitude=1.0 + 2.0j, target=0.0, tolerance=0.5),
        trace(lambda h: 1 + 2j if abs(h) <= 0.5 else None, np.array([0.5, 2.0, 3.0]), nearest=True),
        splittable=False,
        same_shape=True,
        left_out=SHOWN,
    ),
    Case(
        CumulativeTrace(time_constant=(2.0, 1.0, 4.0), target=0.0, amplitude=1j),
        trace(lambda h: 1j if h == 0 else None, np.array([2.0, 1.0, 4.0]), nearest=False),
        splittable=False,
        same_shape=True,
        left_out=SHOWN,
    ),
    Case(
        CumulativeTrace(time_constant=2.0, target=0.0),
        trace(lambda h: 1.0 if h == 0 else None, 2.0, nearest=False),
        splittable=False,
        same_shape=True,
        left_out=SHOWN,
    ),
    Case(
        ScaledNearestTrace(time_constant=3.0, criterion=positive, scale=2.0),
        trace(scaled(2.0, 1.0), 3.0, nearest=True),
        splittable=False,
        same_shape=True,
        data=False,
        left_out=left_out.some(lambda x: x[x > 0]),
    ),
    Case(
        ScaledCumulativeTrace(time_constant=3.0, criterion=positive, scale=-1.0, amplitude=0.5),
        trace(scaled(-1.0, 0.5), 3.0, nearest=False),
        splittable=False,
        same_shape=True,
        data=False,
        left_out=left_out.some(lambda x: x[x > 0]),
    ),
    Case(
        Premap(ConditionalNearestTrace(time_constant=3.0, amplitude=0.0), with_condition),
        trace(scaled(1.0, 0.0), 3.0, nearest=True),
        splittable=False,
        same_shape=True,
        data=False,
        left_out=left_out.some(lambda x: x[x > 0]),
    ),
    Case(
        Premap(ConditionalCumulativeTrace(time_constant=3.0), with_condition),
        trace(scaled(1.0, 1.0), 3.0, nearest=False),
        splittable=False,
        same_shape=True,
        data=False,
        left_out=left_out.some(lambda x: x[x > 0]),
    ),
    *(
        Case(TimeSince(positive, 0.1, name), time_since(start, 0.1), splittable=False, same_shape=True, data=False, left_out=SHOWN)
        for name, start in (("inf", np.inf), ("zero", 0.0), ("nan", np.nan))
    ),
    Case(Difference(Summary()), differences(_summary), splittable=False, graphs=8, left_out=left_out.changes),
    Case(
        Difference(Mean("b c -> c")), differences(units(_mean, (1,))), splittable=False, same_shape=True, left_out=left_out.changes
    ),
    Case(Scan(leaky, 0.25), recurrence(0.25), splittable=False, data=False, merges=False, left_out=SHOWN),
    Case(FirstNonfinite("b c -> c"), first_nonfinite, splittable=False, left_out=SHOWN),
    Case(Idle("b c -> c"), idle, splittable=False),
    Case(History(Mean("b c -> c"), 0.5, 1.0, True), units(_mean, (1,)), splittable=False),
    Case(History(EMA(alpha=0.5), duration=2.0), ema(0.5), splittable=False, same_shape=True),
    Case(
        Window(Summary("b c -> c"), 3),
        lambda xs: _summary(xs[-3:], (1,)),
        splittable=False,
        left_out=left_out.some(slice(-3, None)),
    ),
    Case(
        Window(EMA("b c -> c", alpha=0.5), 2),
        lambda xs: ema(0.5, batch_mean=True)(xs[-2:]),
        splittable=False,
        left_out=left_out.some(slice(-2, None)),
    ),
    Case(
        PerObservation(Mean(), Collect()),
        lambda xs: np.array([units(_mean)([x]) for x in xs if x.size]),
        splittable=False,
        graphs=8,
    ),
    Case(
        PerObservation(Extremes("b c -> c"), Product(mean=Mean("o c -> c"))),
        lambda xs: {
            end: {"mean": units(_mean, (1,))([np.stack([_ends((1,))([x])[end] for x in xs if x.size])])} for end in ("min", "max")
        },
        splittable=False,
    ),
    Case(
        EveryNth(Moments(), 2), lambda xs: units(_moments)(xs[::2]), splittable=False, left_out=left_out.some(slice(None, None, 2))
    ),
    Case(
        EveryNth(Product(last=Last(), top=Max()), 3),
        _third,
        splittable=False,
        same_shape=True,
        left_out=left_out.some(slice(None, None, 3)),
    ),
    Case(
        Premap(Masked(Summary("b c -> c")), with_mask),
        masked(lambda xs: _summary(xs, (1,))),
        (4,),
        data=False,
        left_out=left_out.masked(),
    ),
    Case(
        Premap(Masked(Product(n=Count())), with_mask),
        masked(lambda xs: {"n": units(len)(xs)}),
        (4,),
        data=False,
        left_out=left_out.masked(),
    ),
    Case(
        Premap(Masked(Histogram("b c -> c", edges=(-1.0, 0.0, 0.5, 50.0))), with_mask),
        masked(histogram((-1.0, 0.0, 0.5, 50.0), (1,))),
        (4,),
        data=False,
        left_out=left_out.masked(left_out.nan),
    ),
    Case(
        Premap(Masked(Covariance()), with_mask), masked(_covariance()), (4,), data=False, left_out=left_out.masked(left_out.by_rows)
    ),
    Case(
        Premap(Masked(CountByValue("b c -> c", values=4)), with_mask),
        masked(per_unit(count_by_value(4), (1,))),
        (4,),
        INTEGERS,
        data=False,
        left_out=INTEGERS_ONLY,
    ),
    Case(
        Prefilter(Mean("b c -> c"), positive),
        units(lambda x: _mean(x[x > 0]), (1,)),
        data=False,
        left_out=left_out.some(lambda x: x[x > 0]),
    ),
    Case(Premap(WeightedMean("b c -> c"), with_weights), weighted(None), (4,), data=False, left_out=left_out.weighted),
    Case(Premap(WeightedMoments("b c -> c"), with_weights), weighted(1), (4,), data=False, left_out=left_out.weighted),
    Case(
        Premap(WeightedMoments("b c -> c", correction=0), with_weights), weighted(0), (4,), data=False, left_out=left_out.weighted
    ),
    Case(
        Premap(GroupBy(Moments("b c -> c"), 3), with_labels),
        grouped(units(_moments, (1,))),
        (4,),
        data=False,
        left_out=left_out.grouped,
    ),
    Case(
        Premap(GroupBy(Count("b c -> c"), 3), with_labels), grouped(units(len, (1,))), (4,), data=False, left_out=left_out.grouped
    ),
    Case(
        Premap(GroupBy(Product(s=Summary()), 3), with_labels),
        grouped(lambda xs: {"s": _summary(xs)}),
        (4,),
        data=False,
        left_out=left_out.grouped,
    ),
    Case(SampleNorms(), _sample_norms, trailing=(2, 3), splittable=False, same_shape=True, data=False),
    Case(Scatter(), _scatter, splittable=False, same_shape=True, data=False, left_out=left_out.norms),
)
