"""The recorders of an inspector's lenses on one network, and the pushed values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from recorders.capture.hooks import Hook
from recorders.errors import LensError
from recorders.monitors.base import Monitor
from recorders.monitors.forward import CallMonitor
from recorders.recorder.recorder import Recorder
from recorders.schedule.clock import Clock
from recorders.watch.charts import Chart
from recorders.watch.lenses.layers import is_watched, natural_key, results_by_group, value_at
from recorders.watch.lenses.lens import Lens
from recorders.watch.lenses.spread import spread, statistics

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Kind", "LensRecorders"]

Kind: TypeAlias = Literal["loss", "metric"]


class LensRecorders:
    """One `Recorder` for each lens with monitors, one `CallMonitor` for each pushed value; returns their results as rows.

    Args:
        lenses: what to record.
        clock: the clock that all monitors share.
        every_step: monitors record in steps that this number divides, unless they choose their steps themselves.
    """

    def __init__(self, lenses: tuple[Lens, ...], clock: Clock, every_step: int) -> None:
        self._lenses, self._clock, self._every_step = lenses, clock, every_step
        self._recorders: dict[int, Recorder] = {}  # by index of the lens
        self._layers: dict[str, dict[str, list[str]]] = {chart.title: {} for lens in lenses for chart in lens.charts}
        self._pushed: dict[Kind, dict[str, CallMonitor]] = {"loss": {}, "metric": {}}
        self._loss_hooks: list[RemovableHandle] = []

    def attach(self, net: nn.Module, depth: int | None) -> None:
        """Makes new recorders on `net`, without the results of earlier ones; if it raises, call `detach`."""
        push_output = weakref.WeakMethod(self._push_output)  # a loss module must not keep an inspector alive

        def observe(*args: Any) -> None:
            if (push := push_output()) is not None:
                push(args[-1])

        self._recorders = {}
        for index, lens in enumerate(self._lenses):
            if lens.monitors:
                self._recorders[index] = recorder = self._record(lens, net, depth)
                groups = results_by_group(lens, recorder)
                for chart in lens.charts:
                    for layer in groups.get(chart.of[0], {}):
                        self._layers[chart.title].setdefault(layer, [])
            if lens.loss_fn is not None:
                self._loss_hooks.append(lens.loss_fn.register_forward_hook(Hook(observe, observe)))

    def _record(self, lens: Lens, net: nn.Module, depth: int | None) -> Recorder:
        prototypes = _with_every_step(lens.monitors, self._every_step)
        recorder = Recorder(None, fuse=False, budget=None, **prototypes).modules(
            net, where=lambda name, module: is_watched(name, module, depth) and lens.where(name, module)
        )
        for monitor in recorder.values():
            monitor.clock = self._clock
        return recorder

    def detach(self) -> None:
        """Takes all hooks off, also those on loss modules; results stay."""
        self.switch(False)
        for handle in self._loss_hooks:
            handle.remove()
        self._loss_hooks = []

    def switch(self, on: bool) -> None:
        """Puts the hooks of all recorders on or takes them off; hooks on loss modules stay."""
        for recorder in self._recorders.values():
            recorder.register() if on else recorder.deregister()

    def push(self, kind: Kind, name: str, value: Tensor | float, running: bool) -> None:
        """Records one loss or metric; see `Inspector.push_loss`."""
        reducer = spread(running)
        monitor = self._pushed[kind].setdefault(name, CallMonitor(reducer))
        if monitor.reducer != reducer:
            if monitor.samples:
                raise LensError(f"{kind} {name!r} was pushed with running={not running} in this epoch: do not change it")
            monitor = self._pushed[kind][name] = CallMonitor(reducer)
        monitor.push(value)

    def _push_output(self, loss: Tensor | float) -> None:
        self.push("loss", "train" if torch.is_grad_enabled() else "eval", loss, True)

    def rows(self, *, tick: bool) -> dict[str, dict[str, Tensor]]:
        """The statistics of this epoch by name of row; `tick` first records parameters that are recorded at ticks."""
        rows: dict[str, dict[str, Tensor]] = {}
        pushed: dict[str, dict[str, dict[str, Any]]] = {}
        for kind, monitors in self._pushed.items():
            pushed[kind] = {name: monitor.snapshot().leaves() for name, monitor in monitors.items()}
        for index, lens in enumerate(self._lenses):
            results = pushed
            if (recorder := self._recorders.get(index)) is not None:
                if tick:
                    recorder.tick()
                results = pushed | results_by_group(lens, recorder)
            for chart in lens.charts:
                for layer, leaves in results.get(chart.of[0], {}).items():
                    known = self._layers[chart.title].setdefault(layer, [])
                    for path, result in leaves.items():
                        name = f"{layer}[{path}]" if path else layer
                        if (part := value_at(result, chart.of[1:])) is not None:
                            rows[chart.row(name)] = statistics(part)
                            if name not in known:
                                known.append(name)
                                known.sort(key=natural_key)  # gradients do not arrive in the order of the outputs
        return rows

    def reset(self) -> None:
        """Deletes what was recorded and pushed."""
        for recorder in self._recorders.values():
            recorder.reset()
        for monitors in self._pushed.values():
            for monitor in monitors.values():
                monitor.clear()

    def layers(self, chart: Chart) -> tuple[str, ...]:
        """The layers of a chart in network order, also those that never ran; a layer with several outputs once for each."""
        return tuple(name for layer, names in self._layers[chart.title].items() for name in (names or [layer]))


def _with_every_step(monitors: Mapping[str, Monitor], every_step: int) -> dict[str, Monitor]:
    """The monitors with this `every_step`; monitors that choose their steps, or record at ticks, as they are."""
    changed = dict(monitors)
    for group, monitor in monitors.items():
        if every_step != 1 and not monitor.gate.chooses_steps and getattr(monitor, "when", None) != "tick":
            recipe = monitor.constructor
            changed[group] = replace(recipe, options=(*recipe.options, ("every_step", every_step)))(monitor.attr)
    return changed
