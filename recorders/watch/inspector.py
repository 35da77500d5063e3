"""Inspector: puts lenses on a network, and writes and shows what they record in each epoch, or in some steps."""

from __future__ import annotations

import builtins
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.errors import LensError, TargetError
from recorders.recorder.recorder import Recorder
from recorders.schedule.clock import Clock
from recorders.watch.charts import ChartView, charts_of, notes_of_charts, notes_of_layers
from recorders.watch.lens_recorders import LensRecorders
from recorders.watch.lens_set import complete
from recorders.watch.lenses import Lens
from recorders.watch.position import Position, Ranks
from recorders.watch.showing import Showing
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers import Visualizer, as_visualizers
from recorders.watch.visualizers.choice import Visualizers

DEFAULT = ("ParameterGradientGeometry", "UpdateRatio", "NonFinite")
"""Lenses that say something of any net that is trained."""

_Item = TypeVar("_Item")


class Inspector:
    """Watches a network through lenses: each `tick_epoch` writes what they recorded into a timeline, and shows it.

    `tick` does the same after some steps, for a timeline of steps. Training and evaluation are recorded apart: charts of what was
    recorded in evaluation have titles that end in "in Evaluation".

    Args:
        net: the network to attach to at once; without one, call `attach`.
        lenses: one or several; or their names, also those by which other packages offer lenses (entry points `recorders.lenses`).
            The default ones show norms of gradients, how large updates are, and NaN and infinity.
        show: "text", "matplotlib", "html:report.html", "tensorboard:runs/x", "trackio:project", "wandb:project", an object with
            `show(tick, charts)`, or several of these; None shows nothing.
        depth: watch the modules at this level below the network (its children are level 1), and leaves above it; None for all
            leaves.
        active: the epochs in which lenses record: a number n for every n-th epoch from 0 on, or a function of the epoch. In other
            epochs their hooks are off and cost nothing; pushed values are always recorded. With `tick`, the steps after which they
            record until the next tick.
        timeline: where to write: a `Timeline`, or the path of one, which is continued, after its last tick, with its number of
            steps; see `resume`. None for one in memory.
        optimizer: advances the clock, as in `Recorder.attach`; without one, call `step()` after every step.
        every_step: in active epochs, record in steps that this number divides. This does not apply to monitors of a lens that
            choose their steps themselves (`steps=`, `every_step=`), nor to those that record at ticks, nor to evaluation.
        train_loss_str: the name of training losses.
        non_train_loss_str: the name of other losses.
        master_rank: in distributed training, the rank that shows what all ranks recorded, and that writes the file of the timeline
            (others write in memory). Every rank makes an inspector, after `init_process_group`, and calls `tick_epoch`. None if
            each rank shows and writes its own.

    Attributes:
        clock: the clock that all lenses share; it goes on across epochs and networks.

    Raises:
        LensError: two charts have the same title, no visualizer has that name, or a number is out of range.
        TargetError: `net` is not a module.
        TypeError: `optimizer` is not an optimizer.

    >>> import torch
    >>> from recorders.watch.lenses import OutputGradientGeometry
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> with Inspector(net, OutputGradientGeometry()) as inspector:
    ...     for epoch in inspector.range(3):
    ...         loss = net(torch.ones(8, 4)).square().mean()
    ...         loss.backward()
    ...         inspector.push_loss(loss)
    >>> inspector.timeline.ticks(), [(chart.title, chart.layers) for chart in inspector.charts]
    ([0, 1, 2], [('Output Gradient Norm', ('0', '2')), ('Output Gradient Correlation', ('0', '2')), ('Loss', ('train',))])
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        lenses: str | Lens | Iterable[str | Lens] = DEFAULT,
        *,
        show: Visualizers = None,
        depth: int | None = None,
        active: int | Callable[[int], bool] = 1,
        timeline: Timeline | str | os.PathLike[str] | None = None,
        optimizer: Optimizer | None = None,
        every_step: int = 1,
        train_loss_str: str = "train",
        non_train_loss_str: str = "eval",
        master_rank: int | None = 0,
    ) -> None:
        if net is not None and not isinstance(net, nn.Module):
            raise TargetError(
                f"Inspector(net, lenses): the network comes first, and this is a {type(net).__name__}: {net!r:.100}. For lenses "
                "without a network, write Inspector(lenses=...)"
            )
        self.lenses = complete(lenses)
        if depth is not None and depth < 0:
            raise LensError(f"Inspector(depth={depth}): a depth is 0 for the network itself, 1 for its children, and so on")
        if not callable(active) and active < 1:
            raise LensError(f"Inspector(active={active}): give every how many epochs, at least 1, or a function of the epoch")
        if not isinstance(every_step, int) or every_step < 1:
            raise LensError(f"Inspector(every_step={every_step!r}): give every how many steps, at least 1")
        self.every_step, self.clock = every_step, Clock()
        self._showing = Showing(as_visualizers(show))
        self.depth, self._counting = depth, False
        self._ranks = Ranks(master_rank)
        written = timeline if self._ranks.shows else None
        self.timeline = written if isinstance(written, Timeline) else Timeline() if written is None else Timeline(written)
        self._active: Callable[[int], bool] = active if callable(active) else lambda epoch: epoch % active == 0
        self._net: weakref.ref[nn.Module] | None = None
        if train_loss_str == non_train_loss_str:
            raise LensError(f"training losses and others need different names, or they are mixed; both are {train_loss_str!r}")
        earlier = {view.title: view.layers for view in charts_of(self.timeline)}
        self._recorders = LensRecorders(self.lenses, self.clock, every_step, (train_loss_str, non_train_loss_str), earlier)
        self._position = Position(self.timeline, self.clock, self._ranks)
        self._position.go_on()
        if optimizer is not None:
            self.clock.attach(optimizer)
        if net is not None:
            self.attach(net)

    @property
    def epoch(self) -> int:
        """The number of the present epoch; with `tick`, the step of the last tick. It can be set."""
        return self._position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._position.epoch = epoch

    @property
    def attached(self) -> bool:
        """Whether the inspector is on a network."""
        return self._net is not None

    @property
    def visualizers(self) -> tuple[Visualizer, ...]:
        """All visualizers."""
        return self._showing.visualizers

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

    def resume(self, start: int) -> Inspector:
        """Goes back to where an epoch begins, for a training that goes on from a checkpoint; returns the inspector.

        Deletes later ticks from the timeline, and what was recorded since the last one; sets the clock back to the number of steps
        that it had then. In distributed training every rank calls it, and goes on from the timeline of the rank that writes it.

        Args:
            start: the epoch that begins; in a timeline of steps, the number of steps that have ended, whose tick stays.
        """
        self._position.go_back(start)
        self._recorders.reset()
        self._set_hooks()
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
        self._showing.finish()
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

    def push_metric(self, name: str, value: Tensor | float, *, train: bool | None = None, running: bool = True) -> None:
        """Records a metric of this epoch under a name; otherwise like `push_loss`.

        Args:
            train: whether it is of training or of evaluation: "accuracy" is "train accuracy" or "eval accuracy" then. None: neither
        """
        self._recorders.push_metric(train, name, value, running)

    def tick(self, step: int | None = None) -> None:
        """Like `tick_epoch`, but after some steps, whenever you call it: the ticks of the timeline are numbers of steps.

        Args:
            step: the number of steps that have ended; None for `clock.step`.

        Raises:
            TickError: the timeline has this step already, its ticks are epochs, or no step has ended since the last tick.
            StorageError: as in `tick_epoch`.
        """
        self._end("step", step)

    def tick_epoch(self, epoch: int | None = None) -> None:
        """Ends an epoch: writes its results into the timeline in one transaction, shows them, and starts the next epoch empty.

        In distributed training this is a collective: what all ranks recorded and pushed is merged in one exchange, and every rank
        has the same numbers. A value that only some ranks pushed is merged from those.

        Args:
            epoch: its number; None for the last one plus 1.

        Raises:
            TickError: the timeline has this epoch already, or its ticks are steps. Nothing is lost: tick with another number.
            StorageError: the timeline cannot be written. Nothing is lost: tick again, on every rank.

        Warns:
            RecordingWarning: a visualizer raised, or ranks do not fit together (then each has its own numbers); once. Training goes
                on.
        """
        self._end("epoch", epoch)

    def _end(self, axis: str, number: int | None) -> None:
        number = self._position.check(axis, number)
        recording = self._recorders.recording(tick=self.attached and self._active(self.epoch))
        recording, tick = self._ranks.merge(recording, number)
        rows, notes = self._recorders.rows(recording), self._position.notes(axis)
        if shows := bool(rows) and self._ranks.shows:
            notes |= notes_of_layers(self._recorders.kinds, self._recorders.silent)
            notes |= notes_of_charts(self.timeline, charts := self.charts)
        self.timeline.append(tick, rows, self.clock.step, notes=notes)
        self._recorders.reset()
        self._position.ended(axis, tick)
        self._set_hooks()
        if shows:
            self._showing.show(tick, charts)

    def iter(self, iterable: Iterable[_Item], *, progress: bool = False) -> Iterator[_Item]:
        """Yields the items, each an epoch: calls `tick_epoch()` after the body of the loop, but not after a `break`.

        `progress=True` shows a bar with the last losses and metrics; it needs no library.
        """
        with self._showing.bar(iterable, progress and self._ranks.shows, lambda: self.charts) as advance:
            for item in iterable:
                yield item
                self.tick_epoch()
                advance()

    def range(self, *args: int, progress: bool = False) -> Iterator[int]:
        """Like `iter(range(...))`; the numbers are those of the epochs.

        Raises:
            TickError: the timeline has one of these epochs already, or its ticks are steps. It is raised before the first one.
        """
        epochs = builtins.range(*args)
        self._position.check_new(epochs)
        with self._showing.bar(epochs, progress and self._ranks.shows, lambda: self.charts) as advance:
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
        return (
            f"Inspector(lenses=[{lenses}], timeline={self.timeline!r}): epoch {self.epoch}, {'at' if self.attached else 'de'}tached"
        )

    def _set_hooks(self) -> None:
        """Puts hooks on in active epochs and takes them off in others."""
        if self.attached:
            self._recorders.switch(self._active(self.epoch))
