"""How far two runs are apart: of each tensor that both recorded, at each step that both recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from recorders.watch.divergence.runs.matching import Matched
from recorders.watch.divergence.runs.run import RunTracks, Track, TrackName

SUMMING = 1e-12
"""How far norms of the same numbers may be apart, relative to them, because they were added in another order, in float64."""

_GRADIENTS = ("gradient", "input gradient", "weight gradient")
_TINY = 1e-3  # of the largest gradient in the net: smaller ones are compared with this much of it
_CANCELLED = 1e-2  # of the gradient that reaches a module: what it hands on is compared with this much of it at least
_SUMMED = 1.0  # and the gradient of a parameter: a sum over samples that are independent is as long as all of them together
_RATIO = 0.02  # of a difference that is no multiple, which is left if it is called a multiple


@dataclass(frozen=True)
class Gap:
    """How far two tracks are apart at each common step. What one of them lacks is infinitely far, NaN what both lack.

    Attributes:
        absolute: the Euclidean distance, as sketches estimate it; [steps], as all.
        length: the longer of the two norms.
        first, second: the sketches of the last call in the step, [steps, k].
        same: whether bits are equal; of numbers, whether these are.
        eps: the coarser of both dtypes.
    """

    absolute: Tensor
    length: Tensor
    first: Tensor
    second: Tensor
    same: Tensor
    eps: Tensor

    def relative(self, floor: Tensor | float = 0.0) -> Tensor:
        """The distance, relative to the longer norm, and to `floor` at least."""
        scale = torch.maximum(self.length, torch.as_tensor(floor, dtype=torch.float64, device="cpu").expand_as(self.length))
        found = torch.where(self.absolute == 0, 0.0, self.absolute / scale)
        return torch.where(self.absolute.isnan(), torch.nan, found)

    @cached_property
    def known(self) -> Tensor:
        """The steps in which anything is known."""
        return ~self.absolute.isnan()


@dataclass(frozen=True)
class Growth:
    """How far two runs are apart at a step, relative to their size; NaN if it is not known.

    Attributes:
        output: what the net returns; if that was not recorded, the layer whose output differs most.
        gradient: the gradients of all parameters, as one vector.
        weight: all parameters before the step.
    """

    step: int
    output: float
    gradient: float
    weight: float


class Apart:
    """Distances of two runs."""

    def __init__(self, a: RunTracks, b: RunTracks, matched: Matched) -> None:
        self.a, self.b, self.matched = _with_gradients(a, b, matched)
        in_b = {step: index for index, step in enumerate(b.steps)}
        common = [(index, in_b[step]) for index, step in enumerate(a.steps) if step in in_b]
        self.steps: Sequence[int] = [a.steps[index] for index, _ in common]
        of_a, of_b = ([pair[which] for pair in common] for which in (0, 1))
        self._at = torch.tensor(of_a, dtype=torch.int64, device="cpu"), torch.tensor(of_b, dtype=torch.int64, device="cpu")
        self._gaps: dict[TrackName, Gap | None] = {}

    def gap(self, place: TrackName) -> Gap | None:
        """The gap of a place of the first run; None if the second has no such place."""
        if place not in self._gaps:
            other = self.matched.places.get(place)
            here, there = self.a.tracks[place], None if other is None else self.b.tracks.get(other)
            self._gaps[place] = None if there is None else _gap(here, there, self._at, self._is_permuted(place))
        return self._gaps[place]

    def _is_permuted(self, place: TrackName) -> bool:
        """Whether a parameter has the same numbers in both runs, in another order: one is transposed. Then only norms compare."""
        module, leaf = place.module, place.leaf
        if not place.role.startswith(("weight", "state ")) or self._is_same_class(module):
            return False
        if (module, leaf) not in self._permuted:
            self._permuted[module, leaf] = False
            for role in ("weight before", "weight"):
                own = TrackName(role, module, leaf)
                here = self.a.tracks.get(own)
                there = self.b.tracks.get(self.matched.places[own]) if own in self.matched.places else None
                if here is not None and there is not None and len(here) and len(there):
                    self._permuted[module, leaf] = _holds_the_same(here, there)
                    break
        return self._permuted[module, leaf]

    def _is_same_class(self, module: str) -> bool:
        """Whether a module has the same class in both runs: then it has its parameters in the same order, or it is a fault."""
        own, other = (run.modules.get(name) for run, name in ((self.a, module), (self.b, self.matched.modules.get(module, ""))))
        return own is not None and other is not None and own.kind == other.kind != ""

    @cached_property
    def _permuted(self) -> dict[tuple[str, str], bool]:
        return {}

    def same(self) -> list[bool]:
        """Of each step whether all that both recorded is equal, bit for bit."""
        found = torch.ones(len(self.steps), dtype=torch.bool, device="cpu")
        for modules in self.by_role.values():
            for gaps in modules.values():
                for gap in gaps.values():
                    found &= gap.same
        return found.tolist()

    def moved(self, module: str, leaf: str, index: int) -> tuple[Tensor, Tensor] | None:
        """By how much a common step moved a parameter in each run, as sketches; None if that is not known."""
        place = TrackName("weight", module, leaf)
        other = self.matched.places.get(place)
        if place not in self.a.tracks or other is None or self._is_permuted(place):
            return None
        one, two = (
            _moved(run, at, int(steps[index])) for run, at, steps in ((self.a, place, self._at[0]), (self.b, other, self._at[1]))
        )
        return None if one is None or two is None or one.shape != two.shape else (one, two)

    def calls(self, place: TrackName, index: int) -> tuple[int, int]:
        """How often a common step saw a place in each run."""
        other = self.matched.places.get(place)
        tracks = (self.a.tracks.get(place), None if other is None else self.b.tracks.get(other))
        one, two = (
            0 if track is None else int(_calls(track, at[index : index + 1])[1]) for track, at in zip(tracks, self._at, strict=True)
        )
        return one, two

    @cached_property
    def by_role(self) -> Mapping[str, Mapping[str, Mapping[str, Gap]]]:
        """All gaps by role, module and leaf."""
        found: dict[str, dict[str, dict[str, Gap]]] = {}
        for place in self.a.tracks:
            gap = self.gap(place)
            if gap is not None:
                found.setdefault(place.role, {}).setdefault(place.module, {})[place.leaf] = gap
        return found

    def of(self, role: str, module: str) -> Tensor:
        """The largest relative distance of what the module has in this role, [steps]; NaN if nothing is known."""
        gaps = self.by_role.get(role, {}).get(module, {})
        return largest((self.relative(TrackName(role, module, leaf), gap) for leaf, gap in gaps.items()), len(self.steps))

    def relative(self, place: TrackName, gap: Gap) -> Tensor:
        """The relative distance of one tensor; gradients that cancel are compared with what reaches the module.

        Buffers are compared with numbers as large as those that the module gets: a running mean of these may be close to 0.
        """
        role, module, _ = place
        if role == "buffer":
            inputs = self.by_role.get("input", {}).get(module, {}).items()
            counts = {leaf: self.a.tracks[TrackName("input", module, leaf)].count for leaf, _ in inputs}
            own = int(self.a.tracks[place].count.max()) if len(self.a.tracks[place]) else 0
            sizes = [came.length * math.sqrt(own / max(int(counts[leaf].max()), 1)) for leaf, came in inputs if len(counts[leaf])]
            return gap.relative(or_zero(largest(sizes, len(self.steps))))
        if role not in _GRADIENTS:
            return gap.relative()
        floor = _TINY * self._largest_gradient(role)
        reaches = self._length("gradient", module)
        if role != "gradient" and reaches is not None:
            floor = torch.maximum(floor, (_SUMMED if role == "weight gradient" else _CANCELLED) * reaches)
        return gap.relative(floor)

    def _largest_gradient(self, role: str) -> Tensor:
        of = "weight gradient" if role == "weight gradient" else "gradient"
        if of not in self._largest:
            lengths = [self._length(of, module) for module in self.by_role.get(of, {})]
            self._largest[of] = or_zero(largest((length for length in lengths if length is not None), len(self.steps)))
        return self._largest[of]

    @cached_property
    def _largest(self) -> dict[str, Tensor]:
        return {}

    def _length(self, role: str, module: str) -> Tensor | None:
        gaps = self.by_role.get(role, {}).get(module, {})
        return or_zero(largest((gap.length for gap in gaps.values()), len(self.steps))) if gaps else None

    def other_dtypes(self) -> Iterator[str]:
        """Modules whose output has another dtype in the second run: its rounding is noise, so this is only noted."""
        for module, gaps in self.by_role.get("output", {}).items():
            for leaf in gaps:
                place = TrackName("output", module, leaf)
                own, other = self.a.tracks[place].eps, self.b.tracks[self.matched.places[place]].eps
                if len(own) and len(other) and float(own[0]) != float(other[0]):
                    yield module
                    break

    def first_unlike_bits(self) -> tuple[int, str] | None:
        """The first step, and in it the first place, at which bits differ."""
        best: tuple[int, str] | None = None
        words = {"input": "what {} gets", "output": "what {} returns", "gradient": "the gradient of what {} returns"}
        for role, modules in self.by_role.items():
            for module, gaps in modules.items():
                for gap in gaps.values():
                    unlike = (gap.known & ~gap.same).nonzero()
                    if len(unlike) and (best is None or int(unlike[0]) < best[0]):
                        best = int(unlike[0]), words.get(role, f"the {role} of {{}}").format(module or "the net")
        return best

    @cached_property
    def eps(self) -> float:
        """The coarsest dtype of outputs and weights of both runs, as its distance of numbers."""
        tracks = [
            track for run in (self.a, self.b) for place, track in run.tracks.items() if place.role in ("output", "weight", "value")
        ]
        return max((float(track.eps.max()) for track in tracks if len(track)), default=torch.finfo(torch.float32).eps)


def _moved(run: RunTracks, place: TrackName, step: int) -> Tensor | None:
    """By how much a step of one run moved a parameter: by its value after the step, or before the next one."""
    before = _one(run.tracks.get(place), step)
    after = _one(run.tracks.get(place._replace(role="weight after")), step)
    if after is None and step + 1 < len(run.steps) and run.steps[step + 1] == run.steps[step] + 1:
        after = _one(run.tracks.get(place), step + 1)
    return None if before is None or after is None or not len(before) else after - before


def _one(track: Track | None, step: int) -> Tensor | None:
    """The sketch of the only observation in a step; None if there is not one."""
    if track is None:
        return None
    first, last = (int(torch.searchsorted(track.steps, step, right=right)) for right in (False, True))
    return track.sketch[first] if last - first == 1 else None


def _with_gradients(a: RunTracks, b: RunTracks, matched: Matched) -> tuple[RunTracks, RunTracks, Matched]:
    """Both, with empty tracks for gradients that only one has: that of a module or a parameter that is cut off in the other."""
    modules, places = matched.modules, dict(matched.places)
    back = {other: name for name, other in modules.items()}
    tracks_a, tracks_b = dict(a.tracks), dict(b.tracks)
    both = {place.role for place in tracks_a} & {place.role for place in tracks_b} & set(_GRADIENTS)
    taken = set(places.values())
    for place, track in a.tracks.items():
        if place.role in both and place not in places and place.module in modules:
            places[place] = other = place._replace(module=modules[place.module])
            tracks_b.setdefault(other, track.at(torch.arange(0, device="cpu")))
    for other, track in b.tracks.items():
        if other.role in both and other not in taken and other.module in back:
            place = other._replace(module=back[other.module])
            if place not in tracks_a:
                tracks_a[place], places[place] = track.at(torch.arange(0, device="cpu")), other
    return replace(a, tracks=tracks_a), replace(b, tracks=tracks_b), Matched(modules, places)


def multiple(first: Tensor, second: Tensor) -> str:
    """Whether the second sketch is a multiple of the first, in words; "" if it is not."""
    long = float(first @ first)
    if not len(first) or long == 0 or not bool(second.isfinite().all()):
        return ""
    times = float(first @ second) / long
    left = float(torch.linalg.vector_norm(second - times * first))
    if times == 1 or left > _RATIO * abs(times - 1) * math.sqrt(long):
        return ""
    return " is 0, and not in the first run" if times == 0 else f" is {times:.3g} times that of the first run"


def or_zero(x: Tensor) -> Tensor:
    """The tensor, with 0 for what is not known."""
    return torch.where(x.isnan(), 0.0, x)


def largest(values: Iterable[Tensor], steps: int) -> Tensor:
    """The largest of several tensors [steps], at each step; NaN if all are NaN."""
    found = torch.full((steps,), torch.nan, dtype=torch.float64, device="cpu")
    for value in values:
        found = torch.fmax(found, value)
    return found


def joint(gaps: Iterable[Gap], steps: int) -> Tensor:
    """The relative distance of several tensors as if they were one, [steps]; NaN if nothing is known."""
    far, long = torch.zeros(steps, dtype=torch.float64, device="cpu"), torch.zeros(steps, dtype=torch.float64, device="cpu")
    known = torch.zeros(steps, dtype=torch.bool, device="cpu")
    for gap in gaps:
        far += torch.where(gap.known, gap.absolute, 0.0) ** 2
        long += torch.where(gap.known, gap.length, 0.0) ** 2
        known |= gap.known
    apart = torch.where(far == 0, 0.0, (far / long).sqrt())
    return torch.where(known, apart, torch.nan)


def _holds_the_same(a: Track, b: Track) -> bool:
    """Whether the first of each holds the same numbers in another order, as far as their squares tell."""
    same_norm = math.isclose(float(a.norm[0]), float(b.norm[0]), rel_tol=SUMMING)
    apart = float(torch.linalg.vector_norm(a.sketch[0] - b.sketch[0])) if a.sketch.shape == b.sketch.shape else 0.0
    return bool(a.count[0] == b.count[0]) and same_norm and apart > 0.1 * float(a.norm[0])


def _gap(a: Track, b: Track, steps_of: tuple[Tensor, Tensor], by_norm: bool) -> Gap:
    steps = len(steps_of[0])
    (start_a, calls_a), (start_b, calls_b) = (_calls(track, at) for track, at in zip((a, b), steps_of, strict=True))
    sketches = [torch.zeros((steps, track.sketch.shape[1]), dtype=torch.float64, device="cpu") for track in (a, b)]
    numbers = [torch.full((steps,), value, dtype=torch.float64, device="cpu") for value in (torch.nan, 0.0, 0.0)]
    found = Gap(numbers[0], numbers[1], sketches[0], sketches[1], torch.ones(steps, dtype=torch.bool, device="cpu"), numbers[2])
    alone = (calls_a == 0) != (calls_b == 0)
    found.absolute[alone] = torch.inf
    found.same[alone] = False
    calls = torch.where(calls_a == calls_b, calls_a, 0)
    for call in range(int(calls.max()) if steps else 0):
        chosen = (calls > call).nonzero()[:, 0]
        here, there = a.at(start_a[chosen] + call), b.at(start_b[chosen] + call)
        absolute, same = _distances(here, there)
        if by_norm:
            absolute = (here.norm - there.norm).abs()
        found.absolute[chosen] = torch.fmax(found.absolute[chosen], absolute)
        found.length[chosen] = torch.fmax(found.length[chosen], torch.fmax(here.norm, there.norm))
        found.first[chosen], found.second[chosen] = here.sketch, there.sketch
        found.same[chosen] &= same
        found.eps[chosen] = torch.maximum(here.eps, there.eps)
    return found


def _calls(track: Track, at: Tensor) -> tuple[Tensor, Tensor]:
    """The first observation of each of these steps, and how many there are."""
    first, last = (torch.searchsorted(track.steps, at, right=right) for right in (False, True))
    return first, last - first


def _distances(a: Track, b: Track) -> tuple[Tensor, Tensor]:
    """The Euclidean distances of observations, and whether their bits are equal."""
    if a.sketch.shape[1] != b.sketch.shape[1]:
        apart = torch.full_like(a.norm, torch.inf)
    else:
        apart = torch.linalg.vector_norm(a.sketch - b.sketch, dim=1)
    unlike = (a.count != b.count) | (a.nonfinite != b.nonfinite)
    apart = torch.where(unlike, torch.inf, torch.where(apart.isnan(), 0.0, apart))
    if a.digest is None or b.digest is None:
        return apart, apart == 0
    same = a.digest == b.digest
    if a.sketch.shape[1] == 0:
        apart = torch.where(same, apart, torch.inf)
    return torch.where(same, 0.0, apart), same
