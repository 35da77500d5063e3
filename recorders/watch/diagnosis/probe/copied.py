"""CopiedNet: a copy of a net, which is run while nothing of the user's program changes."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import NoAutocast, NoInference, drop_backward_hooks, each_operator, eagerly, is_distributed, outside_modes
from recorders.capture.copying import OF_MODULES, apart_from, copied, names_of
from recorders.capture.operands import is_spread, leaves, mapped
from recorders.recorder.selection import Criteria, select_modules, unwrapped
from recorders.watch.diagnosis.limits import PROBE
from recorders.watch.diagnosis.probe.example import Example
from recorders.watch.diagnosis.probe.seen import Seen


class ProbeError(Exception):
    """A net, or its example, is not one that can be examined; the message says why."""


@dataclass
class ModuleCall:
    """One call of a module, with copies of the tensors that came in and went out."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class CopiedNet:
    """A copy of a net, to be run in place of it.

    It has the parameters, buffers, attributes and hooks on forwards that the net has now, and none of its recorders. A run starts
    where the one before it ended, unless `fresh` is asked for; then it starts from the net as it was copied.

    Args:
        net: is not changed.

    Attributes:
        names: by module of the copy, its name.
        runs: how many times it was run.

    Raises:
        ProbeError: the net is too large, or spread over ranks.
    """

    def __init__(self, net: nn.Module) -> None:
        inner = unwrapped(net)
        _check(inner)
        self._names = names_of(inner)
        self._origin = self._pristine = _copied(inner)
        self._live: nn.Module | None = None
        self._inside: list[tuple[str, list[Tensor]]] = []
        self._seen: Seen | None = None
        self._calls: list[ModuleCall] | None = None
        self._change: dict[str, Callable[[Any], Any]] = {}
        self.draws = RandomState(_devices(inner), inner_generators(self._pristine))
        self.runs = 0

    def run(
        self,
        example: Example,
        *,
        fresh: bool = False,
        draws_again: bool = True,
        training: bool = False,
        gradients: bool = False,
        seen: Seen | None = None,
        calls: list[ModuleCall] | None = None,
        change: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> dict[str, Tensor]:
        """Run it; return copies of the floating-point tensors that it returns, by path.

        Args:
            fresh: it starts as the net was copied, whatever earlier runs left in its attributes and buffers.
            draws_again: random numbers are those of the run before.
            training: it runs in training mode.
            gradients: what it returns has a graph, which leads to its parameters.
            seen: is told of each operator.
            calls: gets each call of a module, in the order in which they end.
            change: by name of a module, what its first output in this run is replaced by.
        """
        net = self._net(fresh)
        net.train(training)
        if draws_again:
            self.draws.restore(inner_generators(net))
        given = example.map(lambda path, tensor: tensor.clone())
        self._seen, self._calls, self._change, self._inside = seen, calls, dict(change or {}), []
        self.runs += 1
        if seen is not None:
            seen.lineage.begin(self.modules)
        with torch.set_grad_enabled(gradients), apart_from(self._names), ExitStack() as stack:
            if seen is not None:
                stack.enter_context(each_operator(seen))
            outputs = net(*given.args, **given.kwargs)
            found = {path: tensor.clone() for path, tensor in leaves(outputs) if tensor.is_floating_point()}
        if seen is not None:
            seen.lineage.end(outputs)
        return found

    def module(self, name: str) -> nn.Module:
        """The module of this name."""
        return self._net().get_submodule(name)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name; the net itself is the first."""
        return {place.name: place.module for place in select_modules(self._net(), Criteria(), recursive=True)}

    def kept(self) -> dict[str, list[Tensor]]:
        """By name of a module, copies of the floating-point tensors with several elements that it keeps as plain attributes."""
        found: dict[str, list[Tensor]] = {}
        for name, module in self.modules.items():
            for key, value in vars(module).items():
                if key not in OF_MODULES:
                    found.setdefault(name, []).extend(tensor.detach().clone() for _, tensor in leaves(value) if is_state(tensor))
        return {name: tensors for name, tensors in found.items() if tensors}

    def cut_kept(self, count: int, axis: int) -> bool:
        """Cut the tensors that modules keep as plain attributes to this size along an axis; whether there is any to cut.

        So a net runs on few samples that keeps a state of as many as were in the last batch.
        """
        self._pristine, self._live = _again(self._origin), None
        was_cut = False

        def cut(tensor: Tensor) -> Tensor:
            nonlocal was_cut
            if not is_state(tensor) or tensor.ndim <= axis or tensor.shape[axis] <= count:
                return tensor
            was_cut = True
            return tensor.narrow(axis, 0, count)

        for module in self._pristine.modules():
            for key, value in list(vars(module).items()):
                if key not in OF_MODULES:
                    vars(module)[key] = mapped(value, cut)
        return was_cut

    def restore_buffers(self) -> None:
        """Give all buffers the values that they had when the net was copied."""
        for now, then in zip(self._net().buffers(), self._pristine.buffers(), strict=False):
            if now.shape == then.shape:
                now.copy_(then)

    def _net(self, fresh: bool = False) -> nn.Module:
        if fresh or self._live is None:
            self._live = _again(self._pristine)
            for name, module in self.modules.items():
                module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                module.register_forward_hook(self._after(name), with_kwargs=True, always_call=True)
        return self._live

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            kept = [] if self._calls is None else [tensor.clone() for _, tensor in leaves((args, kwargs))]
            self._inside.append((name, kept))
            if self._seen is not None:
                self._seen.inside.append(name)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not self._inside or self._inside[-1][0] != name:  # a forward before it raised
                return None
            _, inputs = self._inside.pop()
            if self._seen is not None and self._seen.inside:
                self._seen.inside.pop()
            change = self._change.pop(name, None)
            if change is not None:
                output = change(output)
            if self._calls is not None:
                self._calls.append(ModuleCall(name, inputs, [tensor.clone() for _, tensor in leaves(output)]))
            return output if change is not None else None

        return hook


def is_state(tensor: Tensor) -> bool:
    """Whether a tensor that is a plain attribute may be a state: several floating-point numbers, and no parameter."""
    return tensor.is_floating_point() and tensor.numel() > 1 and not isinstance(tensor, nn.Parameter)


class RandomState:
    """The random numbers that are drawn next: of PyTorch on the CPU and some devices, of Python, of NumPy, and of generators.

    Args:
        devices: those of which generators are kept, besides the CPU.
        generators: others.
    """

    def __init__(self, devices: list[torch.device], generators: list[torch.Generator]) -> None:
        self.devices = devices
        self.cpu = torch.get_rng_state()
        self.of_devices = [torch.get_device_module(device).get_rng_state(device) for device in devices]
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state()
        self.generators = [generator.get_state() for generator in generators]

    def restore(self, generators: list[torch.Generator]) -> None:
        """Let the same numbers be drawn again, also by these generators."""
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.of_devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for generator, state in zip(generators, self.generators, strict=False):
            generator.set_state(state)


def inner_generators(net: nn.Module) -> list[torch.Generator]:
    """The generators that modules keep as attributes."""
    return [value for module in net.modules() for value in vars(module).values() if isinstance(value, torch.Generator)]


def undisturbed(net: nn.Module, call: Callable[[], Any]) -> Any:
    """Call `call()` outside the user's modes, without gradients, autocast and compilation; random numbers stay as they were."""
    return outside_modes(_run_undisturbed, net, call)


def _run_undisturbed(net: nn.Module, call: Callable[[], Any]) -> Any:
    state = RandomState(_devices(net), [])
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        with NoInference(False), NoAutocast(), torch.no_grad(), eagerly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.backends.mha.set_fastpath_enabled(False)  # its one operator shows nothing of the attention
            return call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        state.restore([])


def _devices(net: nn.Module) -> list[torch.device]:
    found = {tensor.device for tensor in [*net.parameters(), *net.buffers()]}
    return sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)


def _check(net: nn.Module) -> None:
    tensors = [*net.parameters(), *net.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > PROBE.bytes:
        raise ProbeError(f"its parameters take {size:,} bytes; nets of more than {PROBE.bytes:,} are not copied")
    if any(tensor.is_meta for tensor in tensors):
        raise ProbeError("its parameters hold no numbers")
    spread = any(map(is_spread, tensors)) or any(is_distributed(module) for module in net.modules())
    if spread or any(type(module).__name__ == "FullyShardedDataParallel" for module in net.modules()):
        raise ProbeError("its parameters are spread over ranks")


def _again(net: nn.Module) -> nn.Module:
    """A copy of attributes and buffers; parameters are the same, as runs without gradients do not write to them."""
    return copied(net, {id(parameter): parameter for parameter in net.parameters()})


def _copied(net: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}  # tensors with a graph, such as a state that was not detached, cannot be copied with it
    for module in net.modules():
        for value in vars(module).values():
            memo.update({id(tensor): tensor.detach().clone() for _, tensor in leaves(value) if not tensor.is_leaf})
    found = copied(net, memo)
    drop_backward_hooks(found)
    return found
