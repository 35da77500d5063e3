"""bisect(): pairs that are healthy, what is put back, and what it does with compiled nets, other names and errors."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from planted_divergences import Language, Planted, Vision, batch, loss, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders import BackwardMonitor, Divergence, ForwardMonitor, Recorder, SelectionError, TargetError, bisect
from reducers import Mean

TYPES = (torch.bfloat16, torch.float16, torch.float64)


def pair(net: Callable[..., Any] = Language, training: bool = False, rewritten: bool = False) -> tuple[Any, Any]:
    return twins(Planted("", "", "", net=net, training=training), rewritten)


def square(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor.square().mean()


def deep(depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    return nn.Sequential(*layers)


class Fused(nn.Module):
    """Attention, by one operator or by hand."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        mixed = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", [Language, Vision])
@pytest.mark.parametrize("rewritten", [False, True])
def test_a_copy_is_not_named(net: Callable[..., Any], training: bool, rewritten: bool) -> None:
    first, second = pair(net, training, rewritten)
    found = bisect(first, second, batch(first), loss=loss)
    assert not found
    assert found.distance == 0
    assert str(found) == "No difference beyond noise (largest distance seen: 0).\n- gradients agree, too"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("net", [Language, Vision])
def test_a_copy_in_another_dtype_is_not_named(net: Callable[..., Any], dtype: torch.dtype) -> None:
    first, _ = pair(net, training=True)
    other = copy.deepcopy(first).to(dtype)
    for a, b in ((first, other), (other, first)):
        found = bisect(a, b, batch(first), loss=loss)
        assert not found
        assert 0 < found.distance < 0.05


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("net", "x"),
    [
        (lambda: deep(3), torch.randn(8, 64)),
        (lambda: deep(30), torch.randn(8, 64)),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3), torch.randn(2, 9, 32)),
        (lambda: nn.LSTM(8, 16, 2, batch_first=True), torch.randn(2, 9, 8)),
    ],
    ids=["deep 3", "deep 30", "encoder", "lstm"],
)
def test_depth_and_kind_of_net_name_no_copy(net: Callable[[], nn.Module], x: Tensor, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    first = net()
    assert not bisect(first, copy.deepcopy(first).to(dtype), x, loss=square)


def test_a_rewrite_by_other_operators_is_not_named() -> None:
    first, second = Fused(True), Fused(False)
    second.load_state_dict(first.state_dict())
    found = bisect(first, second, torch.randn(2, 5, 32), loss=square)
    assert not found
    assert found.distance > 0


def test_a_fault_in_a_net_of_half_precision_is_named() -> None:
    first, second = twins(Planted("no scale of attention", "", ""))
    found = bisect(first, second.bfloat16(), batch(first))
    assert (found.phase, found.module, found.operator) == ("forward", "blocks.1.attend", "aten.div.Tensor")


def test_other_numbers_of_threads_are_not_named() -> None:
    class Threads(nn.Module):
        def __init__(self, net: nn.Module, number: int) -> None:
            super().__init__()
            self.net, self.number = net, number

        def forward(self, x: Tensor) -> Any:
            before = torch.get_num_threads()
            torch.set_num_threads(self.number)
            try:
                return self.net(x)
            finally:
                torch.set_num_threads(before)

    net = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512), nn.Softmax(-1))
    assert not bisect(Threads(net, 1), Threads(copy.deepcopy(net), 2), torch.randn(256, 512), loss=square)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_copy_is_not_named(backend: str, in_place: bool, fresh_compiler: None) -> None:
    first, second = pair()
    if in_place:
        second.compile(backend=backend)
    else:
        second = torch.compile(second, backend=backend)
    assert not bisect(first, second, batch(first), loss=loss)


def test_what_a_compiler_makes_wrong_is_named_as_such(fresh_compiler: None) -> None:
    def wrong(graph: Any, inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(x * 1.01 if x.is_floating_point() else x for x in graph(*args))

    first, second = pair()
    second.blocks[1].mlp = torch.compile(second.blocks[1].mlp, backend=wrong)
    with torch.no_grad():
        found = bisect(first, second, batch(first))
    assert (found.phase, found.module) == ("compiled", "blocks.1.mlp")
    assert "differ from those of its own eager code" in str(found)


def test_a_fault_in_a_compiled_net_is_found_in_its_eager_code(fresh_compiler: None) -> None:
    first, second = twins(Planted("gelu by tanh", "", ""))
    found = bisect(first, torch.compile(second, backend="aot_eager"), batch(first))
    assert (found.phase, found.module, found.operator) == ("forward", "blocks.1.mlp", "aten.gelu.default")


def snapshot(*nets: nn.Module) -> list[Any]:
    tensors = [tensor for net in nets for tensor in [*net.parameters(), *net.buffers()]]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    modes = [module.training for net in nets for module in net.modules()]
    return [values, gradients, versions, modes, torch.get_rng_state(), random.getstate(), numpy.random.get_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Tensor, numpy.ndarray)):
        return bool((a == b).all())
    return bool(a == b)


class Stateful(nn.Module):
    """Has whatever a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.zeros(4))
        self.calls, self.seen, self.cache = 0, [], {}
        self.generator = torch.Generator().manual_seed(3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.cache["x"] = x
        self.kept = self.kept + 1
        random.random()
        numpy.random.rand()
        y = self.norm(self.layer(x)) + torch.rand(4, generator=self.generator)
        self.layer.weight.data.mul_(1.5)
        if self.fails:
            raise KeyError("of the user")
        return nn.functional.dropout(y, 0.5) * self.calls


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails: bool) -> None:
    first = Stateful()
    second = copy.deepcopy(first)
    second.fails = fails
    first.layer.weight.grad = torch.ones(4, 4)
    x = torch.randn(8, 4)
    before, generator = snapshot(first, second), first.generator.get_state()
    kept = x.clone()
    if fails:
        with pytest.raises(KeyError, match="of the user"):
            bisect(first, second, x, loss=square)
    else:
        assert not bisect(first, second, x, loss=square)
    after = snapshot(first, second)
    for name, a, b in zip(["values", "gradients", "versions", "modes", "rng", "python", "numpy"], before, after, strict=True):
        assert name == "versions" or same(a, b), name
    assert first.calls == second.calls == 0
    assert first.seen == [] == second.seen
    assert first.cache == {} == second.cache
    assert bool((first.generator.get_state() == generator).all())
    assert bool((x == kept).all())
    assert not first._forward_hooks
    assert not second.layer._forward_pre_hooks


def test_a_graph_of_the_user_stays_valid_and_nothing_is_written_that_did_not_change() -> None:
    first, second = pair(Vision, training=True)
    x = batch(first)
    output = loss(first(x))
    versions = [tensor._version for tensor in first.parameters()]
    assert not bisect(first, second, x) or True
    output.backward()
    assert versions == [tensor._version for tensor in first.parameters()]


def test_recorders_record_nothing_of_it() -> None:
    first, second = pair()
    with Recorder(out=ForwardMonitor(Mean()), back=BackwardMonitor(Mean())).modules(first) as recorder:
        bisect(first, second, batch(first), loss=loss)
        assert sum(recorder.samples.values()) == 0
        loss(first(batch(first))).backward()
        assert recorder.samples["out/head"] == 1


def test_gradients_modes_and_autocast_are_those_of_the_caller() -> None:
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), self.training))
            return x * 2

    net = Looks().eval()
    with torch.no_grad(), torch.autocast("cpu"):
        bisect(net, Looks().eval(), torch.ones(2))
    assert set(seen) == {(False, True, False)}


def test_names_say_what_belongs_together() -> None:
    class Two(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.one, self.two, self.scale = nn.Tanh(), nn.Tanh(), scale

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x) * self.scale)

    found = bisect(Two(1.0), Two(2.0), torch.randn(3), names={"one": "one", "two": "two"})
    assert (found.module, found.operator) == ("", "aten.mul.Tensor")
    assert "its scale is 1.0 in the first net, 2.0 in the second" in str(found)
    with pytest.raises(SelectionError, match="the second net has no module 'three'"):
        bisect(Two(1.0), Two(2.0), torch.randn(3), names={"one": "three"})


@pytest.mark.parametrize("wrong", ["module", "meta", "target"])
def test_errors_say_what_to_do(wrong: str) -> None:
    net, x = nn.Linear(2, 2), torch.ones(1, 2)
    if wrong == "target":
        with pytest.raises(TypeError, match="give loss="):
            bisect(net, net, x, target=x)
        return
    other: Any = torch.relu if wrong == "module" else nn.Linear(2, 2, device="meta")
    with pytest.raises(TargetError, match=r"two torch\.nn\.Module" if wrong == "module" else "meta device"):
        bisect(net, other, x)


def test_inputs_are_tensors_tuples_or_keywords_and_a_target_goes_to_the_loss() -> None:
    net = nn.Bilinear(2, 3, 2)
    other = copy.deepcopy(net)
    other.bias = None
    a, b = torch.randn(4, 2), torch.randn(4, 3)
    for given in ((a, b), {"input1": a, "input2": b}):
        assert bisect(net, other, given).differs == "its bias is missing in the second net"
    assert not bisect(net, copy.deepcopy(net), (a, b), target=torch.zeros(4, 2), loss=nn.functional.mse_loss)


def test_a_tolerance_of_the_user_holds_everywhere() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].weight[0, 0] *= 1.001
    assert bisect(net, other, torch.ones(2, 4))
    assert not bisect(net, other, torch.ones(2, 4), tolerance=0.01)


def test_a_module_that_is_called_several_times_is_compared_call_by_call() -> None:
    class Often(nn.Module):
        def __init__(self, last: float) -> None:
            super().__init__()
            self.cell, self.last = nn.Tanh(), last

        def forward(self, x: Tensor) -> Tensor:
            for scale in (1.0, 1.0, self.last):
                x = self.cell(x * scale)
            return x

    found = bisect(Often(1.0), Often(1.5), torch.randn(5))
    assert (found.module, found.operator) == ("", "aten.mul.Tensor")


def test_checkpointed_modules_are_seen_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), scale

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False) * self.scale

    net = Checkpointed(1.0)
    other = copy.deepcopy(net)
    assert not bisect(net, other, torch.randn(2, 4), loss=square)
    other.scale = 2.0
    assert bisect(net, other, torch.randn(2, 4), loss=square).operator == "aten.mul.Tensor"


def test_in_place_operators_and_views_are_followed() -> None:
    class InPlace(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            y[:, 0].mul_(self.by)
            nn.functional.relu(y, inplace=True)
            return y + 1

    assert not bisect(InPlace(2.0), InPlace(2.0), torch.randn(3, 3))
    assert bisect(InPlace(2.0), InPlace(3.0), torch.randn(3, 3).abs()).operator == "aten.mul_.Tensor"


def test_nothing_found_is_false_and_says_how_far() -> None:
    assert not Divergence()
    assert str(Divergence(distance=0.5)) == "No difference beyond noise (largest distance seen: 0.5)."


def stacked(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.parametrize("first_is_laid_out", [False, True])
def test_a_copy_whose_parameters_lie_otherwise_in_memory_is_not_named(first_is_laid_out: bool) -> None:
    net = stacked()
    other = copy.deepcopy(net).to(memory_format=torch.channels_last)
    pairs = (other, net) if first_is_laid_out else (net, other)
    pointers = [parameter.data_ptr() for one in pairs for parameter in one.parameters()]
    strides = [parameter.stride() for one in pairs for parameter in one.parameters()]
    found = bisect(*pairs, torch.randn(4, 3, 32, 32), loss=nn.functional.cross_entropy, target=torch.arange(4))
    assert not found, found
    assert found.distance == 0
    assert pointers == [parameter.data_ptr() for one in pairs for parameter in one.parameters()]
    assert strides == [parameter.stride() for one in pairs for parameter in one.parameters()]
    with torch.no_grad():
        pairs[1][4].weight.mul_(1.01)  # type: ignore[operator]
    found = bisect(*pairs, torch.randn(4, 3, 32, 32))
    assert (found.phase, found.module, found.differs) == ("parameters", "4", "its weight is 1.01 times as large in the second net")


def test_a_module_in_the_place_of_another_is_named_as_such() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    shared, exchanged = copy.deepcopy(net), copy.deepcopy(net)
    shared[2] = shared[0]
    exchanged[0], exchanged[4] = exchanged[4], exchanged[0]
    found = bisect(net, shared, torch.randn(4, 8))
    assert (found.phase, found.module, found.module_b) == ("forward", "2", "0")
    assert found.differs == "the second net calls 0 in its place"
    found = bisect(net, exchanged, torch.randn(4, 8))
    assert (found.phase, found.module, found.module_b) == ("parameters", "0", "0")
    assert found.differs == "its parameters are those of 4 in the first net"
