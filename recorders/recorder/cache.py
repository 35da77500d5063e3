"""Cache: the outputs of modules in one call of a net, as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recorders._torch.compiler import has_compiled
from recorders.capture.operands import mapped
from recorders.recorder.selection import Criteria, Names, select_modules


def cache(net: nn.Module, names: Names) -> Callable[..., dict[str, Any]]:
    """Returns a function that calls `net` and returns the outputs of the modules that it chose, by name, for a quick look.

    The outputs are detached copies, in the structure that the module returned. A module that is called several times is there as
    `"relu"`, `"relu:1"`, `"relu:2"`; one that is not called is absent. Hooks are on during the call only, also if it fails.
    Gradients and training mode are as around the call: use `torch.no_grad()` and `net.eval()`. A compiled net runs in eager mode,
    because graphs made before know no hooks. All outputs are in memory at once; a `Recorder` reduces them, a `Stream` writes them
    to a disk.

    Args:
        net: the network; wrappers of `torch.compile` and data parallelism are looked through for the names.
        names: names, globs (`"encoder.*"`, below which all is included) or compiled regular expressions; "" is the net itself.

    Raises:
        SelectionError: a name or glob matches nothing (the message lists what exists).

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> {name: tuple(output.shape) for name, output in cache(net, ["0", "1"])(torch.ones(4, 2)).items()}
    {'0': (4, 3), '1': (4, 3)}
    """
    places = select_modules(net, Criteria(names=names), recursive=True)

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        calls: dict[str, int] = {}

        def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
            number = calls[name] = calls.get(name, -1) + 1
            found[f"{name}:{number}" if number else name] = mapped(output, _copied)

        handles = [place.module.register_forward_hook(partial(keep, place.name)) for place in places]
        try:
            if has_compiled():
                with torch.compiler.set_stance("force_eager"):
                    net(*args, **kwargs)
            else:
                net(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return found

    return call


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
