"""Selection: finds the modules and parameters of a net that satisfy criteria, with their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import nn

from recorders.capture.contents import modules_in, own_parameters
from recorders.errors import SelectionError, TargetError
from recorders.recordings.display import is_named, listed, shown_name
from reducers.errors import did_you_mean

Names: TypeAlias = "str | re.Pattern[str] | Iterable[str | re.Pattern[str]]"
Excluded: TypeAlias = "str | re.Pattern[str] | type | Iterable[str | re.Pattern[str] | type]"

Match: TypeAlias = Literal["name", "all"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}  # the last is of Fabric
_NAMES = "names, globs such as 'encoder.*' or compiled regular expressions"
_CLASSES = "a module class or several, such as (nn.Linear, nn.Conv2d)"
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass
class Place:
    """A module, or its parameter `attr`, with its first name; further names of the same object are aliases."""

    name: str
    module: nn.Module
    attr: str | None = None
    aliases: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [self.name, *self.aliases]


@dataclass(frozen=True)
class Criteria:
    """What a place must satisfy: every criterion that is given. See `Recorder.modules` for their meaning."""

    types: type | Iterable[type] | None = None
    names: Names | None = None
    indices: int | Iterable[int] | None = None
    exclude: Excluded | None = None
    depth: int | None = None
    leaves: bool = False
    where: Callable[[str, nn.Module], bool] | None = None

    def filter(self, places: list[Place], what: str, *, one_of_two: bool = False, prefix: str = "") -> list[Place]:
        """The places that satisfy every criterion; raises `SelectionError` if there are none, or a name or index does not exist.

        Of one of two nets a name that is excluded need not exist: it may be in the other.
        """
        types = None if self.types is None else _all_of(self.types, "types", (type,), _CLASSES)
        if self.depth is not None and not isinstance(self.depth, int):
            raise TypeError(f"depth={self.depth!r}: give a number of levels below the net")
        if self.where is not None and not callable(self.where):
            raise TypeError(f"where={self.where!r}: give a function of name and module, such as lambda name, module: ...")
        names = None if self.names is None else _all_of(self.names, "names", (str, re.Pattern), _NAMES)
        given = () if self.exclude is None else self.exclude
        excluded = _all_of(given, "exclude", (str, re.Pattern, type), f"{_NAMES}, or module classes")
        not_types = tuple(item for item in excluded if isinstance(item, type))
        not_names = [item for item in excluded if not isinstance(item, type)]
        for pattern in () if one_of_two else not_names:
            known = [shown_name(name) for place in places for name in place.names]
            if isinstance(pattern, str) and not set("*?[") & set(pattern) and not any(_matches(pattern, name) for name in known):
                guess = did_you_mean(pattern, known)
                raise SelectionError(f"exclude={pattern!r} is the name of no {what}; {guess}{_inventory(places, what)}")
        indices = None
        if self.indices is not None:
            indices = {*_all_of(self.indices, "indices", (int,), "one whole number or several, such as (0, 2)")}
        for pattern in names or ():
            if not any(_matches(pattern, name) for place in places for name in place.names):
                known = [shown_name(name) for place in places for name in place.names]
                raise SelectionError(f"no {what} named {_shown(pattern)}; {did_you_mean(pattern, known)}{_inventory(places, what)}")
        if indices is not None:
            indices = {index + len(places) if index < 0 else index for index in indices}
            if wrong := sorted(index for index in indices if not 0 <= index < len(places)):
                raise SelectionError(f"no {what} at {wrong}: indices run from 0 to {len(places) - 1}; {_inventory(places, what)}")
        chosen = [
            place
            for index, place in enumerate(places)
            if (types is None or isinstance(place.module, types))
            and (names is None or any(_matches(pattern, name) for pattern in names for name in place.names))
            and (indices is None or index in indices)
            and not (not_types and isinstance(place.module, not_types))
            and not any(_matches(pattern, name) for pattern in not_names for name in place.names)
            and (self.depth is None or _level(place.name, prefix) <= self.depth)
            and (not self.leaves or _is_leaf(place.module))
            and (self.where is None or self.where(place.name, place.module))
        ]
        if not chosen:
            raise SelectionError(f"the selection {self._given()} matches no {what}; {_inventory(places, what)}")
        return chosen

    def _given(self) -> str:
        given = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        return "(" + ", ".join(f"{name}={value!r}" for name, value in given.items()) + ")"


def _level(name: str, prefix: str) -> int:
    """How deep a module lies in the net: 0 for the net itself."""
    below = name.removeprefix(prefix).strip(".")
    return below.count(".") + bool(below)


def _is_leaf(module: nn.Module) -> bool:
    """Whether it contains no modules, except those that hold the parameters of a quantised layer and are never called."""
    return not any(_is_called(child) for child in modules_in(module).values()) and _is_called(module)


def _is_called(module: nn.Module) -> bool:
    return not (type(module).__name__.endswith("PackedParams") and type(module).__module__.startswith("torch."))


def select_modules(
    net: nn.Module, criteria: Criteria, *, recursive: bool, prefix: str = "", one_of_two: bool = False
) -> list[Place]:
    """The modules of `net` that satisfy `criteria`: of itself and all below if `recursive`, else of its direct children."""
    places: dict[int, Place] = {}
    net = unwrapped(_net(net))
    for name, module in _walk(net, prefix, recursive):
        if recursive or module is not net:
            _add(places, id(module), Place(name, module))
    return criteria.filter(list(places.values()), "module", one_of_two=one_of_two, prefix=prefix)


def select_parameters(net: nn.Module, criteria: Criteria, *, prefix: str = "") -> list[Place]:
    """The parameters of `net` that satisfy `criteria`; `types`, `leaves` and `where` look at the module that owns them."""
    places: dict[int, Place] = {}
    for name, module in _walk(_net(net), prefix, True):
        for attr, parameter in own_parameters(module)[1].items():
            if parameter is not None:
                _add(places, id(parameter), Place(f"{name}.{attr}" if name else attr, module, attr))
    return criteria.filter(list(places.values()), "parameter")


def select_pairs(net_a: nn.Module, net_b: nn.Module, match: Match, criteria: Criteria) -> list[tuple[str, nn.Module, nn.Module]]:
    """The pairs of modules of two nets, each with its name; see `Recorder.pairs`."""
    if match not in ("name", "all"):
        raise ValueError(f"pairs(match={match!r}): choose 'name', for modules of the same name, or 'all', for each with each")
    selected: list[list[Place]] = []
    for which, net in (("net_a", net_a), ("net_b", net_b)):
        try:
            selected.append(select_modules(net, criteria, recursive=True, one_of_two=True))
        except SelectionError as error:
            raise SelectionError(f"pairs: {which}: {error}") from error
    first, second = selected
    if match == "all":
        return [(f"{a.name}~{b.name}", a.module, b.module) for a in first for b in second]
    by_name = {name: place.module for place in second for name in place.names}
    found = [(name, a.module, by_name[name]) for a in first for name in a.names if name in by_name]
    if not found:
        here, there = (listed([place.name for place in places]) for places in selected)
        raise SelectionError(f"no module selected has one name in both nets: net_a has {here}, net_b {there}; try match='all'")
    return found


def _net(net: object) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise TargetError(f"a torch.nn.Module is needed to select from; got {type(net).__name__}: {net!r:.100}")
    return net


def _add(places: dict[int, Place], key: int, place: Place) -> None:
    if key not in places:
        places[key] = place
    elif place.name not in places[key].names:
        places[key].aliases.append(place.name)


def _walk(module: nn.Module, name: str, recursive: bool, above: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Every name of every module, without the names of wrappers, each module before those inside it."""
    inner = unwrapped(module)
    yield name, inner
    for key, child in modules_in(inner).items():
        if id(child) not in above:
            path = f"{name}.{key}" if name else key
            if recursive:
                yield from _walk(child, path, True, (*above, id(inner)))
            else:
                yield path, unwrapped(child)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that `torch.compile`, checkpointing, data parallelism or Fabric wrapped; hooks are put on it."""
    while True:
        key = next((key for key in module._modules.keys() if key in _WRAPPERS), None)  # noqa: SIM118
        if key is None and isinstance(module, _PARALLEL):
            key = "module"
        inner = module._modules.get(key) if key is not None else None
        if inner is None:
            return module
        module = inner


def _all_of(value: Any, argument: str, kinds: tuple[type, ...], wanted: str) -> tuple[Any, ...]:
    """What was given for a criterion, one thing or several; raises `TypeError` if something is of none of these kinds."""
    several = isinstance(value, Iterable) and not isinstance(value, (str, re.Pattern, type))
    found = tuple(value) if several else (value,)
    if not all(isinstance(item, kinds) for item in found):
        raise TypeError(f"{argument}={value!r}: give {wanted}")
    return found


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    if isinstance(pattern, str):
        return is_named(name, pattern)
    return pattern.search(name) is not None


def _shown(pattern: str | re.Pattern[str]) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"/{pattern.pattern}/"


def _inventory(places: list[Place], what: str) -> str:
    kinds = Counter(type(place.module).__name__ for place in places)
    names = [shown_name(place.name) for place in places[:20]]
    more = f" and {len(places) - 20} more" if len(places) > 20 else ""
    return f"there are {len(places)} {what}s: {', '.join(names)}{more}; of types {dict(kinds)}"
