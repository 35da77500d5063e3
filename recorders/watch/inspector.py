"""Inspector: lenses on a network, epochs and steps, and where the charts are shown."""

from __future__ import annotations

import builtins
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.hooks import Hook
from recorders.errors import LensError, RecordingWarning, TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.forward import CallMonitor
from recorders.recorder.recorder import Recorder
from recorders.schedule.clock import Clock
from recorders.watch.charts import ChartView, keep_charts
from recorders.watch.lenses import Lens, LossMetrics
from recorders.watch.lenses.layers import by_group, dig, is_unit, natural
from recorders.watch.lenses.spread import spread, statistics
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import Visualizer, as_visualizers
from recorders.watch.visualizers.choice import Visualizers

__all__ = ["Inspector"]

_Item = TypeVar("_Item")


class Inspector:
    """Watches a network through lenses and, at each `tick_epoch`, writes what was seen into a timeline and shows it.

    Args:
        lenses: one or several.
        visualizer: "text", "matplotlib", an object with `show(tick, charts)`, or several of them; None keeps the numbers only.
        net: the network to attach to at once.
        depth: watch modules at this level below the network (its children are level 1), and leaves above it; all leaves where None.
        active: the epochs in which lenses watch: every so many, from 0 on, or a function of the epoch. In the others their hooks
            are off and cost nothing; what is pushed is always kept.
        timeline: where numbers go: a `Timeline`, or the path of one, which is continued; in memory where None.
        optimizer: advances the clock, as `Recorder.attach` does; without one, call `step()` after every step.
        every_step: within those epochs, watch in steps that this number divides. Monitors of a lens that choose steps themselves
            (`steps=`, `every_step=`) are left as they are, and those of values at the tick see every tick.

    Attributes:
        clock: the one clock of all lenses, whose steps go on across epochs and networks. To resume, set `clock.step`.

    Raises:
        LensError: two charts have the same title, or the visualizer is unknown.
        TypeError: `optimizer` is none.

    >>> from recorders.watch.lenses import OutputGradientGeometry
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> with Inspector(OutputGradientGeometry(), net=net) as inspector:
    ...     for epoch in inspector.range(3):
    ...         loss = net(torch.ones(8, 4)).square().mean()
    ...         loss.backward()
    ...         inspector.push_loss(loss)
    >>> inspector.timeline.ticks(), [(chart.title, chart.layers) for chart in inspector.charts]
    ([0, 1, 2], [('Output Gradient Norm', ('0', '2')), ('Output Gradient Correlation', ('0', '2')), ('Loss', ('train',))])
    """

    def __init__(
        self,
        lenses: Lens | Iterable[Lens],
        visualizer: Visualizers = None,
        *,
        net: nn.Module | None = None,
        depth: int | None = None,
        active: int | Callable[[int], bool] = 1,
        timeline: Timeline | str | os.PathLike[str] | None = None,
        optimizer: Optimizer | None = None,
        every_step: int = 1,
    ) -> None:
        self.lenses = _lenses(lenses)
        if depth is not None and depth < 0:
            raise LensError(f"Inspector(depth={depth}): a depth is 0 for the network itself, 1 for its children, and so on")
        if not callable(active) and active < 1:
            raise LensError(f"Inspector(active={active}): give every how many epochs, at least 1, or a function of the epoch")
        if not isinstance(every_step, int) or every_step < 1:
            raise LensError(f"Inspector(every_step={every_step!r}): give every how many steps, at least 1")
        self.every_step, self.clock = every_step, Clock()
        self.visualizers: tuple[Visualizer, ...] = as_visualizers(visualizer)
        self.depth = depth
        self.timeline = timeline if isinstance(timeline, Timeline) else Timeline() if timeline is None else Timeline(timeline)
        self._active: Callable[[int], bool] = active if callable(active) else lambda epoch: epoch % active == 0
        self._net: weakref.ref[nn.Module] | None = None
        self._recorders: list[Recorder | None] = [None] * len(self.lenses)
        self._layers: dict[str, dict[str, list[str]]] = {chart.title: {} for lens in self.lenses for chart in lens.charts}
        self._loss_hooks: list[Any] = []
        self._clock_hook: Any = None
        self._pushed: dict[str, dict[str, CallMonitor]] = {"loss": {}, "metric": {}}
        self._failed: set[int] = set()
        self.epoch = max(self.timeline.ticks(), default=-1) + 1
        if optimizer is not None:
            self.clock.attach(optimizer)
        if net is not None:
            self.attach(net)

    @property
    def attached(self) -> bool:
        """Whether the inspector sits on a network."""
        return self._net is not None

    @property
    def visualizer(self) -> Visualizer | None:
        """The first of the visualizers."""
        return self.visualizers[0] if self.visualizers else None

    @property
    def charts(self) -> list[ChartView]:
        """What there is to show, layers in network order, those that never ran too; charts without layers are left out."""
        found = [chart for lens in self.lenses for chart in lens.charts]
        views = []
        for chart in found:
            names = [name for layer, shown in self._layers[chart.title].items() for name in (shown or [layer])]
            views += [ChartView(chart, self.timeline, tuple(names))] if names else []
        return views

    def attach(self, net: nn.Module, optimizer: Optimizer | None = None) -> Inspector:
        """Puts the lenses on a network; returns the inspector itself. Where it sits already, the lenses stay as they are.

        What was recorded before by way of another network and not ticked yet is forgotten; timeline and clock go on. An optimizer
        advances the clock from now on, beside those given before.

        Raises:
            TypeError: `optimizer` is none.
            TargetError: `net` is no module, or the inspector sits on another one: `detach()` first.
            SelectionError: a lens finds nothing to watch; the inspector stays detached.
        """
        if not isinstance(net, nn.Module):
            raise TargetError(f"Inspector.attach needs a torch.nn.Module and got {type(net).__name__}: {net!r:.100}")
        if self._net is not None and self._net() is not net:
            raise TargetError("the inspector sits on another network: call detach() first, or make another inspector")
        if optimizer is not None:
            self.clock.attach(optimizer)
        if self._net is not None:
            self._count(net)
            return self
        self._net = weakref.ref(net)
        self._recorders = [None] * len(self.lenses)
        try:
            for index, lens in enumerate(self.lenses):
                self._attach(index, lens, net)
        except BaseException:
            self.detach()
            raise
        self.clock.watch(net)
        self._count(net)
        self._set_hooks()
        return self

    def step(self) -> Inspector:
        """Advances the clock by one step, where no optimizer that it is attached to does; returns the inspector itself."""
        self.clock.advance()
        return self

    def _count(self, net: nn.Module) -> None:
        """Micro-batches are counted once an optimizer is attached."""
        if self.clock.attached and self._clock_hook is None:
            self._clock_hook = self.clock.count(net)

    def _attach(self, index: int, lens: Lens, net: nn.Module) -> None:
        if lens.monitors:
            recorder = Recorder(fuse=False, budget=None, **_paced(lens.monitors, self.every_step)).modules(
                net, where=lambda name, module: is_unit(name, module, self.depth) and lens.where(name, module)
            )
            for monitor in recorder.values():
                monitor.clock = self.clock
            self._recorders[index] = recorder
            groups = by_group(lens, recorder)
            for chart in lens.charts:
                for layer in groups.get(chart.of[0], {}):
                    self._layers[chart.title].setdefault(layer, [])
        if lens.loss_fn is not None:
            # Weakly: a loss module outlives the inspector, and must not keep it.
            push = weakref.WeakMethod(self._push_loss_of)
            hook = Hook(lambda *args: (push() or _ignore)(args[-1]), lambda *args: (push() or _ignore)(args[-1]))
            self._loss_hooks.append(lens.loss_fn.register_forward_hook(hook))

    def detach(self) -> Inspector:
        """Takes all hooks off, those of loss modules too; returns the inspector itself.

        What was recorded stays until the next `tick_epoch`, or `attach`; steps go on being counted. Detaching twice is harmless.
        """
        self._net = None
        for recorder in self._recorders:
            if recorder is not None:
                recorder.deregister()
        for handle in [*self._loss_hooks, *([] if self._clock_hook is None else [self._clock_hook])]:
            handle.remove()
        self._loss_hooks, self._clock_hook = [], None
        return self

    def push_loss(self, value: Tensor | float, *, train: bool = True, running: bool = True) -> None:
        """Keeps a loss of this epoch. Tensors stay on their device, and no device is waited for.

        Args:
            value: a number, or a tensor; of several elements each counts.
            train: training loss, else evaluation loss.
            running: keep running statistics; False keeps every value, so that medians and quartiles are known.

        Raises:
            LensError: this loss was pushed the other way (running or not) in this epoch.
        """
        self._push("loss", "train" if train else "eval", value, running)

    def push_metric(self, name: str, value: Tensor | float, *, running: bool = True) -> None:
        """Keeps a metric of this epoch under its name; otherwise as `push_loss`."""
        self._push("metric", name, value, running)

    def _push_loss_of(self, loss: Any) -> None:
        self.push_loss(loss, train=torch.is_grad_enabled())

    def _push(self, kind: str, name: str, value: Any, running: bool) -> None:
        reducer = spread(running)
        monitor = self._pushed[kind].setdefault(name, CallMonitor(reducer))
        if monitor.reducer != reducer:
            if monitor.samples:
                raise LensError(
                    f"{kind} {name!r} was pushed with running={not running} in this epoch: push it one way or the other"
                )
            monitor = self._pushed[kind][name] = CallMonitor(reducer)
        monitor.push(value)

    def tick_epoch(self, epoch: int | None = None) -> None:
        """Ends an epoch: writes what was recorded into the timeline, in one transaction, shows it, and starts the next one afresh.

        Args:
            epoch: its number; one more than the last where None.

        Raises:
            TickError: the timeline has this epoch already; nothing is lost, tick with another number.
            StorageError: the timeline cannot be written; nothing is lost, what was recorded can be ticked again.

        Warns:
            RecordingWarning: a visualizer raised; once for each, and training goes on.
        """
        tick = self.epoch if epoch is None else epoch
        rows = self._rows()
        self.timeline.append(tick, rows)
        for recorder in self._recorders:
            if recorder is not None:
                recorder.reset()
        for monitors in self._pushed.values():
            for monitor in monitors.values():
                monitor.clear()
        self.epoch = tick + 1
        self._set_hooks()
        if rows:
            self._show(tick)

    def iter(self, iterable: Iterable[_Item]) -> Iterator[_Item]:
        """The items, each an epoch: `tick_epoch()` follows the loop's body. Not after `break`: call it there, if it is to count."""
        for item in iterable:
            yield item
            self.tick_epoch()

    def range(self, *args: int) -> Iterator[int]:
        """Like `iter(range(...))`, and the numbers are those of the epochs."""
        for epoch in builtins.range(*args):
            self._begin(epoch)
            yield epoch
            self.tick_epoch(epoch)

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        lenses = ", ".join(lens.name for lens in self.lenses)
        return f"Inspector([{lenses}], timeline={self.timeline!r}): epoch {self.epoch}, {'at' if self.attached else 'de'}tached"

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._set_hooks()

    def _set_hooks(self) -> None:
        """Hooks are on in active epochs only."""
        if not self.attached:
            return
        on = self._active(self.epoch)
        for recorder in self._recorders:
            if recorder is not None:
                recorder.register() if on else recorder.deregister()

    def _rows(self) -> dict[str, dict[str, Tensor]]:
        """Statistics by name of row; layers met for the first time are noted."""
        rows: dict[str, dict[str, Tensor]] = {}
        results = {kind: {name: one.snapshot().leaves() for name, one in pushed.items()} for kind, pushed in self._pushed.items()}
        for lens, recorder in zip(self.lenses, self._recorders, strict=True):
            if recorder is not None and self.attached and self._active(self.epoch):
                recorder.tick()
            found = results if recorder is None else results | by_group(lens, recorder)
            for chart in lens.charts:
                for layer, leaves in found.get(chart.of[0], {}).items():
                    shown = self._layers[chart.title].setdefault(layer, [])
                    for path, result in leaves.items():
                        name = f"{layer}[{path}]" if path else layer
                        if (one := dig(result, chart.of[1:])) is not None:
                            rows[chart.row(name)] = statistics(one)
                            if name not in shown:
                                shown.append(name)
                                shown.sort(key=natural)  # gradients arrive in no order of the outputs
        return rows

    def _show(self, tick: int) -> None:
        charts = self.charts
        keep_charts(self.timeline, charts)
        for visualizer in self.visualizers:
            try:
                visualizer.show(tick, charts)
            except Exception as error:
                if id(visualizer) not in self._failed:
                    self._failed.add(id(visualizer))
                    message = f"{type(visualizer).__name__} failed at tick {tick}: {type(error).__name__}: {error}"
                    warnings.warn(
                        f"{message}; the numbers are in the timeline, and training goes on", RecordingWarning, stacklevel=3
                    )


def _lenses(given: Lens | Iterable[Lens]) -> tuple[Lens, ...]:
    """The lenses, and the one on losses and metrics where none of them shows those."""
    lenses = (given,) if isinstance(given, Lens) else tuple(given)
    for lens in lenses:
        if not isinstance(lens, Lens):
            raise LensError(f"an inspector takes lenses, such as OutputGradientGeometry(); got {lens!r}")
    shown = {chart.of[0] for lens in lenses for chart in lens.charts}
    default = LossMetrics()
    if missing := tuple(chart for chart in default.charts if chart.of[0] not in shown):
        lenses = (*lenses, Lens(default.name, missing))
    titles = [chart.title for lens in lenses for chart in lens.charts]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise LensError(f"several charts are called {twice[0]!r}: rename one with dataclasses.replace(chart, title=...)")
    return lenses


def _paced(monitors: Mapping[str, Monitor], every_step: int) -> dict[str, Monitor]:
    """The same, recording in steps that `every_step` divides where they choose none themselves, and where steps mean something."""
    return {
        group: one if one.gated or every_step == 1 or getattr(one, "when", None) == "tick" else _every(one, every_step)
        for group, one in monitors.items()
    }


def _every(monitor: Monitor, every_step: int) -> Monitor:
    recipe = monitor.constructor
    return replace(recipe, options=(*recipe.options, ("every_step", every_step)))(monitor.attr)


def _ignore(loss: Any) -> None:
    """Stands for an inspector that is gone."""
