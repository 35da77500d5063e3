"""Runs this package on a torch from which one private API was deleted: `python taken_away.py FOLDER KIND NAME...`.

The kinds are "eager"; "fresh", the same without an import of Dynamo before; and "compiled". A name may be several, joined by "+".

Each name has a process of its own, forked from one that has imported PyTorch. If PyTorch works on without it, it is deleted;
if not, it is hidden from this package alone. One line of JSON is printed for each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # the folders of tests have the names of the packages

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

AFTER: list[Callable[[], object]] = []
"""What is called after each step."""

hidden: dict[int, set[str]] = {}
"""By the id of a module, the names in it that this package does not find."""

OURS = ("recorders", "reducers")


def owner_of(name: str) -> tuple[Any, str]:
    """What holds a private API, and its name there."""
    found: Any = torch
    *path, last = name.split(".")[1:]
    for index, part in enumerate(path):
        if not hasattr(found, part):
            __import__(".".join(["torch", *path[: index + 1]]))
        found = getattr(found, part)
    return found, last


def take_away(name: str) -> str:
    """Deletes a private API, or hides it from this package; returns which of them."""
    owner, last = owner_of(name)
    if name == "torch.utils.hooks.RemovableHandle.hooks_dict_ref":  # an attribute of each handle
        import inspect

        scope = {"torch": torch, "weakref": __import__("weakref"), "OrderedDict": __import__("collections").OrderedDict, "Any": Any}
        exec(inspect.getsource(owner).replace(last, "renamed_ref"), scope)
        for method in ("__init__", "remove", "__getstate__", "__setstate__"):
            setattr(owner, method, vars(scope["RemovableHandle"])[method])
        scope["RemovableHandle"].next_id = 1 << 30
        return "deleted"
    kept = getattr(owner, last)
    held = vars(owner).get(last, kept) if isinstance(owner, type) else kept
    try:
        delattr(owner, last)
    except (AttributeError, TypeError):
        return hide(name)
    if works():
        return "deleted"
    setattr(owner, last, held)
    return hide(name)


def works() -> bool:
    """Whether PyTorch does what users do, as it is now; tried in another process, because a failed import leaves things behind."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            plain()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def hide(name: str) -> str:
    """Lets this package alone not find a private API."""
    owner, last = owner_of(name)
    if isinstance(owner, types.ModuleType):
        if id(owner) in hidden:
            hidden[id(owner)].add(last)
            return "hidden"
        names, kind = hidden.setdefault(id(owner), {last}), type(owner)

        class Hiding(kind):  # type: ignore[misc, valid-type]
            def __getattribute__(self, wanted: str) -> Any:
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if wanted in names and caller.partition(".")[0] in OURS:
                    raise AttributeError(wanted)
                return super().__getattribute__(wanted)

        with contextlib.suppress(TypeError, AttributeError):
            owner.__class__ = Hiding
            return "hidden"
        del hidden[id(owner)]
    import reducers._torch

    found = reducers._torch._found

    def without(wanted: str) -> Any:
        if wanted == name:
            raise AttributeError(wanted)
        return found(wanted)

    reducers._torch._found = without
    return "refused"


class Seen(TorchDispatchMode):
    """A mode of the user that counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Named(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(8, 4)


def train(module: nn.Module, context: Callable[[], Any] = contextlib.nullcontext, call: Any = None, steps: int = 3) -> list[float]:
    """Losses and, at the end, the sum of the weights."""
    found = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(steps):
        with context():
            loss = (call or module)(batch(step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for call_after in AFTER:
            call_after()
        found.append(loss.item())
    return [*found, *(float(value.double().sum()) for value in module.parameters())]


def transform(module: nn.Module) -> list[float]:
    module.eval()
    found = torch.func.vmap(lambda x: module(x[None])[0])(batch(9))
    grads = torch.func.grad(lambda x: module(x).sum())(batch(9))
    return [float(found.detach().double().sum()), float(grads.double().sum())]


def evaluate(module: nn.Module) -> list[float]:
    module.eval()
    with torch.inference_mode():
        return [float(module(batch(9)).double().sum())]


def retained(module: nn.Module) -> list[float]:
    """Two backwards through one graph."""
    loss = module(batch(3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [float(loss.detach())]


WAYS: dict[str, Callable[[nn.Module], list[float]]] = {
    "plainly": train,
    "in inference mode": evaluate,
    "under autocast": lambda module: train(module, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "checkpointed": lambda module: train(module, call=lambda x: checkpoint(module, x, use_reentrant=False)),
    "checkpointed, reentrant": lambda module: train(
        module, call=lambda x: checkpoint(module, x.requires_grad_(), use_reentrant=True)
    ),
    "under a dispatch mode": lambda module: train(module, Seen),
    "under a function mode": lambda module: train(module, Named),
    "on a default device": lambda module: train(module, lambda: torch.device("cpu")),
    "inside transforms": transform,
    "with a retained graph": retained,
    "as fake tensors": lambda module: fake(module),
    "written down": lambda module: written(module),
}
"""What a user does with a net, each with what it returns."""


def fake(module: nn.Module) -> list[float]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return [float(module.eval()(torch.ones(2, 4)).shape[0])]


def written(module: nn.Module) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [float(torch.jit.trace(module.eval(), batch(9))(batch(9)).double().sum())]


def plain() -> dict[str, list[float]]:
    """What a user gets without this package."""
    pickle.loads(pickle.dumps(net()))
    return {way: run(net()) for way, run in WAYS.items()}


def numbers(recorder: Any) -> dict[str, Any]:
    """What was recorded: samples and results."""
    found = {}
    for name in recorder:
        values = recorder[name].peek() if recorder.samples[name] else {}
        values = values if isinstance(values, dict) else {"": values}
        found[name] = [recorder.samples[name], {key: value.double().flatten().tolist() for key, value in values.items()}]
    return found


def record() -> dict[str, Any]:
    """What this package does: in all ways, with files, and on the command line."""
    import recorders
    import reducers

    found: dict[str, Any] = {}
    for way, run in WAYS.items():
        module = net()
        recorder = recorders.Recorder(
            out=recorders.ForwardMonitor(reducers.Summary()),
            into=recorders.ForwardInputMonitor(reducers.Moments("b c -> c")),
            back=recorders.BackwardMonitor(reducers.Mean()),
            before=recorders.BackwardInputMonitor(reducers.Sum()),
            calls=recorders.ForwardMonitor(reducers.Max(), op_=lambda output: output * 2, every_step=2),
            change=recorders.DifferenceMonitor(reducers.Mean(), "training"),
            weights=recorders.ParameterMonitor(reducers.Norm()),
            gradients=recorders.ParameterGradientMonitor(reducers.Norm()),
            updates=recorders.ParameterUpdateMonitor(reducers.Norm()),
        ).modules(module)
        AFTER[:] = [recorder.step]
        result = run(module)
        AFTER.clear()
        recorder.deregister()
        found[way] = [result, numbers(recorder), list(recorder.report().troubles)]
        if way == "plainly":
            where = str(FOLDER / str(os.getpid()))
            recorder.save(where)
            assert recorders.load(where).samples["out/0"] == recorder.samples["out/0"]
            recorders.load(where).compute()
            recorders.verify(where)
            from recorders.cli import main as command

            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                assert command(["check", where]) == 0
                assert command(["show", where]) == 0
            assert "out/0" in shown.getvalue()
            copied = pickle.loads(pickle.dumps(module))
            assert copied(batch(1)).shape == (8, 2)
    return found


def compiled() -> tuple[dict[str, Any], list[float]]:
    """A compiled training, recorded, and what the same is without a recorder."""
    import recorders
    import reducers

    module = net()
    alone = train(module, call=torch.compile(module, backend="aot_eager"))
    torch._dynamo.reset()
    module = net()
    early = torch.compile(module, backend="aot_eager")
    early(batch(0))
    module.load_state_dict(net().state_dict())
    recorder = recorders.Recorder(
        out=recorders.ForwardMonitor(reducers.Summary()),
        back=recorders.BackwardMonitor(reducers.Mean()),
        some=recorders.ForwardMonitor(reducers.Mean(), every_step=2),
        weights=recorders.ParameterMonitor(reducers.Norm()),
    ).modules(module, types=(nn.Linear, nn.ReLU))
    change = recorders.DifferenceMonitor(reducers.Mean(), "running_mean", module[1])
    AFTER[:] = [recorder.step]
    result = train(module, call=early, steps=3)
    AFTER.clear()
    torch._dynamo.reset()
    wide = torch.compile(module.eval(), backend="aot_eager", dynamic=True)
    wide(batch(0)), wide(batch(0)[:3])
    found = numbers(recorder)
    found["change"] = [change.samples, {}]
    return {"compiled": [result, found, list(recorder.report().troubles)]}, alone


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def one(kind: str, name: str) -> dict[str, Any]:
    """What happens without one private API; without none if the name is "none"."""
    together = "+" in name or kind == "compiled"  # without what the compiler needs itself, it does not work
    ways = [hide(each) if together else take_away(each) for each in name.split("+") if each != "none"]
    with _told() as told:
        found, alone = compiled() if kind == "compiled" else (record(), [])
    import reducers._torch

    return {
        "name": name,
        "way": ways,
        "plain": plain() if name == "none" and kind != "compiled" else {},
        "found": found,
        "alone": alone,
        "missing": reducers._torch.missing(),
        "told": told,
        "dynamo": "torch._dynamo" in sys.modules,
    }


def main() -> None:
    kind, names = sys.argv[2], sys.argv[3:]
    if kind != "fresh":  # what takes long to import
        import torch._dynamo  # noqa: F401

    for name in names:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                found = one(kind, name)
            except BaseException:
                found = {"name": name, "failed": traceback.format_exc()}
            with os.fdopen(writing, "w") as file:
                json.dump(found, file)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            print(file.read() or json.dumps({"name": name, "failed": "the process ended"}), flush=True)
        os.waitpid(child, 0)


FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()

if __name__ == "__main__":
    main()
