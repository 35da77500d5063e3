"""The same observations by this library, by others, and by the hooks one would write by hand: on a GPU, in turn.

Others that are not installed, or fail, are left out; the result says why.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_timing import QUICK, Effort, Findings, in_turn, ratios
from gpu_training import SIZES, SMALL, TINY, Put, outputs, released, rigs
from measure import spread
from peers import eight, lenses, metrics
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders import ForwardMonitor, ParameterGradientMonitor, Recorder
from reducers import Mean, Quantile, Reducer, Summary

__all__ = ["observations", "steps"]

TITAN = "torchtitan's design"
HAND = "by hand"
LEAVES = {"include": (nn.Linear, nn.LayerNorm, nn.GELU, nn.Embedding, nn.Identity)}
NEEDS_TRITON = "needs a GPU and Triton"
SHAPES = {
    "25 MB, float32": ((8192, 768), torch.float32, 20),
    "34 MB, bfloat16": ((8192, 2048), torch.bfloat16, 20),
    "8x64, float32": ((8, 64), torch.float32, 400),
}
"""Observations: shape, dtype, and how many calls make a turn."""

Watch = Callable[[nn.Module], Any]
"""Puts something on one layer, and returns what must be kept alive."""


def hook_of(function: Callable[[Any, Tensor], Any]) -> Watch:
    """A forward hook as one writes it by hand: it keeps what `function` makes of what it kept (0 at first) and the output."""

    def put(module: nn.Module) -> list[Any]:
        held: list[Any] = [0.0]

        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            held[0] = function(held[0], output.detach())

        module.register_forward_hook(hook)
        return held

    return put


def ours(reducer: Reducer) -> Watch:
    return lambda module: Recorder(ForwardMonitor(reducer)).modules(module)


def titan(module: nn.Module) -> Any:
    from gpu_slots import Slots

    slots = Slots(1, torch.get_default_device())
    slots.watch(module, 0)
    return slots


def watches(device: torch.device) -> dict[str, Watch]:
    """By who, what is put on one layer."""
    found: dict[str, Watch] = {
        "torch-recorders, Summary": ours(Summary()),
        "torch-recorders, Mean": ours(Mean()),
        TITAN: titan,
        f"{HAND}, eight statistics": hook_of(lambda held, x: held + eight(x.float())),
        f"{HAND}, x.mean()": hook_of(lambda held, x: held + x.mean()),
        f"{HAND}, x.mean().item()": hook_of(lambda held, x: held + x.mean().item()),
        "torchmetrics, MeanMetric": metrics("MeanMetric")[1],
        "torchmetrics, four metrics": metrics("MeanMetric", "MinMetric", "MaxMetric", "SumMetric")[1],
        "monitorch, norm and activity": lenses(OutputNorm=LEAVES, OutputActivation=LEAVES)[1],
    }
    if device.type != "cuda":
        del found[TITAN]
    return found


def observations(found: Findings, device: torch.device, quick: bool) -> None:
    """One call of a layer that does nothing, observed; `x.sum()` is the yardstick."""
    if device.type != "cuda":
        found.leave_out(NEEDS_TRITON, who=TITAN)
    for name, (shape, dtype, count) in SHAPES.items():
        x = torch.randn(shape if not quick else (64, *shape[1:]), dtype=dtype, device=device)
        of = {"observation": name}
        functions: dict[str, Callable[[], Any]] = {"x.sum()": x.sum}
        for who, put in watches(device).items():
            layer = nn.Identity()
            with device:
                found.tried(lambda: functions.update({who: _called(layer, put(layer), x)}), **of, who=who)  # noqa: B023
        with torch.no_grad():
            functions = found.working(functions, **of)
            times = in_turn(functions, device, QUICK if quick else Effort(count, seconds=0.5))
        for who in functions:
            row = {**of, "who": who, "ms": spread(times[who]), "x sum": ratios(times[who], times["x.sum()"])}
            found.add(row, f"{1e3 * row['ms']['median']:.1f} us, {row['x sum']['median']:.2f} x x.sum()")


def _called(layer: nn.Module, held: Any, x: Tensor) -> Callable[[], Any]:
    """A function that calls the layer, and keeps alive what is on it."""

    def call(kept: Any = held) -> Any:
        return layer(x)

    return call


def on_leaves(watch: Watch) -> Put:
    """Puts it on every leaf module of a network."""
    return lambda net, optimizer: [watch(module) for module in net.modules() if not list(module.children())]


def on_net(watch: Watch) -> Put:
    return lambda net, optimizer: watch(net)


def titan_on_leaves(net: nn.Module, optimizer: Optimizer) -> Any:
    from gpu_slots import Slots

    leaves = [module for module in net.modules() if not list(module.children())]
    slots = Slots(len(leaves), next(net.parameters()).device)
    for place, module in enumerate(leaves):
        slots.watch(module, place)
    return slots


def gradient_norms(net: nn.Module, optimizer: Optimizer) -> Any:
    """The norm of each gradient as a number on the host, by a hook on each parameter."""
    norms: dict[Tensor, float] = {}

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[parameter] = torch.linalg.vector_norm(parameter.grad).item()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return norms


def gradient_quantiles(net: nn.Module, optimizer: Optimizer) -> Any:
    return Recorder(ParameterGradientMonitor(Quantile())).modules(net, leaves=True).attach(optimizer)


def wandb_watch(net: nn.Module, optimizer: Optimizer) -> Any:
    """`wandb.watch` with histograms of all gradients, in each step, in a run that sends nothing."""
    import wandb

    assert wandb.run is not None
    wandb.unwatch()
    wandb.watch(net, log="gradients", log_freq=1)
    return optimizer.register_step_post_hook(lambda *_: wandb.run.log({}))


@contextmanager
def wandb_offline(found: Findings) -> Iterator[dict[str, Put]]:
    """What `wandb` can be measured at, while it has a run; nothing if it is not installed or does not start."""
    if importlib.util.find_spec("wandb") is None:
        found.leave_out("not installed", who="wandb.watch")
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        run = found.tried(lambda: _wandb_run(folder), who="wandb.watch")
        try:
            yield {"wandb.watch, histograms of gradients": wandb_watch} if run is not None else {}
        finally:
            if run is not None:
                run.finish()


def _wandb_run(folder: str) -> Any:
    import wandb

    return wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True, console="off", x_disable_stats=True))


EAGER: dict[str, Put] = {
    "torch-recorders, Summary of outputs": outputs(Summary()),
    "torch-recorders, Mean of outputs": outputs(Mean()),
    f"{TITAN}, outputs": titan_on_leaves,
    f"{HAND}, output.mean()": on_leaves(hook_of(lambda held, x: held + x.mean())),
    f"{HAND}, output.mean().item()": on_leaves(hook_of(lambda held, x: held + x.mean().item())),
    "torchmetrics, MeanMetric of outputs": on_leaves(metrics("MeanMetric")[1]),
    "monitorch, norm and activity of outputs": on_net(lenses(OutputNorm=LEAVES, OutputActivation=LEAVES)[1]),
    "torch-recorders, Quantile of gradients": gradient_quantiles,
    f"{HAND}, norms of gradients, .item()": gradient_norms,
}
COMPILED = (f"{TITAN}, outputs", "torch-recorders, Summary of outputs")


def steps(found: Findings, device: torch.device, quick: bool) -> None:
    """A training step of the smaller network, observed by each; inside `torch.compile` by those that are made for it."""
    name, size = ("tiny", TINY) if quick else (SMALL, SIZES[SMALL])
    effort = QUICK if quick else Effort(calls=10, seconds=3.0)
    puts = dict(EAGER)
    if device.type != "cuda":
        del puts[f"{TITAN}, outputs"]
        found.leave_out(NEEDS_TRITON, network=name, who=f"{TITAN}, outputs")
    with wandb_offline(found) as more:
        rigs(found, name, size, device, "eager", {**puts, **more}, effort)
    if device.type == "cuda":  # quick: the section "training" has tried what is ours
        rigs(found, name, size, device, "compiled", {who: puts[who] for who in COMPILED[: 1 if quick else None]}, effort)
    torch.compiler.reset()
    released()
