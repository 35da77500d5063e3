"""What two modules that belong together have differently: parameters, buffers, class and attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recorders.watch.divergence.distance import distance


def parameters_apart(a: nn.Module, b: nn.Module, inner: tuple[list[str], list[str]], eps: float) -> Iterator[tuple[str, float]]:
    """What is said of each parameter or buffer that differs, with its distance.

    Args:
        inner: names of modules in each, "" for itself, of which parameters are compared.
        eps: what their dtypes allow.
    """
    first, second = (_own(module, names) for module, names in zip((a, b), inner, strict=True))
    pairs = {name: name for name in first if name in second}
    left_a, left_b = ([name for name in of if name not in pairs] for of in (first, second))
    for name in list(left_a):  # of other names, those that have the same shape
        mate = next((o for o in left_b if first[name].shape in (second[o].shape, second[o].shape[::-1])), None)
        if mate is not None:
            pairs[name] = mate
            left_a.remove(name)
            left_b.remove(mate)
    for name, mate in pairs.items():
        far = distance(first[name], second[mate])
        if far > eps:
            yield _said(name, first[name], second[mate], eps), far
    for which, names, of in (("second", left_a, first), ("first", left_b, second)):
        yield from ((f"its {name} is missing in the {which} net", 1.0) for name in names if bool((of[name] != 0).any()))


def namesake(module: nn.Module, others: Mapping[str, nn.Module], eps: float) -> str | None:
    """The name of the first of `others` that has the class and the parameters of a module; None also if these are constant."""
    names = [name for name, _ in module.named_modules()]
    if not any(bool((tensor != tensor.reshape(-1)[:1]).any()) for tensor in _own(module, names).values()):
        return None
    alike = ((name, other) for name, other in others.items() if type(other) is type(module))
    fits = ((name, other) for name, other in alike if [inner for inner, _ in other.named_modules()] == names)
    return next((name for name, other in fits if not any(parameters_apart(other, module, (names, names), eps))), None)


def _own(module: nn.Module, names: list[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in names:
        inner = module.get_submodule(name)
        for key, tensor in [*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)]:
            if tensor.ndim or tensor.is_floating_point():  # a count of batches changes nothing
                found[f"{name}.{key}" if name else key] = tensor.detach()
    return found


def _said(name: str, a: Tensor, b: Tensor, eps: float) -> str:
    if a.ndim == 2 and distance(a.T, b) <= eps:
        return f"its {name} is transposed"
    if a.shape != b.shape:
        return f"its {name} has shape {tuple(a.shape)} in the first net, {tuple(b.shape)} in the second"
    if not a.is_floating_point():
        return f"its {name} differs"
    if distance(-a, b) <= eps:
        return f"its {name} has the other sign"
    scale = float(
        (a.double() * b.to(a.device).double()).sum() / a.double().square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    )
    if scale and distance(a.double() * scale, b.double()) <= eps:
        return f"its {name} is {scale:.3g} times as large in the second net"
    return f"its {name} differs"


def attributes_apart(a: nn.Module, b: nn.Module) -> list[str]:
    """What is said of the class, if it differs, and of each attribute that both have and that is not the same."""
    found = []
    if type(a) is not type(b):
        found.append(f"its class is {type(a).__name__} in the first net, {type(b).__name__} in the second")
    for key, value in vars(a).items():
        other = vars(b).get(key, value)
        if _is_plain(value) and _is_plain(other) and value != other and not key.startswith("_"):
            found.append(f"its {key} is {value!r} in the first net, {other!r} in the second")
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) < 10 and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def tied_apart(a: nn.Module, b: nn.Module) -> list[str]:
    """What is said of parameters that are one in one net and several in the other."""
    groups = [_tied(net) for net in (a, b)]
    found = []
    for which, own, others in (("first", *groups), ("second", *groups[::-1])):
        known = {name for names in others for name in names}
        apart = [names for names in own if len(names) > 1 and known.issuperset(names) and names not in others]
        found += [f"{' and '.join(names)} are one parameter in the {which} net only" for names in apart]
    return found


def _tied(net: nn.Module) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())
