"""RunTracks: what was recorded of a training step by step, as tracks: one for each tensor, with its fingerprint in each step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recorders.recordings.recording import Recording, Subrecording
from recorders.watch.diagnosis.steps import FACTS
from recorders.watch.timeline import Timeline

_ROLES = {
    "ForwardInputMonitor": "input",
    "ForwardMonitor": "output",
    "BackwardMonitor": "gradient",
    "BackwardInputMonitor": "input gradient",
    "ParameterGradientMonitor": "weight gradient",
    "ParameterMonitor": "weight after",
}
"""What each kind of monitor sees of a module."""

_OF_WEIGHTS = {".gradient": "weight gradient", ".value": "weight"}  # leaves of what `presets.fingerprints` calls "weights"
_SINGLE = torch.finfo(torch.float32).eps


class TrackName(NamedTuple):
    """What a track is of: a role such as "output", the name of a module, and the path of a leaf in its operand."""

    role: str
    module: str
    leaf: str


@dataclass(frozen=True)
class Track:
    """The fingerprints of one tensor, an entry for each observation.

    Attributes:
        sketch: float64 [n, k]; of a number over time, the number itself, [n, 1].
        norm: float64 [n], of the finite elements.
        digest: int64 [n]; None if only numbers are known.
        count: elements of each, int64 [n]; -1 if not known.
        nonfinite: int64 [n], elements that are not finite.
        eps: float64 [n], of the dtype.
        steps: the index in `RunTracks.steps` of each observation, int64 [n].
    """

    sketch: Tensor
    norm: Tensor
    digest: Tensor | None
    count: Tensor
    nonfinite: Tensor
    eps: Tensor
    steps: Tensor

    def __len__(self) -> int:
        return len(self.sketch)

    def at(self, chosen: Tensor) -> Track:
        """Those of some observations."""
        values = (self.sketch, self.norm, self.digest, self.count, self.nonfinite, self.eps, self.steps)
        return Track(*(None if value is None else value[chosen] for value in values))  # type: ignore[arg-type]


class Weight(NamedTuple):
    """What a parameter was first: its number of elements, its norm, and its digest, which is None if it is not known."""

    elements: int
    norm: float
    digest: int | None


@dataclass(frozen=True)
class Module:
    """A module of which something is known.

    Attributes:
        name: "" is the net.
        kind: its class; "" if it is not known.
        sizes: elements of the first of each output.
        weights: its parameters as they were first, by name.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    weights: Mapping[str, Weight]


@dataclass(frozen=True)
class RunTracks:
    """One run.

    Attributes:
        steps: the step of the clock of each recorded step, or the tick of a timeline; the number of an observation if there were no
            steps.
        unit: "step", "tick" or "observation".
    """

    steps: Sequence[int]
    unit: str
    tracks: Mapping[TrackName, Track]
    modules: Mapping[str, Module] = field(default_factory=dict)

    def of(self, role: str, module: str) -> dict[str, Track]:
        """The tracks of a module in this role, by leaf."""
        return {place.leaf: track for place, track in self.tracks.items() if place.role == role and place.module == module}


def run_of(recorded: Recording | Timeline) -> RunTracks:
    """What a recording, or a timeline, tells of a run step by step; without tracks if it tells nothing."""
    return _of_timeline(recorded) if isinstance(recorded, Timeline) else _of_recording(recorded)


def tells_steps(recorded: Recording | Timeline) -> bool:
    """Whether it is a timeline, or a recording with a digest for each observation."""
    if isinstance(recorded, Timeline):
        return True
    return any(_digests(result) is not None for part in recorded.values() for _, result in part.iter_leaves())


def _of_recording(recording: Recording) -> RunTracks:
    groups = {name.partition("/")[0] for name in recording if "/" in name}
    if any(part.monitor == "StepMonitor" for part in recording.values()):  # as `fingerprints` makes it: names begin with a group
        groups |= set(recording)
    found: dict[TrackName, Mapping[str, Tensor]] = {}
    kinds: dict[str, str] = {}
    for name, part in recording.items():
        group, slash, module = name.partition("/")
        module = module if slash else "" if name in groups else name
        for leaf, result in part.iter_leaves():
            values = _per_observation(result)
            if values is not None:
                found[_place(part, module, leaf, group if slash or name in groups else "")] = values
        if part.monitor not in ("OptimizerMonitor", "StepMonitor"):
            kinds.setdefault(module, part.module)
    steps, unit = _steps(recording, found)
    tracks = {place: _track(values, len(steps)) for place, values in found.items()}
    seen = dict.fromkeys(place.module for place in tracks)
    names = [*(name for name in kinds if name in seen), *(name for name in seen if name not in kinds)]
    return RunTracks(steps, unit, tracks, {name: _module(name, kinds.get(name, ""), tracks) for name in names})


def _place(part: Subrecording, module: str, leaf: str, group: str) -> TrackName:
    """What a leaf of a subrecording is of."""
    role = _ROLES.get(part.monitor, part.monitor)
    if part.monitor == "OptimizerMonitor":  # its leaf is the name of a buffer in the net, or of a parameter and what is kept for it
        path, _, key = (leaf, "", "") if group == "buffers" else leaf.rpartition(".")
        module, _, leaf = path.replace("\\.", ".").rpartition(".")
        return TrackName(f"state {key}" if key else "buffer", module, leaf)
    if role == "weight after" and group == "before":
        return TrackName("weight before", module, leaf)
    for end, other in _OF_WEIGHTS.items():
        if role == "weight gradient" and leaf.endswith(end):
            return TrackName(other, module, leaf.removesuffix(end))
    return TrackName(role, module, leaf)


def _per_observation(result: Any) -> Mapping[str, Tensor] | None:
    """The entries of what was recorded for each observation; None if it was not."""
    if not isinstance(result, Mapping):
        return {"sketch": result.double().cpu()[:, None]} if _is_list_of_numbers(result) else None
    return _digests(result)


def _digests(result: Any) -> Mapping[str, Tensor] | None:
    """What `Fingerprints`, or a list of digests, has; None if it is something else."""
    if not isinstance(result, Mapping):
        return None
    values = {key: value.cpu() for key, value in result.items() if isinstance(value, Tensor)}
    digest = values.get("digest")
    return values if digest is not None and digest.ndim == 1 else None


def _is_list_of_numbers(result: Any) -> bool:
    return isinstance(result, Tensor) and result.ndim == 1 and result.is_floating_point()


def _steps(recording: Recording, found: Mapping[TrackName, Mapping[str, Tensor]]) -> tuple[list[int], str]:
    """The steps that were recorded."""
    for part in recording.values():
        if part.monitor == "StepMonitor" and part.samples:
            rows: Any = next(iter(part.iter_leaves()))[1]
            if isinstance(rows, Tensor) and rows.ndim == 2 and rows.shape[1] == len(FACTS):
                steps = sorted({int(step) for step in rows[:, FACTS.index("step")].tolist()})
                return steps, "step"
    longest = max((len(_first(values)) for values in found.values()), default=0)
    return list(range(longest)), "observation"


def _first(values: Mapping[str, Tensor]) -> Tensor:
    return values["digest"] if "digest" in values else values["sketch"]


def _track(values: Mapping[str, Tensor], steps: int) -> Track:
    number = len(_first(values))
    sketch = values.get("sketch", torch.zeros((number, 0), dtype=torch.float64, device="cpu")).double()
    norm = values.get("norm", torch.linalg.vector_norm(sketch, dim=1)).double()
    calls = number // steps if steps and number >= steps else 1  # of a module in one step
    return Track(
        sketch,
        norm,
        values.get("digest"),
        values.get("count", torch.full((number,), -1, device="cpu")),
        values.get("nonfinite", (~sketch.isfinite()).sum(dim=1)),
        values.get("eps", torch.full((number,), _SINGLE, dtype=torch.float64, device="cpu")).double(),
        (torch.arange(number, device="cpu") // calls).clamp(max=max(steps - 1, 0)),
    )


def _module(name: str, kind: str, tracks: Mapping[TrackName, Track]) -> Module:
    outputs = [track for place, track in tracks.items() if place[:2] == ("output", name) and len(track)]
    weights: dict[str, Weight] = {}
    for role in ("weight", "weight before"):
        for place, track in tracks.items():
            if place[:2] == (role, name) and len(track):
                digest = None if track.digest is None else int(track.digest[0])
                weights[place.leaf] = Weight(int(track.count[0]), float(track.norm[0]), digest)
    return Module(
        name,
        kind,
        tuple(int(track.count[0]) for track in outputs),
        weights,
    )


def _of_timeline(timeline: Timeline) -> RunTracks:
    ticks = timeline.ticks()
    at = {tick: index for index, tick in enumerate(ticks)}
    tracks = {}
    for name, statistic, (own, numbers) in _series(timeline):
        sketch = torch.tensor(numbers, dtype=torch.float64, device="cpu")[:, None]
        found = _track({"sketch": sketch}, 0)
        steps = torch.tensor([at[tick] for tick in own], dtype=torch.int64, device="cpu")
        tracks[TrackName("value", name, statistic)] = Track(**{**vars(found), "steps": steps})
    return RunTracks(ticks, "tick", tracks, {place.module: Module(place.module, "", (), {}) for place in tracks})


def _series(timeline: Timeline) -> Iterator[tuple[str, str, tuple[Sequence[int], Sequence[float]]]]:
    for name in timeline:
        for statistic in timeline[name]:
            ticks, numbers = timeline.series(name, statistic)
            yield name, statistic, (ticks, [math.nan if number is None else float(number) for number in numbers])
