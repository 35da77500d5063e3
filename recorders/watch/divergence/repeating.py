"""repeat(): the first operator of a step that gives something else if the step is done again from the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import eagerly, in_place_of_operators
from recorders.capture.context import unrecorded
from recorders.errors import TargetError
from recorders.watch.divergence.distance import distance
from recorders.watch.divergence.first_operator import first_unlike
from recorders.watch.divergence.operators import OperatorCall, OperatorLog, digest
from recorders.watch.divergence.restoring import Restored
from recorders.watch.divergence.result import Divergence

_OTHER_OPERATORS = "the runs call different operators"


def repeat(
    step: Callable[[], object], n: int = 2, *, modules: nn.Module | torch.optim.Optimizer | Iterable[Any] = ()
) -> Divergence:
    """Calls a step several times from the same state; returns the first operator that is not deterministic, false if all are.

    Before each call the random numbers of PyTorch, Python and NumPy are those of the first, and so is everything in `modules`;
    after the last call they are as before. Each operator of the forward and of the backward is seen, and a 64-bit hash of the bits
    of its outputs is kept. So NaN equals NaN, and a difference of one bit is found. Compiled code runs eagerly. If a run differs,
    the step is called twice more, to see by how much, and whether already what the operator reads differs. If the first run alone
    calls other operators, as one that makes what it keeps for later calls, that is a note.

    Args:
        step: does one step, such as forward, backward and optimizer; what it returns is not looked at. What it changes besides
            `modules` stays changed, such as the place of a data loader: then the runs differ there.
        n: how often it is called; at least 2.
        modules: modules and optimizers that are put back: parameters, gradients, buffers, attributes, modes, states.

    Raises:
        ValueError: n is less than 2.
        TargetError: something in `modules` is neither a module nor an optimizer.

    Whatever `step` raises is raised, after all was put back.

    >>> import numpy, torch, recorders
    >>> net = torch.nn.Linear(8, 2)
    >>> def step():
    ...     noise = torch.tensor(numpy.random.default_rng().normal(size=8))
    ...     net(torch.randn(4, 8) + noise.float()).sum().backward()
    >>> found = recorders.repeat(step, modules=net)
    >>> found.phase, found.index, found.operator
    ('forward', 0, 'aten.lift_fresh.default')
    """
    if n < 2:
        raise ValueError(f"repeat(n={n}): two runs at least are compared")
    objects = [modules] if isinstance(modules, (nn.Module, torch.optim.Optimizer)) else list(modules)
    if wrong := [thing for thing in objects if not isinstance(thing, (nn.Module, torch.optim.Optimizer))]:
        raise TargetError(f"repeat(modules=...): give modules and optimizers; got {type(wrong[0]).__name__}")
    result: Divergence = unrecorded(_Repetition(step, objects).result, n)
    return result


class _Repetition:
    """A step that is called several times."""

    def __init__(self, step: Callable[[], object], objects: list[Any]) -> None:
        self.step, self.start = step, Restored(objects)
        self.names: dict[int, str] = {}
        for net in (thing for thing in objects if isinstance(thing, nn.Module)):
            self.names.update((id(module), name) for name, module in net.named_modules())

    def result(self, n: int) -> Divergence:
        """What was found in n runs."""
        first = self._run(OperatorLog(digest, inputs=False))
        notes: tuple[str, ...] = ()
        for run in range(2, n + 1):
            other = self._run(OperatorLog(digest, inputs=False))
            found = self._apart(first, other, run)
            if found and run == 2 and found.differs == _OTHER_OPERATORS:  # maybe it made something that is kept for later calls
                if self._apart(other, self._run(OperatorLog(digest, inputs=False)), 3):
                    return found
                first, notes = other, ("the first run called other operators than later ones, which agree",)
            elif found:
                return found
        return Divergence(notes=(f"{len(first)} operators, {n} runs", *notes))

    def _run(self, log: OperatorLog) -> list[OperatorCall]:
        try:
            self.start.restore()
            with eagerly(), in_place_of_operators(log):
                self.step()
        finally:
            self.start.restore()
        return log.calls

    def _apart(self, first: list[OperatorCall], other: list[OperatorCall], run: int) -> Divergence:
        for a, b in zip(first, other, strict=False):
            if a.key != b.key or a.form != b.form or not _same(a.outputs, b.outputs):
                return self._named(a, b, run)
        if len(first) != len(other):
            return self._named(*first_unlike(first, other), run)
        return Divergence()

    def _named(self, a: OperatorCall | None, b: OperatorCall | None, run: int) -> Divergence:
        shown = a or b
        assert shown is not None
        differs, far = "its output differs", float("nan")
        if a is None or b is None or a.name != b.name:
            differs = _OTHER_OPERATORS
        elif a.settings != b.settings:
            key = next(key for key in (*a.settings, *b.settings) if a.settings.get(key) != b.settings.get(key))
            differs = f"its argument {key.partition('.')[2]} is {a.settings.get(key)}, then {b.settings.get(key)}"
        elif a.form != b.form:
            differs = f"its output is {a.form}, then {b.form}"
        else:
            differs, far = self._looked_at(shown)
        module = "" if shown.module is None else self._name(*shown.module)
        return Divergence(
            phase="backward" if shown.node else "forward",
            module=module,
            module_b=module,
            operator="" if a is None else a.name,
            operator_b="" if b is None else b.name,
            index=shown.index,
            form=shown.form,
            source=None if a is None else a.source,
            source_b=None if b is None else b.source,
            equal=f"the outputs of the {shown.index} operators before it" if shown.index else "",
            differs=differs,
            distance=far,
            notes=(f"in the backward of {shown.node}",) if shown.node else (),
            run=run,
        )

    def _looked_at(self, call: OperatorCall) -> tuple[str, float]:
        """Whether already the inputs of an operator differ, and how far its outputs are apart, in two more runs."""
        found = []
        for _ in range(2):
            calls = self._run(OperatorLog(lambda tensor: tensor.detach().clone(), only=call.index))
            if len(calls) <= call.index or calls[call.index].key != call.key:
                return "its output differs", float("nan")
            found.append(calls[call.index])
        outputs = [distance(x, y) for x, y in zip(found[0].outputs, found[1].outputs, strict=False)]
        inputs = [distance(x, y) for x, y in zip(found[0].inputs, found[1].inputs, strict=False)]
        far = max(outputs, default=0.0) or float("nan")
        if inputs and max(inputs) > 0:
            return f"its input {inputs.index(max(inputs))} differs, which no operator made: it comes from outside of PyTorch", far
        return "its output differs, though its inputs are the same", far

    def _name(self, inner: nn.Module, outermost: nn.Module) -> str:
        if id(inner) in self.names:
            return self.names[id(inner)]
        name = next((name for name, module in outermost.named_modules() if module is inner), "")
        return name or type(inner).__name__


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(bool(x == y) for x, y in zip(a, b, strict=True))
