"""The table of an optimizer: which of its parameters the monitors watch, and where their rows are, found once for many steps.

To notify each of thousands of monitors takes longer than to reduce their small tensors. So a table knows which monitors watch the
parameters of an optimizer, and which of these are reduced together. Each step compares in a few passes what the table was made
from: the parameters of the watched modules, those of the optimizer, and the kinds of the tensors that are read. If one of them
differs, a new table is made. Monitors that ask for more than steps are notified one by one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders._torch import copy_all, graph_task, inside_transform, is_being_traced, negate_all, subtract_all
from recorders.capture import entering
from recorders.capture.context import as_monitor
from recorders.capture.cuda_graphs import CAPTURES
from recorders.capture.entering import failure_of
from recorders.capture.switching import SWITCHING, forget
from recorders.ring.rows import LOCK, ParameterRows, RowBlock
from recorders.schedule.stopwatch import note_elements

HERE = "the hook on optimizers"
NOT_DUE = "not due (every)"
GRADIENTS, VALUES, CHANGE = "gradients", "values", "change"
"""When a monitor reads: when the gradients are final, after the step, or before it and after it."""
ODD = object()
"""What is read of a parameter of which the monitor itself has to be asked."""
LARGE = 1 << 15  # elements; a larger tensor on the CPU is subtracted by itself, in one pass instead of two

Registered: TypeAlias = "Mapping[int, tuple[weakref.ref[nn.Module], weakref.ref[Any]]]"
Entry: TypeAlias = tuple[int, int, str, int]
"""A parameter of a monitor: the number of the monitor, its place among those, the path, and the id of the parameter."""


class Reading(NamedTuple):
    """What monitors read of the parameters in a step. Those with equal readings are read together.

    Attributes:
        when: one of `GRADIENTS`, `VALUES` and `CHANGE`.
        read: returns for each parameter a tensor, None if there is nothing, or `ODD`.
        together: returns for all parameters after a step, and as they were before it, one number each, which is recorded in place
            of their change; None if that is. It may overwrite the latter.
    """

    when: str
    read: Callable[[Sequence[Any], Optimizer], Sequence[Any]]
    together: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] | None = None


class Watched:
    """All parameters that monitors of steps watch, and in which modules they are.

    Attributes:
        moments: when anything is read of them.
    """

    def __init__(self, registered: Registered) -> None:
        self._entries: dict[int, list[Entry]] = {}  # by the id of the parameter
        self._nested: list[tuple[Any, Any, list[Any]]] = []  # monitors of parameters of modules inside theirs, and of TorchScript
        self._backward, self.moments = -1, set[str]()
        owners: dict[int, nn.Module] = {}
        for number, (module_ref, ref) in registered.items():
            module, monitor = module_ref(), ref()
            if module is None or monitor is None or monitor.reading is None:
                continue
            there: list[Any] = []
            failure_of(monitor._fail, _look, there, monitor, module)
            owners |= {id(module): module, **{id(owner): owner for owner, _, _ in there}}
            self.moments.add(monitor.reading.when)
            for place, (_, path, parameter) in enumerate(there):
                self._entries.setdefault(id(parameter), []).append((number, place, path, id(parameter)))
            if any(owner is not module or not _has_plain_parameters(owner) for owner, _, _ in there):
                self._nested.append((module_ref, ref, [*map(_ids, there)]))
        plain = [owner for owner in owners.values() if _has_plain_parameters(owner)]
        self._modules = [*map(weakref.ref, plain)]
        self._contents = _contents(plain)

    def holds(self) -> bool:
        """Whether all parameters are where they were. In one backward, in which many optimizers may step, it is compared once."""
        backward = graph_task()
        if backward > 0 and backward == self._backward:  # 0: the first, or one of which PyTorch does not tell
            return True
        modules = [*map(_target, self._modules)]
        if None in modules or _contents(modules) != self._contents:
            return False
        for module_ref, ref, ids in self._nested:
            module, monitor = module_ref(), ref()
            if module is not None and monitor is not None and [*map(_ids, monitor.parameters_of(module))] != ids:
                return False
        self._backward = backward
        return True

    def among(self, ids: Collection[int]) -> list[Entry]:
        """Where these parameters are, in the order of the monitors."""
        return sorted([entry for key in ids if key in self._entries for entry in self._entries[key]])


class View:
    """A monitor in a table.

    Attributes:
        leaves: the path, and the position among those of the optimizer, of its parameters.
    """

    __slots__ = ("leaves", "module", "monitor", "number")

    def __init__(self, number: int, module: weakref.ref[nn.Module], monitor: weakref.ref[Any]) -> None:
        self.number, self.module, self.monitor = number, module, monitor
        self.leaves: list[tuple[str, int]] = []

    def ask(self, method: str, *args: Any) -> Exception | None:
        """Calls a method of the monitor with its module; returns what it raised because the user asks for it."""
        module, monitor = self.module(), self.monitor()
        return None if module is None or monitor is None else failure_of(monitor._fail, getattr(monitor, method), module, *args)


class Found:
    """What is read for a block in a step.

    Attributes:
        xs: for each row an observation, or None.
        due: the rows that have one; None if all have.
    """

    def __init__(self, block: RowBlock, parameters: list[Any], optimizer: Optimizer) -> None:
        self.block, self.xs = block, block.reading.read([parameters[position] for position in block.positions], optimizer)
        self.due: list[int] | None = None
        if not _ABSENT.isdisjoint(map(type, self.xs)):
            self.due = [row for row, x in enumerate(self.xs) if x is not None and x is not ODD]

    def rows(self) -> Sequence[int]:
        """The rows that have an observation."""
        return range(len(self.xs)) if self.due is None else self.due

    def of_due(self, xs: Sequence[Any]) -> list[Any]:
        """Returns those of the rows that have an observation."""
        return [*xs] if self.due is None else [xs[row] for row in self.due]

    def only(self, views: Collection[View]) -> None:
        """Leaves out the rows of other views than these."""
        self.due = [row for row in self.rows() if self.block.views[row] in views]
        there = {*self.due}
        self.xs = [x if row in there else None for row, x in enumerate(self.xs)]

    def copy(self) -> bool:
        """Copies the parameters that are due into memory of the monitors, and keeps none of them; returns whether they fit."""
        xs, copies, fits = self.of_due(self.xs), self._copies(), True
        if not alike(copies, xs):
            fits = self.block.fits(xs)
            for place, (row, x) in enumerate(zip(self.rows(), xs, strict=True)):
                ref, path = self.block.leaves[row]
                monitor = ref()
                copies[place] = torch.empty_like(x.detach()) if monitor is None else monitor.memory(path, x)
        self.xs = [None] * len(self.xs)
        copy_all(copies, xs)
        return fits

    def change(self, parameters: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Takes the copies as the observations; returns them, and the parameters. None if another thread took monitors off, or the
        step changed the shape of a parameter.
        """
        now, copies = self.of_due([parameters[position] for position in self.block.positions]), self._copies()
        if not alike(copies, now):
            return None
        if self.due is None:
            self.xs = copies
        else:
            self.set(copies)
        return copies, now

    def set(self, xs: Sequence[Any]) -> None:
        """Takes these as the observations of the rows that have one."""
        self.xs = [*xs] if self.due is None else [None] * len(self.xs)
        for row, x in zip(self.due or (), xs, strict=False):
            self.xs[row] = x

    def _copies(self) -> list[Any]:
        """What the monitors keep of the parameters that are due; None if there is no memory yet."""
        found: list[Any] = []
        for ref, path in self.of_due(self.block.leaves):
            monitor = ref()
            found.append(None if monitor is None else monitor.before.get(path))
        return found


class Table:
    """What the monitors read of the parameters of an optimizer. It holds monitors and rows weakly.

    Attributes:
        positions: of the parameters in the optimizer, by their ids.
        entries: where they are, as `Watched.among` returns it.
        watched: where they were found last.
        stale: whether to make a new table in the next step.
        moments: when anything is read.
        views: of the monitors whose observations are reduced together, by when they read; those of others are in `alone`.
    """

    def __init__(self, registered: Registered, watched: Watched, parameters: list[Any], optimizer: Optimizer) -> None:
        self.ids, self.watched, self.stale = [*map(id, parameters)], watched, False
        self.entries = watched.among(self.ids)
        self.positions = {key: position for position, key in enumerate(self.ids)}
        self.blocks: dict[str, list[RowBlock]] = {GRADIENTS: [], VALUES: [], CHANGE: []}
        self.views: dict[str, dict[View, None]] = {GRADIENTS: {}, VALUES: {}, CHANGE: {}}
        self.alone: dict[str, list[View]] = {GRADIENTS: [], VALUES: [], CHANGE: []}
        self._rows: Callable[[], ParameterRows | None] = _nothing
        views: dict[int, View] = {}
        for number, _, path, key in self.entries:
            view = views.get(number) or views.setdefault(number, View(number, *registered[number]))
            view.leaves.append((path, self.positions[key]))
        blocks: dict[Any, RowBlock] = {}
        read: dict[Reading, Sequence[Any]] = {}
        for view in views.values():
            monitor = view.monitor()
            if monitor is None:
                continue
            reading: Reading = monitor.reading
            joins = monitor.joins
            if joins and reading not in read:
                read[reading] = reading.read(parameters, optimizer)
            if joins and self._join(view, monitor.reducer, reading, read[reading], parameters, blocks):
                self.views[reading.when][view] = None
            else:
                self.alone[reading.when].append(view)
        self._all = [*blocks.values()]
        for block in self._all:
            self.blocks[block.reading.when].append(block)
        self.moments = {moment for moment in self.views if self.blocks[moment] or self.alone[moment]}

    def _join(
        self, view: View, reducer: Any, reading: Reading, xs: Sequence[Any], parameters: list[Any], blocks: dict[Any, RowBlock]
    ) -> bool:
        """Gives the leaves of a monitor rows, if they can be reduced together with others; returns whether they can."""
        likes = [parameters[at] if xs[at] is None or xs[at] is ODD else xs[at] for _, at in view.leaves]
        if not all(accepts(like) and (reading.when != CHANGE or like.is_floating_point()) for like in likes):
            return False
        for (path, position), like in zip(view.leaves, likes, strict=True):
            key: Any = (reading, reducer, like.dtype, like.device)
            try:
                hash(key)
            except TypeError:  # the reducer holds something that has no hash
                key = (reading, id(reducer), like.dtype, like.device)
            block = blocks.get(key) or blocks.setdefault(key, RowBlock(len(blocks), reading, reducer, like))
            block.add(view, path, position, like)
        return True

    def elements(self, parameters: list[Any]) -> dict[int, int]:
        """The number of elements that each monitor watches, by its `id`."""
        views = chain(*self.views.values(), *self.alone.values())
        return {id(view.monitor()): sum(parameters[at].numel() for _, at in view.leaves) for view in views}

    def settle(self, moment: str, found: list[Found], stream: object, listening: Collection[int]) -> Iterable[View]:
        """Counts the calls of monitors, and leaves out what is not due; returns the views of those that must be asked."""
        views, odd, all_there = self.views[moment], dict[View, None](), True
        for one in found:
            all_there = all_there and one.due is None
        if not all_there:
            odd, views = _sort_out(found, listening)
        due = _due(views, stream, listening)
        if len(due) < len(self.views[moment]):
            for one in found:
                one.only({*due})
            for view in self.views[CHANGE].keys() - due if moment == CHANGE else ():
                if (monitor := view.monitor()) is not None:
                    for path, _ in view.leaves:
                        monitor.before.pop(path, None)  # memory is for steps that are due
        return odd

    def record(self, found: list[Found], copied: Sequence[Found], changes: Sequence[Any]) -> Exception | None:
        """Records what was read, at once, when copies were made and changes computed; returns what the user asks to be raised."""
        failed: list[Found] = []
        raised = failure_of(HERE, as_monitor, self._write, found, copied, changes, failed)
        for one in failed:  # each by itself, so that only those at fault are told of
            self.stale = True
            for row in one.rows():
                raised = one.block.views[row].ask("record_leaf", one.block.leaves[row][1], one.xs[row]) or raised
        return raised

    def _write(self, found: list[Found], copied: Sequence[Found], changes: Sequence[Any], failed: list[Found]) -> None:
        with LOCK:
            for one in copied:
                self.stale = not one.copy() or self.stale
            for one, befores, afters in changes:
                if one.block.reading.together is None:
                    subtract(befores, afters)
                else:
                    one.set(one.block.reading.together(afters, befores).unbind())
            # of other kinds than before
            failed += [one for one in found if not one.block.reading.together and not one.block.fits(one.of_due(one.xs))]
            if len(failed) < len(found):
                rows = self._rows()
                if rows is None:
                    rows = ParameterRows.of(self._all)
                    self._rows = weakref.ref(rows)
                failed += rows.write([one for one in found if one not in failed] if failed else found)


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
        forget(self.listening, number)  # first: of what is interrupted in between, nobody may be notified
        self.registered.pop(number, None)

    def observe(self, step: Any, optimizer: Optimizer, keeper: Optimizer, moments: Sequence[str]) -> None:
        """Records what is read at these moments of a step, and copies the parameters whose change is read after it.

        Args:
            step: the `Step` of `recorders.schedule.steps`.
            keeper: the optimizer that keeps the state.

        Raises:
            Exception: what the user asks for.
        """
        before, copied, notified, watched = step.table, step.copied, step.notified, self._watched
        reads = watched is None or not watched.moments.isdisjoint(moments)
        parameters = step.own() if reads or copied or notified else []
        if not parameters:
            return
        table, found = self._read(step, optimizer, keeper, parameters, moments) if reads else (before, {})
        if entering.timing is not None and reads:
            note_elements(table.elements(parameters))
        fits = table is before and (reads or [*map(id, parameters)] == table.ids)
        step.table, step.copied, step.notified, failed = table, [], [], None
        together, changes = list[Found](), list[Any]()
        for view in notified:
            failed = view.ask("changed", table.positions) or failed
        for one in copied:
            change = one.change(parameters) if fits else None
            if change is not None:
                changes.append((one, *change))
                together.append(one)
                continue
            for row in one.rows():
                failed = one.block.views[row].ask("changed", table.positions, one.block.leaves[row][1]) or failed
        for moment in moments if reads else ():
            asked = [*table.alone[moment]]
            if moment in found:
                asked += table.settle(moment, found[moment], weakref.ref(keeper), self.listening)
                for one in found[moment]:
                    if one.due is None or one.due:
                        (step.copied if moment == CHANGE else together).append(one)
            elif not step.usable:
                asked += table.views[moment]
            for view in asked:
                if view.number in self.listening:
                    leaves = [(path, parameters[position]) for path, position in view.leaves]
                    failed = view.ask("notified", keeper, leaves) or failed
                    step.notified += [view] if moment == CHANGE else []
        if together or step.copied:
            failed = table.record(together, step.copied, changes) or failed
        if failed is not None:
            raise failed

    def _read(
        self, step: Any, optimizer: Optimizer, keeper: Optimizer, parameters: list[Any], moments: Sequence[str]
    ) -> tuple[Table, dict[str, list[Found]]]:
        """Returns the table of an optimizer, and what is read now, by moment."""
        table = self._find(optimizer, keeper, parameters)
        if table.moments.isdisjoint(moments):
            return table, {}
        step.usable = step.usable or _usable()
        found: dict[str, list[Found]] = {}
        for moment in moments if step.usable else ():
            for block in table.blocks[moment]:
                found.setdefault(moment, []).append(Found(block, parameters, keeper))
        return table, found

    def _find(self, optimizer: Optimizer, keeper: Optimizer, parameters: list[Any]) -> Table:
        """Returns the table of an optimizer, made anew if it does not fit any more."""
        watched, table = self._watched, self._tables.get(optimizer)
        if watched is None or not watched.holds():
            watched = self._watch()
        ids = [*map(id, parameters)]
        if (
            table is None
            or table.stale
            or table.ids != ids
            or (table.watched is not watched and table.entries != watched.among(ids))
        ):
            table = self._tables[optimizer] = Table(self.registered, watched, parameters, keeper)
        table.watched = watched
        return table

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


def alike(copies: list[Any], xs: list[Any]) -> bool:
    """Whether there are copies with the shapes, the dtypes and the devices of these tensors."""
    if type(None) in {*map(type, copies)} or [*map(_shape, copies)] != [*map(_shape, xs)]:
        return False
    return [*map(_dtype, copies)] == [*map(_dtype, xs)] and [*map(_device, copies)] == [*map(_device, xs)]


def _usable() -> bool:
    """Whether tensors may be reduced together now: not while a program is traced or inside a transform.

    Replays of a CUDA graph would copy and read the addresses of now.
    """
    if torch.compiler.is_compiling() or is_being_traced() or inside_transform():
        return False
    return not (CAPTURES and CAPTURES[0]())


def _sort_out(found: list[Found], listening: Collection[int]) -> tuple[dict[View, None], dict[View, None]]:
    """Counts the parameters of which there is nothing to read; returns the views that are `ODD`, and the others that have any."""
    odd, there = dict[View, None](), dict[View, None]()
    for one in found:
        for view, x in zip(one.block.views, one.xs, strict=True):
            if x is ODD:
                odd[view] = None
            elif x is not None:
                there[view] = None
            elif view.number in listening:
                monitor = view.monitor()
                if monitor is not None and monitor.absence:
                    monitor.counts[monitor.absence] = monitor.counts.get(monitor.absence, 0) + 1
    return odd, {view: None for view in there if view not in odd}


def _due(views: Collection[View], stream: object, listening: Collection[int]) -> list[View]:
    """Counts a call of the monitor of each view; returns the views of those that are due."""
    due: list[View] = []
    for view in views:
        monitor = view.monitor()
        if monitor is None or view.number not in listening:
            continue
        gate, counts = monitor.gate, monitor.counts
        counts["calls"] = counts.get("calls", 0) + 1
        refusal = "" if gate.open else gate.refusal(None, stream)
        if refusal:
            counts[refusal] = counts.get(refusal, 0) + 1
        else:
            due.append(view)
    return due


def subtract(befores: list[Tensor], afters: list[Tensor]) -> None:
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


def _look(there: list[Any], monitor: Any, module: nn.Module) -> None:
    there += monitor.parameters_of(module)


def _ids(place: tuple[nn.Module, str, nn.Parameter]) -> tuple[int, str, int]:
    return id(place[0]), place[1], id(place[2])


def _has_plain_parameters(module: nn.Module) -> bool:
    """Whether a module keeps its parameters in a dict; one of TorchScript keeps them in C++."""
    return isinstance(module._parameters, dict)


def _contents(modules: Iterable[Any]) -> tuple[list[str], list[int]]:
    """Returns the names and the ids of the parameters that modules own."""
    owned = [*map(_owned, modules)]
    return [*chain.from_iterable(owned)], [*map(id, chain.from_iterable(map(_values, owned)))]


_target: Any = weakref.ref.__call__
_owned, _values = attrgetter("_parameters"), methodcaller("values")
_shape, _dtype, _device = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
_ABSENT = {type(None), type(ODD)}
