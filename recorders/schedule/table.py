"""The table of an optimizer: which of its parameters the monitors watch, and where their rows are, found once for many steps.

To notify each of thousands of monitors takes longer than to reduce their small tensors. So a table knows where the parameters of an
optimizer are in the modules, which monitors watch them, and which of these are reduced together. Each step compares what the table
was made from, in a few passes: the modules, the ids of their parameters, and the kinds of the tensors that are read. If one of them
differs, a new table is made; the rows of the old one go on in it. Monitors that ask for more than steps are notified one by one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders._torch import copy_all, inside_transform, is_being_written_down, negate_all, subtract_all
from recorders.capture.context import as_monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.entering import failure_of
from recorders.capture.switching import SWITCHING, forget
from recorders.ring.rows import LOCK, ParameterRows, RowBlock
from recorders.schedule.under_way import Step
from recorders.schedule.watched import Registered, Watched, contents, target

__all__ = ["CHANGE", "GRADIENTS", "HERE", "NOT_DUE", "ODD", "VALUES", "Reading", "Tables"]

HERE = "the hook on optimizers"
NOT_DUE = "not due (every)"
GRADIENTS, VALUES, CHANGE = "gradients", "values", "change"
"""When a monitor reads: when the gradients are final, after the step, or before it and after it."""
ODD = object()
"""What is read of a parameter of which the monitor itself has to be asked."""
LARGE = 1 << 15  # elements; a larger tensor on the CPU is subtracted by itself, in one pass instead of two


class Reading(NamedTuple):
    """What monitors read of the parameters in a step. Those with equal readings are read together.

    Attributes:
        when: one of `GRADIENTS`, `VALUES` and `CHANGE`.
        read: returns for each parameter a tensor, None if there is nothing, or `ODD`.
    """

    when: str
    read: Callable[[Sequence[Any], Optimizer], Sequence[Any]]


class StaleError(Exception):
    """The tensors that are read are of other kinds than those of which the table was made.

    Attributes:
        thaws: whether there is something to read of a parameter that was frozen.
    """

    def __init__(self, thaws: bool) -> None:
        super().__init__(thaws)
        self.thaws = thaws


class View:
    """A monitor in a table.

    Attributes:
        leaves: the path, and the position in the table, of its parameters.
    """

    __slots__ = ("leaves", "module", "monitor", "number")

    def __init__(self, number: int, module: weakref.ref[nn.Module], monitor: weakref.ref[Any]) -> None:
        self.number, self.module, self.monitor = number, module, monitor
        self.leaves: list[tuple[str, int]] = []

    def ask(self, method: str, *args: Any) -> Exception | None:
        """Calls a method of the monitor with its module; returns what it raised because the user asks for it."""
        module, monitor = self.module(), self.monitor()
        return None if module is None or monitor is None else failure_of(monitor._fail, getattr(monitor, method), module, *args)


class Reads(RowBlock):
    """A block of rows, and what is read for it.

    Attributes:
        number: of the block in the rows; None if there is nothing to read, because the parameters need no gradient.
        views: the view of each row.
        positions: that of the parameter of each row; None if they are all of the table, in its order.
    """

    def __init__(self, reading: Reading, reducer: Any, number: int | None, like: Tensor) -> None:
        super().__init__(reducer)
        self.reading, self.number = reading, number
        self.views: list[View] = []
        self.positions: list[int] | None = []
        self._types: set[type] = {Tensor}  # as gradients and states are that are not there yet
        self._dtypes, self._devices = {like.dtype}, {like.device}

    def add(self, view: View, path: str, position: int, like: Tensor) -> None:
        """Adds a row for tensors like this one."""
        self.leaves.append((view.monitor, path))
        self.views.append(view)
        self._types.add(type(like))
        if self.positions is not None:
            self.positions.append(position)

    def of(self, parameters: list[Any]) -> list[Any]:
        """Returns the parameters of the rows."""
        return parameters if self.positions is None else [parameters[position] for position in self.positions]

    def fits(self, xs: Sequence[Any]) -> bool:
        """Whether all of these are tensors like those for which the block was made."""
        return (
            self._types.issuperset(map(type, xs))
            and {*map(_dtype, xs)} == self._dtypes
            and {*map(_device, xs)} == self._devices
            and {*map(_layout, xs)} == _STRIDED
        )


class Found:
    """What is read for a block in a step.

    Attributes:
        xs: for each row an observation, or None.
        due: the rows that have one; None if all have.
    """

    def __init__(self, block: Reads, parameters: list[Any], optimizer: Optimizer) -> None:
        self.block, self.due = block, list[int]() if block.number is None else None
        self.xs = block.reading.read(block.of(parameters), optimizer)
        if block.number is None or not block.fits(self.xs):
            self.due = [row for row, x in enumerate(self.xs) if x is not None and x is not ODD]
            if self.due and (block.number is None or not block.fits([self.xs[row] for row in self.due])):
                raise StaleError(block.number is None)

    def rows(self) -> Sequence[int]:
        """The rows that have an observation."""
        return range(len(self.xs)) if self.due is None else self.due

    def only(self, views: Collection[View]) -> None:
        """Leaves out the rows of other views than these."""
        if not views:
            self.due = []  # nothing of it is used
            return
        self.due = [row for row in self.rows() if self.block.views[row] in views]
        there = {*self.due}
        self.xs = [x if row in there else None for row, x in enumerate(self.xs)]

    def copy(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns memory of the monitors for the parameters that are due, and the parameters; keeps none of them."""
        xs = [*self.xs] if self.due is None else [self.xs[row] for row in self.due]
        copies = self._copies()
        if not _alike(copies, xs):
            for place, (row, x) in enumerate(zip(self.rows(), xs, strict=True)):
                ref, path = self.block.leaves[row]
                monitor = ref()
                if monitor is not None and not _alike(copies[place : place + 1], [x]):
                    monitor.before[path] = copies[place] = torch.empty_like(x.detach())
        self.xs = [None] * len(self.xs)
        return copies, xs

    def changed(self, parameters: list[Any]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Takes the copies as the observations; returns them, the parameters, and the rows in which the two have other shapes."""
        parameters, copies, rows, others = self.block.of(parameters), self._copies(), [*self.rows()], list[int]()
        now = parameters if self.due is None else [parameters[row] for row in rows]
        if not _alike(copies, now):  # another thread took monitors off, or the step changed their shapes
            found = [(row, copy) for row, copy in zip(rows, copies, strict=True) if copy is not None]
            others = [row for row, copy in found if not _alike([copy], [parameters[row]])]
            rows, copies = [row for row, _ in found if row not in others], [copy for row, copy in found if row not in others]
            now, self.due = [parameters[row] for row in rows], rows
        self.xs = [None] * len(self.xs) if self.due is not None else copies
        for row, copy in zip(rows, copies, strict=True) if self.due is not None else ():
            self.xs[row] = copy
        return copies, now, others

    def _copies(self) -> list[Any]:
        """What the monitors keep of the parameters that are due; None if there is no memory yet."""
        found: list[Any] = []
        for row in self.rows():
            ref, path = self.block.leaves[row]
            monitor = ref()
            found.append(None if monitor is None else monitor.before.get(path))
        return found


class Table:
    """What the monitors read of the parameters of an optimizer. It holds modules, monitors and rows weakly.

    Attributes:
        mine: the ids of the parameters.
        entries: where they are, as `Watched.among` returns it.
        watched: where they were found last.
        whole: whether it has all that is watched.
        stale: whether to make a new table in the next step.
        thaws: whether parameters were frozen and are not any more; from then on all have rows.
        moments: when anything is read.
        views: of the monitors whose observations are reduced together, by when they read; those of others are in `alone`.
    """

    def __init__(self, registered: Registered, watched: Watched, mine: set[int], optimizer: Optimizer, thaws: bool) -> None:
        self.mine, self.entries, self.stale, self.thaws = mine, watched.among(mine), False, thaws
        self._modules = [watched.modules[owner] for owner in dict.fromkeys(map(_owner, self.entries))]
        self.watch(watched)
        *self._contents, parameters = contents([*map(target, self._modules)])
        self._blocks: dict[str, list[Reads]] = {GRADIENTS: [], VALUES: [], CHANGE: []}
        self.views: dict[str, dict[View, None]] = {GRADIENTS: {}, VALUES: {}, CHANGE: {}}
        self.alone: dict[str, list[View]] = {GRADIENTS: [], VALUES: [], CHANGE: []}
        self._numbered: list[Reads] = []
        self._rows: Callable[[], ParameterRows | None] = _nothing
        positions = {id(parameter): position for position, parameter in enumerate(parameters)}
        views: dict[int, View] = {}
        for number, _, path, _, key in self.entries:
            view = views.get(number) or views.setdefault(number, View(number, *registered[number]))
            view.leaves.append((path, positions[key]))
        found: dict[Any, Reads] = {}
        for view in views.values():
            monitor = view.monitor()
            if monitor is not None and not (monitor.joins and self._join(view, monitor, parameters, optimizer, found)):
                self.alone[monitor.reading.when].append(view)
        self.moments = {moment for moment in self.views if self._blocks[moment] or self.alone[moment]}
        for block in found.values():
            if block.positions == [*range(len(parameters))]:
                block.positions = None

    def _join(self, view: View, monitor: Any, parameters: Sequence[Any], optimizer: Optimizer, found: dict[Any, Reads]) -> bool:
        """Gives the leaves of a monitor rows, if they can be reduced together with others; returns whether they can."""
        reading: Reading = monitor.reading
        mine = [parameters[position] for _, position in view.leaves]
        xs = [None if x is ODD else x for x in reading.read(mine, optimizer)]
        likes = [parameter if x is None else x for parameter, x in zip(mine, xs, strict=True)]
        if not all(accepts(like) and (reading.when != CHANGE or like.is_floating_point()) for like in likes):
            return False
        for (path, position), parameter, x, like in zip(view.leaves, mine, xs, likes, strict=True):
            frozen = x is None and not parameter.requires_grad and not self.thaws
            key: Any = (reading, frozen, monitor.reducer, like.dtype, like.device)
            try:
                block = found.get(key)
            except TypeError:  # the reducer holds something that has no hash
                key = (reading, frozen, id(monitor.reducer), like.dtype, like.device)
                block = found.get(key)
            if block is None:
                block = found[key] = Reads(reading, monitor.reducer, None if frozen else len(self._numbered), like)
                self._blocks[reading.when].append(block)
                self._numbered += [] if frozen else [block]
            block.add(view, path, position, like)
            if not frozen:
                self.views[reading.when][view] = None
        return True

    def watch(self, watched: Watched) -> None:
        """Notes where the entries of the table are found."""
        self.watched, self.whole = watched, watched.is_in(len(self._modules))

    def current(self, mine: set[int]) -> list[Any] | None:
        """Returns the parameters of the modules; None if they are not those of which the table was made."""
        modules = [*map(target, self._modules)]
        if self.stale or mine != self.mine or None in modules:
            return None
        owned = [*map(_owned, modules)]  # as `contents`, without a call: this is asked at each step
        parameters = [*chain.from_iterable(map(_values, owned))]
        names, ids = self._contents
        return parameters if [*map(id, parameters)] == ids and [*chain.from_iterable(owned)] == names else None

    def read(self, moments: Sequence[str], parameters: list[Any], optimizer: Optimizer) -> dict[str, list[Found]]:
        """Returns what there is to be read, by moment.

        Raises:
            StaleError: a tensor is of another kind than before.
        """
        found: dict[str, list[Found]] = {}
        for moment in moments:
            for block in self._blocks[moment]:
                found.setdefault(moment, []).append(Found(block, parameters, optimizer))
        return found

    def settle(self, moment: str, found: list[Found], stream: object, listening: Collection[int]) -> list[View]:
        """Counts the calls of monitors, and leaves out what is not due; returns the views of those that must be asked."""
        views, odd, sparse = self.views[moment], dict[View, None](), False
        for one in found:
            if one.due is not None:
                sparse = sparse or one.block.number is not None
                odd |= _sort_out(one, listening)
        if sparse or odd:
            views = dict.fromkeys([one.block.views[row] for one in found for row in one.rows() if one.block.views[row] not in odd])
        due = _due(views, stream, listening)
        if len(due) < len(self.views[moment]) or sparse:
            for one in found:
                one.only({*due})
            for view in self.views[CHANGE].keys() - due if moment == CHANGE else ():
                if (monitor := view.monitor()) is not None:
                    for path, _ in view.leaves:
                        monitor.before.pop(path, None)  # memory is for steps that are due
        return [*odd]

    def record(self, found: list[Found], copies: Sequence[Any] = (), changes: Sequence[Any] = ()) -> Exception | None:
        """Records what was read, at once, when copies were made and changes computed; returns what the user asks to be raised."""
        failed: list[Found] = []
        raised = failure_of(HERE, as_monitor, self._write, found, copies, changes, failed)
        for one in failed:  # each by itself, so that only those at fault are told of
            self.stale = True
            for row in one.rows():
                raised = one.block.views[row].ask("record_leaf", one.block.leaves[row][1], one.xs[row]) or raised
        return raised

    def _write(self, found: list[Found], copies: Sequence[Any], changes: Sequence[Any], failed: list[Found]) -> None:
        with LOCK:
            for copy, parameters in copies:
                copy_all(copy, parameters)
            for befores, afters in changes:
                _subtract(befores, afters)
            if found:
                rows = self._rows()
                if rows is None:
                    rows = ParameterRows([len(block.leaves) for block in self._numbered])
                    self._rows = weakref.ref(rows)
                failed += rows.write(self._numbered, found)


class Tables:
    """The tables of all optimizers.

    Attributes:
        registered: module and monitor of all who may be notified, by number.
        listening: those of them that are notified now.
    """

    def __init__(self, listening: OrderedDict[int, Any]) -> None:
        self.registered: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]] = {}
        self.listening = listening
        self._tables: WeakKeyDictionary[Optimizer, Table] = WeakKeyDictionary()
        self._watched: Watched | None = None

    def register(self, number: int, module: nn.Module, monitor: Any) -> None:
        """Adds a monitor. `SWITCHING` must be held."""
        self.registered[number], self._watched = (weakref.ref(module), weakref.ref(monitor)), None

    def remove(self, number: int) -> None:
        """Removes a monitor. `SWITCHING` must be held."""
        self._watched = None
        self.registered.pop(number, None)
        forget(self.listening, number)

    def begin(self, step: Step, optimizer: Optimizer, closure: bool) -> None:
        """Records what is read before a step, and copies the parameters whose change is read after it.

        Raises:
            Exception: what the user asks for.
        """
        step.ids, step.closure = step.own, closure
        moments = (CHANGE,) if closure else (CHANGE, GRADIENTS)
        if step.ids and (self._watched is None or not self._watched.moments.isdisjoint(moments)):
            self._observe(step, optimizer, optimizer, moments)

    def end(self, step: Step, optimizer: Optimizer, keeper: Optimizer, closure: bool) -> None:
        """Records what is read after a step; `keeper` is the optimizer that keeps the state.

        Raises:
            Exception: what the user asks for.
        """
        moments, watched = (GRADIENTS, VALUES) if closure else (VALUES,), self._watched
        if step.copied or step.notified or watched is None or not watched.moments.isdisjoint(moments):
            self._observe(step, optimizer, keeper, moments)

    def _observe(self, step: Step, optimizer: Optimizer, keeper: Optimizer, moments: Sequence[str]) -> None:
        mine = step.own if step.ids is None else step.ids
        table, parameters = self._find(optimizer, keeper, mine)
        before, copied, notified = step.table, step.copied, step.notified
        if table.moments.isdisjoint(moments) and not (copied or notified):
            step.table = table
            return
        usable, failed = step.usable or _usable(), None
        step.usable = usable
        try:
            read = table.read(moments if usable else (), parameters, keeper)
        except StaleError as error:
            table.stale, table.thaws = True, table.thaws or error.thaws
            table, parameters = self._find(optimizer, keeper, mine)
            read = table.read(moments, parameters, keeper)
        step.table, step.copied, step.notified = table, [], []
        together, copies, changes = list[Found](), list[Any](), list[Any]()
        for view in notified:
            failed = view.ask("changed", table.mine) or failed
        for one in copied:
            others = one.rows()
            if before is table:
                *pair, others = one.changed(parameters)
                changes.append(pair)
                together += [one] if one.due is None or one.due else []
            for row in others:
                failed = one.block.views[row].ask("changed", table.mine, one.block.leaves[row][1]) or failed
        for moment in moments:
            asked = table.alone[moment] if usable else [*table.views[moment], *table.alone[moment]]
            if found := read.get(moment):
                asked = table.settle(moment, found, weakref.ref(keeper), self.listening) + asked
                for one in found:
                    if one.due is None or one.due:
                        (step.copied if moment == CHANGE else together).append(one)
            for view in asked:
                if view.number in self.listening:
                    leaves = [(path, parameters[position]) for path, position in view.leaves]
                    failed = view.ask("notified", keeper, leaves) or failed
                    step.notified += [view] if moment == CHANGE else []
        for one in step.copied:
            copies.append(one.copy())
        if together or copies:
            failed = table.record(together, copies, changes) or failed
        if failed is not None:
            raise failed

    def _find(self, optimizer: Optimizer, keeper: Optimizer, mine: set[int]) -> tuple[Table, list[Any]]:
        """Returns the table of an optimizer, made anew if it does not fit any more, and the parameters of its modules."""
        table, watched = self._tables.get(optimizer), self._watched
        if watched is None or not watched.holds(table is not None and table.watched is watched and table.whole):
            watched = self._watch()
        if table is not None and table.watched is not watched and table.entries == watched.among(mine):
            table.watch(watched)
        parameters = table.current(mine) if table is not None and table.watched is watched else None
        if parameters is None:
            watched = watched if watched.holds() else self._watch()
            table = Table(self.registered, watched, mine, keeper, table is not None and table.thaws)
            self._tables[optimizer], parameters = table, table.current(mine)
        if table is None or parameters is None:
            raise StaleError(False)  # another thread changes the modules
        return table, parameters

    def _watch(self) -> Watched:
        with SWITCHING:
            for number, refs in [*self.registered.items()]:
                if any(ref() is None for ref in refs):
                    self.remove(number)
            watched = self._watched = Watched(self.registered)
        return watched


def accepts(x: Any) -> bool:
    """Whether a tensor may be reduced together with others: a plain strided tensor with elements, not on the meta device."""
    plain = type(x) is Tensor or type(x) is nn.Parameter
    return plain and x.layout is torch.strided and not x.is_meta and x.numel() > 0


def _usable() -> bool:
    """Whether tensors may be reduced together now: not while a program is traced or inside a transform.

    Replays of a CUDA graph would copy and read the addresses of now.
    """
    if torch.compiler.is_compiling() or is_being_written_down() or inside_transform():
        return False
    return not (CAPTURES and CAPTURES[0]())


def _sort_out(one: Found, listening: Collection[int]) -> dict[View, None]:
    """Counts the parameters of which there is nothing to read; returns the views of which some are `ODD`."""
    odd: dict[View, None] = {}
    there = {*one.rows()}
    for row, x in enumerate(one.xs):
        view = one.block.views[row]
        if x is ODD:
            odd[view] = None
        elif row not in there and view.number in listening:
            monitor = view.monitor()
            if monitor is not None and monitor.absence:
                monitor.counts[monitor.absence] = monitor.counts.get(monitor.absence, 0) + 1
    return odd


def _due(views: Collection[View], stream: object, listening: Collection[int]) -> list[View]:
    """Counts a call of the monitor of each view; returns the views of those that are due."""
    due: list[View] = []
    for view in views:
        monitor = view.monitor()
        if monitor is None or view.number not in listening:
            continue
        gate, counts = monitor.gate, monitor.counts
        if not gate.on:
            continue
        counts["calls"] = counts.get("calls", 0) + 1
        every, eligible = gate.every, gate.eligible
        if every == 1 and gate.active:
            due.append(view)
            continue
        before = eligible.get(stream) if gate.active else None
        if before is not None:  # as `refusal` does, without a call for each monitor
            eligible[stream] = before + 1
            refusal = NOT_DUE if (before + 1) % every else ""
        else:
            refusal = gate.refusal(None, stream)
        if refusal:
            counts[refusal] = counts.get(refusal, 0) + 1
        else:
            due.append(view)
    return due


def _alike(copies: list[Any], xs: list[Any]) -> bool:
    """Whether there are copies with the shapes, the dtypes and the devices of these tensors."""
    if type(None) in {*map(type, copies)} or [*map(_shape, copies)] != [*map(_shape, xs)]:
        return False
    return [*map(_dtype, copies)] == [*map(_dtype, xs)] and [*map(_device, copies)] == [*map(_device, xs)]


def _subtract(befores: list[Tensor], afters: list[Tensor]) -> None:
    """Overwrites the tensors before updates with the updates."""
    small: list[tuple[Tensor, Tensor]] = []
    for before, after in zip(befores, afters, strict=True):
        if after.numel() >= LARGE and after.device.type == "cpu":
            torch.sub(after, before, out=before)
        else:
            small.append((before, after))
    if small:
        befores, afters = map(list, zip(*small, strict=True))
        subtract_all(befores, afters)
        negate_all(befores)


def _nothing() -> None: ...


_owner, _owned, _values = itemgetter(3), attrgetter("_parameters"), methodcaller("values")
_shape, _dtype, _device, _layout = attrgetter("shape"), attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
_STRIDED = {torch.strided}
