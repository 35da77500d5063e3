"""MonitorOptions: the options that every kind of monitor takes, for type checkers, for help, and checked."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from recorders.errors import TargetError
from recorders.schedule.chosen_steps import Steps
from recorders.schedule.clock import Phase

if TYPE_CHECKING:
    from torch import Tensor

OnError: TypeAlias = Literal["raise", "warn", "disable"]


class MonitorOptions(TypedDict, total=False):
    """The options of all monitors. Other kinds of monitors add some of their own.

    Args:
        train_update: record while training.
        eval_update: record while evaluating.
        phase: what counts as training: "module", if the module is in training mode, or "grad", if gradients are on. With "grad",
            gradients and optimizer steps always count as training.
        prepend: put the hook before those already registered.
        condition: called without arguments; if it returns False, nothing is recorded.
        steps: the steps of the clock in which to record: `range(100, 200)`, `slice(1000, None)`, the steps themselves, or a
            function of the step, called once a step; all steps if None.
        every_step: record all calls in every n-th step. `Recorder.attach` or `Recorder.step` advances the steps of `monitor.clock`.
            Inside compiled graphs all monitors of one clock that choose steps cost one more graph together.
        every: record every n-th call that passed the other gates, beginning with the first. A compiled graph computes the lifts of
            the other calls too, and discards them; steps that are not chosen cost nothing.
        filter_: called with the operands; if it returns False, nothing is recorded. If a callable takes fewer arguments than there
            are operands, it gets the first ones. If it takes `module` or `name` by keyword only (`lambda x, *, name: ...`), it gets
            the module, or the name of the subrecorder. A function of PyTorch or NumPy gets as many as it needs: `torch.abs` one,
            `torch.sub` two; one in C that does not say gets all, and fewer if that is a TypeError. All hold for `map_` and `op_`.
        map_: called with the operands; returns the tensor that the reducer gets, or the tuple of tensors if it takes several.
        op_: called with the operands if `map_` is None; returns the tensor, the number, or the nested tensors
            that the reducer gets.
        given: the name of a value of `Recorder.given`, such as "mask", or several: the reducer gets them after the tensor, in this
            order. Gradients get what was given at their forward.
        on_error: what to do when a callable or the reducer fails: "warn" (once, and once for all monitors of a recorder that were
            made alike; the observation is left out and training goes on),
            "disable" (warn, and take the monitor off) or "raise".
    """

    train_update: bool
    eval_update: bool
    phase: Phase
    prepend: bool
    condition: Callable[[], bool] | None
    steps: Steps | None
    every_step: int
    every: int
    filter_: Callable[..., bool] | None
    map_: Callable[..., Tensor | tuple[Tensor, ...]] | None
    op_: Callable[..., Any] | None
    given: str | Sequence[str]
    on_error: OnError


DEFAULTS: MonitorOptions = {
    "train_update": True,
    "eval_update": True,
    "phase": "module",
    "prepend": False,
    "condition": None,
    "steps": None,
    "every_step": 1,
    "every": 1,
    "filter_": None,
    "map_": None,
    "op_": None,
    "given": (),
    "on_error": "warn",
}


def check_options(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a monitor of this kind, with defaults for those that are not given.

    Raises:
        TypeError: an option does not exist, or is of a wrong type.
        ValueError: an option has a wrong value.
    """
    if unknown := sorted(set(options) - set(DEFAULTS)):
        raise TypeError(f"{kind} got {unknown}; every monitor takes {list(DEFAULTS)}")
    given: dict[str, Any] = {**DEFAULTS, **options}
    for name, counted in {"every": "calls", "every_step": "steps"}.items():
        number = given[name]
        try:
            given[name] = 0 if isinstance(number, bool) else operator.index(number)
        except TypeError:
            given[name] = 0
        if given[name] < 1:
            raise ValueError(f"{kind}({name}={number!r}): {name} is a whole number of {counted}, at least 1")
    if given["phase"] not in ("module", "grad"):
        raise ValueError(f"{kind}(phase={given['phase']!r}): choose 'module' or 'grad'")
    if given["on_error"] not in ("raise", "warn", "disable"):
        raise ValueError(f"{kind}(on_error={given['on_error']!r}): choose 'raise', 'warn' or 'disable'")
    for name in ("train_update", "eval_update", "prepend"):
        if not isinstance(given[name], bool):
            raise TypeError(f"{kind}({name}={given[name]!r}): {name} is True or False")
    for name in ("condition", "filter_", "map_", "op_"):
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"{kind}({name}={given[name]!r}): {name} must be callable")
    names = given["given"]
    given["given"] = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if not all(isinstance(name, str) and name.isidentifier() for name in given["given"]):
        raise TypeError(f"{kind}(given={names!r}): given is the name of a value of Recorder.given, such as 'mask', or several")
    return given


def spell_out(cls: type, root: type) -> dict[str, Any]:
    """Gives `cls` a signature with all options instead of `**options`; returns the options with their defaults."""
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" in owner.__dict__ and issubclass(owner, root):
            for name, parameter in inspect.signature(owner.__dict__["__init__"]).parameters.items():
                if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                    found.setdefault(name, parameter)
    for name, default in DEFAULTS.items():
        annotation: Any = MonitorOptions.__annotations__[name]
        text = getattr(annotation, "__forward_arg__", annotation)
        found.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=text))
    signature = inspect.Signature(sorted(found.values(), key=lambda parameter: parameter.kind))
    cls.__signature__ = signature  # type: ignore[attr-defined]
    return {name: parameter.default for name, parameter in found.items() if name not in ("reducer", "attr", "module")}


def as_names(names: str | Sequence[str], kind: str, what: str) -> str | tuple[str, ...]:
    """The names that a monitor of this kind watches; raises `TargetError` if they are no texts."""
    several = [names] if isinstance(names, str) else names
    if not isinstance(several, Sequence) or not several or not all(isinstance(name, str) and name for name in several):
        raise TargetError(f"{kind} needs the name of {what}, with dots for nested ones, after the reducer; got {names!r}")
    return names if isinstance(names, str) else tuple(names)
