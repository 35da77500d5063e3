"""Copies of nets in which functions lead to the copy, too.

`deepcopy` leaves functions as they are. One that was put in the place of a `forward`, or is a hook, would call modules of the net
that was copied, and append to the user's lists.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from recorders._torch import hooks_on_forwards

OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes in which `nn.Module` keeps parameters, buffers, modules and hooks."""
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
"""What modules and functions keep things in."""
MOST = 1000
"""The most items of a container that are looked at: what is longer holds data."""


def copied(net: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a net, in which functions refer to the copy where they referred to the net.

    So do methods, partial functions, and objects that hold the net. What such functions keep in lists, dicts and sets, they keep in
    copies of these; and if they are of `__main__`, what they keep in global ones. All else they share.

    Args:
        memo: as for `deepcopy`: the copy of each object, by its id.

    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(2))
    >>> forward = net[0].forward
    >>> net[0].forward = lambda x: 2 * forward(x)
    >>> copied(net, {})(torch.ones(3, 2)).shape, int(net[0].num_batches_tracked)
    (torch.Size([3, 2]), 0)
    """
    made = copy.deepcopy(net, memo)
    rebound = _Rebound(memo)
    for module in made.modules():
        for hooks in hooks_on_forwards(module).values():
            hooks.update({number: rebound(hook) for number, hook in hooks.items()})
        own = {key: value for key, value in vars(module).items() if key not in OF_MODULES}
        vars(module).update({key: rebound(value) for key, value in own.items()})
    return made


class NotApartError(RuntimeError):
    """The copy of a net calls modules of the net itself."""


def names_of(net: nn.Module) -> dict[int, str]:
    """By its id, the name of each module of a net."""
    return {id(module): name for name, module in net.named_modules()}


@contextmanager
def apart_from(names: Mapping[int, str]) -> Iterator[None]:
    """Within it, a call of one of these modules is an error: a function may lead to a net in ways that `copied` does not follow.

    Args:
        names: see `names_of`.
    """
    thread = threading.get_ident()

    def refuse(module: nn.Module, args: Any) -> None:
        if id(module) in names and threading.get_ident() == thread:
            raise NotApartError(
                f"a function or a hook of a copy of the net calls the module {names[id(module)]!r} of the net itself"
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


class _Rebound:
    """Makes of a value one that refers to copies; the value itself if it refers to nothing that was copied.

    Args:
        memo: the copy of each object that has one, by its id.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, tuple[Any, Any]] = {}  # by its id, what was seen, so that it stays alive, and what became of it

    def __call__(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if id(value) in self._made:
            return self._made[id(value)][1]
        self._made[id(value)] = value, value
        made = self._of(value)
        self._made[id(value)] = value, made
        return made

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in CONTAINERS:
            return self._container(value)
        if kind is tuple:
            items = tuple(map(self, value))
            return value if all(one is other for one, other in zip(items, value, strict=True)) else items
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            function, of = self(value.__func__), self(value.__self__)
            return value if function is value.__func__ and of is value.__self__ else MethodType(function, of)
        if kind is functools.partial:
            function, args, keywords = self(value.func), self(value.args), {name: self(one) for name, one in value.keywords.items()}
            return functools.partial(function, *args, **keywords)
        held = {} if kind is ModuleType else getattr(value, "__dict__", {})
        if any(isinstance(one, nn.Module) and id(one) in self._memo for one in held.values()):
            return self._object(value)
        return value

    def _container(self, value: Any) -> Any:
        made = copy.copy(value)
        if len(made) > MOST or isinstance(made, set):
            return made
        for key, one in [*(made.items() if isinstance(made, dict) else enumerate(made))]:
            made[key] = self(one)
        return made

    def _object(self, value: Any) -> Any:
        """One that holds a module; what it holds besides, it shares."""
        try:
            made = copy.copy(value)
            vars(made).update({name: self(one) for name, one in vars(value).items() if id(one) in self._memo or _keeps(one)})
        except Exception:  # what cannot be copied
            return value
        return made

    def _function(self, function: FunctionType) -> Any:
        """The function with other cells, defaults and global values, if any of them refers to what was copied."""
        cells = function.__closure__ or ()
        inside = [cell.cell_contents for cell in cells if _is_filled(cell)]
        inside += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        own = function.__globals__.get("__name__") == "__main__"
        found = {name: self(value) for name, value in _globals_of(function) if own or not _keeps(value)}
        found = {name: value for name, value in found.items() if value is not function.__globals__[name]}
        if not found and all(self(value) is value for value in inside):
            return function
        closure = tuple(CellType(self(cell.cell_contents)) if _is_filled(cell) else CellType() for cell in cells)
        values = {**function.__globals__, **found} if found else function.__globals__
        made = FunctionType(function.__code__, values, function.__name__, self(function.__defaults__), closure or None)
        made.__kwdefaults__ = self(function.__kwdefaults__)
        made.__dict__.update({name: self(value) for name, value in function.__dict__.items()})
        for cell in closure:  # a function that calls itself
            if _is_filled(cell) and cell.cell_contents is function:
                cell.cell_contents = made
        return made


def _keeps(value: Any) -> bool:
    return type(value) in CONTAINERS


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True


def _globals_of(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The global values that a function of the user may read, by name; of functions only those of its own file."""
    values, file = function.__globals__, function.__globals__.get("__name__")
    if not str(file).startswith("torch."):
        for name in _names(function.__code__) & values.keys():
            value = values[name]
            if type(value) is not FunctionType or value.__globals__.get("__name__") == file:
                yield name, value


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names, *(name for one in inner for name in _names(one))}
