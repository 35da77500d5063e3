"""Inspector: puts lenses on a network, and writes and shows what they record in each epoch."""

from __future__ import annotations

import builtins
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.errors import LensError, RecordingWarning, TargetError
from recorders.recorder.recorder import Recorder
from recorders.schedule.clock import Clock
from recorders.watch.charts import ChartView, keep_charts
from recorders.watch.lens_recorders import LensRecorders
from recorders.watch.lenses import Lens, LossMetrics
from recorders.watch.progress import ProgressBar
from recorders.watch.ranks import Ranks
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import Visualizer, as_visualizers
from recorders.watch.visualizers.choice import Visualizers
from recorders.watch.visualizers.visualizer import finish

__all__ = ["Inspector"]

_Item = TypeVar("_Item")


class Inspector:
    """Watches a network through lenses: each `tick_epoch` writes what they recorded into a timeline, and shows it.

    Args:
        lenses: one or several.
        visualizer: "text", "matplotlib", "html:report.html", "tensorboard:runs/x", "wandb:project", an object with
            `show(tick, charts)`, or several of these; None shows nothing.
        net: the network to attach to at once.
        depth: watch the modules at this level below the network (its children are level 1), and leaves above it; None for all
            leaves.
        active: the epochs in which lenses record: a number n for every n-th epoch from 0 on, or a function of the epoch. In other
            epochs their hooks are off and cost nothing; pushed values are always recorded.
        timeline: where to write: a `Timeline`, or the path of one, which is continued; None for one in memory.
        optimizer: advances the clock, as in `Recorder.attach`; without one, call `step()` after every step.
        every_step: in active epochs, record in steps that this number divides. This does not apply to monitors of a lens that
            choose their steps themselves (`steps=`, `every_step=`), nor to those that record at ticks.
        train_loss_str: the name of training losses.
        non_train_loss_str: the name of other losses.
        master_rank: in distributed training, the rank that shows what all ranks recorded, and that writes the file of the timeline
            (others write in memory). Every rank makes an inspector, after `init_process_group`, and calls `tick_epoch`. None if
            each rank shows and writes its own.

    Attributes:
        clock: the clock that all lenses share; it goes on across epochs and networks. To resume, set `clock.step`.

    Raises:
        LensError: two charts have the same title, the visualizer is unknown, or a number is out of range.
        TypeError: `optimizer` is not an optimizer.

    >>> import torch
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
        train_loss_str: str = "train",
        non_train_loss_str: str = "eval",
        master_rank: int | None = 0,
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
        self.depth, self._counting = depth, False
        self._ranks = Ranks(master_rank)
        written = timeline if self._ranks.shows else None
        self.timeline = written if isinstance(written, Timeline) else Timeline() if written is None else Timeline(written)
        self._active: Callable[[int], bool] = active if callable(active) else lambda epoch: epoch % active == 0
        self._net: weakref.ref[nn.Module] | None = None
        if train_loss_str == non_train_loss_str:
            raise LensError(f"training losses and others need different names, or they are mixed; both are {train_loss_str!r}")
        self._recorders = LensRecorders(self.lenses, self.clock, every_step, (train_loss_str, non_train_loss_str))
        self._failed: set[int] = set()
        self.epoch = max(self.timeline.ticks(), default=-1) + 1
        if optimizer is not None:
            self.clock.attach(optimizer)
        if net is not None:
            self.attach(net)

    @property
    def attached(self) -> bool:
        """Whether the inspector is on a network."""
        return self._net is not None

    @property
    def visualizer(self) -> Visualizer | None:
        """The first visualizer."""
        return self.visualizers[0] if self.visualizers else None

    @property
    def recorders(self) -> dict[str, Recorder]:
        """The recorder of each lens that has monitors, by the name of the lens; the second lens of one name is "name 2".

        They hold the full results of this epoch so far, which `tick_epoch` deletes.
        """
        return dict(self._recorders.by_lens)

    @property
    def charts(self) -> list[ChartView]:
        """The charts that have layers, each with its layers in network order, also those that never ran."""
        found = [(chart, self._recorders.layers(chart)) for lens in self.lenses for chart in lens.charts]
        return [ChartView(chart, self.timeline, layers) for chart, layers in found if layers]

    def attach(self, net: nn.Module, optimizer: Optimizer | None = None) -> Inspector:
        """Puts the lenses on a network; returns the inspector. If they are on it already, they stay as they are.

        On a new network, results of the one before that were not ticked are deleted; the timeline and the clock go on. The
        optimizer advances the clock from now on, as do those given before.

        Raises:
            TypeError: `optimizer` is not an optimizer.
            TargetError: `net` is not a module, or the inspector is on another one: call `detach()` first.
            SelectionError: a lens finds nothing to watch; the inspector stays detached.
        """
        if not isinstance(net, nn.Module):
            raise TargetError(f"Inspector.attach needs a torch.nn.Module and got {type(net).__name__}: {net!r:.100}")
        if self._net is not None and self._net() is not net:
            raise TargetError("the inspector is on another network: call detach() first, or make another inspector")
        if optimizer is not None:
            self.clock.attach(optimizer)
        if self._net is None:
            self._net = weakref.ref(net)
            try:
                self._recorders.attach(net, self.depth)
            except BaseException:
                self.detach()
                raise
            self.clock.watch(net)
            self._set_hooks()
        if self.clock.attached and not self._counting:
            self.clock.count(net)
            self._counting = True
        return self

    def step(self) -> Inspector:
        """Advances the clock by one step, for training loops without an attached optimizer; returns the inspector."""
        self.clock.advance()
        return self

    def detach(self) -> Inspector:
        """Takes all hooks off, also those on loss modules; returns the inspector.

        Results stay until the next `tick_epoch` or `attach`, and the clock still counts steps. Detaching twice is harmless.
        Visualizers that write seldom, such as `HtmlVisualizer`, write what they have.
        """
        self._net = None
        self._recorders.detach()
        self.clock.uncount()
        self._counting = False
        for visualizer in self.visualizers:
            self._guard(visualizer, "when the inspector was detached", finish, visualizer)
        return self

    def push_loss(self, value: Tensor | float, *, train: bool = True, running: bool = True) -> None:
        """Records a loss of this epoch. Tensors stay on their device, without waiting for it.

        Args:
            value: a number, or a tensor; each element counts.
            train: whether it is a training loss or an evaluation loss.
            running: keep running statistics only; False keeps every value, so that median and quartiles are known.

        Raises:
            LensError: this loss was pushed with another value of `running` in this epoch.
        """
        self._recorders.push_loss(train, value, running)

    def push_metric(self, name: str, value: Tensor | float, *, running: bool = True) -> None:
        """Records a metric of this epoch under a name; otherwise like `push_loss`."""
        self._recorders.push("metric", name, value, running)

    def tick_epoch(self, epoch: int | None = None) -> None:
        """Ends an epoch: writes its results into the timeline in one transaction, shows them, and starts the next epoch empty.

        In distributed training this is a collective: what all ranks recorded and pushed is merged in one exchange, and every rank
        has the same numbers. A value that only some ranks pushed is merged from those.

        Args:
            epoch: its number; None for the last one plus 1.

        Raises:
            TickError: the timeline has this epoch already. Nothing is lost: tick with another number.
            StorageError: the timeline cannot be written. Nothing is lost: tick again, on every rank.

        Warns:
            RecordingWarning: a visualizer raised, or ranks do not fit together (then each has its own numbers); once. Training goes
                on.
        """
        recording = self._recorders.recording(tick=self.attached and self._active(self.epoch))
        recording, tick = self._ranks.merge(recording, self.epoch if epoch is None else epoch)
        rows = self._recorders.rows(recording)
        self.timeline.append(tick, rows)
        self._recorders.reset()
        self.epoch = tick + 1
        self._set_hooks()
        if rows and self._ranks.shows:
            self._show(tick)

    def iter(self, iterable: Iterable[_Item], *, progress: bool = False) -> Iterator[_Item]:
        """Yields the items, each an epoch: calls `tick_epoch()` after the body of the loop, but not after a `break`.

        `progress=True` shows a bar with the last losses and metrics; it needs no library.
        """
        with self._bar(iterable, progress) as advance:
            for item in iterable:
                yield item
                self.tick_epoch()
                advance()

    def range(self, *args: int, progress: bool = False) -> Iterator[int]:
        """Like `iter(range(...))`; the numbers are those of the epochs."""
        epochs = builtins.range(*args)
        with self._bar(epochs, progress) as advance:
            for epoch in epochs:
                self.epoch = epoch
                self._set_hooks()
                yield epoch
                self.tick_epoch(epoch)
                advance()

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        lenses = ", ".join(lens.name for lens in self.lenses)
        return f"Inspector([{lenses}], timeline={self.timeline!r}): epoch {self.epoch}, {'at' if self.attached else 'de'}tached"

    @contextlib.contextmanager
    def _bar(self, items: Iterable[object], wanted: bool) -> Iterator[Callable[[], None]]:
        """A progress bar, if it is wanted here, and what advances it."""
        if not (wanted and self._ranks.shows):
            yield lambda: None
            return
        bar = ProgressBar(items, lambda: self.charts)
        self._guard(bar, "at the beginning", bar.start)
        try:
            yield lambda: self._guard(bar, f"at tick {self.epoch - 1}", bar.advance)
        finally:
            self._guard(bar, "at the end", bar.finish)

    def _set_hooks(self) -> None:
        """Puts hooks on in active epochs and takes them off in others."""
        if self.attached:
            self._recorders.switch(self._active(self.epoch))

    def _show(self, tick: int) -> None:
        charts = self.charts
        keep_charts(self.timeline, charts)
        for visualizer in self.visualizers:
            self._guard(visualizer, f"at tick {tick}", visualizer.show, tick, charts)

    def _guard(self, visualizer: object, when: str, work: Callable[..., None], *arguments: object) -> None:
        """Calls a visualizer; if it raises, warns once."""
        try:
            work(*arguments)
        except Exception as error:
            if id(visualizer) not in self._failed:
                self._failed.add(id(visualizer))
                message = f"{type(visualizer).__name__} failed {when}: {type(error).__name__}: {error}"
                warnings.warn(f"{message}; the timeline has its numbers, and training goes on", RecordingWarning, stacklevel=4)


def _lenses(given: Lens | Iterable[Lens]) -> tuple[Lens, ...]:
    """The lenses, and `LossMetrics` for losses and metrics that none of them shows."""
    lenses = (given,) if isinstance(given, Lens) else tuple(given)
    for lens in lenses:
        if not isinstance(lens, Lens):
            raise LensError(f"an inspector takes lenses, such as OutputGradientGeometry(); got {lens!r}")
    shown = {group for lens in lenses for chart in lens.charts for group in chart.of[:1]}
    shown |= {"loss", "metric"} if "pushed" in shown else set()
    default = LossMetrics()
    if missing := tuple(chart for chart in default.charts if chart.of[0] not in shown):
        lenses = (*lenses, Lens(default.name, missing))
    titles = [chart.title for lens in lenses for chart in lens.charts]
    if twice := sorted({title for title in titles if titles.count(title) > 1}):
        raise LensError(f"several charts are called {twice[0]!r}: rename one with dataclasses.replace(chart, title=...)")
    return lenses
