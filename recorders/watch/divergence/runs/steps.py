"""`bisect_steps`: the first step at which two runs part, found by replaying parts of them from checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from recorders.recorder.recorder import Recorder
from recorders.recordings.recording import Recording
from recorders.watch.divergence.runs.answer import RunDivergence
from recorders.watch.divergence.runs.search import divergence

Replay: TypeAlias = "Callable[[Literal['first', 'second'], int, int, int], Recorder | Recording]"


def bisect_steps(
    replay: Replay, equal: int, apart: int, *, most: int = 16, names: Mapping[str, str] | None = None
) -> RunDivergence:
    """The first step at which two runs part, and where in it, by replays of ever shorter parts of them.

    Runs that were recorded seldom, or that saved checkpoints, are known to be equal before one step and to differ at a later one.
    The part between is replayed, with at most `most` of its steps recorded, then the part between the last equal and the first
    unequal of these, until each step is recorded. So a million steps take five replays, and no more than `most` steps are kept.

    Args:
        replay: called as `replay(run, start, stop, every)`, with `run` "first" or "second". It goes on with that run from its state
            before step `start`, such as from the newest checkpoint before it, does the steps up to `stop` and `stop` itself, and
            returns what `presets.fingerprints(every)` recorded from step `start` on.
        equal: a step before which the runs are equal.
        apart: a later step at which they are not.
        most: steps that are recorded in one replay, at least 3: each replay then halves the part.
        names: see `divergence`.

    Raises:
        ValueError: `apart` does not come after `equal`, or `most` is less than 3.

    Returns:
        the answer of `divergence` for the last replay, with the step counted from the beginning of the run; false if the replays
        do not part, which says that the runs do not repeat, see `recorders.repeat`.

    >>> import torch
    >>> from recorders import presets
    >>> def replay(run, start, stop, every):
    ...     torch.manual_seed(0)
    ...     net = torch.nn.Linear(4, 1)
    ...     optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ...     for step in range(stop + 1):
    ...         if step == start:
    ...             recorder = presets.fingerprints(every).modules(net)
    ...         if step == 37 and run == "second":
    ...             optimizer.param_groups[0]["lr"] = 0.02
    ...         net(torch.randn(8, 4)).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return recorder.deregister()
    >>> found = bisect_steps(replay, 0, 100)
    >>> found.step, found.phase, found.differs
    (37, 'update', 'its update is 2 times that of the first run')
    """
    if not 0 <= equal < apart:
        raise ValueError(f"bisect_steps(equal={equal}, apart={apart}): the runs are equal before one step, and differ later")
    if most < 3:
        raise ValueError(f"bisect_steps(most={most}): three steps of a replay at least are recorded, one between two others")
    while True:
        every = max(1, math.ceil((apart - equal) / (most - 1)))
        stop = equal + every * math.ceil((apart - equal) / every)
        found = divergence(*(replay(run, equal, stop, every) for run in ("first", "second")), names=names)
        if not found:
            return found
        growth = tuple(replace(row, step=row.step + equal) for row in found.growth)
        found = found.with_(step=found.step + equal, growth=growth)
        if every == 1:
            return found
        equal, apart = max(equal, found.step - every), max(found.step, equal + 1)
