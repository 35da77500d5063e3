"""Monitors of attributes of a module: their values, and how a forward changes them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from recorders.capture.calls import Call
from recorders.capture.operands import as_operand, items
from recorders.errors import OperandError, TargetError
from recorders.monitors.base import Monitor
from recorders.monitors.constructor import MonitorConstructor
from recorders.monitors.options import MonitorOptions, as_names
from recorders.monitors.record import NothingToRecordError
from reducers import Reducer
from reducers.errors import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class _AttributeMonitor(Monitor):
    """A monitor that reads attributes of its module, by dot path."""

    of_module = True

    def __init__(
        self, reducer: Reducer, attr: str | Sequence[str], module: nn.Module | None = None, **options: Unpack[MonitorOptions]
    ) -> None:
        self.attr = as_names(attr, type(self).__name__, "an attribute")
        super().__init__(reducer, module, **options)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.attr,) if isinstance(self.attr, str) else self.attr

    def applies(self, module: nn.Module) -> bool:
        return all(_parametrized(module, name) or _has(module, name) for name in self._names)

    def _check(self, module: nn.Module) -> None:
        for name in self._names:
            self._check_readable(module, name)
            self._read(module, name)

    def _check_readable(self, module: nn.Module, name: str) -> None:
        """Refuses a parametrized tensor: reading computes it, which may change the model (by a step of power iteration, say)."""
        if _parametrized(module, name):
            owner_name, _, leaf = name.rpartition(".")
            place = f"{owner_name}.parametrizations.{leaf}" if owner_name else f"parametrizations.{leaf}"
            raise TargetError(
                f"{self.describe(module)}: {name!r} is parametrized, and reading it would compute it anew and may change the "
                f"model; put a ForwardMonitor on the module {place!r} instead, which returns it whenever it is computed"
            )

    def _read(self, module: nn.Module | None, name: str) -> Any:
        try:
            return as_operand(operator.attrgetter(name)(module))
        except AttributeError:
            known = [] if module is None else beside(module, name)
            raise TargetError(
                f"{self.describe(module)}: {type(module).__name__} has no attribute {name!r}; {did_you_mean(name, known)}it has "
                f"{known}. If forward sets it, give it a first value (such as None) before the monitor is put on"
            ) from None


def beside(module: nn.Module, name: str) -> list[str]:
    """The attributes in the place of `name`, a dot path, with their paths; those of `module` itself if there is no such place."""
    owner_name = name.rpartition(".")[0]
    owner = operator.attrgetter(owner_name)(module) if owner_name and _has(module, owner_name) else module
    path = f"{owner_name}." if owner is not module else ""
    held = {key for kind in ("_parameters", "_buffers", "_modules") for key in getattr(owner, kind, ())}
    return sorted(path + key for key in held | {key for key in getattr(owner, "__dict__", ()) if key[0] != "_"} - {"training"})


def _has(module: nn.Module, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def _parametrized(module: nn.Module, name: str) -> bool:
    """Whether `torch.nn.utils.parametrize` computes the attribute; the attribute is not read."""
    owner_name, _, leaf = name.rpartition(".")
    if owner_name and not _has(module, owner_name):
        return False
    owner = operator.attrgetter(owner_name)(module) if owner_name else module
    return isinstance(owner, nn.Module) and is_parametrized(owner, leaf)


class StateOptions(MonitorOptions, total=False):
    """The options of `StateMonitor`."""

    as_prehook: bool


class StateMonitor(_AttributeMonitor):
    """Records attributes of a module after its forward (before it with `as_prehook=True`). Operands: the attributes, in order.

    Args:
        attr: name or dot path; or several, each with a state of its own unless `map_` or `op_` brings them together.
        as_prehook: read before the forward instead of after it.

    An attribute that is None is not recorded; Python numbers become tensors.

    >>> import torch
    >>> from reducers import Last
    >>> norm = torch.nn.BatchNorm1d(1)
    >>> monitor = StateMonitor(Last(), "num_batches_tracked", norm)
    >>> _ = norm(torch.ones(4, 1))
    >>> monitor.peek()
    tensor(1)
    """

    def __init__(
        self,
        reducer: Reducer,
        attr: str | Sequence[str],
        module: nn.Module | None = None,
        *,
        as_prehook: bool = False,
        **options: Unpack[MonitorOptions],
    ) -> None:
        self.as_prehook = as_prehook
        self.sites = ("forward_pre",) if as_prehook else ("forward",)
        super().__init__(reducer, attr, module, **options)

    if TYPE_CHECKING:  # the same function, with types for the options of this kind

        @classmethod
        def partialconstructor(cls, reducer: Reducer, **options: Unpack[StateOptions]) -> MonitorConstructor[Self]: ...

    def operands(self, call: Call) -> tuple[Any, ...]:
        return tuple(self._read(call.module, name) for name in self._names)

    def _default(self, *operands: Any) -> Any:
        if isinstance(self.attr, str):
            return operands[0]
        present = {name: operand for name, operand in zip(self.attr, operands, strict=True) if operand is not None}
        return present or None


class DifferenceMonitor(_AttributeMonitor):
    """Records how a forward changes an attribute of its module. Operands: after, before.

    The default is `after - before`, leaf by leaf if the attribute is a tuple, list, dict or dataclass. If one of the two is None or
    lacks a leaf, that counts as zeros; if both are None, nothing is recorded. All tensors of the value before are cloned, so that
    changes in place are found. Booleans and integers are subtracted as int64.

    >>> import torch
    >>> from reducers import Last
    >>> norm = torch.nn.BatchNorm1d(1, momentum=0.5)
    >>> monitor = DifferenceMonitor(Last(), "running_mean", norm)
    >>> _ = norm(torch.tensor([[2.0], [6.0]]))
    >>> monitor.peek()
    tensor([2.])
    """

    sites = ("around_forward",)
    operand_names = ("after", "before")

    def __init__(self, reducer: Reducer, attr: str, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        if not isinstance(attr, str):
            raise TargetError(f"DifferenceMonitor watches one attribute; got {attr!r}: make one monitor for each")
        super().__init__(reducer, attr, module, **options)

    def watched(self, call: Call) -> Any:
        return self._read(call.module, self.attr)

    def operands(self, call: Call) -> tuple[Any, ...]:
        return self.watched(call), call.before

    def _inputs(self, operands: tuple[Any, ...]) -> dict[str, tuple[Tensor, ...]]:
        after, before = operands
        if self.filter_ is None and after is None and before is None:
            raise NothingToRecordError("operand was None")
        return super()._inputs(_with_zeros(after, before))

    def _default(self, *operands: Any) -> Any:
        difference = _difference(*operands)
        return operands[0] if difference is None else difference  # without a tensor in it, which is an error unless it is None


def _difference(after: Any, before: Any) -> Any:
    """Returns `after - before`, leaf by leaf if nested; None if there is no tensor. Missing leaves and None count as zeros."""
    after, before = _with_zeros(after, before)
    if isinstance(after, Tensor) and isinstance(before, Tensor):
        if not (after.is_nested or before.is_nested or _fit(after, before)):
            raise OperandError(_RESHAPED)  # while a graph is traced, the error of the subtraction could not be caught
        after, before = (x if x.is_floating_point() or x.is_complex() else x.long() for x in (after, before))  # 1 - 2 is no uint8
        return after - before
    here, there = dict(items(after)), dict(items(before))
    differences = {key: _difference(here.get(key), there.get(key)) for key in {**here, **there}}
    return {key: difference for key, difference in differences.items() if difference is not None} or None


def _fit(after: Tensor, before: Tensor) -> bool:
    """Whether one can be subtracted from the other."""
    return all(a == b or a == 1 or b == 1 for a, b in zip(after.shape[::-1], before.shape[::-1], strict=False))


_RESHAPED = "the attribute has another shape than before, so there is no difference: make one with op_=lambda after, before: tensor"


def _with_zeros(after: Any, before: Any) -> tuple[Any, Any]:
    """Returns both; if one is None and the other a tensor, with zeros for None."""
    if isinstance(after, Tensor) and before is None:
        return after, torch.zeros_like(after)
    if isinstance(before, Tensor) and after is None:
        return torch.zeros_like(before), before
    return after, before
