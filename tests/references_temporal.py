"""One-shot references for reducers of time, masks, weights and groups: plain loops in NumPy, by the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Observations = list[Array]


def positive(x: torch.Tensor) -> torch.Tensor:
    """A criterion."""
    return x > 0


def with_condition(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All of it, and where it is above 0."""
    return x, x > 0


def with_mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three columns, and the mask that the last one makes."""
    return x[:, :3], x[:, 3] > 0


def with_weights(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three columns, and the weights that the last one makes."""
    return x[:, :3], x[:, 3].double().abs()


def with_labels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three columns, and the labels from -1 to 2 that the last one makes."""
    return x[:, :3], x[:, 3].double().nan_to_num(0, 0, 0).long() % 4 - 1


def masked(inner: Callable[[Observations], Any]) -> Callable[[Observations], Any]:
    def reference(xs: Observations) -> Any:
        whole = np.concatenate(xs)
        return inner([whole[whole[:, 3] > 0, :3]])

    return reference


def grouped(inner: Callable[[Observations], Any]) -> Callable[[Observations], Any]:
    def reference(xs: Observations) -> Any:
        whole = np.concatenate(xs)
        labels = np.nan_to_num(whole[:, 3], nan=0, posinf=0, neginf=0).astype(np.int64) % 4 - 1
        parts = [inner([whole[labels == group, :3]]) for group in range(3)]
        return _stacked(parts)

    return reference


def _stacked(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: _stacked([part[name] for part in parts]) for name in parts[0]}
    return np.stack(parts)


def weighted(correction: float | None) -> Callable[[Observations], Any]:
    """By `numpy.average` and `numpy.cov`; the mean alone where there is no correction."""

    def reference(xs: Observations) -> Any:
        whole = np.concatenate(xs)
        rows = []
        for column in whole[:, :3].T:
            there = np.isfinite(column) & np.isfinite(whole[:, 3])
            x, w = column[there], np.abs(whole[there, 3])
            total = w.sum()
            mean = np.average(x, weights=w) if total > 0 else np.nan
            if correction is None:
                rows.append({"mean": mean})
                continue
            freedom = total - correction * (w * w).sum() / total if total > 0 else 0
            var = float(np.cov(x, aweights=w, ddof=correction)) if freedom > 1e-12 * total else np.nan
            rows.append({"weight": total, "mean": mean, "var": var, "std": np.sqrt(var)})
        found = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return found["mean"] if correction is None else found

    return reference


def ema(alpha: float, batch_mean: bool = False) -> Callable[[Observations], Array]:
    def reference(xs: Observations) -> Array:
        if batch_mean:
            xs = [
                np.array([column[np.isfinite(column)].mean() if np.isfinite(column).any() else np.nan for column in x.T])
                for x in xs
            ]
        smoothed = np.full(xs[0].shape, np.nan)
        for x in xs:
            for i in np.ndindex(x.shape):
                if np.isfinite(x[i]):
                    smoothed[i] = x[i] if np.isnan(smoothed[i]) else alpha * x[i] + (1 - alpha) * smoothed[i]
        return smoothed

    return reference


def trace(event: Callable[[float], complex | None], tau: float | Array, nearest: bool) -> Callable[[Observations], Array]:
    """Args:
    event: what an element contributes, None where it is no event.
    """

    def reference(xs: Observations) -> Array:
        value, fade = np.zeros(xs[0].shape, np.complex128), np.broadcast_to(np.exp(-1 / np.asarray(tau)), xs[0].shape)
        for x in xs:
            for i in np.ndindex(x.shape):
                found = event(x[i])
                value[i] *= fade[i]
                if found is not None:
                    value[i] = found if nearest else value[i] + found
        return value

    return reference


def scaled(scale: float, amplitude: float) -> Callable[[float], float | None]:
    """What an element above 0 contributes."""
    return lambda h: scale * h + amplitude if math.isfinite(h) and h > 0 else None


def recurrence(start: float) -> Callable[[Observations], Array]:
    """Of the function `leaky` of the table."""

    def reference(xs: Observations) -> Array:
        value = np.array(start)
        for x in xs:
            value = 0.5 * value + x.mean(axis=0) * np.abs(value)
        return value

    return reference


def time_since(initial: float, step_time: float) -> Callable[[Observations], Array]:
    def reference(xs: Observations) -> Array:
        since = np.full(xs[0].shape, initial)
        for step, x in enumerate(xs):
            for i in np.ndindex(x.shape):
                since[i] = 0 if x[i] > 0 else since[i] + (step_time if step else 0)
        return since

    return reference


def differences(inner: Callable[[Observations], Any]) -> Callable[[Observations], Any]:
    def reference(xs: Observations) -> Any:
        found = [after - before for before, after in pairwise(xs) if after.shape == before.shape]
        return inner(found) if found else {}

    return reference


def idle(xs: Observations) -> dict[str, Array]:
    """How long each channel, the second axis, had no element but zeros; an observation without a finite one ends it."""
    count = np.zeros(xs[0].shape[1], dtype=np.int64)
    for x in xs:
        for channel in range(x.shape[1]):
            finite = x[:, channel][np.isfinite(x[:, channel])]
            count[channel] = count[channel] + 1 if len(finite) and (np.abs(finite) <= 1e-8).all() else 0
    return {"idle": count, "observations": np.array(len(xs)), "elements": np.array(sum(x[:, 0].size for x in xs))}


def first_nonfinite(xs: Observations) -> Array:
    when = np.full(xs[0].shape[1], -1)
    for step, x in enumerate(xs):
        for channel in range(x.shape[1]):
            if when[channel] < 0 and not np.isfinite(x[:, channel]).all():
                when[channel] = step
    return when
