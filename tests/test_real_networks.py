"""Real networks, trained with everything recorded: the numbers are those taken by hand, and the training is the same to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    OptimizerStateMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
)
from reducers import Count, Max, Mean, Min, Product

STEPS = 2
COMPILERS_OWN = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"  # where a graph goes on after a break
HUGGING_FACE = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")
NUMBERS = Product(n=Count(), low=Min(), top=Max(), mean=Mean())
KINDS = {
    "out": ForwardMonitor(NUMBERS, on_error="raise"),
    "inp": ForwardInputMonitor(NUMBERS, on_error="raise"),
    "back": BackwardMonitor(NUMBERS, on_error="raise"),
    "back_inp": BackwardInputMonitor(NUMBERS, on_error="raise"),
    "grad": ParameterGradientMonitor(NUMBERS, on_error="raise"),
    "value": ParameterMonitor(NUMBERS, on_error="raise"),
    "update": ParameterUpdateMonitor(NUMBERS, on_error="raise"),
    "kept": OptimizerStateMonitor(NUMBERS, "exp_avg", on_error="raise"),
}


ACTIVATIONS, PARAMETERS = [*KINDS][:4], [*KINDS][4:]


@dataclass(frozen=True)
class Way:
    """How a network is trained."""

    micro_batches: int = 2
    reentrant: bool | None = None
    autocast: bool = False
    compiled: bool = False
    layers: int = 2
    steps: int = STEPS
    groups: tuple[str, ...] = tuple(KINDS)

    def by_hand(self, name: str) -> Way:
        """The way to take the same numbers by hand: without compiling, and without checkpointing where that can be."""
        checkpointed = NETWORKS[name].another and self.reentrant is not None
        return replace(self, reentrant=False if checkpointed else None, compiled=False, groups=tuple(KINDS))

    @property
    def rtol(self) -> float:
        """How close the numbers are, 0 for the same bits; compilers and reentrant checkpoints add in another order."""
        if not self.compiled and self.reentrant is not True:
            return 0.0
        return 2e-2 if self.autocast else 1e-4  # in bfloat16, which has 8 bits


WAYS = {
    "plain": Way(micro_batches=1),
    "accumulated": Way(),
    "checkpointed": Way(reentrant=False),
    "checkpointed, reentrant": Way(reentrant=True),
    "autocast": Way(autocast=True),
    "autocast, checkpointed": Way(autocast=True, reentrant=False),
}


@dataclass
class ByHand:
    """Observations by (group, module, leaf): how many numbers, the least, the greatest, and their sum in float64."""

    found: dict[tuple[str, str, str], list[Any]] = field(default_factory=dict)

    def see(self, group: str, module: str, leaf: str, x: Tensor) -> None:
        numbers = x.detach()
        kept = self.found.setdefault((group, module, leaf), [0, numbers.flatten()[0], numbers.flatten()[0], 0.0])
        kept[0] += numbers.numel()
        kept[1], kept[2] = torch.minimum(kept[1], numbers.min()), torch.maximum(kept[2], numbers.max())
        kept[3] += numbers.double().sum()


@dataclass
class Trained:
    """What a training leaves behind."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    recorder: Recorder | None
    graphs: int
    hand: ByHand


def tensors(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield ".".join(path), value
    elif isinstance(value, (dict, tuple, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(item, (*path, str(key)))


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The inputs of a call, as the documents say that they are named."""
    if len(args) + len(kwargs) == 1:
        return args[0] if args else next(iter(kwargs.values()))
    return args if not kwargs else {**{str(index): value for index, value in enumerate(args)}, **kwargs}


class Owned:
    """The parameters of a network, looked at before and after each step."""

    def __init__(self, net: nn.Module, hand: ByHand) -> None:
        self.hand = hand
        self.all = [
            (key, leaf, value)
            for key, module in net.named_modules()
            for leaf, value in module._parameters.items()
            if value is not None
        ]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        earlier = [parameter.detach().clone() for _, _, parameter in self.all]
        optimizer.step()
        for (module, leaf, parameter), old in zip(self.all, earlier, strict=True):
            self.hand.see("value", module, leaf, parameter)
            self.hand.see("update", module, leaf, parameter.detach() - old)
            if parameter.grad is not None:
                self.hand.see("grad", module, leaf, parameter.grad)
                self.hand.see("kept", module, leaf, optimizer.state[parameter]["exp_avg"])


def loss_of(call: Callable[..., Any], inputs: dict[str, Tensor], way: Way) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way.autocast):
        loss: Tensor = call(**inputs).loss
    return loss / way.micro_batches


def train(name: str, way: Way, recorded: bool) -> Trained:
    torch.manual_seed(0)
    if way.compiled:
        torch._dynamo.reset()
        counters.clear()
    network = NETWORKS[name]
    net = network.make(layers=way.layers).train()
    if way.reentrant is not None:
        network.checkpointed(net, way.reentrant)
    recorder = Recorder(**{group: KINDS[group] for group in way.groups}).modules(net) if recorded else None
    with torch._dynamo.config.patch(wrap_top_frame=True):  # the hooks of the net itself are in its graph
        call = torch.compile(net, backend="aot_eager") if way.compiled else net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    owned, losses = Owned(net, ByHand()), []
    for _ in range(way.steps):
        optimizer.zero_grad()
        for samples in range(3, 3 + way.micro_batches):
            loss = loss_of(call, network.feed(samples), way)
            loss.backward()
            losses.append(loss.detach())
        owned.step(optimizer)
    return Trained(losses, net.state_dict(), recorder, counters["stats"]["unique_graphs"], owned.hand)


@functools.cache
def by_hand(name: str, way: Way) -> ByHand:
    """Activations and their gradients in the same training, by plain hooks and `torch.autograd.grad`."""
    torch.manual_seed(0)
    network, hand = NETWORKS[name], ByHand()
    net = network.make(inplace=False, layers=way.layers).train()
    if way.reentrant is not None:
        network.checkpointed(net, way.reentrant)
    modules = dict(net.named_modules())
    names = {module: key for key, module in modules.items()}
    awaited: dict[tuple[str, str, str, int], Tensor] = {}
    forward = False

    def look(group: str, back: str, module: nn.Module, value: Any) -> None:
        for leaf, tensor in tensors(value) if forward else ():
            hand.see(group, names[module], leaf, tensor)
            if tensor.requires_grad:
                awaited[back, names[module], leaf, id(tensor)] = tensor

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        look("inp", "back_inp", module, given(args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        look("out", "back", module, output)

    for module in modules.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(way.steps):
        optimizer.zero_grad()
        for samples in range(3, 3 + way.micro_batches):
            forward = True
            loss = loss_of(net, network.feed(samples), way)
            forward = False
            gradients = torch.autograd.grad(loss, list(awaited.values()), retain_graph=True, allow_unused=True)
            for (group, module, leaf, _), gradient in zip(awaited, gradients, strict=True):
                if gradient is not None:
                    hand.see(group, module, leaf, gradient)
            awaited.clear()
            loss.backward()
        optimizer.step()
    return hand


def check_numbers(recorder: Recorder, hand: ByHand, rtol: float, leave_out: tuple[object, ...] = ()) -> None:
    recorded = {}
    for name, monitor in recorder.items():
        group, _, module = name.partition("/")
        if group not in leave_out and (group, module) not in leave_out:
            recorded.update({(group, module, leaf): result for leaf, result in monitor.snapshot().leaves().items()})
    expected = {key: kept for key, kept in hand.found.items() if key[0] not in leave_out and key[:2] not in leave_out}
    assert set(recorded) == set(expected)
    tolerance = {"rtol": rtol, "atol": rtol / 100}
    for key, (n, low, top, total) in expected.items():
        result = recorded[key]
        assert result["n"] == n, key
        for found, wanted in ((result["low"], low), (result["top"], top)):
            torch.testing.assert_close(found, wanted, check_dtype=not rtol, msg=lambda m, key=key: f"{key}: {m}", **tolerance)
        bound = (rtol or 1e-12) * max(abs(float(low)), abs(float(top)))
        assert abs(float(result["mean"]) - float(total) / n) <= bound, key


def check(name: str, way: Way, leave_out: tuple[object, ...] = ()) -> None:
    bare, recorded = train(name, way, recorded=False), train(name, way, recorded=True)
    assert all(a.equal(b) for a, b in zip(bare.losses, recorded.losses, strict=True))
    assert bare.weights.keys() == recorded.weights.keys()
    if not (NETWORKS[name].cut and way.compiled and way.reentrant is not None):
        assert all(bare.weights[key].equal(recorded.weights[key]) for key in bare.weights)
        assert bare.graphs == recorded.graphs
    assert recorded.recorder is not None
    if way.compiled and (name == "mixtral" or NETWORKS[name].cut):  # what a broken graph returns is partial, as the report tells
        told = [row.name for row in recorded.recorder.report().rows if "a compiled graph returned it" in row.reason]
        leave_out = (*leave_out, *((key.partition("/")[0], key.partition("/")[2]) for key in told))
    leave_out = (*leave_out, *KINDS.keys() - way.groups)
    check_numbers(recorded.recorder, recorded.hand, 0.0, (*leave_out, *ACTIVATIONS))  # of the very training, compiled as it is
    check_numbers(recorded.recorder, by_hand(name, way.by_hand(name)), way.rtol, (*leave_out, *PARAMETERS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_everything_recorded_is_what_is_taken_by_hand_and_the_training_is_the_same(name: str, way: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    if WAYS[way].reentrant and not NETWORKS[name].reentrant:
        pytest.skip("its router's logits lose their gradients, so that it is trained otherwise")
    # a tensor that several blocks of T5 share is another one inside each reentrant checkpoint, with a part of the gradient
    apart = bool(NETWORKS[name].another and WAYS[way].reentrant)
    check(name, WAYS[way], leave_out=("back", "back_inp") if apart else ())


def test_generation_with_a_cache_is_recorded_token_by_token() -> None:
    transformers = pytest.importorskip("transformers")

    def generate(net: nn.Module) -> list[Tensor]:
        tokens, cache, logits = torch.arange(10).view(2, 5), transformers.DynamicCache(), []
        with torch.inference_mode():
            for _ in range(3):
                # by position: the releases of transformers give the cache other names
                logits.append(net(tokens, None, None, cache, use_cache=True).logits)
                tokens = logits[-1][:, -1:].argmax(-1)
        return logits

    torch.manual_seed(0)
    net = NETWORKS["llama"].make().eval()
    bare, hand = generate(net), ByHand()
    handles = [
        module.register_forward_hook(
            lambda _, args, output, key=key: [hand.see("out", key, leaf, x) for leaf, x in tensors(output)] and None
        )
        for key, module in net.named_modules()
    ]
    generate(net)
    for handle in handles:
        handle.remove()
    recorder = Recorder(out=KINDS["out"]).modules(net)
    assert all(a.equal(b) for a, b in zip(bare, generate(net), strict=True))
    check_numbers(recorder, hand, rtol=0.0)
    assert recorder.samples["out/model.layers.1.self_attn.k_proj"] == 3
    assert recorder["out/model.layers.1.self_attn.k_proj"].peek()["n"] == 2 * (5 + 1 + 1) * 8


COMPILED = {
    "compiled": Way(micro_batches=1, compiled=True),
    "compiled, accumulated": Way(compiled=True),
    "compiled, checkpointed": Way(micro_batches=1, reentrant=False, compiled=True),
    # one step: from the second on networks differ, where Adam makes a whole step of what bfloat16 rounds differently
    "compiled, autocast": Way(micro_batches=1, autocast=True, compiled=True, steps=1),
    "compiled, accumulated, checkpointed, autocast": Way(reentrant=False, autocast=True, compiled=True, steps=1),
}
IN_SECONDS = {("unet", way) for way in COMPILED} | {("lstm", "compiled"), ("gru", [*COMPILED][-1])}


def cases() -> Iterator[Any]:
    """Those that take minutes are under the marker `long`."""
    for name in NETWORKS:
        for way in COMPILED:
            yield pytest.param(name, way, marks=() if (name, way) in IN_SECONDS else pytest.mark.long, id=f"{name}-{way}")


@pytest.mark.slow
@pytest.mark.filterwarnings(COMPILERS_OWN)
@pytest.mark.parametrize(("name", "way"), [*cases()])
def test_a_compiled_network_is_recorded_as_without_a_compiler_and_trains_the_same(name: str, way: str) -> None:
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    check(name, COMPILED[way])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_of_a_compiled_transformer_are_recorded_in_its_one_graph(name: str) -> None:
    pytest.importorskip("transformers")
    check(name, Way(micro_batches=1, compiled=True, layers=1, groups=("back", "back_inp")))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
