"""bisect(): the first module and operator by which two nets part on one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import eagerly, in_place_of_operators, is_distributed
from recorders.capture.context import unrecorded
from recorders.capture.operands import is_spread, leaves, mapped
from recorders.errors import TargetError
from recorders.watch.diagnosis.probe.example import Example, as_call
from recorders.watch.divergence.aligning import aligned
from recorders.watch.divergence.comparing import Compared, Comparing, Copying, Sighted, matched, operators_of, seen_apart
from recorders.watch.divergence.distance import NOISE, number_type, tolerance_of
from recorders.watch.divergence.first_operator import Logging, first_apart, first_unlike
from recorders.watch.divergence.gradients import GradientPair, Gradients, GradientsApart, GradientWatcher
from recorders.watch.divergence.modules import attributes_apart, namesake, parameters_apart, tied_apart
from recorders.watch.divergence.operators import OperatorCall, OperatorLog, rounding, shown_tensors
from recorders.watch.divergence.restoring import Restored
from recorders.watch.divergence.result import Divergence
from recorders.watch.divergence.tracing import Net, TracedCall, Watcher, copied, only_compiled


def bisect(
    net_a: nn.Module,
    net_b: nn.Module,
    batch: Any,
    *,
    target: Any = None,
    loss: Callable[..., Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
) -> Divergence:
    """Returns the first module and operator by which two nets part on the same batch; it is false if nothing differs beyond noise.

    Both nets run with the same random numbers, in the mode in which they are (training or evaluation, gradients, autocast). Then
    the second runs again, and each module in it gets the inputs that its partner in the first got: so each is judged by itself, and
    rounding does not add up with depth. The first module that returns something else, or the first operators between modules that
    make something else, run again with each operator seen. If the forwards agree and there is a `loss`, gradients are compared from
    the loss backwards. If a net is compiled, its eager code is compared first, and then what the compiler made of it.

    Modules belong together if they have one name, class and shapes; else if their parameters are equal; else by class and shapes in
    the order of their calls.

    Values are compared, not how they lie in memory: if the parameters of the second net are in another order there, as after
    `to(memory_format=torch.channels_last)`, the first runs with its own in that order.

    Noise is relative to the largest magnitude in a tensor. Allowed is `(2 eps + 16 eps_sum) * sqrt(n)`: eps of the coarser of the
    two nets' dtypes, eps of the dtype in which sums are added (float32 at most), and n operators between equal inputs and the
    tensor. A larger difference is noise, too, if the first net differs from itself by a fourth of it when each of its operators
    reads rounded inputs.

    Everything is put back after: parameters, buffers, gradients, attributes, modes and random numbers. Monitors record nothing of
    it. The nets run 3 to 10 times in all. For this time there is a copy of all inputs and outputs of the modules of the first net,
    and of the parameters and buffers of both.

    Args:
        net_a: the net that is right, or older, or taken for the measure.
        net_b: the other one.
        batch: what they are called with: a tensor, a tuple of positional arguments, or a dict of keyword arguments. It is moved to
            the device of each net; if their dtypes differ, its floating-point tensors get the dtype of each.
        target: is given to `loss` after the output.
        loss: returns the scalar of which gradients are taken: `loss(output, target)`, or `loss(output)` if there is no target.
        names: by name of a module in the first net, its name in the second, if they are found wrong.
        tolerance: a relative distance that is allowed everywhere, in place of the rule above.

    Raises:
        TargetError: one of the nets is no module, holds no numbers (meta device), or is spread over ranks.
        SelectionError: a name in `names` does not exist.
        TypeError: a target without a loss.

    >>> import copy, torch, recorders
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    >>> other = copy.deepcopy(net)
    >>> other[1].eps = 1e-3
    >>> found = recorders.bisect(net, other, torch.randn(4, 8))
    >>> found.phase, found.module, found.operator
    ('forward', '1', 'aten.native_layer_norm.default')
    >>> bool(recorders.bisect(net, net, torch.randn(4, 8)))
    False
    """
    if target is not None and loss is None:
        raise TypeError("bisect(target=...): give loss=, a function of output and target")
    for net in (net_a, net_b):
        _check(net)
    result: Divergence = unrecorded(_Bisection(net_a, net_b, batch, target, loss, names, tolerance).result)
    return result


class _Bisection:
    """One comparison of two nets."""

    def __init__(
        self,
        net_a: nn.Module,
        net_b: nn.Module,
        batch: Any,
        target: Any,
        loss: Callable[..., Tensor] | None,
        names: Mapping[str, str] | None,
        fixed: float | None,
    ) -> None:
        example = as_call(net_a, batch)
        start = Restored([net_a, net_b])
        types = [number_type(net, batch) for net in (net_a, net_b)]
        self.a, self.b = (
            Net(net, _moved(example, net, dtype if types[0] != types[1] else None), start)
            for net, dtype in zip((net_a, net_b), types, strict=True)
        )
        self.a.lay_out_as(net_b)
        self.target, self.loss, self.names, self.fixed = target, loss, names, fixed
        self.tolerance = tolerance_of(types, fixed)
        coarse = max(types, key=lambda dtype: torch.finfo(dtype).eps)
        self.coarse = coarse if torch.finfo(coarse).eps > torch.finfo(types[0]).eps else None
        self.seen = 0.0
        self.notes: list[str] = []

    def result(self) -> Divergence:
        """What was found."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its one operator shows nothing of the attention
        try:
            with eagerly():
                found = self._forward() or self._whole() or (self._backward() if self.loss is not None else Divergence())
            found = found or (self._compiled() if self.a.is_compiled or self.b.is_compiled else found)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return found or Divergence(distance=self.seen, notes=tuple(self.notes))

    def _forward(self) -> Divergence:
        outputs = self.a.run(Copying(), in_place_of_operators(self.a.count))
        self.calls_a = self.a.calls
        self.output_a = copied(outputs)
        self.output_b = copied(self.b.run(Watcher()))
        partners = aligned(self.a, self.b, self.names)
        self.compared = Compared(partners, operators_of(self.calls_a, {call.key for call in partners.values()}))
        self.keys_b = {call.key: key for key, call in partners.items()}
        comparing = Comparing(self.compared)
        self.b.run(comparing)
        self.seen = max(one.distance for one in comparing.sighted)
        suspects = [one for one in comparing.sighted if one.distance > self.compared.allowed(one, self.tolerance)]
        if suspects and self.fixed is None:
            moved = self._movement()
            suspects = [one for one in suspects if one.distance > NOISE * moved.get((one.partner.key, one.when), 0.0)]
        return self._operator(suspects[0]) if suspects else Divergence()

    def _movement(self) -> dict[tuple[tuple[str, int], str], float]:
        """By call of the first net, and "in" or "out": how far rounding moves it."""
        same = {call.key: call for call in self.calls_a}
        own = Comparing(Compared({call.key: same[call.key] for call in self.compared.partners.values()}, {}))
        self.a.run(own, rounding(self.coarse))
        return {(one.partner.key, one.when): one.distance for one in own.sighted}

    def _operator(self, sighted: Sighted) -> Divergence:
        """The first operator, in the module that a comparison is about, or in what comes before its inputs."""
        inner, inner_b = sighted.partner, sighted.call
        until = sighted.when == "in"
        outer, outer_b = self.compared.around(inner_b, inner) if until else (inner, inner_b)
        log_a, log_b = (OperatorLog(lambda tensor: tensor.detach().clone()) for _ in "ab")
        first = Logging(log_a, outer.key, self.keys_b, inner.key if until else None)
        second = Logging(log_b, outer_b.key, self.compared.partners, inner_b.key if until else None, Comparing(self.compared))
        self.a.run(first, in_place_of_operators(log_a))
        self.b.run(second, in_place_of_operators(log_b))
        pair = first_apart(first.flow, second.flow, self.tolerance(max(len(log_a.calls), 1)))
        equal = f"{shown_tensors(first.flow.inputs) or 'no tensors'} into {outer.name or 'the net'}"
        found = self._named("forward", outer, outer_b, pair, equal, sighted.distance)
        apart = list(parameters_apart(outer.module, outer_b.module, self._inlined(outer, outer_b), 2 * self.tolerance.eps))
        if self.fixed is not None:
            apart = [(text, far) for text, far in apart if far > self.fixed]
        if apart:
            texts, others = [text for text, _ in apart], {k: m for k, m in self.a.modules.items() if m is not outer.module}
            theirs = namesake(outer_b.module, others, 2 * self.tolerance.eps)
            if theirs is not None and theirs == outer_b.name != outer.name:
                return replace(found, differs=f"the second net calls {theirs} in its place")
            texts = texts if theirs is None else [f"its parameters are those of {theirs} in the first net"]
            return replace(found, phase="parameters", differs=texts[0], distance=apart[0][1], notes=(*texts[1:], *found.notes))
        return found

    def _inlined(self, outer: TracedCall, outer_b: TracedCall) -> tuple[list[str], list[str]]:
        """Names, below two partners, of the modules in them that have no partner: their parameters belong to these two."""
        found = []
        for net, call, kept in (
            (self.a, outer, {k for k, _ in self.keys_b}),
            (self.b, outer_b, {k for k, _ in self.compared.partners}),
        ):
            known = {id(module): name for name, module in net.modules.items()}
            inner = [(name, known.get(id(module), "")) for name, module in call.module.named_modules()]
            found.append([name for name, full in inner if not name or full not in kept])
        return found[0], found[1]

    def _named(
        self,
        phase: str,
        outer: TracedCall,
        outer_b: TracedCall,
        pair: tuple[OperatorCall | None, OperatorCall | None],
        equal: str,
        far: float,
    ) -> Divergence:
        a, b = pair
        shown = a or b
        return Divergence(
            phase=phase,
            module=outer.name,
            module_b=outer_b.name,
            operator="" if a is None else a.name,
            operator_b="" if b is None else b.name,
            index=-1 if shown is None else shown.index,
            form="" if shown is None else shown.form,
            source=None if a is None else a.source,
            source_b=None if b is None else b.source,
            equal=equal,
            differs=_difference(a, b),
            distance=far,
            notes=tuple(attributes_apart(outer.module, outer_b.module)),
        )

    def _whole(self) -> Divergence:
        """What is said if each module agrees: whether the outputs do, after all that adds up."""
        far = seen_apart(self.output_a, self.output_b)
        self.seen = max(self.seen, far)
        if far <= self._allowed():
            return Divergence()
        if self.fixed is None and far <= NOISE * self._moved(self.a, self.output_a):
            self.notes.append(
                f"the outputs differ by {far:.2g}, since rounding is amplified: given the same inputs, each module agrees"
            )
            return Divergence()
        return Divergence(
            phase="forward",
            distance=far,
            differs="the outputs differ, though each module agrees if it is given the same inputs",
        )

    def _allowed(self) -> float:
        return self.tolerance(sum(call.operators for call in self.calls_a))

    def _moved(self, net: Net, outputs: list[Tensor]) -> float:
        """How far rounding moves the outputs of a net."""
        return seen_apart(outputs, copied(net.run(None, rounding(self.coarse))))

    def _compiled(self) -> Divergence:
        for net, eager, which in ((self.a, self.output_a, "first"), (self.b, self.output_b, "second")):
            if not net.is_compiled:
                continue
            far = seen_apart(eager, copied(net.run()))
            self.seen = max(self.seen, far)
            if far > self._allowed():
                with eagerly():
                    moved = self._moved(net, eager)
                if self.fixed is not None or far > NOISE * moved:
                    inner = only_compiled(net.net)[0]
                    text = f"the outputs of the {which} net differ from those of its own eager code"
                    return Divergence(phase="compiled", module=inner, module_b=inner, differs=text, distance=far)
        return Divergence()

    def _backward(self) -> Divergence:
        ours, theirs = self._gradients(self.a), self._gradients(self.b)
        partners = {call.key: key for key, call in self.compared.partners.items()}
        allowed = self.tolerance(3 * sum(call.operators for call in self.calls_a))
        found = GradientPair(ours, theirs, partners, allowed).first_apart()
        if found is not None and self.fixed is None:
            again = self._gradients(self.a, rounding(self.coarse))
            found = GradientPair(ours, theirs, partners, allowed, again).first_apart()
        if found is None:
            self.notes.append("gradients agree, too")
            return Divergence()
        return self._backward_operator(found, partners)

    def _gradients(self, net: Net, *contexts: Any) -> Gradients:
        watcher = GradientWatcher()
        with torch.enable_grad():
            net.run(watcher, *contexts, then=lambda output: watcher.backward(self._loss(output), net.net))
        return watcher.found

    def _loss(self, output: Any) -> Tensor:
        assert self.loss is not None
        if self.target is None:
            return self.loss(output)
        device = next((tensor.device for _, tensor in leaves(output)), None)
        return self.loss(output, mapped(self.target, lambda tensor: tensor.to(device)))

    def _backward_operator(self, found: GradientsApart, partners: Mapping[tuple[str, int], tuple[str, int]]) -> Divergence:
        outer = found.call
        key_b = partners[outer.key]
        logs = []
        for net, key, agreed in ((self.a, outer.key, partners.keys()), (self.b, key_b, set(partners.values()))):
            log = OperatorLog(None, inputs=False)
            watcher = Logging(log, key, agreed, None)
            with torch.enable_grad():
                net.run(watcher, in_place_of_operators(log), then=lambda output: self._loss(output).backward())  # type: ignore[no-untyped-call]
            logs.append(log.calls)
            calls = net.calls
        outer_b = next(call for call in calls if call.key == key_b)
        pair = first_unlike(*logs)
        of = f"of its {found.parameter}" if found.parameter else "that it hands on"
        differs = f"the gradient {of} differs"
        if found.missing:
            differs = f"the {found.missing} net has no gradient {of}"
        named = self._named("backward", outer, outer_b, pair, "the forward, and the gradients of its outputs", found.distance)
        notes = [named.differs] if named.operator or named.operator_b else []
        return replace(named, differs=differs, notes=(*notes, *tied_apart(self.a.net, self.b.net), *named.notes))


def _difference(a: OperatorCall | None, b: OperatorCall | None) -> str:
    """What differs between two operators, in words."""
    if a is None or b is None:
        only = a or b
        return f"only the {'first' if b is None else 'second'} net calls {only.name}" if only else "what it returns differs"
    if a.name != b.name:
        return f"the first calls {a.name}{_shown(a)}, the second {b.name}{_shown(b)}"
    for key in [*a.settings, *(key for key in b.settings if key not in a.settings)]:
        first, second = a.settings.get(key, "not given"), b.settings.get(key, "not given")
        if first != second:
            return f"its argument {key.partition('.')[2]} is {first} in the first net, {second} in the second"
    if len(a.inputs) == len(b.inputs) > 1:
        apart = [seen_apart([x], [y]) if x.shape == y.shape else 1.0 for x, y in zip(a.inputs, b.inputs, strict=True)]
        if max(apart) > 1e-3 and _exchanged(a.inputs, b.inputs):
            return "its inputs are exchanged"
        if max(apart) > 0:
            return f"its input {apart.index(max(apart))} differs"
    return "what it returns differs"


def _exchanged(a: list[Tensor], b: list[Tensor]) -> bool:
    def alike(x: Tensor, y: Tensor) -> bool:
        return any(len(matched([x], [other])) == 1 and seen_apart([x], [other]) < 1e-3 for other in (y, y.mT if y.ndim > 1 else y))

    return alike(a[0], b[1]) and alike(a[1], b[0])


def _shown(call: OperatorCall) -> str:
    dtype = call.settings.get("1.dtype")
    return f" to {str(dtype).removeprefix('torch.')}" if isinstance(dtype, torch.dtype) else ""


def _moved(example: Example, net: nn.Module, dtype: torch.dtype | None) -> Example:
    devices = {tensor.device for tensor in [*net.parameters(), *net.buffers()]}
    device = next(iter(devices)) if len(devices) == 1 else None

    def moved(path: str, tensor: Tensor) -> Tensor:
        changed = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
        return changed.requires_grad_(tensor.requires_grad)

    return example.map(moved)


def _check(net: object) -> None:
    if not isinstance(net, nn.Module):
        raise TargetError(f"bisect compares two torch.nn.Module; got {type(net).__name__}")
    tensors = [*net.parameters(), *net.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        raise TargetError("bisect runs the nets, and one has parameters on the meta device, which hold no numbers: load it first")
    if any(map(is_spread, tensors)) or any(is_distributed(module) for module in net.modules()):
        raise TargetError("bisect compares nets of one process, and the parameters of one are spread over ranks")
