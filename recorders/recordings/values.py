"""The words with which all that holds results is asked, by leaf or by name."""

from __future__ import annotations

import difflib
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recordings.display import Names, flat_leaves, listed
from recorders.recordings.export import ExportedLeaves, ExportedNames


class LeafResults(ExportedLeaves):
    """Results by leaf: what monitors, subrecordings and cells have in common.

    It is read like a mapping from the path of a leaf in the operand ("" for a lone tensor) to its result; leaves without
    observations are left out. It is true, also if nothing was recorded, and equals itself only: `equals` compares numbers.
    """

    def snapshot(self) -> Any:  # a Subrecording
        """What was recorded so far, which no later observation changes."""
        raise NotImplementedError

    def leaves(self) -> dict[str, Any]:
        """Results by path of the leaf; leaves without observations are left out."""
        return dict(self.snapshot().iter_leaves())

    def keys(self) -> Names:
        """The paths of the leaves with observations."""
        return Names(dict.fromkeys(self.snapshot().leaf_names()))

    def values(self) -> ValuesView[Any]:
        """The results of these leaves."""
        return self.leaves().values()

    def items(self) -> ItemsView[str, Any]:
        """The paths of these leaves, each with its result."""
        return self.leaves().items()

    def get(self, leaf: str, default: Any = None) -> Any:
        """The result of a leaf, or `default` if nothing was recorded of it."""
        part = self.snapshot()
        return part.result_of(leaf) if leaf in part.leaf_names() else default

    def __getitem__(self, leaf: str) -> Any:
        part = self.snapshot()
        if leaf not in (names := part.leaf_names()):
            there = f"there are {listed(names)}" if names else "nothing was recorded"
            raise SelectionError(f"no leaf {leaf!r}; {there}")
        return part.result_of(leaf)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """The number of leaves with observations."""
        return len(self.snapshot().leaf_names())

    def __contains__(self, leaf: object) -> bool:
        return leaf in self.snapshot().leaf_names()

    def __bool__(self) -> bool:
        return True

    def peek(self) -> Any:  # a function given to `apply` may return anything
        """The result so far, as deep as the operand and the reducer make it; None if nothing was recorded. For any: `value`.

        If the operand was one tensor, this is the result of the reducer; if it was nested, or parameters of a module, results by
        path of the leaf. The result of a reducer is one tensor, or tensors by statistic.
        """
        return bare(self.leaves())

    compute = peek

    def value(self, *, leaf: str | None = None, stat: str | None = None) -> Any:
        """One statistic of one leaf: a tensor; or what a function given to `apply` or `postmap` made of it, if that is no number.

        Args:
            leaf: the path of the leaf; may be left out if there is one.
            stat: the statistic, with dots between nested ones as in "ratio.mean"; may be left out if there is one.

        Raises:
            SelectionError: nothing was recorded, or there is no such leaf or statistic, or several to choose from; lists them.

        >>> import torch
        >>> from recorders import CallMonitor
        >>> from reducers import Mean, Product, Summary
        >>> loss = CallMonitor(Product(all=Summary(), mean=Mean()))
        >>> loss.push(torch.tensor([1.0, 3.0]))
        >>> loss.value(stat="all.var"), loss.value(stat="mean")
        (tensor(2., dtype=torch.float64), tensor(2., dtype=torch.float64))
        """
        return _value(self.leaves(), leaf, stat, "this subrecorder")

    def equals(self, other: object, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
        """Whether another monitor, subrecording or cell recorded the same, of as many observations.

        The leaves, statistics and shapes must be the same, and numbers differ by at most `atol + rtol * abs(number of the other)`.
        NaN equals NaN. Kinds of monitors, dtypes and reducers may differ.

        >>> from recorders import Cell
        >>> from reducers import Mean
        >>> one, other = Cell(Mean()), Cell(Mean())
        >>> one.push(torch.tensor(1.0))
        >>> other.push(torch.tensor(1.001))
        >>> one.equals(other), one.equals(other, rtol=0.01), one == other
        (False, True, False)
        """
        if not isinstance(other, LeafResults):
            return False
        mine, theirs = self.snapshot(), other.snapshot()
        return mine.samples == theirs.samples and are_close(mine.leaves(), theirs.leaves(), rtol, atol)


class NamedResults(ExportedNames):
    """Results by name of the subrecorder: what recorders and recordings have in common."""

    def snapshot(self) -> Any:  # a Recording
        """What was recorded so far, which no later observation changes."""
        raise NotImplementedError

    def compute(self) -> dict[str, Any]:
        """Results by name."""
        raise NotImplementedError

    @property
    def samples(self) -> Samples:
        """The number of observations that each subrecorder recorded, by name; also by index.

        If calls differed in the tensors that they had, it is that of the tensor (the leaf) that has most; `report()` tells of all.

        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Mean
        >>> recorder = Recorder(loss=CallMonitor(Mean())).push("loss", 0.5)
        >>> recorder.samples, recorder.samples["loss"], recorder["loss"].samples
        ({'loss': 1}, 1, 1)
        """
        return Samples(self)

    def peek(self) -> dict[str, Any]:
        """What `compute` returns."""
        return self.compute()

    def value(self, name: str | int, *, leaf: str | None = None, stat: str | None = None) -> Any:
        """One statistic of one leaf of one subrecorder, at the same depth for any operand and reducer; see `Subrecording.value`.

        Args:
            name: of the subrecorder, or its index.
            leaf: the path of the leaf, such as "weight"; may be left out if there is one.
            stat: the statistic, with dots between nested ones as in "ratio.mean"; may be left out if there is one.

        Raises:
            SelectionError: nothing was recorded, or there is no such subrecorder, leaf or statistic, or several leaves or
                statistics to choose from; lists them.

        >>> import torch
        >>> from recorders import ParameterMonitor, Recorder
        >>> from reducers import Summary
        >>> net = torch.nn.LayerNorm(4)
        >>> recorder = Recorder(ParameterMonitor(Summary(), when="tick")).modules(net).tick()
        >>> recorder.value("", leaf="weight", stat="mean")
        tensor(1., dtype=torch.float64)
        """
        return _value(self[name].leaves(), leaf, stat, f"subrecorder {name!r}")  # type: ignore[index]

    def equals(self, other: object, *, rtol: float = 0.0, atol: float = 0.0) -> bool:
        """Whether another recorder or recording recorded the same under the same names; see `Subrecording.equals`.

        Steps, aliases and the order of names may differ.

        >>> from recorders import CallMonitor, Recorder
        >>> from reducers import Mean
        >>> recorder = Recorder(loss=CallMonitor(Mean())).push("loss", 0.5)
        >>> before = recorder.snapshot()
        >>> recorder.equals(before), recorder.push("loss", 0.5).equals(before)
        (True, False)
        """
        if not isinstance(other, NamedResults) or set(self) != set(other):
            return False
        return all(self[name].equals(other[name], rtol=rtol, atol=atol) for name in self)

    # A mapping compares its items, and they hold tensors, which have no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Samples(Mapping[str, int]):
    """The number of observations of each subrecorder of a recorder or recording, as it is when it is asked for."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def __getitem__(self, name: str | int) -> int:
        return int(self._parts[name].samples)  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __repr__(self) -> str:
        return repr(dict(self))


def bare(leaves: Mapping[str, Any]) -> Any:
    """The result of a lone tensor; results by path of the leaf if operands were nested; None if there are none."""
    return leaves.get("", leaves) if len(leaves) == 1 else leaves or None


def _value(leaves: Mapping[str, Any], leaf: str | None, stat: str | None, where: str) -> Any:
    if not leaves:
        raise SelectionError(f"{where} recorded nothing, so it has no value: report() of the recorder says why")
    leaf = chosen(leaves, leaf, "leaf", "leaves", where)
    statistics = dict(flat_leaves(leaves[leaf]))
    return statistics[chosen(statistics, stat, "stat", "statistics", f"{where}{f', leaf {leaf!r},' * bool(leaf)}")]


def chosen(known: Mapping[str, Any], given: str | None, option: str, several: str, where: str) -> str:
    """The one that is given, or the only one; raises a `SelectionError` that lists all if it is not clear which."""
    if given is None and len(known) == 1:
        return next(iter(known))
    if given is not None and given in known:
        return given
    if set(known) == {""}:
        raise SelectionError(f"{where} has one result, without {several}: leave {option}={given!r} out")
    if given is None:
        raise SelectionError(f"{where} has the {several} {listed(known)}: give one, such as {option}={next(iter(known))!r}")
    close = difflib.get_close_matches(given, known, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise SelectionError(f"{where} has no {option} {given!r}: {guess}there are {listed(known)}")


def are_close(mine: Any, theirs: Any, rtol: float, atol: float) -> bool:
    """Whether two nested results hold the same under the same paths."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        return mine.keys() == theirs.keys() and all(are_close(part, theirs[key], rtol, atol) for key, part in mine.items())
    (_, x), (_, y) = (next(flat_leaves(one)) if not isinstance(one, Mapping) else ("", one) for one in (mine, theirs))
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and bool(x == y)
    x, y = x.detach().cpu(), y.detach().cpu()
    if x.shape != y.shape:
        return False
    inexact = any(one.is_floating_point() or one.is_complex() for one in (x, y))
    if not (inexact or rtol or atol):
        return bool(x.tolist() == y.tolist())  # of any integer dtypes, beyond 2**53 too
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    return bool(torch.isclose(x.to(wide), y.to(wide), rtol=rtol, atol=atol, equal_nan=True).all())
