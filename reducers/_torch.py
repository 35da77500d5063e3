"""What both packages ask of PyTorch beyond its public API, and what they tell its compiler, which nothing here imports.

A private API may go in any release. So each is declared, with what is off without it, and reached by its name when it is needed:
`reach` raises an error that tells both, and `or_else` returns something that does without. What was missed is told by `missing`.
`recorders/_torch` declares all of them.

Dynamo takes seconds to import. What it must know before it traces a program waits until somebody imports it; see
`when_dynamo_is_imported`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_declared: dict[str, str] = {}
_missing: dict[str, str] = {}


class MissingInTorchError(RuntimeError):
    """This torch no longer has a private API; the message tells which one, and what is off without it."""


def declare(needs: Mapping[str, str]) -> None:
    """Declares private APIs by name, each with what is off without it; "" if something public does the same."""
    _declared.update(needs)


def declared() -> Mapping[str, str]:
    """Returns every private API that was declared, with what is off without it."""
    return dict(_declared)


def missing() -> tuple[str, ...]:
    """Returns what was asked for so far and is not in this torch: the names, and what is off."""
    return tuple(_missing.values())


def reach(name: str) -> Any:
    """Returns the private API of this name, such as "torch._C._len_torch_dispatch_stack".

    Raises:
        MissingInTorchError: this torch does not have it.
    """
    off = _declared[name]
    try:
        return _found(name)
    except (ImportError, AttributeError):
        message = f"torch {torch.__version__} has no {name}: {off or 'there is another way'}"
        if off:
            _missing.setdefault(name, message)
        raise MissingInTorchError(message) from None


def or_else(name: str, fallback: Any) -> Any:
    """Returns the private API of this name; `fallback` if this torch does not have it."""
    try:
        return reach(name)
    except MissingInTorchError:
        return fallback


def _found(name: str) -> Any:
    found: Any = torch
    path, *parts = name.split(".")
    for part in parts:
        path += "." + part
        if not hasattr(found, part) and isinstance(found, ModuleType):
            import_module(path)
        found = getattr(found, part)
    return found


def cpu_library() -> ctypes.CDLL:
    """Returns the library of PyTorch that has its functions in C++, and those of the OpenMP it runs on.

    Raises:
        OSError: there is none.
    """
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def constant_in_graphs(function: _F) -> _F:
    """Lets the compiler call `function` while it traces a program, and take what it returns for a constant.

    `torch.compiler.assume_constant_result` sets this attribute, too, but imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    when_dynamo_is_imported(lambda: torch.compiler.assume_constant_result(function))  # type: ignore[no-untyped-call]
    return function


def in_graphs(function: _F) -> _F:
    """Makes calls of `function` nodes of a graph, into which Dynamo does not look; also those of functions that return nothing."""
    torch.fx.has_side_effect(function)
    when_dynamo_is_imported(lambda: torch.compiler.allow_in_graph(function))  # type: ignore[no-untyped-call]
    return function


_DYNAMO = "torch._dynamo"
_waiting: list[Callable[[], object]] = []


def dynamo_is_imported() -> bool:
    """Whether somebody has imported Dynamo, or is about to."""
    return _DYNAMO in sys.modules


def when_dynamo_is_imported(call: Callable[[], object]) -> None:
    """Calls `call` once Dynamo is imported, which is before it traces anything; now, if it is imported already."""
    _waiting.append(call)
    tell_dynamo()


def tell_dynamo() -> bool:
    """Calls what waits for Dynamo, if somebody has imported it: also if an import hook of others kept us from noticing."""
    if _waiting and dynamo_is_imported():
        import_module(_DYNAMO)  # waits for another thread that is about to
        for call in list(_waiting):
            try:
                call()
            except MissingInTorchError:
                pass
            except Exception as error:  # the user's import must not fail
                _missing.setdefault(repr(call), f"torch {torch.__version__}: its compiler was not told all: {error!r}")
            with suppress(ValueError):  # another thread calls it, too
                _waiting.remove(call)
    return True


tell_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Finder:
    """Finds Dynamo as all other finders do, and notices when it is imported. It stays first on `sys.meta_path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the spec of Dynamo; None for all else."""
        if name != _DYNAMO:
            return None
        others = [finder for finder in sys.meta_path if finder is not _Finder and hasattr(finder, "find_spec")]
        spec = next((found for other in others if (found := other.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                tell_dynamo()

            loader.exec_module = load_and_tell
        return spec


if not dynamo_is_imported():
    sys.meta_path.insert(0, _Finder)
