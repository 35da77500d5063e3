"""Differing: copies that ranks should hold alike and do not; which ranks differ, and from which observation on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recorders._torch import outside_modes
from recorders.recordings.storage.tensors import as_bytes
from reducers import Product, Reducer, State


@dataclass(frozen=True)
class Copy:
    """What one rank recorded of a tensor that other ranks hold, too.

    Attributes:
        rank: the global rank; negative if it is not known.
    """

    rank: int
    state: State
    samples: int


@dataclass(frozen=True)
class Differing:
    """A tensor that several ranks hold, and of which they did not record the same bits.

    Attributes:
        name: of the subrecorder.
        leaf: the path of the tensor in the operand; "" for a single tensor.
        monitor: the kind of monitor, such as "ParameterMonitor".
        ranks: those that differ from most. If no majority is equal, as of two ranks, all.
        of: all ranks that recorded it.
        observation: the first observation that differs, counted from 0; None if that is not known, because the reducer does not
            list observations. `Fingerprints()`, and `PerObservation(..., Collect())` of any statistic, do.
        first_counts: whether the copy of the first rank was kept alone, because these are copies of one DTensor; otherwise each
            that differs counts as of a net of its own.

    >>> print(Differing("value/0", "weight", "ParameterMonitor", (1,), (0, 1, 2), 3))
    'value/0', leaf 'weight' (ParameterMonitor) on rank 1, unlike ranks 0 and 2, from observation 3 on
    """

    name: str
    leaf: str
    monitor: str
    ranks: tuple[int, ...]
    of: tuple[int, ...]
    observation: int | None = None
    first_counts: bool = False

    def __str__(self) -> str:
        where = f"{self.name!r}{f', leaf {self.leaf!r}' if self.leaf else ''} ({self.monitor})"
        return f"{where} on {self.on}" + ("" if self.observation is None else f", from observation {self.observation} on")

    @property
    def on(self) -> str:
        """The ranks in words.

        >>> Differing("0", "", "ParameterMonitor", (0, 1), (0, 1)).on
        'ranks 0 and 1'
        """
        others = [rank for rank in self.of if rank not in self.ranks]
        return shown_ranks(self.ranks) + (f", unlike {shown_ranks(others)}" if others else "")


def shown_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words; of more than five the first four.

    >>> shown_ranks([2]), shown_ranks([0, 1, 5]), shown_ranks(range(9))
    ('rank 2', 'ranks 0, 1 and 5', 'ranks 0, 1, 2, 3 and 5 more')
    """
    known = [str(rank) for rank in ranks if rank >= 0]
    if len(known) < 2:
        return f"rank {known[0]}" if known else "a rank that is not known"
    told = known if len(known) < 6 else [*known[:4], f"{len(known) - 4} more"]
    return f"ranks {', '.join(told[:-1])} and {told[-1]}"


def compared(
    reducer: Reducer, copies: Sequence[Copy], name: str, leaf: str, monitor: str, *, first_counts: bool = False
) -> Differing | None:
    """Compare copies bit for bit; return which ranks differ, and since when, or None if all are equal."""
    if all(equal_states(copies[0].state, copy.state) for copy in copies[1:]):
        return None
    first, rows = _first_difference([_listed(reducer, copy) for copy in copies])
    groups: list[list[int]] = []  # the places of copies that are equal where they first differ
    for place, copy in enumerate(copies):
        for group in groups:
            before = group[0]
            if torch.equal(rows[before], rows[place]) if rows else equal_states(copies[before].state, copy.state):
                group.append(place)
                break
        else:
            groups.append([place])
    largest = max(groups, key=len)
    most = set(largest) if 2 * len(largest) > len(copies) else set()
    odd = tuple(copy.rank for place, copy in enumerate(copies) if place not in most)
    return Differing(name, leaf, monitor, odd, tuple(copy.rank for copy in copies), first, first_counts)


def _first_difference(listed: Sequence[Tensor | None]) -> tuple[int | None, list[Tensor]]:
    """The first observation of which copies differ, and the bytes of each copy there; (None, []) if that is not known."""
    known = [rows for rows in listed if rows is not None]
    if len(known) < len(listed) or len({rows.shape[1] for rows in known}) > 1:
        return None, []
    least = min(map(len, known))
    differs = torch.stack([(rows[:least] != known[0][:least]).any(1) for rows in known]).any(0)
    if differs.any():
        first = int(differs.int().argmax())
        return first, [rows[first] for rows in known]
    if max(map(len, known)) > least:  # some ranks observed no more
        return least, [rows[least : least + 1].flatten() for rows in known]
    return None, []


def _listed(reducer: Reducer, copy: Copy) -> Tensor | None:
    """The bytes of what a state lists of each observation, a row each; None if it lists nothing."""
    parts = []
    for one, state in _parts(reducer, copy.state):
        if not one.bounded and state:
            with suppress(Exception):  # a reducer of the user's may raise anything
                results = list(_tensors(outside_modes(one.compute, state)))
                if results and all(x.ndim and len(x) == copy.samples for x in results):
                    parts += [as_bytes(x.detach().cpu().contiguous()).view(len(x), -1) for x in results]
    return torch.cat(parts, 1) if parts else None


def _parts(reducer: Reducer, state: State) -> Iterator[tuple[Reducer, State]]:
    """The reducers that a product is of, each with its state; any other reducer is one part."""
    if not isinstance(reducer, Product):
        yield reducer, state
        return
    for name, part in reducer.parts:
        prefix = f"{name}/"
        yield from _parts(part, {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)})


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Mapping):
        for part in result.values():
            yield from _tensors(part)
    else:
        yield result


def equal_states(a: State, b: State) -> bool:
    """Whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(equal_tensors(a[key], b[key]) for key in a)


def equal_tensors(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit."""
    if a is b:
        return True
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    x, y = (as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()) for tensor in (a, b))
    return bool(torch.equal(x, y))
