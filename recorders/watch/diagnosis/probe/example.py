"""Inputs of a probe: the arguments of a call, its samples and positions, and how some of them are replaced by others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.operands import leaves, mapped

LABELS = frozenset({"label", "labels", "target", "targets", "decoder_labels", "next_sentence_label"})
"""Names of arguments that are no inputs: nets that compute their loss are given the target, too."""
SAMPLES = 4
"""The most samples of a batch that are run."""


@dataclass(frozen=True)
class Example:
    """The arguments of one call of a net.

    Attributes:
        args, kwargs: positional and keyword arguments.
        batch: the axis of the samples; None if it is not known.
        shared: the paths of tensors that all samples have in common, such as the mask of an attention.
        why: why the axis of the samples is not known.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: int | None = None
    shared: frozenset[str] = frozenset()
    why: str = ""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments, by path; of several with one path the last."""
        return dict(leaves((self.args, dict(self.kwargs))))

    @property
    def samples(self) -> dict[str, Tensor]:
        """The tensors that have an axis of samples, by path, each with that axis first."""
        if self.batch is None:
            return {}
        own = {path: tensor for path, tensor in self.tensors.items() if tensor.ndim and path not in self.shared}
        return {path: tensor.movedim(self.batch, 0) for path, tensor in own.items()}

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The samples, but for what is the target by its name."""
        return {path: tensor for path, tensor in self.samples.items() if path.rpartition(".")[2] not in LABELS}

    @property
    def count(self) -> int:
        """The number of samples; 0 if it is not known."""
        return min((len(tensor) for tensor in self.samples.values()), default=0)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Example:
        """These arguments with a function of path and tensor applied to each tensor."""
        paths = iter([path for path, _ in leaves((self.args, dict(self.kwargs)))])
        args, kwargs = mapped((self.args, dict(self.kwargs)), lambda tensor: function(next(paths), tensor))
        return replace(self, args=args, kwargs=kwargs)

    def map_samples(self, function: Callable[[str, Tensor], Tensor]) -> Example:
        """These arguments with a function applied to each tensor that has an axis of samples, which is first."""
        own, axis = self.samples, self.batch
        if axis is None:
            return self
        return self.map(lambda path, tensor: function(path, own[path]).movedim(0, axis) if path in own else tensor)

    def cut(self, most: int = SAMPLES) -> Example:
        """The first samples alone."""
        return self.map_samples(lambda path, tensor: tensor[:most])

    def along(self, axis: int) -> Example:
        """These arguments with their samples along this axis, if all tensors agree on their number; else it says why not."""
        shapes = {path: tuple(tensor.shape) for path, tensor in self.tensors.items() if tensor.ndim}
        shared = frozenset(
            path
            for path, shape in shapes.items()
            if len(shape) == 2
            and shape[0] == shape[1]
            and any(other != path and len(of) > 1 and of[1] == shape[0] != of[0] for other, of in shapes.items())
        )
        own = {path: shape for path, shape in shapes.items() if path not in shared}
        sizes = {shape[axis] if len(shape) > axis else 1 for shape in own.values()}
        why = ""
        if any(tensor.layout is not torch.strided for tensor in self.tensors.values()):
            why = "the example holds a sparse or nested tensor, of which no samples can be taken"
        elif not own:
            why = "the example has no tensor with an axis"
        elif len(sizes) > 1:
            why = f"the tensors of the example differ in the size of axis {axis}: {', '.join(map(str, sorted(sizes)))}"
        elif max(sizes) < 2:
            why = "the example is one sample" if max(sizes) else "the example is empty"
        return replace(self, batch=None if why else axis, shared=shared, why=why)


def as_call(net: nn.Module, example: Any) -> Example:
    """The arguments that an example stands for: a tuple is positional ones, a dict keyword ones, all else the only one.

    A tuple or dict that does not fit the parameters of `forward` is its only argument, too.

    >>> as_call(nn.Linear(2, 2), (1, 2)).args, as_call(nn.Bilinear(2, 2, 2), (1, 2)).args
    (((1, 2),), (1, 2))
    """
    if isinstance(example, Example):
        return example
    if type(example) is tuple:
        args, kwargs = example, {}
    elif isinstance(example, Mapping) and all(isinstance(key, str) for key in example):
        args, kwargs = (), dict(example)
    else:
        return Example((example,), {}).along(0)
    try:
        inspect.signature(net.forward).bind(*args, **kwargs)
    except TypeError:
        args, kwargs = (example,), {}
    except ValueError:  # a forward without a signature
        pass
    return Example(args, kwargs).along(0)


def donors(whole: Example, count: int) -> dict[str, Tensor]:
    """By path, for each of the first `count` samples another one, with the axis of samples first."""
    many = whole.count
    rows = [(at + count) % many if many >= 2 * count else (at + 1) % count for at in range(count)]
    return {path: tensor[torch.tensor(rows, device=tensor.device)] for path, tensor in whole.samples.items()}
