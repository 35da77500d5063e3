"""Which call of a module of one net belongs to which of the other: by name, or by order, class, shapes and parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor

from recorders.errors import SelectionError
from recorders.recordings.display import listed, shown_name
from recorders.watch.divergence.tracing import Net, TracedCall

__all__ = ["aligned"]


def aligned(a: Net, b: Net, names: Mapping[str, str] | None) -> dict[tuple[str, int], TracedCall]:
    """By name and number of a call of the second net, the call of the first that belongs to it.

    Calls belong together, in this order of preference, if `names` says so; if name, class and shapes are the same; if parameters
    are equal; if class and shapes are the same, in the order of the calls; if only shapes are, or only the class; if only names.

    Raises:
        SelectionError: a name in `names` does not exist.
    """
    pairs = _Pairs(a.calls, b.calls)
    if names is not None:
        _check(a, b, names)
        pairs.match(lambda call: (names.get(call.name, call.name), call.number), lambda call: call.key, within=set(names))
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


class _Pairs:
    """Pairs of calls, by their indices."""

    def __init__(self, a: list[TracedCall], b: list[TracedCall]) -> None:
        self.a, self.b = a, b
        self.found: dict[int, int] = {}

    def add(self, first: int, second: int) -> None:
        if first not in self.found and second not in self.found.values():
            self.found[first] = second

    def match(
        self,
        key: Callable[[TracedCall], Hashable],
        key_b: Callable[[TracedCall], Hashable] | None = None,
        *,
        once: bool = False,
        within: set[str] | None = None,
    ) -> None:
        """Pair calls whose keys are equal; `once` only if no other call of the net has the key. None is no key."""
        first, second = self._left()
        keys_a = {index: key(self.a[index]) for index in first if within is None or self.a[index].name in within}
        keys_b = {index: (key_b or key)(self.b[index]) for index in second}
        counts = [Counter(keys.values()) for keys in (keys_a, keys_b)]
        by_key = {value: index for index, value in reversed(keys_b.items()) if value is not None}
        for index, value in keys_a.items():
            if value in by_key and not (once and any(count[value] > 1 for count in counts)):
                self.add(index, by_key[value])

    def in_order(self, key: Callable[[TracedCall], Hashable]) -> None:
        """Pair calls whose keys are equal, in their order, between those that are pairs already."""
        first, second = self._left()
        gaps: dict[int, tuple[list[int], list[int]]] = {}
        fences = self._fences()
        for index in first:
            gaps.setdefault(sum(a < index for a, _ in fences), ([], []))[0].append(index)
        for index in second:
            gaps.setdefault(sum(b < index for _, b in fences), ([], []))[1].append(index)
        for left, right in gaps.values():
            keys_a, keys_b = ([key(calls[index]) for index in of] for calls, of in ((self.a, left), (self.b, right)))
            for block in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():
                for step in range(block.size):
                    self.add(left[block.a + step], right[block.b + step])

    def _left(self) -> tuple[list[int], list[int]]:
        taken = set(self.found.values())
        return [i for i in range(len(self.a)) if i not in self.found], [i for i in range(len(self.b)) if i not in taken]

    def _fences(self) -> list[tuple[int, int]]:
        """The longest pairs in the order of both nets, beginning with the first."""
        fences: list[tuple[int, int]] = []
        for pair in sorted(self.found.items()):
            if not fences or pair[1] > fences[-1][1]:
                fences.append(pair)
        return fences


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
