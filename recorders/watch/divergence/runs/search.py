"""`divergence`: the first step, phase and layer at which two recorded runs part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from recorders.errors import SelectionError
from recorders.recorder.recorder import Recorder
from recorders.recordings.display import shown_name
from recorders.recordings.recording import Recording
from recorders.watch.divergence.distance import Tolerance
from recorders.watch.divergence.runs.answer import RunDivergence
from recorders.watch.divergence.runs.apart import SUMMING, Apart, Gap, Growth, joint, largest, multiple, or_zero
from recorders.watch.divergence.runs.gradients import addends, holders, switched
from recorders.watch.divergence.runs.matching import matched
from recorders.watch.divergence.runs.run import TrackName, run_of
from recorders.watch.timeline import Timeline

GAIN = 16.0
"""How many times what comes in a layer may enlarge its relative distance before it is the layer that makes the difference."""

_OPERATORS = 4  # that a module without modules in it calls
_STEPWISE = 4.0  # how many times the distance of a number may grow from one tick to the next
_SPREAD = 4.0  # how many times the noise of a repeat may be exceeded
_SMOOTH = ("Linear", "Bilinear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "GroupNorm", "RMSNorm")
"""Layers whose gradients of parameters have no threshold in them."""


def divergence(
    first: Recorder | Recording | Timeline,
    second: Recorder | Recording | Timeline,
    *,
    names: Mapping[str, str] | None = None,
    repeat: Recorder | Recording | Timeline | None = None,
) -> RunDivergence:
    """The first step, phase and layer at which two runs part by more than rounding.

    Both were recorded with `presets.fingerprints`; of others, monitors with `reducers.Fingerprints`, and whatever lists a number
    for each observation, are compared likewise. Of two timelines it is the first tick and statistic.

    In each step, in this order, are compared what the net gets, its parameters, each forward, each gradient, and what the optimizer
    makes of it. Each layer is judged by what it gets: its output may differ by what rounding allows for so many operators, and 16
    times as much as its input and its parameters differ already. So the layer is named that makes the difference, not those after.

    Args:
        first, second: two runs, with steps in common. The second is described as it differs from the first.
        names: names of modules of the second run by those of the first, if they are not the same and cannot be found by what the
            modules are and compute; also of modules that contain them: `{"encoder": "bert.encoder"}`.
        repeat: the first run once more. It shows what noise is, in place of what the dtypes say; if it is equal to the first, bit
            for bit, any difference of the second is one.

    Raises:
        TypeError: one is a timeline, and another is not.
        SelectionError: they tell nothing step by step, or have no step in common; or `names` names nothing.

    >>> from recorders import presets
    >>> def train(rate):
    ...     torch.manual_seed(0)
    ...     net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    ...     optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    ...     with presets.fingerprints().modules(net) as recorder:
    ...         for _ in range(3):
    ...             net(torch.randn(16, 4)).square().mean().backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    ...     return recorder
    >>> found = divergence(train(0.1), train(0.101))
    >>> found.step, found.phase, found.name, found.differs
    (0, 'update', '0.weight', 'its update is 1.01 times that of the first run')
    """
    recorded = [one if isinstance(one, Timeline) else one.snapshot() for one in (first, second)]
    if isinstance(recorded[0], Timeline) != isinstance(recorded[1], Timeline):
        raise TypeError("divergence needs two recordings or two timelines; got one of each")
    a, b = map(run_of, recorded)
    for run, which in ((a, "first"), (b, "second")):
        if not run.tracks:
            raise SelectionError(f"the {which} run tells nothing step by step: record it with presets.fingerprints()")
    apart = Apart(a, b, matched(a, b, names))
    if not apart.steps:
        raise SelectionError(f"the runs have no {a.unit} in common: {_span(a.steps)} and {_span(b.steps)}")
    again = None
    if repeat is not None:
        c = run_of(repeat if isinstance(repeat, Timeline) else repeat.snapshot())
        again = Apart(a, c, matched(a, c, None))
    return _Search(apart, again).found()


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


class _Search:
    def __init__(self, apart: Apart, repeat: Apart | None) -> None:
        self.apart, self.repeat = apart, repeat
        self.modules = apart.a.modules
        self.count = len(apart.steps)
        self.tolerance = Tolerance(apart.eps, min(apart.eps, torch.finfo(torch.float32).eps))

    def found(self) -> RunDivergence:
        """The answer."""
        number, one = next(((index, one) for index in self._unlike() if (one := self._at(index)) is not None), (None, None))
        if one is None:
            one = RunDivergence(distance=self._farthest())
        return one.with_(
            unit=self.apart.a.unit,
            noise=self._noise_in_words(),
            growth=self.growth,
            by_layer=self._by_layer(number),
            notes=(*one.notes, *self._notes(number)),
        )

    def _unlike(self) -> Iterator[int]:
        """The first step, those in which any bit differs, and those before them, whose updates may be why."""
        same = self.apart.same()
        for index in range(self.count):
            if index == 0 or not same[index] or not same[min(index + 1, self.count - 1)]:
                yield index

    def _at(self, step: int) -> RunDivergence | None:
        for look in (self._numbers, self._input, self._parameters, self._forward, self._backward, self._update):
            for found in look(step):
                return self._or_its_calls(found, step).with_(step=self.apart.steps[step])
        return None

    def _or_its_calls(self, found: RunDivergence, step: int) -> RunDivergence:
        """The answer, or that a step has other numbers of batches: what comes after is told only if it is no noise."""
        places = [place for place in self.apart.a.tracks if place[:2] == ("input", "")]
        if found.phase not in ("forward", "backward", "update") or not places:
            return found
        here, there = self.apart.calls(places[0], step)
        if here == there:
            return found
        differs = f"how often the net is called in a step: {there} times, and {here} in the first run"
        return RunDivergence("input", 0, "", "", found.distance, found.allowed, differs=differs)

    # What is noise

    def _learned(self, role: str, module: str) -> Tensor | None:
        """What a repeat of the first run allows, [steps]; None if there is none."""
        if self.repeat is None:
            return None
        seen = or_zero(self.repeat.of(role, module))
        grown = seen.cummax(0).values if len(seen) else seen
        if len(grown) < self.count:  # the repeat was shorter
            grown = torch.cat([grown, (grown[-1:] if len(grown) else grown.new_zeros(1)).expand(self.count - len(grown))])
        return _SPREAD * grown[: self.count]

    @cached_property
    def _leaves(self) -> Mapping[str, int]:
        """How many modules without modules in them each has, or is."""
        found = {}
        for module in self.modules:
            inside = [name for name in self.modules if name.startswith(f"{module}." if module else "") and name != module]
            outer = {name.rpartition(".")[0] for name in inside}
            found[module] = max(1, sum(name not in outer for name in inside))
        return found

    def _allowed(self, role: str, module: str, *came: Tensor) -> Tensor:
        """How far what a module makes may be apart, [steps], given how far that is of which it is made."""
        leaves = self._leaves.get(module, 1)
        learned = self._learned(role, module)
        rounding = self.tolerance(_OPERATORS * leaves) if learned is None else learned
        before = or_zero(largest(came, self.count))
        return rounding + GAIN * math.sqrt(leaves) * before

    # What came in

    @cached_property
    def _inputs(self) -> Mapping[str, Tensor]:
        """How far what each module gets is apart; if that is not known, what the module around it gets."""
        found: dict[str, Tensor] = {}
        for name in self.modules:
            own = self.apart.of("input", name)
            outer = found.get(name.rpartition(".")[0] if name else "")
            found[name] = own if outer is None or not bool(own.isnan().all()) else outer
        return found

    @cached_property
    def _weights(self) -> Mapping[str, Tensor]:
        """How far the parameters of each module, and of those in it, are apart; beside them, none."""
        found = {}
        for name in self.modules:
            gaps = [gap for role in ("weight", "weight before") for gap in self._below(role, name)]
            found[name] = or_zero(joint(gaps, self.count))
        return found

    def _below(self, role: str, module: str) -> Iterator[Gap]:
        for name, gaps in self.apart.by_role.get(role, {}).items():
            if not module or name == module or name.startswith(f"{module}."):
                yield from gaps.values()

    def _came_in(self, module: str, step: int) -> tuple[str, ...]:
        """What came in equal."""
        kinds = {"its input": self.apart.by_role.get("input", {}).get(module, {}).values()}
        weights = [gap for role in ("weight", "weight before") for gap in self._below(role, module)]
        kinds["its parameters"] = weights  # type: ignore[assignment]
        found = []
        for what, gaps in kinds.items():
            seen = [gap for gap in gaps if bool(gap.known[step])]
            if seen and all(bool(gap.same[step]) for gap in seen):
                found.append(f"{what}, bit for bit")
            elif seen:
                far = float(joint(seen, self.count)[step])
                found.append(f"{what}, up to {far:.1g}" if far > SUMMING else f"{what}, in another order")
        return tuple(found)

    # The phases of a step

    def _numbers(self, step: int) -> Iterator[RunDivergence]:
        """Of numbers over time: the first that jumps."""
        values = self.apart.by_role.get("value", {})
        for name, gaps in values.items():
            for statistic, gap in gaps.items():
                apart = or_zero(gap.relative())
                before = float(apart[:step].max()) if step else 0.0
                learned = self._learned("value", name)
                noise = self.tolerance(_OPERATORS * 64) if learned is None else float(learned[step])
                allowed = noise + _STEPWISE * before
                if float(apart[step]) > allowed:
                    numbers = float(gap.first[step, 0]), float(gap.second[step, 0])
                    differs = f"its {statistic or 'value'} is {numbers[1]:.6g}, and {numbers[0]:.6g} in the first run"
                    other = self.apart.matched.modules.get(name, name)
                    yield RunDivergence("value", 0, name, other, float(apart[step]), allowed, differs=differs)

    def _input(self, step: int) -> Iterator[RunDivergence]:
        apart = self.apart.of("input", "")
        allowed = self._allowed("input", "")
        if float(or_zero(apart)[step]) > float(allowed[step]):
            notes = ("the second run got the same batches in another order",) if self._same_batches() else ()
            numbers = float(apart[step]), float(allowed[step])
            yield RunDivergence("input", 0, "", "", *numbers, differs="what the net gets", notes=notes)

    def _same_batches(self) -> bool:
        pairs = [
            (track, self.apart.b.tracks[other])
            for place, track in self.apart.a.tracks.items()
            if place[:2] == ("input", "") and (other := self.apart.matched.places.get(place)) is not None
        ]
        return bool(pairs) and all(
            one.digest is not None and other.digest is not None and len(one) == len(other)
            and bool(torch.equal(one.digest.sort().values, other.digest.sort().values))
            for one, other in pairs
        )  # fmt: skip

    def _parameters(self, step: int) -> Iterator[RunDivergence]:
        """Parameters that differ from the first step on; later ones are what updates made, also of steps that were not recorded."""
        if step:
            yield from self._unrecorded(step)
            return
        found: list[RunDivergence] = []
        for role in ("weight before", "weight"):
            for module, gaps in self.apart.by_role.get(role, {}).items():
                for leaf, gap in gaps.items():
                    apart = float(or_zero(gap.relative())[0])
                    allowed = 2 * self.apart.eps if self.repeat is None else 0.0
                    if apart > allowed and _path(module, leaf) not in [one.name for one in found]:
                        times = multiple(gap.first[0], gap.second[0])
                        differs = f"its first value{times}"
                        found.append(self._one("parameters", module, leaf, apart, allowed, differs))
        found += self._missing()
        if found:
            number = len({place[1:] for place in self.apart.a.tracks if place.role in ("weight", "weight before")})
            yield found[0].with_(notes=_others(found, number, "parameters differ"))

    def _missing(self) -> Iterator[RunDivergence]:
        """Parameters that a module of the same class does not have in the other run."""
        a, b = self.apart.a, self.apart.b
        for module, other in self.apart.matched.modules.items():
            own, others = a.of("weight before", module), b.of("weight before", other)
            if not own or not others or a.modules[module].kind != b.modules[other].kind:
                continue
            partners = {
                self.apart.matched.places[place].leaf: leaf
                for leaf in own
                if (place := TrackName("weight before", module, leaf)) in self.apart.matched.places
            }
            for leaf, which in [(leaf, "second") for leaf in own] + [(leaf, "first") for leaf in others]:
                if leaf not in (partners.values() if which == "second" else partners):
                    yield self._one("parameters", module, leaf, math.inf, 0.0, f"the {which} run does not have it")

    def _unrecorded(self, step: int) -> Iterator[RunDivergence]:
        """Parameters that came apart in steps that were not recorded: by what rounding allows in so many steps, or more."""
        steps = self.apart.steps[step] - self.apart.steps[step - 1]
        if steps < 2 or self.apart.a.unit != "step":
            return
        found: list[RunDivergence] = []
        gaps = {(module, leaf): gap for module, of in self.apart.by_role.get("weight", {}).items() for leaf, gap in of.items()}
        for (module, leaf), gap in gaps.items():
            far, before = (float(or_zero(gap.relative())[index]) for index in (step, step - 1))
            rounding = self.tolerance(_OPERATORS) if self.repeat is None else 0.0
            allowed = steps * (rounding + GAIN * before)
            if far > allowed:
                found.append(self._one("between", module, leaf, far, allowed, "its value"))
        if len(found) > len(gaps) / 2:
            yield found[0].with_(notes=_others(found, len(gaps), "parameters differ"))

    def _forward(self, step: int) -> Iterator[RunDivergence]:
        found = {
            module: (far, most)
            for module, *judged in self._outputs
            if (far := float(judged[0][step])) > (most := float(judged[1][step]))
        }
        name = next(iter(_innermost(found)), None)
        if name is None:
            yield from self._between(step)
            for module, far, allowed, differs in self._buffers_apart(step):  # which came in before, or is running statistics
                yield self._one("forward", module, "", far, allowed, differs).with_(equal=self._came_in(module, step))
            return
        differs = f"its output{self._multiple_of('output', name, step)}"
        if any(other.startswith(f"{name}." if name else "") and other != name for other in self.apart.by_role["output"]):
            differs += self._inside(name, step)
        notes = tuple(f"{text}, which may be why" for inner, *_, text in self._buffers_apart(step) if inner == name)
        yield self._one("forward", name, "", *found[name], differs).with_(equal=self._came_in(name, step), notes=notes)

    def _buffers_apart(self, step: int) -> Iterator[tuple[str, float, float, str]]:
        """Of each buffer that differs after a step: whose it is, how far it is apart, what is allowed, and that in words."""
        for place, *judged in self._buffers:
            far, allowed = (float(each[step]) for each in judged)
            if far > allowed:
                gap = self.apart.by_role["buffer"][place.module][place.leaf]
                times = multiple(gap.first[step], gap.second[step])
                yield place.module, far, allowed, f"its buffer {place.leaf}{times or ' differs'}"

    @cached_property
    def _buffers(self) -> Sequence[tuple[TrackName, Tensor, Tensor]]:
        """How far each buffer is apart, and what is allowed: running statistics keep what came in up to a step."""
        found = []
        for module, gaps in self.apart.by_role.get("buffer", {}).items():
            came = (or_zero(apart).cummax(0).values for apart in (self._inputs[module], self._weights[module]))
            allowed = self._allowed("buffer", module, *came)
            places = ((TrackName("buffer", module, leaf), gap) for leaf, gap in gaps.items())
            found += [(place, or_zero(self.apart.relative(place, gap)), allowed) for place, gap in places]
        return found

    @cached_property
    def _outputs(self) -> Sequence[tuple[str, Tensor, Tensor]]:
        """How far what each module returns is apart, and what is allowed."""
        return [
            (
                module,
                or_zero(self.apart.of("output", module)),
                self._allowed("output", module, self._inputs[module], self._weights[module]),
            )
            for module in self.apart.by_role.get("output", {})
        ]

    def _inside(self, name: str, step: int) -> str:
        """Where in the code of a module it is, if no module in it makes the difference."""
        for inner in self.modules:
            if inner != name and inner.startswith(f"{name}." if name else ""):
                apart = float(or_zero(self.apart.of("input", inner)[step]))
                if apart > float(self._allowed("input", inner, self._inputs[name])[step]):
                    return f"; no module in it makes the difference: it is there first in what {inner} gets"
        return "; no module in it makes the difference, it comes after them"

    def _between(self, step: int) -> Iterator[RunDivergence]:
        """The first module that gets or returns what differs, if those around it are not recorded, which would tell more."""
        if "" in self.apart.by_role.get("output", {}):
            return
        before = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        for module in self.modules:
            for role in ("input", "output"):
                apart = or_zero(self.apart.of(role, module))
                allowed = self._allowed(role, module, before, self._weights[module])
                if float(apart[step]) > float(allowed[step]):
                    differs = "its output" if role == "output" else "what it gets, which modules that are not recorded make"
                    yield self._one("forward", module, "", float(apart[step]), float(allowed[step]), differs)
                before = torch.maximum(before, apart)

    def _backward(self, step: int) -> Iterator[RunDivergence]:
        came, allowed = self._of_loss
        if float(came[step]) > float(allowed[step]) and not self._same_gradients(step):
            times = self._multiple_of("gradient", "", step)
            differs = f"the gradient of what it returns{times}: the loss, or its target"
            yield self._one("backward", "", "", float(came[step]), float(allowed[step]), differs)
            return
        found = {
            place: (far, most)
            for place, *judged in self._gradients
            if (far := float(judged[0][step])) > (most := float(judged[1][step]))
        }
        if self._is_after_backward(found, step):
            yield self._handed_over(found, step)
        elif found:
            name = _innermost(dict.fromkeys(place.module for place in found))[-1]
            place = next(place for place in found if place.module == name)
            gap = self.apart.by_role[place.role][name][place.leaf]
            what = "the gradient of its input" if place.role == "input gradient" else f"the gradient of {place.leaf}"
            differs = what + (self._lacks(place, step) or multiple(gap.first[step], gap.second[step]))
            yield self._one("backward", name, "", *found[place], differs).with_(equal=self._came_in(name, step))

    @cached_property
    def _of_loss(self) -> tuple[Tensor, Tensor]:
        """How far the gradient of what the net returns is apart, and what is allowed."""
        allowed = self._allowed("gradient", "", self.apart.of("output", ""), self._inputs.get("", self.apart.of("input", "")))
        return or_zero(self.apart.of("gradient", "")), allowed + self._turned.get("", 0.0)

    @cached_property
    def _gradients(self) -> Sequence[tuple[TrackName, Tensor, Tensor]]:
        """How far each gradient that a module makes is apart, and what is allowed, module by module in the order of the net."""
        reaches: dict[str, Tensor] = {}
        for module in self.modules:
            own = self.apart.of("gradient", module)
            outer = reaches.get(module.rpartition(".")[0] if module else "")
            reaches[module] = own if outer is None or not bool(own.isnan().all()) else outer
        came = {
            module: (reaches[module], self._inputs[module], self.apart.of("output", module), self._weights[module])
            for module in self.modules
        }
        held = holders(self.apart.a)
        found = []
        for module in self.modules:
            for role in ("input gradient", "weight gradient"):
                for leaf, gap in self.apart.by_role.get(role, {}).get(module, {}).items():
                    place = TrackName(role, module, leaf)
                    before = [came[holder] for holder in held.get(place, [module])]
                    sums = addends(self.apart.a, place) if role == "weight gradient" else 1.0
                    more = max(1.0, 2 * math.sqrt(sums) / GAIN)  # if all differ in one direction; sketches tell that within a half
                    allowed = self._allowed(role, module, *(more * apart for each in before for apart in each))
                    if role == "input gradient" or self.modules[module].kind not in _SMOOTH:
                        allowed = allowed + self._turned[module]
                    found.append((place, or_zero(self.apart.relative(place, gap)), allowed))
        return found

    @cached_property
    def _turned(self) -> Mapping[str, Tensor]:
        return switched(self.apart)

    def _same_gradients(self, step: int) -> bool:
        """Whether gradients of parameters agree: then a loss that is scaled, as for float16, was unscaled before the step."""
        gaps = [gap for gap in self._below("weight gradient", "") if bool(gap.known[step])]
        came = (self.apart.of("output", ""), joint(self._below("weight", ""), self.count))
        allowed = self._allowed("weight gradient", "", *came) + self._turned.get("", 0.0)
        return bool(gaps) and float(joint(gaps, self.count)[step]) <= float(allowed[step])

    def _is_after_backward(self, found: Mapping[TrackName, object], step: int) -> bool:
        """Whether most gradients of parameters differ as the optimizer gets them, and none that goes through the net."""
        weights = [place for place, *_ in self._gradients if place.role == "weight gradient"]
        through = [gap for gaps in self.apart.by_role.get("gradient", {}).values() for gap in gaps.values()]
        seen = any(bool(gap.known[step]) for gap in through)
        return seen and all(place.role == "weight gradient" for place in found) and len(found) > len(weights) / 2

    def _handed_over(self, found: Mapping[TrackName, tuple[float, float]], step: int) -> RunDivergence:
        """Gradients that were made alike, and differ in the optimizer."""
        place = next(iter(found))
        gap = self.apart.by_role[place.role][place.module][place.leaf]
        times = multiple(gap.first[step], gap.second[step])
        differs = f"its gradient as the optimizer gets it{times}: clipped, scaled, summed or averaged after the backward"
        equal = ("the gradients that go through the net",)
        notes = (f"{len(found)} gradients of parameters differ",)
        return self._one("update", place.module, place.leaf, *found[place], differs).with_(equal=equal, notes=notes)

    def _lacks(self, place: TrackName, step: int) -> str:
        """Which run has no such gradient."""
        gap = self.apart.by_role[place.role][place.module][place.leaf]
        if not bool(gap.absolute[step].isinf()):
            return ""
        own, at = self.apart.a.tracks[place], self.apart.steps[step]
        here = bool((own.steps == list(self.apart.a.steps).index(at)).any())
        other = self.apart.b.tracks[self.apart.matched.places[place]]
        there = bool((other.steps == list(self.apart.b.steps).index(at)).any())
        return "" if here and there else f", which the {'second' if here else 'first'} run does not have"

    def _multiple_of(self, role: str, module: str, step: int) -> str:
        gaps = self.apart.by_role.get(role, {}).get(module, {})
        return next((text for gap in gaps.values() if (text := multiple(gap.first[step], gap.second[step]))), "")

    def _update(self, step: int) -> Iterator[RunDivergence]:
        found: list[RunDivergence] = []
        moves = {
            (module, leaf): moved
            for module, gaps in self.apart.by_role.get("weight", {}).items()
            for leaf in gaps
            if (moved := self.apart.moved(module, leaf, step)) is not None
        }
        certain = False
        for (module, leaf), moved in moves.items():
            far, allowed, exact = self._judged(module, leaf, moved, step)
            if far > allowed:
                times = multiple(*moved)
                certain |= exact or bool(times)
                found.append(self._one("update", module, leaf, far, allowed, f"its update{times}"))
        # What an optimizer makes of gradients that cancel, such as those of biases of keys, is noise of any size.
        found = found if certain or len(found) > len(moves) / 2 else []
        if found:
            notes = _others(found, len(moves), "updates differ")
            yield found[0].with_(notes=notes, equal=tuple(self._before_update(step)))

    def _judged(self, module: str, leaf: str, moved: tuple[Tensor, Tensor], step: int) -> tuple[float, float, bool]:
        """How far updates are apart, relative to their length, what is allowed, and whether all came in equal, bit for bit."""
        one, other = moved
        length = max(float(torch.linalg.vector_norm(one)), float(torch.linalg.vector_norm(other)))
        gap = self.apart.by_role["weight"][module][leaf]
        gradient = self.apart.by_role.get("weight gradient", {}).get(module, {}).get(leaf)
        exact = all(bool(gap.same[: step + 1].all()) for gap in (gap, gradient) if gap is not None)
        if not length:
            return 0.0, 0.0, exact
        coarse = 2 * float(gap.eps[step]) * float(gap.length[step]) * (self.repeat is None)
        fine = coarse + GAIN * float(or_zero(gap.absolute[step]))
        seen = 0.0 if gradient is None else float(or_zero(gradient.relative())[: step + 1].max())
        rounding = self.tolerance(_OPERATORS) if self.repeat is None else self._drift(module, leaf, step)
        # Adam divides by the size of a gradient, so those whose sign is noise move as far as others
        allowed = rounding + 4 * math.sqrt(seen) + fine / length
        return float(torch.linalg.vector_norm(one - other)) / length, allowed, exact

    def _drift(self, module: str, leaf: str, step: int) -> float:
        """How far the updates of a repeat are apart up to a step, relative to their length, and with room."""
        assert self.repeat is not None
        most = 0.0
        for index in range(min(step + 1, len(self.repeat.steps))):
            moved = self.repeat.moved(module, leaf, index)
            if moved is not None and float(length := torch.linalg.vector_norm(moved[0])) > 0:
                most = max(most, float(torch.linalg.vector_norm(moved[0] - moved[1]) / length))
        return _SPREAD * most

    def _before_update(self, step: int) -> Iterator[str]:
        for role, what in (("weight gradient", "its gradients"), ("weight", "its parameters before it")):
            gaps = [gap for gaps in self.apart.by_role.get(role, {}).values() for gap in gaps.values() if bool(gap.known[step])]
            if gaps:
                exact = all(bool(gap.same[step]) for gap in gaps)
                yield f"{what}, " + ("bit for bit" if exact else f"up to {float(joint(gaps, self.count)[step]):.1g}")
        kept = [gap for role in self.apart.by_role if role.startswith("state ") for gap in self._below(role, "")]
        if kept and all(bool(gap.same[step]) for gap in kept if bool(gap.known[step])):
            yield "what the optimizer keeps, bit for bit"

    # The rest of the answer

    def _one(self, phase: str, module: str, leaf: str, apart: float, allowed: float, differs: str) -> RunDivergence:
        other = self.apart.matched.modules.get(module, module)
        own = {place.leaf: place for place in self.apart.matched.places if place.module == module and place.leaf == leaf}
        place = next(iter(own.values()), None)
        other_leaf = leaf if place is None else self.apart.matched.places[place].leaf
        return RunDivergence(phase, 0, _path(module, leaf), _path(other, other_leaf), apart, allowed, differs=differs)

    @cached_property
    def growth(self) -> tuple[Growth, ...]:
        """How far outputs, gradients and parameters are apart at each step."""
        output = self.apart.of("output", "")
        if bool(output.isnan().all()):
            output = largest((self.apart.of("output", module) for module in self.modules), self.count)
        if bool(output.isnan().all()):
            output = largest((self.apart.of("value", module) for module in self.apart.by_role.get("value", {})), self.count)
        gradients = joint(self._below("weight gradient", ""), self.count)
        weights = joint(self._below("weight", ""), self.count)
        columns = (self.apart.steps, output.tolist(), gradients.tolist(), weights.tolist())
        return tuple(Growth(*row) for row in zip(*columns, strict=True))

    def _by_layer(self, step: int | None) -> Mapping[str, float]:
        at = self.count - 1 if step is None else step
        found = {module: float(self.apart.of("output", module)[at]) for module in self.apart.by_role.get("output", {})}
        return {module: apart for module, apart in found.items() if not math.isnan(apart)}

    def _farthest(self) -> float:
        seen = [value for row in self.growth for value in (row.output, row.gradient, row.weight) if not math.isnan(value)]
        return max(seen, default=0.0)

    def _notes(self, number: int | None) -> Iterator[str]:
        unknown = [name for name in self.modules if name not in self.apart.matched.modules]
        if unknown:
            yield f"{len(unknown)} modules of the first run have no partner: {', '.join(unknown[:3])}{', ...' * (len(unknown) > 3)}"
        unlike = list(self.apart.other_dtypes())
        if unlike:
            number_of = len(self.apart.by_role["output"])
            yield f"{len(unlike)} of {number_of} modules return another dtype in the second run, first {shown_name(unlike[0])}"
        parted = self.apart.first_unlike_bits()
        if parted is not None and (number is None or parted[0] < number):
            yield f"bits differ first at {self.apart.a.unit} {self.apart.steps[parted[0]]}, in {parted[1]}: that is rounding"
        elif parted is None and number is None:
            yield "all that both recorded is equal, bit for bit"
        if number is not None and number and parted is not None and parted[0] == number:
            yield f"all before {self.apart.a.unit} {self.apart.steps[number]} is equal, bit for bit"

    def _noise_in_words(self) -> str:
        if self.repeat is None:
            of_a_layer = self.tolerance(_OPERATORS)
            return f"what rounding allows in a dtype with an eps of {self.apart.eps:.2g}: {of_a_layer:.1g} for a layer"
        seen = [self.repeat.of(role, module) for role, modules in self.repeat.by_role.items() for module in modules]
        most = float(or_zero(largest(seen, len(self.repeat.steps))).max())
        return f"what a repeat of the first run shows: {most:.1g} at most"


def _path(module: str, leaf: str) -> str:
    return f"{module}.{leaf}" if module and leaf else module or leaf


def _innermost(found: Mapping[str, object]) -> list[str]:
    """Names with no other in them."""
    return [name for name in found if not any(other != name and other.startswith(f"{name}." if name else "") for other in found)]


def _others(found: list[RunDivergence], number: int, what: str) -> tuple[str, ...]:
    return (f"{len(found)} of {number} {what}",) if len(found) > 1 else ()
