"""Pairs: recorders of modules of two nets that are recorded together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import nn

from recorders.capture.renewal import together
from recorders.errors import SelectionError
from recorders.monitors.options import MonitorOptions
from recorders.monitors.pairs import PairMonitor
from recorders.recorder.results import Results
from recorders.recorder.selection import Criteria, Excluded, Names, Place, select_modules
from recorders.recordings.shown import listed
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["OfPairs"]

Match: TypeAlias = Literal["name", "all"]


class OfPairs(Results):
    """The part of a `Recorder` that makes one of the modules of two nets."""

    @classmethod
    def pairs(
        cls,
        net_a: nn.Module,
        net_b: nn.Module,
        reducer: Reducer,
        types: type | Iterable[type] | None = None,
        *,
        match: Match = "name",
        names: Names | None = None,
        exclude: Excluded | None = None,
        depth: int | None = None,
        leaves: bool = False,
        where: Callable[[str, nn.Module], bool] | None = None,
        **options: Unpack[MonitorOptions],
    ) -> Self:
        """A recorder with a `PairMonitor` for each pair: how modules of two nets, given the same inputs, are related.

        Args:
            net_a, net_b: the nets; they may be one.
            reducer: takes two tensors, such as `CKA()`.
            match: "name" pairs the modules that have one name in both nets, and leaves out the others; "all" pairs each module with
                each, under the name `"a~b"`: every pair keeps a copy of one output until the other comes.
            types, names, exclude, depth, leaves, where: which modules, of both nets, as in `modules`.
            **options: see `MonitorOptions`.

        Raises:
            SelectionError: the criteria match nothing in one of the nets, or no name is in both.
            ValueError: `match` is neither "name" nor "all".

        >>> import torch
        >>> from recorders import Recorder
        >>> from reducers import CKA
        >>> small, large = (torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh()) for width in (4, 8))
        >>> with Recorder.pairs(small, large, CKA(), torch.nn.Tanh, match="all") as recorder:
        ...     for batch in torch.randn(5, 16, 3).unbind():
        ...         _ = small(batch), large(batch)
        >>> list(recorder), 0 < recorder["1~1"].peek()["cka"] <= 1
        (['1~1'], tensor(True))
        """
        found = list(_matched(net_a, net_b, match, Criteria(types, names, None, exclude, depth, leaves, where)))
        recorder = cls(PairMonitor(reducer, **options))  # type: ignore[call-arg]  # of Recorder
        recorder._subrecorders.know(net_a)
        with together([net_a, net_b]):
            for name, module, other in found:
                recorder._subrecorders.add(name, PairMonitor(reducer, other, **options), module)
        return recorder


def _matched(net_a: nn.Module, net_b: nn.Module, match: Match, criteria: Criteria) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """The pairs of modules, each with its name."""
    if match not in ("name", "all"):
        raise ValueError(f"pairs(match={match!r}): choose 'name', for modules of the same name, or 'all', for each with each")
    first, second = _selected(net_a, criteria, "net_a"), _selected(net_b, criteria, "net_b")
    if match == "all":
        yield from ((f"{a.name}~{b.name}", a.module, b.module) for a in first for b in second)
        return
    by_name = {name: place.module for place in second for name in place.names}
    found = [(name, a.module, by_name[name]) for a in first for name in a.names if name in by_name]
    if not found:
        here, there = (listed([place.name for place in places]) for places in (first, second))
        raise SelectionError(f"no module selected has one name in both nets: net_a has {here}, net_b {there}; try match='all'")
    yield from found


def _selected(net: nn.Module, criteria: Criteria, which: str) -> list[Place]:
    try:
        return select_modules(net, criteria, recursive=True)
    except SelectionError as error:
        raise SelectionError(f"pairs: {which}: {error}") from error
