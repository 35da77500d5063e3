"""A subrecording as tensors with names, and back: what a file of a recording contains, and the entry of a state dict."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, StorageError
from recorders.recordings.distributed.placement import from_plain, to_plain
from recorders.recordings.recording import Progress, Subrecording
from recorders.recordings.storage.schema import MAX_DEPTH, Entry, Tree
from recorders.recordings.storage.tensors import stored_as
from reducers import RecipeError, Reducer, ReducerError, State, from_recipe, to_recipe
from reducers.core.reducer import registry


class Contents:
    """What is written of a subrecording.

    Attributes:
        tensors: all its tensors, by readable names of which none is used twice.
        kinds: the dtype in which each is stored, and its own.
        states, values: the names in place of the tensors.
        progress: its progress as data; None if it has none.
        placement: its placement as data.
        left_out: which results are not in it, and why; "" if all are.

    Args:
        results: whether to store results; those of a reducer that cannot be stored are stored anyway.
        prefix: what the names of all tensors begin with.

    Raises:
        StorageError: a state is no tensor.
    """

    def __init__(self, part: Subrecording, *, results: bool = True, prefix: str = "") -> None:
        self.tensors: dict[str, Tensor] = {}
        self.kinds: dict[str, tuple[torch.dtype, str]] = {}
        self._prefix = prefix
        self._left_out: list[str] = []
        self.states = {leaf: self._put_state(("state", leaf), state) for leaf, state in part.states.items()}
        self.values = self._put_values(part) if results or part.reducer is None else {}
        self.progress = None if part.progress is None else part.progress.as_data()
        self.placement = {leaf: to_plain(place) for leaf, place in part.placement.items()}
        self.left_out = "; ".join(self._left_out)

    def _put_state(self, path: tuple[str, ...], state: State) -> dict[str, str]:
        return {key: self._put((*path, key), tensor) for key, tensor in state.items()}

    def _put_values(self, part: Subrecording) -> dict[str, Tree]:
        """The results by leaf; what of them cannot be computed or stored is left out, and nothing else."""
        found: dict[str, Tree] = {}
        for leaf in part.leaf_names():
            try:
                result = part.result_of(leaf)
            except Exception as error:
                where = f" of leaf {leaf!r}" if leaf else ""
                self._left_out.append(f"its result{where} cannot be computed: {type(error).__name__}: {error}")
                continue
            if (tree := self._kept(("value", leaf), result)) is not None:
                found[leaf] = tree
        return found

    def _kept(self, path: tuple[str, ...], result: Any) -> Tree | None:
        """Like `_flatten`; None if it cannot be stored, which is noted."""
        try:
            found = self._flatten(path, result)
        except StorageError as error:
            self._left_out.append(str(error))
            return None
        return None if found == {} and len(result) else found

    def _flatten(self, path: tuple[str, ...], result: Any) -> Tree:
        """Adds the tensors of a result; returns the result with names in place of tensors."""
        if isinstance(result, Tensor):
            return self._put(path, result)
        if isinstance(result, Mapping):
            if len(path) > MAX_DEPTH:
                raise StorageError(f"its result is nested deeper than {MAX_DEPTH}")
            if wrong := [key for key in result if not isinstance(key, str)]:
                raise StorageError(f"its result {_readable(path)!r} has the key {wrong[0]!r:.100}; keys must be texts to be stored")
            nodes = {key: self._kept((*path, key), node) for key, node in result.items()}
            return {key: node for key, node in nodes.items() if node is not None}
        if isinstance(result, (bool, int, float, complex)):
            try:
                wide = torch.float64 if isinstance(result, float) else torch.complex128 if isinstance(result, complex) else None
                return self._put(path, torch.tensor(result, dtype=wide, device="cpu"))
            except (OverflowError, RuntimeError, ValueError) as error:
                raise StorageError(f"its result {_readable(path)!r} does not fit a tensor: {error}") from error
        raise StorageError(
            f"its result {_readable(path)!r} is a {type(result).__name__}; only tensors, numbers and mappings of these can be "
            "stored: let the function given to postmap or apply return one"
        )

    def _put(self, path: tuple[str, ...], tensor: Tensor) -> str:
        readable = _readable(path)
        kind = stored_as(tensor, readable)
        wanted = name = self._prefix + readable
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{wanted}#{number}"
        self.tensors[name], self.kinds[name] = tensor, kind
        return name


@functools.lru_cache(maxsize=1024)  # thousands of subrecorders have the same few
def _readable(path: tuple[str, ...]) -> str:
    # Empty leaves and keys are left out; lone surrogates cannot be encoded.
    name = "/".join([str(part) for part in path if part != ""])
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


class Recipes:
    """Recipes of reducers, and the reducers of recipes: thousands of subrecorders share a few."""

    def __init__(self) -> None:
        self._recipes: dict[int, tuple[Reducer, Mapping[str, Any] | str, Mapping[str, int]]] = {}
        self._reducers: dict[str, Reducer | str] = {}
        self.unknown: dict[str, list[str]] = {}
        self._sound: dict[Any, Reducer] = {}  # keeps the reducers alive, and so their ids unique

    def of(self, part: Subrecording) -> tuple[Mapping[str, Any] | str | None, Mapping[str, int]]:
        """The recipe of its reducer, with the versions of states."""
        if part.reducer is None:
            return part.recipe, {}
        if id(part.reducer) not in self._recipes:
            try:
                recipe = to_recipe(part.reducer)
                self._recipes[id(part.reducer)] = (part.reducer, recipe, _versions(recipe))
            except RecipeError:
                self._recipes[id(part.reducer)] = (part.reducer, repr(part.reducer)[:1000], {})
        return self._recipes[id(part.reducer)][1:]

    def reducer(self, entry: Entry) -> Reducer | None:
        """The reducer of an entry; None if it holds a function, or is not known here, of which `unknown` says the reason."""
        recipe = entry.reducer
        if not isinstance(recipe, Mapping):
            return None
        text = json.dumps([recipe, dict(entry.versions)])
        if text not in self._reducers:
            self._reducers[text] = _build(recipe, entry.versions)
        reducer = self._reducers[text]
        if isinstance(reducer, str):
            self.unknown.setdefault(reducer, []).append(entry.name)
            return None
        return reducer

    def check(self, part: Subrecording, where: str) -> None:
        """Raises `CorruptRecordingError` if a state cannot come from the reducer; equal shapes are checked once."""
        reducer = part.reducer
        for leaf, state in part.states.items() if reducer is not None else ():
            kind = id(reducer), tuple((key, tensor.shape, tensor.dtype) for key, tensor in state.items())
            if kind not in self._sound:
                try:
                    reducer.check(state)  # type: ignore[union-attr]
                except ReducerError as error:
                    raise CorruptRecordingError(f"{where} is malformed: the state of leaf {leaf!r:.100}: {error}") from error
                self._sound[kind] = reducer  # type: ignore[assignment]


def _build(recipe: Mapping[str, Any], versions: Mapping[str, int]) -> Reducer | str:
    """The reducer of a recipe, or why there is none."""
    here = _versions(recipe)
    if differing := {kind for kind in {*here, *versions} if here.get(kind, 1) != versions.get(kind, 1)}:
        kind = min(differing)
        saved, read = versions.get(kind, 1), here.get(kind, 1)
        return f"the states of {kind!r:.100} were saved in version {saved}, and this version of the library reads {read}"
    try:
        return from_recipe(recipe)
    # A registered class is constructed from untrusted values, and may raise anything.
    except Exception as error:
        return str(error)


def _versions(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The versions of the states of all reducers in a recipe, by type; those of version 1 are left out."""
    known = {kind: registry[kind].state_version for kind in _types(recipe, 0) if kind in registry}
    return {kind: version for kind, version in known.items() if version != 1}


def _types(recipe: Any, depth: int) -> Iterator[str]:
    if depth < 2 * MAX_DEPTH:
        if isinstance(recipe, Mapping) and isinstance(recipe.get("type"), str):
            yield recipe["type"]
        for item in recipe.values() if isinstance(recipe, Mapping) else recipe if isinstance(recipe, list) else ():
            yield from _types(item, depth + 1)


def rebuilt(entry: Entry, recipes: Recipes, tensor: Callable[[str], Tensor], where: str) -> Subrecording:
    """The subrecording of an entry.

    Args:
        tensor: returns the tensor of a name.
        where: the file, for errors.

    Raises:
        CorruptRecordingError: a state cannot come from the reducer.
    """
    where = f"{where} (subrecorder {entry.name!r})"
    reducer = recipes.reducer(entry)

    states = {leaf: {key: tensor(name) for key, name in names.items()} for leaf, names in entry.states.items()}
    values = {leaf: _unflatten(tree, tensor) for leaf, tree in entry.values.items()}
    progress = None if entry.progress is None else Progress(**entry.progress)
    recipe = entry.reducer if reducer is None else None
    facts = (entry.samples, values, entry.monitor, entry.attr, entry.module)
    placement = {leaf: from_plain(place) for leaf, place in entry.placement.items()}
    part = Subrecording(reducer, states, *facts, recipe=recipe, progress=progress, placement=placement)
    recipes.check(part, where)
    return part


def _unflatten(tree: Tree, tensor: Callable[[str], Tensor]) -> Any:
    """The result whose tensors have these names."""
    return tensor(tree) if isinstance(tree, str) else {key: _unflatten(node, tensor) for key, node in tree.items()}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disables the garbage collector: among thousands of new objects it takes up to half of the time, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
