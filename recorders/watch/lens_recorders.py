"""The recorders of an inspector's lenses on one network, and the pushed values."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from recorders.capture.contents import modules_in
from recorders.capture.hooks import Hook
from recorders.errors import LensError, SelectionError
from recorders.monitors.base import Monitor
from recorders.monitors.forward import CallMonitor
from recorders.recorder.recorder import Recorder
from recorders.recorder.selection import Criteria, select_modules
from recorders.recordings.recording import Recording, Subrecording
from recorders.schedule.clock import Clock, Phase
from recorders.watch.charts import Chart
from recorders.watch.lens_set import is_of_evaluation, with_options
from recorders.watch.lenses.lens import Lens, spread, statistics

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Kind: TypeAlias = Literal["loss", "metric"]


class LensRecorders:
    """One `Recorder` for each lens with monitors, one `CallMonitor` for each pushed value; returns their results as rows.

    Args:
        lenses: what to record.
        clock: the clock that all monitors share.
        every_step: monitors record in steps that this number divides, unless they choose their steps themselves.
        loss_names: the names of training losses and of evaluation losses.
        earlier: the layers of charts, by title, in the part of the training that this one continues.

    Attributes:
        by_lens: the recorder of each lens, by its name; the second lens of one name is called "name 2".
        kinds: the classes of all layers that are watched, in network order.
        silent: the layers of which no output was recorded in the last epoch, without a fault.
    """

    def __init__(
        self,
        lenses: tuple[Lens, ...],
        clock: Clock,
        every_step: int,
        loss_names: tuple[str, str],
        earlier: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._lenses = _by_name(lenses)
        self._clock, self._every_step, self._loss_names, self._earlier = clock, every_step, loss_names, earlier
        self.by_lens: dict[str, Recorder] = {}
        self._layers: dict[str, dict[str, list[str]]] = {chart.title: {} for lens in lenses for chart in lens.charts}
        self._pushed: dict[Kind, dict[str, CallMonitor]] = {"loss": {}, "metric": {}}
        self.silent: set[str] = set()
        self.kinds: dict[str, str] = {}
        self._loss_hooks: list[RemovableHandle] = []

    def attach(self, net: nn.Module, depth: int | None) -> None:
        """Makes new recorders on `net`, without the results of earlier ones; if it raises, call `detach`."""
        push_output = weakref.WeakMethod(self._push_output)  # a loss module must not keep an inspector alive
        self.by_lens, self.kinds = {}, {}
        for name, lens in self._lenses.items():
            if lens.monitors:
                self.by_lens[name] = recorder = self._record(lens, net, depth)
                groups = results_by_group(lens, recorder.snapshot())
                for chart in own_charts(lens):
                    if not is_of_evaluation(chart):
                        self._know(chart, groups.get(chart.of[0], {}))
            if lens.loss_fn is not None:
                observe = partial(_observe, push_output, lens.loss_phase, lens.loss_running)
                self._loss_hooks.append(lens.loss_fn.register_forward_hook(Hook(observe, observe)))

    def _record(self, lens: Lens, net: nn.Module, depth: int | None) -> Recorder:
        prototypes = _with_every_step(lens.monitors, self._every_step)
        recorder = Recorder(None, budget=None, **prototypes)
        places = select_modules(net, Criteria(), recursive=True)
        kinds = {place.name or f"({type(net).__name__})": type(place.module).__name__ for place in places}
        try:
            recorder.modules(
                net, where=lambda name, module: is_watched(name, module, depth, lens.inner) and lens.where(name, module)
            )
        except SelectionError as error:
            raise SelectionError(f"lens {lens.name!r} finds nothing to watch at depth={depth}: {error}") from error
        for monitor in recorder.values():
            monitor.clock = self._clock
        watched = {*self.kinds, *(name.partition("/")[2] or f"({type(net).__name__})" for name in recorder)}
        self.kinds = {name: kind for name, kind in kinds.items() if name in watched}
        return recorder

    def _know(self, chart: Chart, layers: Iterable[str]) -> None:
        for layer in layers:
            self._layers[chart.title].setdefault(layer, [])

    def detach(self) -> None:
        """Takes all hooks off, also those on loss modules; results stay."""
        self.switch(False)
        for handle in self._loss_hooks:
            handle.remove()
        self._loss_hooks = []

    def switch(self, on: bool) -> None:
        """Puts the hooks of all recorders on or takes them off; hooks on loss modules stay."""
        for recorder in self.by_lens.values():
            recorder.register() if on else recorder.deregister()

    def push_loss(self, train: bool, value: Tensor | float, running: bool) -> None:
        """Records one loss; see `Inspector.push_loss`."""
        self.push("loss", self._loss_names[not train], value, running)

    def push_metric(self, train: bool | None, name: str, value: Tensor | float, running: bool) -> None:
        """Records one metric; see `Inspector.push_metric`."""
        self.push("metric", name if train is None else f"{self._loss_names[not train]} {name}", value, running)

    def push(self, kind: Kind, name: str, value: Tensor | float, running: bool) -> None:
        """Records one loss or metric under a name."""
        reducer = spread(running)
        monitor = self._pushed[kind].setdefault(name, CallMonitor(reducer))
        if monitor.reducer != reducer:
            if monitor.samples:
                raise LensError(f"{kind} {name!r} was pushed with running={not running} in this epoch: do not change it")
            monitor = self._pushed[kind][name] = CallMonitor(reducer)
        monitor.push(value)

    def _push_output(self, phase: Phase, running: bool, module: nn.Module, loss: Tensor | float) -> None:
        self.push_loss(torch.is_grad_enabled() if phase == "grad" else module.training, loss, running)

    def recording(self, *, tick: bool) -> Recording:
        """What was recorded and pushed in this epoch, in one; `tick` first records what is recorded at ticks."""
        if tick:
            for recorder in self.by_lens.values():
                recorder.tick()
        parts = {f"{kind}/{name}": pushed.snapshot() for kind, found in self._pushed.items() for name, pushed in found.items()}
        for lens, recorder in self.by_lens.items():
            parts.update({f"lens {lens}/{name}": part for name, part in recorder.snapshot().items()})
        return Recording(parts)

    def rows(self, recording: Recording) -> dict[str, dict[str, Tensor]]:
        """The statistics by name of row, of what `recording` returned here, or of that merged over ranks."""
        self._note_silent()
        rows: dict[str, dict[str, Tensor]] = {}
        pushed: dict[str, dict[str, dict[str, Any]]] = {
            kind: {name: part.leaves() for name, part in _from(recording, kind).items()} for kind in self._pushed
        }
        pushed["pushed"] = {**{_loss(name): leaves for name, leaves in pushed["loss"].items()}, **pushed["metric"]}
        for name, lens in self._lenses.items():
            results = pushed | results_by_group(lens, _from(recording, f"lens {name}"))
            for chart in own_charts(lens):
                layers = results.get(chart.of[0], {})
                if is_of_evaluation(chart) and not any(layers.values()):
                    continue  # who evaluates nothing sees no charts of it
                self._know(chart, layers)
                for layer, leaves in layers.items():
                    known = self._layers[chart.title][layer]
                    for path, result in leaves.items():
                        shown = f"{layer}[{path}]" if path else layer
                        if (part := value_at(result, chart.of[1:])) is not None:
                            rows[chart.row(shown)] = statistics(part)
                            if shown not in known:
                                known.append(shown)
                                known.sort(key=natural_key)  # gradients do not arrive in the order of the outputs
        return rows

    def _note_silent(self) -> None:
        """Notes which layers are silent without a fault: those that were called, but not recorded, and those without weights."""
        for recorder in self.by_lens.values():
            for name, monitor in recorder.items():
                layer = name.partition("/")[2]
                if (monitor.sites, monitor.side) != (("forward",), "outputs") or (module := monitor.module) is None:
                    continue
                if not monitor.gate.train_update:  # it records evaluations beside the one of the training
                    continue
                excused = monitor.counts.get("calls") or next(module.parameters(recurse=False), None) is None
                if excused and not monitor.samples:
                    self.silent.add(layer)
                else:
                    self.silent.discard(layer)

    def reset(self) -> None:
        """Deletes what was recorded and pushed."""
        for recorder in self.by_lens.values():
            recorder.reset()
        for monitors in self._pushed.values():
            for monitor in monitors.values():
                monitor.clear()

    def layers(self, chart: Chart) -> tuple[str, ...]:
        """The layers of a chart in network order, also those that never ran; a layer with several outputs once for each."""
        titles = [across.title for across in chart.across] or [chart.title]
        earlier = dict.fromkeys(name for title in titles for name in self._earlier.get(title, ()))
        several = {name.rpartition("[")[0] for name in earlier if name.endswith("]")}
        now = (name for title in titles for layer, names in self._layers[title].items() for name in names or [layer])
        found = dict.fromkeys((*earlier, *(name for name in now if name in earlier or name not in several)))
        wanted = {*chart.only, *map(_loss, self._loss_names)} if chart.only else found
        return tuple(name for name in found if name in wanted)


def _from(recording: Recording, source: str) -> dict[str, Subrecording]:
    """The subrecordings of one source, by their names there."""
    start = f"{source}/"
    return {name.removeprefix(start): part for name, part in recording.items() if name.startswith(start)}


def own_charts(lens: Lens) -> list[Chart]:
    """The charts that have rows of their own in the timeline: those that do not compare others."""
    return [chart for chart in lens.charts if not chart.across]


def _by_name(lenses: tuple[Lens, ...]) -> dict[str, Lens]:
    found: dict[str, Lens] = {}
    for lens in lenses:
        names = (lens.name, *(f"{lens.name} {count}" for count in range(2, len(found) + 3)))
        found[next(name for name in names if name not in found)] = lens
    return found


def _observe(
    push_output: weakref.WeakMethod[Callable[..., None]], phase: Phase, running: bool, module: nn.Module, *args: Any
) -> None:
    """Hands the output of a loss module to an inspector that still exists."""
    if (push := push_output()) is not None:
        push(phase, running, module, args[-1])


def _loss(name: str) -> str:
    """The name of a loss among losses and metrics."""
    return f"{name} loss"


def _with_every_step(monitors: Mapping[str, Monitor], every_step: int) -> dict[str, Monitor]:
    """The monitors with this `every_step`; those that choose their steps, or record at ticks or in evaluation only, as they are."""
    changed = dict(monitors)
    for group, monitor in monitors.items():
        gate = monitor.gate
        if every_step != 1 and gate.train_update and not gate.chooses_steps and getattr(monitor, "when", None) != "tick":
            changed[group] = with_options(monitor, every_step=every_step)
    return changed


def is_watched(name: str, module: nn.Module, depth: int | None, inner: bool) -> bool:
    """Whether an inspector watches a module: a leaf or, if a depth is given, a module at that level or a leaf above it.

    With `inner` also the modules that contain these.
    """
    leaf = inner or not modules_in(module)
    if depth is None:
        return leaf
    level = name.count(".") + 1 if name else 0
    return level == depth or (leaf and level < depth)


def results_by_group(lens: Lens, parts: Mapping[str, Subrecording]) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by group of monitors, by layer in network order, and by leaf of the output; empty if the layer did not run."""
    found: dict[str, dict[str, dict[str, Any]]] = {group: {} for group in lens.monitors}
    for name, part in parts.items():
        group, _, layer = name.partition("/")
        found[group][layer or f"({part.module or 'net'})"] = part.leaves()  # the network itself has no name
    return found


def value_at(result: Any, path: tuple[str, ...]) -> Any:
    """The value at a path of a nested result; None if there is none (a single pass has no correlation)."""
    for part in path:
        result = result.get(part) if isinstance(result, Mapping) else None
    return result


def natural_key(name: str) -> list[str | int]:
    """A key that sorts numbers in names as numbers: out[2] before out[10]."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name))]
