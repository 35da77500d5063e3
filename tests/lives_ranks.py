"""The life of recorders on several ranks: what happens is drawn by chance, and each rank knows what all others observe."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import laws
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Case
from lives import UNTOLD
from torch import Tensor, nn
from world import Place

from recorders import ForwardMonitor, Recorder, Recording

__all__ = ["live_on"]

SYNCS = ("all", "to one", "at once")


class RankLife:
    """Recorders on all ranks of a group.

    All numbers are drawn from one seed, those of a rank from this and the rank, so that each rank knows those of the others.
    """

    def __init__(self, place: Place, seed: int) -> None:
        (_, self.group), self.chance = place, random.Random(seed)
        self.ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.seed, chance = seed, self.chance
        mergeable = [case for case in CASES if case.merges and case.data and torch.float32 in case.dtypes]
        self.trailing = chance.choice(mergeable).trailing
        fitting = [case for case in mergeable if case.trailing == self.trailing]
        chosen = chance.sample(fitting, min(len(fitting), chance.randint(1, 4)))  # equal monitors would be one
        self.cases: dict[str, Case] = {f"monitor{number}": case for number, case in enumerate(chosen)}
        self.rows = chance.choice([1, 3, 40]) if any(case.same_shape for case in self.cases.values()) else None
        self.layers = nn.ModuleList(nn.Identity() for _ in range(chance.randint(1, 3)))
        lacks = chance.choice([*self.cases]) if len(self.cases) > 1 and chance.random() < 0.3 else ""
        self.absent = (chance.randrange(self.ranks), lacks)  # a rank that does not have one of the monitors
        self.missing: Any = "keep" if lacks else "error"
        self.recorder = self._new_recorder()
        self.seen: list[dict[tuple[int, str], list[Tensor]]] = [{} for _ in range(self.ranks)]
        self.happened: list[str] = []
        self.number = 0

    def _new_recorder(self) -> Recorder:
        names = [name for name in self.cases if (self.rank, name) != self.absent]
        made = {name: ForwardMonitor(self.cases[name].reducer, on_error="raise") for name in names}
        return Recorder(**made).modules(self.layers, types=nn.Identity)

    def _observed(self, rank: int, layer: int) -> Iterator[Any]:
        """What a layer returns on a rank now; often nothing."""
        chance = random.Random(f"{self.seed} {self.number} {rank} {layer}")
        for _ in range(chance.choice([0, 0, 1, 1, 2, 40])):
            generator = torch.Generator().manual_seed(chance.randrange(1 << 40))
            rows = self.rows or chance.choice([1, 2, 3, 8])
            x = torch.randn(rows, *self.trailing, generator=generator)
            x = torch.where(torch.rand(x.shape, generator=generator) < 0.1, chance.choice([0.0, torch.nan]), x)
            yield (x, x + 1) if chance.random() < 0.2 else x

    def observe(self) -> None:
        self.number += 1
        for layer in range(len(self.layers)):
            for rank in range(self.ranks):
                for value in self._observed(rank, layer):
                    for leaf, x in enumerate(value) if isinstance(value, tuple) else [("", value)]:
                        self.seen[rank].setdefault((layer, str(leaf)), []).append(x.double())
            for value in self._observed(self.rank, layer):
                self.layers[layer](value)

    def sync(self) -> None:
        way = self.chance.choice(SYNCS)
        self.happened.append(way)
        to = self.chance.randrange(self.ranks)
        found: Recording | None
        if way == "to one":
            to = to if self.group is None else dist.get_global_rank(self.group, to)
            found = self.recorder.sync(self.group, missing=self.missing, to=to)
            assert (found is None) == (dist.get_rank() != to), f"rank {to} should get it, and {dist.get_rank()} got {found}"
        elif way == "at once":
            handle = self.recorder.sync(self.group, missing=self.missing, async_op=True)
            self.layers[0](torch.randn(self.rows or 2, *self.trailing))  # what is recorded meanwhile is not among it
            found = handle.wait()
            self.recorder.reset()
            self.check(found)
            for seen in self.seen:
                seen.clear()
            return
        else:
            found = self.recorder.sync(self.group, missing=self.missing)
        if found is not None:
            self.check(found)

    def reset(self) -> None:
        self.recorder.reset()
        for seen in self.seen:
            seen.clear()

    def resume(self) -> None:
        """Each rank goes on in another process, from a file of its own."""
        with tempfile.TemporaryDirectory() as folder:
            self.recorder.save(Path(folder) / "run")
            self.recorder.deregister()
            self.recorder = self._new_recorder().resume(Path(folder) / "run")

    def check(self, found: Recording) -> None:
        """What all ranks have together is what all observed, one rank after another."""
        assert {name.partition("/")[0] for name in found} == set(self.cases), f"{[*found]} of {[*self.cases]}"
        for name in found:
            group, _, layer = name.partition("/")
            wanted: dict[tuple[int, str], list[Tensor]] = {}
            for rank, seen in enumerate(self.seen):
                for key, xs in seen.items() if (rank, group) != self.absent else ():
                    wanted.setdefault(key, []).extend(xs)
            case, states = self.cases[group], {leaf: state for leaf, state in found[name].states.items() if state}
            mine = {leaf: xs for (at, leaf), xs in wanted.items() if at == int(layer)}
            assert states.keys() == mine.keys(), f"{name} has {[*states]}, and should have {[*mine]}"
            for leaf, xs in mine.items():
                with np.errstate(all="ignore"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    reference = case.reference([x.numpy() for x in xs])
                result = case.reducer.compute(states[leaf])
                result = {key: value for key, value in result.items() if key != "eps"} if isinstance(result, dict) else result
                try:
                    laws.close(result, reference, 1e-7, 1e-7)
                except AssertionError as error:
                    raise AssertionError(f"{name} {leaf!r}, after {len(xs)} observations: {error}") from None


def live_on(place: Place, seed: int, moments: int = 12) -> list[str]:
    """So many things happen; each rank compares what it gets. Returns what happened."""
    life = RankLife(place, seed)
    things = {life.observe: 5.0, life.sync: 4.0, life.reset: 0.5, life.resume: 0.7}
    with warnings.catch_warnings():
        for text in UNTOLD:
            warnings.filterwarnings("ignore", message=f"(?s).*{text}")
        for thing in (life.observe, *life.chance.choices([*things], [*things.values()], k=moments), life.sync):
            life.happened.append(thing.__name__)
            wrong, all_wrong = "", [""] * life.ranks
            try:
                thing()
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            dist.all_gather_object(all_wrong, wrong, life.group)  # or the others would wait for this one
            if any(all_wrong):
                told = {name: str(case) for name, case in life.cases.items()}
                raise AssertionError(f"{all_wrong}\nin the life of {told}: {'; '.join(life.happened)}")
    return life.happened
