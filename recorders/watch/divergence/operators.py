"""Operators of PyTorch as they are called: what they are called with, who calls them, and what they return."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch import autograd_node, in_place_of_operators
from recorders.capture.operands import is_spread, items, leaves, mapped, plain
from recorders.watch.divergence.sources import SourceLine, caller, module_of_frame
from reducers.kernels.hashing import bits_of, mix

_CHUNK = 1 << 20
_WRITES_A_PART = ("aten.index_copy_", "aten.index_fill_", "aten.index_put_", "aten.masked_", "aten.put_", "aten.scatter_")


@dataclass(eq=False)
class OperatorCall:
    """One call of an operator, or of a module that counts as one.

    Attributes:
        name: such as "aten.mul.Tensor".
        settings: its arguments that are no tensors, each with its position or name.
        inputs, outputs: copies of its tensors, or their digests.
        reads: for each input the call that wrote it; None if it came from elsewhere.
        source: the line that called it; of a backward, the line of the forward that it belongs to.
        module: the innermost module whose forward called it, and the outermost.
        node: the name of the node of autograd that called it; "" in a forward.
        form: shapes and dtypes of the outputs.
        is_view: whether its output shares memory with its input.
        is_module: whether it stands for a whole module.
    """

    name: str
    index: int
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    reads: list[OperatorCall | None] = field(default_factory=list)
    source: SourceLine | None = None
    module: tuple[nn.Module, nn.Module] | None = None
    node: str = ""
    form: str = ""
    is_view: bool = False
    is_module: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for two calls that do the same with the same tensors."""
        return "a module" if self.is_module else self.name, self.node, repr(self.settings), self.form if self.is_module else ""


class OperatorLog:
    """The operators that are called, if `in_place_of_operators` is given this, while it is `on`.

    Args:
        keep: what is kept of a tensor: a copy, a digest, or None for nothing.
        inputs: whether inputs are kept, too, and which call wrote each of them. Then all tensors stay alive.
        only: the index of the one call of which tensors are kept; None for all.
    """

    def __init__(self, keep: Callable[[Tensor], Tensor] | None, *, inputs: bool = True, only: int | None = None) -> None:
        self.calls: list[OperatorCall] = []
        self.on = True
        self._keep, self._inputs, self._only = keep, inputs, only
        self._writers: dict[int, OperatorCall] = {}  # by id of a tensor, which `_alive` keeps from being given to another
        self._bases: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._unwritten: dict[int, Tensor] = {}
        self._nodes: dict[Any, OperatorCall] = {}
        self._new: tuple[OperatorCall, list[Tensor]] | None = None

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and keep what it does."""
        node = self._node()
        if not (self.on or node in self._nodes):
            return operator(*args, **kwargs)
        given = [tensor for _, tensor in leaves((args, kwargs))]
        before = self._kept(given) if self._inputs else []
        output = operator(*args, **kwargs)
        returned = [tensor for _, tensor in leaves(output)]
        if "rnn" in str(operator):  # among what they return is memory for their backward, of which not all is written
            returned = [tensor for tensor in returned if tensor.dtype is not torch.uint8]
        call = OperatorCall(
            str(operator),
            len(self.calls),
            dict(_settings((args, kwargs))),
            before,
            is_view=bool(getattr(operator, "is_view", False)),
        )
        forward = None if node is None else self._nodes.get(node)
        call.node = "" if node is None else node.name()
        call.source = caller() or (forward.source if forward else None)
        call.module = module_of_frame() or (forward.module if forward else None)
        call.form = shown_tensors(returned)
        if not self._is_unwritten(call, given, returned):
            call.outputs = self._kept(returned or given)  # those that return nothing write to what they are given
        self.calls.append(call)
        if self._inputs and self._only is None:
            call.reads = [self.writer(tensor) for tensor in given]
            self._written(call, given, returned)
        if node is None:
            self._new = call, returned
        return output

    def _is_unwritten(self, call: OperatorCall, given: list[Tensor], returned: list[Tensor]) -> bool:
        """Whether an operator returns whatever was in the memory before, shows or copies that, or writes to a part of it."""
        if call.name.startswith("aten.copy_."):
            read = given[1:]
        else:
            read = given[:1] if call.is_view or call.name.startswith(_WRITES_A_PART) else []
        if call.name.startswith(("aten.empty", "aten.new_empty")) or any(id(tensor) in self._unwritten for tensor in read):
            self._unwritten.update((id(tensor), tensor) for tensor in returned)
            return True
        for tensor in returned:
            self._unwritten.pop(id(tensor), None)
        return False

    def _node(self) -> Any:
        """The node of autograd that runs now. Nodes of the last operator are known once it has returned."""
        if self._new is not None:
            call, tensors = self._new
            self._new = None
            self._nodes.update({node: call for node in map(_node_of, tensors) if node is not None})
        return autograd_node()

    def add_module(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Keep a call of a module as if it were one operator."""
        call = OperatorCall(name, len(self.calls), is_module=True, inputs=self._kept(inputs), outputs=self._kept(outputs))
        call.reads = [self.writer(tensor) for tensor in inputs]
        call.form = shown_tensors(outputs)
        self.calls.append(call)
        self._written(call, [], outputs)

    def writer(self, tensor: Tensor) -> OperatorCall | None:
        """The call that wrote to a tensor last, or to what it is a view of."""
        found = [self._writers[key] for key in (id(tensor), self._owner_of(tensor)) if key in self._writers]
        return max(found, key=lambda call: call.index, default=None)

    def _written(self, call: OperatorCall, given: list[Tensor], returned: list[Tensor]) -> None:
        for tensor in returned or given:
            self._alive.append(tensor)
            if call.is_view and given and tensor is not given[0]:
                self._bases[id(tensor)] = self._owner_of(given[0])
            else:
                self._writers[self._owner_of(tensor)] = call
            self._writers[id(tensor)] = call

    def _owner_of(self, tensor: Tensor) -> int:
        return self._bases.get(id(tensor), id(tensor))

    def _kept(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._only is not None and self._only != len(self.calls):
            return []
        return [] if self._keep is None else [self._keep(tensor) for tensor in tensors]


def _node_of(tensor: Tensor) -> Any:
    """The node of autograd that made a tensor; None also of a view made without gradients whose base was written to with them."""
    with contextlib.suppress(RuntimeError):
        return tensor.grad_fn
    return None


def rounding(to: torch.dtype | None) -> AbstractContextManager[Any]:
    """A context in which each operator reads its floating-point inputs rounded, as if they came from less exact operators.

    Args:
        to: the dtype to which they are rounded; None for random errors of half an eps of their own (Monte Carlo arithmetic).

    Reference: Parker, "Monte Carlo arithmetic: exploiting randomness in floating-point arithmetic", 1997.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        if to is not None and torch.finfo(to).eps > torch.finfo(tensor.dtype).eps:
            return tensor.to(to).to(tensor.dtype)
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(0))
        drawn = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
        wide = tensor.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)
        factor = 1 + drawn.sub_(0.5).to(wide.dtype) * (2 * torch.finfo(tensor.dtype).eps)  # infinity stays what it is
        return (wide * factor).to(tensor.dtype)

    def call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_place = str(operator).split(".")[1].endswith("_") or "out" in kwargs
        if not in_place and not getattr(operator, "is_view", False):
            with torch.no_grad():
                args, kwargs = mapped(args, rounded), mapped(kwargs, rounded)
        return operator(*args, **kwargs)

    return in_place_of_operators(call)


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of a tensor and of their order: one int64, on its device.

    That of a nested tensor, or of another that keeps its values in several, is made of those of these tensors.

    >>> x = torch.randn(100)
    >>> bool(digest(x) == digest(x.clone())), bool(digest(x) == digest(x.flip(0)))
    (True, False)
    """
    with torch.no_grad():
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__") and not is_spread(tensor):
            inner = [digest(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
            return torch.stack([mix(one, place + 3) for place, one in enumerate(inner)]).sum()
        tensor = plain(tensor)
        if tensor.is_meta:
            return torch.zeros((), dtype=torch.int64, device="cpu")
        flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
        total = torch.full((), hash(tuple(tensor.shape)) % 2**62, dtype=torch.int64, device=tensor.device)
        for start in range(0, flat.numel(), _CHUNK):
            bits = bits_of(flat[start : start + _CHUNK]).reshape(-1)
            places = torch.arange(start, start + bits.numel(), device=bits.device)
            total += mix(bits ^ mix(places, 1), 2).sum()
        return total


def shown_tensors(tensors: list[Tensor]) -> str:
    """Shapes and dtypes, for messages; for the lengths of a nested tensor, which each time have another name, a star."""
    shown = ((["*" if isinstance(size, torch.SymInt) else size for size in tensor.shape], tensor.dtype) for tensor in tensors)
    return ", ".join(
        f"({', '.join(map(str, sizes))}{',' * (len(sizes) == 1)}) {str(dtype).removeprefix('torch.')}" for sizes, dtype in shown
    )


def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arguments that are no tensors, each with its path."""
    inner = list(items(value))
    if inner:
        for key, item in inner:
            yield from _settings(item, f"{path}.{key}" if path else key)
    elif isinstance(value, float) and math.isnan(value):
        yield path, "nan"
    elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.memory_format, torch.layout)):
        yield path, value
