"""Values: results by leaf and by statistic, at a depth that depends on the data (`peek`) or never does (`value`)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Protocol

from recorders.errors import SelectionError
from recorders.recordings.display import flat_leaves, listed

__all__ = ["Values", "ValuesByName", "bare"]


class Values:
    """`peek`, `compute` and `value` of what has results by leaf."""

    def leaves(self) -> dict[str, Any]:
        """Results by path of the leaf; leaves without observations are left out."""
        raise NotImplementedError

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


class _Named(Protocol):
    def __getitem__(self, name: str | int, /) -> Values: ...


class ValuesByName:
    """`value` of what has subrecorders by name."""

    def value(self: _Named, name: str | int, *, leaf: str | None = None, stat: str | None = None) -> Any:
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
        return _value(self[name].leaves(), leaf, stat, f"subrecorder {name!r}")


def bare(leaves: Mapping[str, Any]) -> Any:
    """The result of a lone tensor; results by path of the leaf if operands were nested; None if there are none."""
    return leaves.get("", leaves) if len(leaves) == 1 else leaves or None


def _value(leaves: Mapping[str, Any], leaf: str | None, stat: str | None, where: str) -> Any:
    if not leaves:
        raise SelectionError(f"{where} recorded nothing, so it has no value: report() of the recorder says why")
    leaf = _chosen(leaves, leaf, "leaf", "leaves", where)
    statistics = dict(flat_leaves(leaves[leaf]))
    return statistics[_chosen(statistics, stat, "stat", "statistics", f"{where}{f', leaf {leaf!r},' * bool(leaf)}")]


def _chosen(known: Mapping[str, Any], given: str | None, option: str, several: str, where: str) -> str:
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
