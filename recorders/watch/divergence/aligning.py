"""Which call of a module of one net belongs to which of the other: by name, or by order, class, shapes and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from recorders.errors import SelectionError
from recorders.recordings.display import listed, shown_name
from recorders.watch.divergence.pairing import Pairs
from recorders.watch.divergence.tracing import Net, TracedCall


def aligned(a: Net, b: Net, names: Mapping[str, str] | None) -> dict[tuple[str, int], TracedCall]:
    """By name and number of a call of the second net, the call of the first that belongs to it.

    Calls belong together, in this order of preference, if `names` says so; if name, class and shapes are the same; if parameters
    are equal; if class and shapes are the same, in the order of the calls; if only shapes are, or only the class; if only names.

    Raises:
        SelectionError: a name in `names` does not exist.
    """
    pairs = Pairs(a.calls, b.calls)
    if names is not None:
        _check(a, b, names)
        pairs.match(
            lambda call: (names.get(call.name, call.name), call.number),
            lambda call: call.key,
            within=lambda call: call.name in names,
        )
    pairs.add(0, 0)
    pairs.match(lambda call: (call.key, type(call.module), _shapes(call)))
    pairs.match(_fingerprint, once=True)
    pairs.in_order(lambda call: (type(call.module), _shapes(call)))
    pairs.match(lambda call: (type(call.module), _shapes(call)), once=True)
    pairs.match(lambda call: (call.key, call.shapes))
    pairs.in_order(_shapes)
    pairs.in_order(lambda call: (type(call.module), call.shapes))
    pairs.match(lambda call: call.key)
    return {b.calls[second].key: a.calls[first] for first, second in pairs.found.items()}


def _shapes(call: TracedCall) -> tuple[Any, ...]:
    """Shapes of the outputs and of the own parameters; a transposed parameter has the same."""
    own = sorted(tuple(sorted(p.shape)) for p in call.module.parameters())
    return call.shapes, tuple(own)


def _fingerprint(call: TracedCall) -> Hashable:
    """A rounded sum over the parameters, which copies in other dtypes share; None if there are none, or all are constant."""
    found = [_moment(parameter) for parameter in call.module.parameters() if parameter.numel() > 1]
    return (call.number, tuple(found)) if any(found) else None


def _moment(parameter: Tensor) -> float:
    wide = parameter.detach().double()
    spread = float(wide.std())
    return float(f"{spread:.2g}") if spread > 0 else 0.0


def _check(a: Net, b: Net, names: Mapping[str, str]) -> None:
    for net, given, which in ((a, names.keys(), "first"), (b, names.values(), "second")):
        known = net.names.values()
        if wrong := [name for name in given if name not in known]:
            raise SelectionError(f"names: the {which} net has no module {shown_name(wrong[0])!r}; it has {listed(list(known))}")
