"""The same work by this library, by others, and by the loop one would write by hand: in one process, taken in turn.

Peers that are not installed are left out, and so is work that a peer cannot do; the result says why.
Run, with `pip install '.[bench]'`: python benchmarks/peers.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, Union

import torch
from measure import alternate, versions, write
from torch import Tensor, nn

from recorders import ForwardMonitor, Monitor, ParameterGradientMonitor, Recorder
from reducers import Activity, Extremes, Mean, Moments, Norm, Quantile, Reducer, Summary

Put: TypeAlias = Callable[[nn.Module], Any]
"""Puts something on a module, and returns what must be kept alive."""
Work: TypeAlias = dict[str, tuple[str, Union[Put, None]]]
"""By who: what is computed, or why it is not, with None."""

OURS, HAND = "torch-recorders", "by hand"
BIG = (64, 128, 768)
CALLS = 500
LAYERS = 24
NOTE = (
    "Nothing in a cell: not done there. Each computes what it has of the work: several statistics are nine numbers here, eight by "
    "hand and with inferno, four with torchmetrics, three with monitorch. torch-recorders keeps NaN and infinities out."
)
EVERY = {"include": (nn.Identity, nn.Linear)}
ALONE = {"compute_correlation": False}
NO_REDUCTION = "a reduction folds whole outputs: nothing smaller is kept"


def ours(reducer: Reducer, kind: Callable[[Reducer], Monitor] = ForwardMonitor) -> tuple[str, Put]:
    return repr(reducer), lambda module: Recorder(kind(reducer)).modules(module)


def hooked(what: str, begin: Callable[[], Any], add: Callable[[Any, Tensor], Any]) -> tuple[str, Put]:
    """A forward hook that folds what `add` makes of the output: the loop one would write."""

    def put(module: nn.Module) -> list[Any]:
        held = [begin()]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            held[0] = add(held[0], output.detach())

        module.register_forward_hook(hook)
        return held

    return what, put


def metrics(*names: str) -> tuple[str, Put]:
    def put(module: nn.Module) -> list[Any]:
        import torchmetrics

        held = [getattr(torchmetrics, name)() for name in names]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            for metric in held:
                metric.update(output)

        module.register_forward_hook(hook)
        return held

    return " + ".join(names), put


def observer(name: str, **options: Any) -> tuple[str, Put]:
    def put(module: nn.Module) -> Any:
        from torch.ao.quantization import observer as observers

        held = getattr(observers, name)(**options)

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            held(output)

        module.register_forward_hook(hook)
        return held

    return name, put


def lenses(**chosen: dict[str, Any]) -> tuple[str, Put]:
    """Of monitorch, by name with their options."""

    def put(module: nn.Module) -> Any:
        from monitorch import lens
        from monitorch.inspector import PyTorchInspector
        from monitorch.visualizer import DummyVisualizer

        held = PyTorchInspector([getattr(lens, name)(**options) for name, options in chosen.items()], visualizer=DummyVisualizer())
        return held.attach(nn.Sequential(module) if not list(module.children()) else module)

    return " + ".join(chosen), put


def cumulative_average(what: str, function: Callable[[Tensor], Tensor]) -> tuple[str, Put]:
    def put(module: nn.Module) -> Any:
        from inferno.observe import CAReducer, OutputMonitor

        return OutputMonitor(CAReducer(1.0), module, map_=lambda output: (function(output),))

    return f"CAReducer of {what}", put


def folded() -> tuple[str, Put]:
    def put(module: nn.Module) -> Any:
        from torchfunc.hooks.recorders import ForwardOutput

        module.register_forward_hook(lambda module, inputs, output: (output,))  # of a bare tensor it takes the first sample only
        return ForwardOutput(reduction=lambda total, output: total + output).modules(module)

    return "ForwardOutput, running sum element by element; the output in a tuple, to be taken whole", put


def eight(x: Tensor) -> Tensor:
    ends = torch.stack([x.min(), x.max(), torch.linalg.vector_norm(x, torch.inf)])
    counts = torch.stack([(x == 0).sum(), x.isnan().sum(), x.isinf().sum()])
    return torch.cat([torch.stack([x.mean(), x.var()]), ends, counts])


def ranges(x: Tensor) -> Tensor:
    return torch.stack(torch.aminmax(x))


def wider(held: Tensor, new: Tensor) -> Tensor:
    return torch.stack([torch.minimum(held[0], new[0]), torch.maximum(held[1], new[1])])


def feature_ranges(x: Tensor) -> Tensor:
    return torch.stack([x.amin((0, 1)), x.amax((0, 1))])


def ends(pattern: str = "... ->") -> Reducer:
    return Extremes(pattern)


def zero() -> Tensor:
    return torch.zeros(())


def endless() -> Tensor:
    return torch.tensor([torch.inf, -torch.inf])


def none(reason: str) -> tuple[str, None]:
    return reason, None


ONE: dict[str, Work] = {
    "mean": {
        OURS: ours(Mean()),
        HAND: hooked("running sum of output.mean()", zero, lambda held, x: held + x.mean()),
        "torchmetrics": metrics("MeanMetric"),
        "inferno": cumulative_average("output.mean()", torch.mean),
        "torchfunc": folded(),
    },
    "norm": {
        OURS: ours(Norm()),
        HAND: hooked("vector_norm", zero, lambda held, x: held + torch.linalg.vector_norm(x).square()),
        "monitorch": lenses(OutputNorm=EVERY),
        "inferno": cumulative_average("vector_norm(output)", torch.linalg.vector_norm),
        "torchfunc": none(NO_REDUCTION),
        "torchmetrics": none("has no norm of a tensor"),
    },
    "min and max": {
        OURS: ours(ends()),
        HAND: hooked("aminmax", endless, lambda held, x: wider(held, ranges(x))),
        "torch.ao": observer("MinMaxObserver"),
        "torch.ao, moving": observer("MovingAverageMinMaxObserver"),
        "torchmetrics": metrics("MinMetric", "MaxMetric"),
        "monitorch": none("keeps extremes of its norms and rates, not of the output"),
        "inferno": none("has no reducer of extremes"),
    },
}
SEVERAL: Work = {
    OURS: ours(Summary()),
    HAND: hooked("eight statistics by plain calls", zero, lambda held, x: eight(x)),
    "torchmetrics": metrics("MeanMetric", "MinMetric", "MaxMetric", "SumMetric"),
    "monitorch": lenses(OutputNorm=EVERY, OutputActivation=EVERY),
    "inferno": cumulative_average("eight statistics by plain calls", eight),
}
ON_BIG: dict[str, Work] = {
    **ONE,
    "min and max per feature": {
        OURS: ours(ends("b ... d -> d")),
        HAND: hooked("amin and amax", lambda: endless()[:, None], lambda held, x: wider(held, feature_ranges(x))),
        "torch.ao": observer("PerChannelMinMaxObserver", ch_axis=2),
        "torchmetrics": none("minima and maxima are of everything"),
    },
    "active units": {
        OURS: ours(Activity(death=True)),
        HAND: hooked("(output.abs() > eps).float().mean((0, 2))", zero, lambda held, x: (x.abs() > 1e-8).float().mean((0, 2))),
        "monitorch": lenses(OutputActivation=EVERY),
        "inferno": cumulative_average("the share of active units", lambda x: (x.abs() > 1e-8).float().mean((0, 2))),
    },
    "several statistics": SEVERAL,
    "distribution": {
        OURS: ours(Quantile()),
        "torch.ao": observer("HistogramObserver"),
        f"{HAND}, histc": hooked("torch.histc, 100 bins", zero, lambda held, x: held + torch.histc(x, 100, -5.0, 5.0)),
        f"{HAND}, histogram": hooked("torch.histogram, 100 bins", zero, lambda held, x: held + _histogram(x)),
        "monitorch": none("has no quantiles or histograms of outputs"),
        "torchmetrics": none("has no quantiles or histograms of tensors"),
        "inferno": none("has no quantiles or histograms"),
    },
}
ON_SMALL: dict[str, Work] = {**ONE, "several statistics": SEVERAL}


def _histogram(x: Tensor) -> Tensor:
    return torch.histogram(x, 100, range=(-5.0, 5.0)).hist


def gradient_hooks(what: str, function: Callable[[Tensor], Tensor]) -> tuple[str, Put]:
    def put(net: nn.Module) -> dict[Tensor, Tensor]:
        held: dict[Tensor, Tensor] = {}

        def hook(parameter: Tensor) -> None:
            new = function(parameter.grad)  # type: ignore[arg-type]
            held[parameter] = held[parameter] + new if parameter in held else new

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        return held

    return what, put


GRADIENTS: dict[str, Work] = {
    "norms": {
        OURS: ours(Norm(), ParameterGradientMonitor),
        HAND: gradient_hooks("vector_norm", torch.linalg.vector_norm),
        "monitorch": lenses(ParameterGradientGeometry=ALONE),
        "torch.ao": none("observes no gradients of parameters"),
        "torchfunc": none("records no gradients of parameters"),
        "inferno": none("records no gradients of parameters"),
        "torchmetrics": none("records no gradients of parameters"),
    },
    "several statistics": {
        OURS: ours(Summary(), ParameterGradientMonitor),
        HAND: gradient_hooks("eight statistics by plain calls", eight),
        "monitorch": lenses(ParameterGradientGeometry=ALONE, ParameterGradientActivation={}),
    },
    "moments": {OURS: ours(Moments(), ParameterGradientMonitor), HAND: gradient_hooks("var", torch.var)},
}


class Table:
    """Rows of what ran, and of what did not with the reason."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = [{"who": "baukit", "not run": "not on PyPI"}]

    def add(
        self,
        where: str,
        name: str,
        work: Work,
        floor: tuple[str, Callable[[], Any]],
        begin: Callable[[Put], tuple[Callable[[], Any], Any]],
        bare: Callable[[], Any] | None = None,
        seconds: float = 0.6,
    ) -> None:
        """Times everybody at one piece of work, and says it as multiples of the floor; beyond the bare run where there is one."""
        functions, kept, rows = {floor[0]: floor[1]}, [], []
        if bare is not None:
            functions["bare"] = bare
        for who, (what, put) in work.items():
            row = {"where": where, "work": name, "who": who}
            if put is None:
                self.left_out.append({**row, "not run": what})
                continue
            try:
                functions[who], held = begin(put)
                functions[who]()
            except Exception as problem:  # a peer that fails is a result
                self.left_out.append({**row, "not run": f"{type(problem).__name__}: {str(problem).splitlines()[0]}"})
                functions.pop(who, None)
                continue
            kept.append(held)
            rows.append({**row, "what": what})
        times = alternate(functions, seconds=seconds, least=3)
        base = times["bare"]["median"] if bare is not None else 0.0
        one = times[floor[0]]["median"]
        cost = {who: max(time["median"] - base, 0.0) for who, time in times.items()}
        for row in rows:
            who = row["who"]
            figures = {"ms": times[who], "floor": floor[0], "x floor": cost[who] / one}
            if cost.get(OURS):
                figures["x ours"] = cost[who] / cost[OURS]
            self.rows.append({**row, **figures})
            print(f"{where:16} {name:24} {who:22} {times[who]['median']:9.3f} ms {cost[who] / one:9.2f} x {floor[0]}", flush=True)


def on_big(table: Table) -> None:
    x = torch.randn(BIG, generator=torch.Generator().manual_seed(0))

    def begin(put: Put) -> tuple[Callable[[], Any], Any]:
        layer = nn.Identity()
        held = put(layer)
        return lambda: layer(x), held

    for name, work in ON_BIG.items():
        table.add("25 MB activation", name, work, ("x.sum()", x.sum), begin)


def on_small(table: Table) -> None:
    x, plain = torch.randn(8, 64), nn.Linear(64, 64)

    def repeated(layer: nn.Module, held: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                layer(x)
            if isinstance(held, Recorder):
                held.compute()

        return run

    def begin(put: Put) -> tuple[Callable[[], Any], Any]:
        layer = nn.Linear(64, 64)
        held = put(layer)
        return repeated(layer, held), held

    call = repeated(plain, None)
    for name, work in ON_SMALL.items():
        table.add("8x64 output", name, work, ("the bare Linear call", call), begin, bare=repeated(nn.Linear(64, 64), None))


def on_gradients(table: Table) -> None:
    x = torch.randn(16, 512)

    def training(net: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(net(x).square().mean())
            optimizer.step()

        return step

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(LAYERS)))

    def begin(put: Put) -> tuple[Callable[[], Any], Any]:
        net = made()
        held = put(net)
        return training(net), held

    clipped = made()
    training(clipped)()
    floor = "clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(clipped.parameters(), 1e9)
    for name, work in GRADIENTS.items():
        table.add("all gradients", name, work, floor, begin, bare=training(made()), seconds=1.5)


def main() -> None:
    warnings.filterwarnings("ignore")  # theirs, of what is deprecated
    torch.manual_seed(0)
    table = Table()
    with torch.no_grad():
        on_big(table)
        on_small(table)
    on_gradients(table)
    absent = sorted({f"{row['who']}: {row['not run']}" for row in table.left_out if "ModuleNotFound" in row["not run"]})
    print("\n".join(["", *absent]))
    write(
        "peers",
        rows=table.rows,
        left_out=table.left_out,
        packages=versions("monitorch", "torchfunc", "inferno-ai", "torchmetrics", "torch"),
        note=NOTE,
        what="beyond the bare run on small outputs and gradients; a hook on an empty layer for the 25 MB activation",
    )


if __name__ == "__main__":
    main()
