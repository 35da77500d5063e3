"""What plain PyTorch does where docs/capture.md says so; where one of these fails, PyTorch has changed and the table must too."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ONE = torch.ones(1, 1)


def watched(module: nn.Module, **options: Any) -> list[Any]:
    """The outputs that a forward hook of this module will have seen."""
    seen: list[Any] = []
    module.register_forward_hook(lambda module, args, output: seen.append(output), **options)
    return seen


def test_calls_aliases_and_ties_are_counted_by_name() -> None:
    shared = nn.Linear(1, 1)
    net = nn.ModuleDict({"first": shared, "second": shared})
    seen = [watched(module) for _, module in net.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)]
    shared(ONE)
    assert len(seen) == 2  # hooks on one module
    assert [len(calls) for calls in seen] == [1, 1]
    tied = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)])
    tied[1].weight = tied[2].weight = tied[0].weight
    fired: list[Tensor] = []
    for _, parameter in tied.named_parameters(remove_duplicate=False):
        parameter.register_post_accumulate_grad_hook(fired.append)
    tied(ONE).sum().backward()
    assert len(fired) == 3


def test_names_have_prefixes_and_outputs_come_in_the_order_of_calls() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = torch.compile(nn.DataParallel(nn.Sequential(checkpoint_wrapper(nn.Linear(1, 1)))))
    assert [name for name, _ in wrapped.named_modules()][-1] == "_orig_mod.module.0._checkpoint_wrapped_module"
    net, seen = nn.ModuleDict({"last": nn.Linear(1, 1), "first": nn.Linear(1, 1)}), []
    for name, module in net.items():
        module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    net["last"](net["first"](ONE))
    assert seen == [*net][::-1]


def test_gradients_that_are_sparse_or_made_inside_a_step() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad.is_sparse
    layer, before = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: before.append(layer.weight.grad))
    optimizer.step(lambda: layer(ONE).sum().backward())
    assert before == [None]
    assert layer.weight.grad is not None


def test_forwards_that_fire_no_hook_and_keywords_that_hooks_do_not_get() -> None:
    layer, attention, x = nn.Linear(1, 1), nn.MultiheadAttention(4, 2), torch.ones(3, 1, 4)
    called, inside = watched(layer), watched(attention.out_proj)
    layer.forward(ONE)
    attention(x, x, x)
    assert called == inside == []
    given: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: given.append(args))
    layer(input=ONE)
    assert given == [()]


@pytest.mark.parametrize(("use_reentrant", "calls"), [(True, [2, 2, 2]), (False, [2, 2, 1])])
def test_checkpointing_calls_hooks_again(use_reentrant: bool, calls: list[int]) -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    seen = [watched(module) for module in net]
    always = watched(net[2], always_call=True)
    checkpoint(net, torch.ones(1, 1, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert [len(outputs) for outputs in seen] == calls
    assert (always[-1] is None) is (not use_reentrant)


def test_full_backward_hooks_break_forwards_and_miss_gradients() -> None:
    fired: list[Any] = []

    def hooked(module: nn.Module) -> nn.Module:
        module.register_full_backward_hook(lambda module, inputs, outputs: fired.append(inputs))
        return module

    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        nn.Sequential(hooked(nn.Linear(1, 1)), nn.ReLU(inplace=True))(ONE)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        hooked(nn.Linear(1, 1))(ONE).add_(1)
    layer = hooked(nn.Linear(1, 1))
    parameters = dict(layer.named_parameters())
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda given: torch.func.functional_call(layer, given, (ONE,)).sum())(parameters)

    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": x * 2}

    with pytest.warns(UserWarning, match="should be a Tensor or a tuple"):
        hooked(Named())(torch.ones(1, requires_grad=True))["out"].sum().backward()
    assert fired == []
    with pytest.warns(UserWarning, match="Full backward hook is firing"):
        layer(input=torch.ones(1, 1, requires_grad=True)).sum().backward()
        layer(ONE).sum().backward()
    assert fired == [(), (None,)]


def test_hooks_on_parameters_see_cumulative_scaled_or_no_gradients() -> None:
    layer = nn.Linear(1, 1, bias=False)
    seen: list[float] = []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.item()))
    for _ in range(2):
        layer(ONE).sum().backward()
    assert seen == [1, 2]
    layer.zero_grad()
    torch.amp.GradScaler("cpu", init_scale=1024.0).scale(layer(ONE).sum()).backward()
    assert seen[-1] == 1024
    layer.load_state_dict({"weight": torch.ones(1, 1)}, assign=True)
    layer(ONE).sum().backward()
    assert len(seen) == 3  # the hook stayed on the tensor that was replaced
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def inside(parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    layer.weight.register_post_accumulate_grad_hook(inside)
    layer(ONE).sum().backward()
    assert layer.weight.grad is None


@pytest.mark.parametrize(("fused", "steps", "gradients"), [(False, 1, [1.0]), (True, 2, [float("inf"), 512.0])])
def test_step_hooks_of_fused_optimizers_see_scaled_gradients_and_skipped_steps(
    fused: bool, steps: int, gradients: list[float]
) -> None:
    layer, seen, after = nn.Linear(1, 1, bias=False), [], []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(layer.weight.grad.item()))
    optimizer.register_step_post_hook(lambda *_: after.append(layer.weight.item()))
    start = layer.weight.item()
    for x in (ONE * float("inf"), ONE):
        optimizer.zero_grad()
        scaler.scale(layer(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert seen == gradients
    assert len(after) == steps
    assert (after[0] == start) is fused  # told of a step in which nothing changed


def test_detached_tensors_are_overwritten_and_kept_whole() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, -1.0)
    kept: list[Tensor] = []
    layer.register_forward_hook(lambda module, args, output: kept.append(output.detach()))
    torch.relu_(layer(ONE))
    inplace = nn.ReLU(inplace=True)
    inplace.register_forward_hook(lambda module, args, output: kept.append(args[0].clone()))
    inplace(-torch.ones(1))
    assert [tensor.item() for tensor in kept] == [0, 0]  # both were -1
    norm = nn.BatchNorm1d(1)
    before: list[Tensor] = []
    norm.register_forward_pre_hook(lambda module, args: before.append(module.running_mean))
    norm(torch.tensor([[1.0], [3.0]]))
    assert norm.running_mean.sub(before[0]).item() == 0
    assert torch.ones(100, 100).detach()[0].untyped_storage().nbytes() == 100 * 100 * 4
    means = watched(nn.Linear(1, 1))
    graph = nn.Linear(1, 1)
    graph.register_forward_hook(lambda module, args, output: means.append(output.mean()))
    graph(ONE)
    assert means[0].grad_fn is not None


def test_hooks_change_and_break_the_users_program() -> None:
    changed, broken = nn.Identity(), nn.Identity()
    changed.register_forward_hook(lambda module, args, output: output.sum())
    assert changed(torch.ones(3)).shape == ()
    broken.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken(ONE)
    stack: list[int] = []
    pair = nn.Linear(1, 1)
    pair.register_forward_pre_hook(lambda module, args: stack.append(1))
    pair.register_forward_hook(lambda module, args, output: stack.pop() and None)
    with contextlib.suppress(RuntimeError):
        pair(torch.ones(3, 3))
    pair(ONE)
    assert stack == [1]  # of the call that raised


def test_four_threads_lose_updates_of_a_bare_counter() -> None:
    layer, x = nn.Identity(), torch.ones(1)
    counted = {"n": 0}
    waiting = threading.Barrier(4)

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        before = counted["n"]
        waiting.wait(timeout=20)  # a switch of threads, which may come here, does
        counted["n"] = before + 1

    layer.register_forward_hook(hook)
    threads = [threading.Thread(target=lambda: layer(x)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted["n"] == 1


def test_modes_reach_into_hooks() -> None:
    with torch.inference_mode():
        total = torch.ones(1) * 2
    with pytest.raises(RuntimeError, match="inference tensor"):
        total += 1
    layer, dtypes = nn.Identity(), []
    layer.register_forward_hook(lambda module, args, output: dtypes.append((output @ output).dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(ONE)
    assert dtypes == [torch.bfloat16]
    sums = watched(mapped := nn.Identity())
    torch.func.vmap(mapped)(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="vmap"):
        sums[0].sum() + 1
    asking = nn.Identity()
    asking.register_forward_hook(lambda module, args, output: output.sum().item() and None)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(asking)(torch.ones(2, 2))


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.n += 1


def test_copies_and_lifetimes_of_hooked_modules() -> None:
    layer, counter = nn.Linear(1, 1), Counter()
    layer.register_forward_hook(counter.hook)
    double = copy.deepcopy(layer)
    double(ONE)
    (copied,) = double._forward_hooks.values()
    assert copied.__self__ is not counter  # a counter of its own, that counts
    assert (copied.__self__.n, counter.n) == (1, 0)
    watched(layer)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(layer)
    counter.n = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(layer)
    counter.module = layer  # type: ignore[attr-defined]
    gone = weakref.ref(layer)
    gc.collect()
    gc.disable()
    try:
        del layer, counter
        assert gone() is not None  # until the cycle collector runs
    finally:
        gc.enable()


class _Layer(nn.Linear):
    """A class that no recorder has watched: of those the compiler guards absent hooks."""


def compiled(attach: Callable[[nn.Module], Any], first: bool = False, calls: int = 3) -> tuple[int, int]:
    """Graphs and graph breaks of a net with a hook; `first`: compiled before the hook is on."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net = nn.Sequential(_Layer(1, 1), nn.ReLU())
    call = torch.compile(net, backend="eager")
    if first:
        call(ONE)
    attach(net[0])
    for _ in range(calls):
        call(ONE).sum().backward()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's own
def test_hooks_in_compiled_graphs() -> None:
    total, sums = {"n": 0.0}, []
    counter = Counter()

    def append(module: nn.Module, args: Any, output: Tensor) -> None:
        sums.append(output.detach().sum())

    def ask(module: nn.Module, args: Any, output: Tensor) -> None:
        total["n"] += output.sum().item()

    def branch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.sum() > 0:
            total["n"] += 1

    assert (
        compiled(lambda layer: layer.register_forward_hook(append), calls=5)[0] == 5
    )  # a list that grows is another graph each time
    assert compiled(lambda layer: layer.register_forward_hook(ask))[1] > 0
    assert compiled(lambda layer: layer.register_forward_hook(branch))[1] > 0
    assert compiled(lambda layer: layer.register_full_backward_hook(lambda *_: None))[1] > 0
    assert compiled(lambda layer: layer.register_forward_hook(counter.hook), first=True) == (1, 0)
    assert counter.n == 0  # the hook never ran


class Residual(nn.Module):
    """Many gradients meet in one tensor, and `box` is changed before that tensor is hooked and after it."""

    def __init__(self, hook: Callable[[Tensor], None] | None, boxed: bool) -> None:
        super().__init__()
        self.hook, self.boxed = hook, boxed
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        box = Box()
        if self.boxed:
            box.scale = 2.0
        x = self.first(x)
        early = x.exp()
        if self.hook is not None:
            x.register_hook(self.hook)
        if self.boxed:
            box.kept = x
        kept = box.kept if self.boxed else x
        out: Tensor = x + self.left(x) + self.right(kept).tanh() + early * x.sin()
        return out


class Box:
    scale: float
    kept: Tensor


def gradients_compiled(net: nn.Module) -> tuple[list[Tensor], int, int]:
    """Those of its parameters, with the graphs made and how often they broke."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    torch.compile(net, backend="aot_eager")(torch.randn(64, 8)).square().sum().backward()
    found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return found, counters["stats"]["unique_graphs"], counters["frames"]["total"] - counters["frames"]["ok"]


def test_a_hook_inside_a_compiled_graph_leaves_every_bit_but_may_break_the_graph() -> None:
    def look(gradient: Tensor) -> None:
        pass

    bare, *whole = gradients_compiled(Residual(None, boxed=False))
    hooked, *still_whole = gradients_compiled(Residual(look, boxed=False))
    assert whole == still_whole == [1, 0]
    assert all(a.equal(b) for a, b in zip(bare, hooked, strict=True))
    assert gradients_compiled(Residual(None, boxed=True))[1:] == (1, 0)
    # an object that was changed in the graph before the hook is traced loses what is changed after it, as a key-value cache is
    lost, _, failed = gradients_compiled(Residual(look, boxed=True))
    assert failed == 1
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(bare, lost, strict=True))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        return hidden, hidden * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's own
@pytest.mark.parametrize(("wrapped", "seen"), [(False, 1.0), (True, 4.0)])
def test_a_hook_on_what_a_compiled_module_returns_misses_what_the_graph_makes_of_it(wrapped: bool, seen: float) -> None:
    net, total = Both(), torch.zeros(())

    def add(gradient: Tensor) -> None:
        total.add_(gradient.sum())

    def after(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        output[0].register_hook(add)

    net.register_forward_hook(after)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(wrap_top_frame=wrapped):
        hidden, thrice = torch.compile(net, backend="aot_eager")(ONE)
    (hidden + thrice).sum().backward()
    assert total.item() == seen  # 1 + 3 is the whole gradient
