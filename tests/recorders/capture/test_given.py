"""The context of a batch: monitors get the ids, labels, masks and weights of their own forward, in every thread and graph."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    MonitorError,
    PairMonitor,
    ParameterMonitor,
    Recorder,
    RecordingWarning,
)
from recorders.capture.given import current
from reducers import CKA, BottomK, GroupBy, Masked, Mean, Sum, Summary, TopK, WeightedMean

SUM = Masked(Sum("b c -> c"))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs that are no leaves, and a mask of their samples."""
    torch.manual_seed(1)
    inputs = [torch.randn(6, 4, requires_grad=True) * 2 for _ in range(count)]
    return [(x, torch.tensor([True, True, False, False, True, False]).roll(index)) for index, x in enumerate(inputs)]


def gradients() -> Recorder:
    return Recorder(
        back=BackwardMonitor(SUM, given="mask"),
        into=BackwardInputMonitor(SUM, given="mask"),
        saliency=BackwardMonitor(SUM, given="mask", op_=lambda gradient, output: gradient * output),
    )


def by_hand(net: nn.Module, forwards: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What `gradients` records on the last layer, by plain hooks."""
    found: dict[str, Tensor] = {"back/2": torch.zeros(3), "into/2": torch.zeros(5), "saliency/2": torch.zeros(3)}
    for x, mask in forwards:
        kept: dict[str, Tensor] = {}
        hook = net[2].register_forward_hook(lambda _, args, output, kept=kept: kept.update(into=args[0], back=output))
        loss = net(x.detach()).square().sum()
        hook.remove()
        into, back = torch.autograd.grad(loss, [kept["into"], kept["back"]])
        found["into/2"] = found["into/2"] + into[mask].sum(0)
        found["back/2"] = found["back/2"] + back[mask].sum(0)
        found["saliency/2"] = found["saliency/2"] + (back * kept["back"])[mask].sum(0).detach()
    return found


def check(recorder: Recorder, wanted: dict[str, Tensor], samples: int) -> None:
    for name, value in wanted.items():
        assert recorder[name].last_error is None
        assert recorder[name].samples == samples
        torch.testing.assert_close(recorder[name].peek(), value.double(), rtol=1e-4, atol=1e-5)


def test_the_ids_of_the_largest_and_the_tokens_of_a_mask() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    recorder = Recorder(
        top=ForwardMonitor(TopK("b c -> c", k=5), given="ids"), mean=ForwardMonitor(Masked(Summary("b c -> c")), given="mask")
    ).modules(net)
    outputs, masks = [], []
    with recorder:
        for step in range(4):
            x, mask = torch.randn(8, 4), torch.rand(8) > 0.5
            with recorder.given(ids=torch.arange(8) + 100 * step, mask=mask):
                outputs.append(net(x))
            masks.append(mask)
    ids = (torch.arange(8) + 100 * torch.arange(4)[:, None]).flatten()
    largest = torch.cat(outputs).topk(5, dim=0).indices.T
    positive = recorder["top/1"].peek()["value"] > 0  # several zeros are equally large
    assert torch.equal(recorder["top/1"].peek()["id"][positive], ids[largest][positive])
    kept = torch.cat(outputs)[torch.cat(masks)].double()
    torch.testing.assert_close(recorder["mean"].peek()["mean"], kept.mean(0))
    assert recorder["top"].samples == recorder["mean/0"].samples == 4


def test_several_values_come_in_the_order_of_their_names() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(TopK(k=1), given=("ids", "images"))).modules(layer)
    images = torch.tensor([[1, 2], [3, 4]])
    with pytest.warns(RecordingWarning, match="no monitor of this recorder takes 'unused', so it has no effect"):
        block = recorder.given(images=images, ids=[70, 71], unused=0)
    with block:
        layer(torch.tensor([[1.0], [5.0]]))
    assert (recorder[0].peek()["id"].tolist(), recorder[0].peek()["payload"].tolist()) == ([71], [[3, 4]])


def test_labels_and_weights_and_a_number_for_the_whole_batch() -> None:
    layer = nn.Identity()
    recorder = Recorder(
        grouped=ForwardMonitor(GroupBy(Mean("b c -> c"), groups=2), given="labels"),
        weighted=ForwardMonitor(WeightedMean("b c -> c"), given="weights"),
    ).modules(layer)
    for factor, weights in ((1.0, [3.0, 1.0]), (2.0, 4.0)):
        with recorder.given(labels=[0, 1], weights=weights):
            layer(torch.tensor([[1.0], [5.0]]) * factor)
    assert recorder["grouped"].peek().tolist() == [[1.5], [7.5]]
    assert recorder["weighted"].peek().item() == pytest.approx((3 * 1 + 5 + 4 * 2 + 4 * 10) / 12)


@pytest.mark.parametrize("inside", [False, True])
def test_a_missing_value_is_one_warning_and_a_failure(inside: bool) -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(top=ForwardMonitor(TopK(k=1), given="ids")).modules(layer)
    reason = "given are \\['idx'\\]" if inside else "nothing is given in this thread"
    with recorder.given(**({"idx": [0]} if inside else {})):
        with pytest.warns(RecordingWarning, match=rf"'top' on Linear.*\['ids'\].*{reason}.*with recorder.given\(ids=...\)"):
            layer(torch.ones(1, 2)).sum().backward()
        layer(torch.ones(1, 2)).sum().backward()
    assert (recorder[0].samples, recorder[0].counts["errors"]) == (0, 2)
    with recorder.given(ids=[7]):
        layer(torch.ones(1, 2))
    assert recorder[0].peek()["id"].tolist() == [7]


def test_what_does_not_fit_is_named_with_both_sizes() -> None:
    layer = nn.Identity()
    raising = Recorder(
        top=ForwardMonitor(TopK(k=1), given="ids", on_error="raise"),
        tokens=ForwardMonitor(Masked(Mean()), given="mask", on_error="raise"),
    ).modules(layer)
    fits = {"ids": [1, 2], "mask": torch.ones(2)}
    with (
        raising.given(**fits),
        raising.given(ids=[1, 2, 3]),
        pytest.raises(MonitorError, match=r"'top' .*'ids' has length 3, but the observation has length 2"),
    ):
        layer(torch.ones(2, 4))
    with (
        raising.given(**fits),
        pytest.raises(MonitorError, match="'ids' has length 2, but leaf 'loss' of the observation has no axis"),
    ):
        layer({"logits": torch.ones(2, 4), "loss": torch.tensor(1.0)})
    with (
        raising.given(**fits),
        raising.given(mask=torch.ones(2, 7)),
        pytest.raises(MonitorError, match=r"'tokens' .*\(2, 7\).*\(2, 4\).*given: mask: \(2, 7\) float32"),
    ):
        layer(torch.ones(2, 4))
    assert raising["tokens"].samples == 0


def test_blocks_within_blocks_add_and_override_and_end_however_they_end() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(TopK(k=9), given=("ids", "extra"))).modules(layer)
    x = torch.ones(1, 1)
    with recorder.given(ids=[1]), recorder.given(extra=[10]):
        layer(x)
        with pytest.raises(KeyError), recorder.given(ids=[2]):
            layer(x)
            raise KeyError
        layer(x)
    assert recorder[0].peek()["id"].tolist()[:3] == [1, 2, 1]


def test_recorders_do_not_get_what_is_given_to_others() -> None:
    layer = nn.Identity()
    first, second = (Recorder(ForwardMonitor(kind(k=1), given="ids")).modules(layer) for kind in (TopK, BottomK))
    with first.given(ids=[1]), second.given(ids=[2]):
        layer(torch.ones(1))
    assert [recorder[0].peek()["id"].tolist() for recorder in (first, second)] == [[1], [2]]


def test_each_thread_has_its_own_and_a_thread_begun_in_a_block_has_none() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(TopK(k=40), given="ids")).modules(layer)
    meet = threading.Barrier(2, timeout=60)

    def run(number: int) -> None:
        for step in range(20):
            with recorder.given(ids=[number]):
                meet.wait()  # both blocks are open
                layer(torch.tensor([[float(number * 100 + step)]]))
                meet.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [1, 2]))
    top = recorder[0].peek()
    assert top["id"].tolist() == [2] * 20 + [1] * 20
    assert ((top["value"] // 100).long() == top["id"]).all()
    with recorder.given(ids=[3]), pytest.warns(RecordingWarning, match="nothing is given in this thread"):
        thread = threading.Thread(target=layer, args=(torch.ones(1, 1),))
        thread.start()
        thread.join()


def test_each_task_of_asyncio_has_its_own() -> None:
    layer = nn.Identity()
    recorder = Recorder(ForwardMonitor(TopK(k=2), given="ids")).modules(layer)

    async def task(number: int) -> None:
        with recorder.given(ids=[number]):
            await asyncio.sleep(0)  # the other task opens its block
            layer(torch.tensor([[float(number)]]))

    async def both() -> None:
        await asyncio.gather(task(1), task(2))

    asyncio.run(both())
    assert recorder[0].peek()["id"].tolist() == recorder[0].peek()["value"].long().tolist() == [2, 1]


@pytest.mark.parametrize("way", ["after the block", "under another", "in another thread"])
def test_gradients_have_the_context_of_their_forward(way: str) -> None:
    net = mlp()
    recorder, forwards = gradients().modules(net), batches(3)
    losses = []
    for x, mask in forwards:  # accumulated: all forwards are before all backwards
        with recorder.given(mask=mask):
            losses.append(net(x).square().sum())
    if way == "in another thread":
        thread = threading.Thread(target=lambda: [loss.backward() for loss in losses])
        thread.start()
        thread.join()
    elif way == "under another":
        with recorder.given(mask=torch.ones(6)):
            sum(losses).backward()
    else:
        for loss in losses:
            loss.backward()
    recorder.deregister()
    check(recorder, by_hand(net, forwards), 3)


def test_a_retained_graph_has_its_context_again() -> None:
    net = mlp()
    recorder, (forward, other) = gradients().modules(net), batches(2)
    with recorder.given(mask=forward[1]):
        loss = net(forward[0]).square().sum()
    loss.backward(retain_graph=True)
    with recorder.given(mask=other[1]):
        loss.backward()
    recorder.deregister()
    check(recorder, by_hand(net, [forward, forward]), 2)


def test_gradients_have_the_context_of_their_forward_under_checkpointing() -> None:
    net = mlp()
    recorder, forwards = gradients().modules(net), batches(2)
    losses = []
    for x, mask in forwards:
        with recorder.given(mask=mask):
            losses.append(checkpoint(net, x, use_reentrant=False).square().sum())
    with recorder.given(mask=torch.ones(6)):
        for loss in losses:
            loss.backward()
    recorder.deregister()
    check(recorder, by_hand(net, forwards), 2)


def test_reentrant_checkpoints_keep_no_context_and_the_error_tells_what_to_do() -> None:
    net = mlp()
    recorder, ((x, mask), *_) = gradients().modules(net), batches(1)
    with recorder.given(mask=mask), pytest.warns(RecordingWarning, match=r"use checkpoint\(..., use_reentrant=False\)"):
        checkpoint(net, x, use_reentrant=True).square().sum().backward()
    recorder.deregister()
    assert sum(row.samples for row in recorder.report().rows) == 0


def test_a_forward_that_runs_in_a_backward_does_not_guess_its_context() -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(BackwardMonitor(Masked(Sum()), given="mask")).modules(layer)
    x = torch.ones(1, 2, requires_grad=True)

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            layer(torch.ones(1, 2)).sum().backward()

    hooked = x * 1
    hooked.register_hook(again)
    with recorder.given(mask=[True]), pytest.warns(RecordingWarning, match="its forward ran again in a backward"):
        hooked.sum().backward()


def test_a_mask_changed_in_place_before_the_backward_is_told() -> None:
    layer = nn.Linear(2, 2)
    recorder = Recorder(BackwardMonitor(Masked(Sum()), given="mask")).modules(layer)
    mask = torch.ones(1)
    with recorder.given(mask=mask):
        loss = layer(torch.ones(1, 2)).sum()
    mask.zero_()
    with pytest.warns(RecordingWarning, match="'mask' was changed in place .*: give a clone"):
        loss.backward()


def test_a_leaf_that_is_given_again_has_the_context_of_each_use() -> None:
    layer = nn.Identity()
    recorder = Recorder(BackwardInputMonitor(Masked(Sum("b -> b")), given="mask")).modules(layer)
    x = torch.ones(2, requires_grad=True)
    for mask in ([1, 0], [0, 1], [0, 1]):
        with recorder.given(mask=mask):
            layer(x).sum().backward()
    assert recorder[0].peek().tolist() == [1, 2]
    with recorder.given(mask=[1, 0]):
        first = layer(x).sum()
    with recorder.given(mask=[0, 1]):
        second = layer(x).sum()
    with pytest.warns(RecordingWarning, match="under several given"):
        (first + second).backward()
    assert recorder[0].samples == 3


@pytest.mark.slow
def test_what_was_given_lives_as_long_as_the_graph_that_needs_it(fresh_compiler: None) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    recorder = Recorder(BackwardMonitor(Masked(Sum()), given="mask")).modules(net[0])
    for run in (net, torch.compile(net, backend="aot_eager")):
        with recorder.given(mask=torch.ones(1)):
            loss = run(torch.ones(1, 2)).sum()
            block = weakref.ref(current())
        gc.collect()
        assert block() is not None
        loss.backward()
        del loss
        gc.collect()
        assert block() is None
    assert recorder[0].samples == 2


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_net_gives_the_same_in_one_graph(checkpointed: bool, fresh_compiler: None) -> None:
    net = mlp()
    kinds = {"top": ForwardMonitor(TopK("b c -> c", k=4), given="ids"), "mean": ForwardMonitor(SUM, given="mask", op_=lambda y: y)}
    eager, compiled = (Recorder(**kinds, **gradients()._prototypes).modules(net[2]) for _ in range(2))
    plain: Callable[[Tensor], Tensor] = (lambda x: checkpoint(net, x, use_reentrant=False)) if checkpointed else net
    for recorder in (eager, compiled):
        for other in (eager, compiled):
            other.deregister()
        recorder.register()
        call = plain if recorder is eager else torch.compile(plain, backend="aot_eager", fullgraph=True)
        for start in (0, 2, 4):  # two forwards, then their backwards
            losses = []
            for index, (x, mask) in list(enumerate(batches(6)))[start : start + 2]:
                with recorder.given(ids=torch.arange(6) + 6 * index, mask=mask):
                    losses.append(call(x).square().sum())
            for loss in losses:
                loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompiles"]
    for name, monitor in eager.items():
        assert (compiled[name].samples, compiled[name].last_error) == (6, None)
        torch.testing.assert_close(compiled[name].peek(), monitor.peek(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_the_input_of_a_compiled_checkpoint_fails_no_compilation(fresh_compiler: None) -> None:
    net = mlp()
    recorder = Recorder(BackwardInputMonitor(SUM, given="mask")).modules(net[0])
    recorder.add("clone", BackwardInputMonitor(Sum(), op_=lambda gradient, x: gradient * x), net[0])
    call = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
    ((x, mask),) = batches(1)
    with recorder.given(mask=mask), pytest.warns(RecordingWarning, match="could not be read while the graph was traced"):
        call(x).sum().backward()
    assert [monitor.counts["errors"] for monitor in recorder.values()] == [1, 1]


def test_other_kinds_of_monitors_take_what_is_given() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    recorder = Recorder(
        loss=CallMonitor(WeightedMean(), given="weights"),
        lengths=ParameterMonitor(WeightedMean(), given="rate"),
    ).modules(net[1])
    recorder["pair"] = PairMonitor(CKA(), net[0], net[1], map_=lambda mine, other: (mine,), given="other")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.randn(5, 2)
    with recorder.given(weights=[1.0, 3.0], rate=0.5, other=x):
        net(x).sum().backward()
        recorder.push("loss", torch.tensor([1.0, 5.0]))
        optimizer.step()
    assert recorder["loss"].peek().item() == 4
    assert recorder["lengths"].peek()["bias"].item() == pytest.approx(net[1].bias.mean().item())
    assert recorder["pair"].samples == 1


def test_recipes_know_what_is_given() -> None:
    monitor = ForwardMonitor(TopK(k=1), given="ids")
    assert repr(monitor) == "ForwardMonitor(TopK(pattern='... ->', k=1), given=('ids',))"
    assert monitor.constructor == ForwardMonitor(TopK(k=1), given=["ids"]).constructor
    assert monitor.constructor != ForwardMonitor(TopK(k=1)).constructor
    assert ForwardMonitor.partialconstructor(TopK(k=1), given="ids")().given == ("ids",)
    layer = nn.Identity()
    recorder = Recorder(monitor).modules(layer).modules(layer)
    assert len(recorder) == 1  # an equal monitor is there already
    pushed = pickle.loads(pickle.dumps(Recorder(top=CallMonitor(TopK(k=1), given="ids"))))
    with pushed.given(ids=[5]):
        pushed.push("top", torch.ones(1))
    assert pushed["top"].peek()["id"].tolist() == [5]
    with pytest.raises(TypeError, match="given is the name"):
        ForwardMonitor(TopK(), given=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"given\(ids=...\) takes a tensor.*got list"), recorder.given(ids=["a"]):
        pass


def test_the_plan_shows_what_is_given_and_uses_it() -> None:
    net = nn.Linear(4, 3)
    recorder = Recorder(ForwardMonitor(TopK("b c -> c", k=2), given="ids")).modules(net)
    assert "given=('ids',)" in str(recorder.plan(torch.ones(2, 4)))
    assert "with recorder.given(...): recorder.plan(...)" in str(recorder.plan(torch.ones(2, 4)))
    with recorder.given(ids=[1, 2]):
        plan = recorder.plan(torch.ones(2, 4))
    assert plan.state_bytes > 0
    assert plan.note == ""
    with recorder.given(ids=[1, 2, 3]):
        assert "'ids' has length 3, but the observation has length 2" in str(recorder.plan(torch.ones(2, 4)))
