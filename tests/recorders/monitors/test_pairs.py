"""Monitors of two places at once."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from recorders import PairMonitor, Recorder, RecordingWarning, TargetError
from reducers import CKA, Collect, CrossCovariance, Last


def data() -> list[Tensor]:
    return list(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).split([16, 16, 8]))


def test_both_outputs_reach_the_reducer_whichever_comes_first() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(3, 2)
    monitor = PairMonitor(CrossCovariance("b x -> x", "b y -> y"), second, first)
    for index, batch in enumerate(data()):
        for module in (first, second) if index % 2 else (second, first):
            module(batch)
    monitor.deregister()
    x = torch.cat(data())
    expected = torch.cov(torch.cat((first(x), second(x)), 1).detach().double().T)[:4, 4:]
    assert monitor.samples == 3
    torch.testing.assert_close(monitor.peek()["covariance"], expected, rtol=1e-6, atol=1e-8)


def test_layers_of_two_networks_are_compared_under_the_right_names() -> None:
    torch.manual_seed(1)
    small, large = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))
    recorder = Recorder(**{name: PairMonitor(CKA(), other) for name, other in large.named_children()}).children(small)
    assert list(recorder) == ["0/0", "0/1", "1/0", "1/1"]
    for batch in data():
        small(batch), large(batch)
    outputs = {"small": {}, "large": {}}
    for net, found in ((small, outputs["small"]), (large, outputs["large"])):
        hidden = torch.cat(data())
        for name, module in net.named_children():
            hidden = found[name] = module(hidden)

    def cka(x: Tensor, y: Tensor) -> Tensor:
        x, y = (z.detach().double() - z.detach().double().mean(0) for z in (x, y))
        return (x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())

    for theirs, mine in (name.split("/") for name in recorder):
        torch.testing.assert_close(
            recorder[f"{theirs}/{mine}"].peek()["cka"], cka(outputs["small"][mine], outputs["large"][theirs]), rtol=1e-6, atol=0
        )


def test_an_output_without_partner_is_left_out_and_later_changes_are_not_seen() -> None:
    first, second = nn.Identity(), nn.Identity()
    monitor = PairMonitor(Collect(), second, first, op_=lambda mine, other: torch.stack((mine, other)))
    first(torch.tensor(1.0))
    x = torch.tensor(2.0)
    with pytest.warns(RecordingWarning, match="called again before the other was.*run both modules on one batch before the next"):
        first(x)
    x += 100
    second(torch.tensor(3.0))
    second(torch.tensor(4.0))
    assert monitor.peek().tolist() == [2.0, 3.0]
    assert monitor.counts["called again before its partner was"] == 1
    monitor.deregister().register()  # what waited does not wait for ever
    first(torch.tensor(5.0))
    second(torch.tensor(6.0))
    assert monitor.peek().tolist() == [2.0, 3.0, 5.0, 6.0]


def test_outputs_without_numbers_are_left_out_with_their_partners() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(3, 4)
    monitor = PairMonitor(Collect(), second, first, map_=torch.sub)
    batch = torch.ones(2, 3)
    torch.func.vmap(first)(batch)
    second(batch)
    first(2 * batch)
    torch.func.vmap(second)(batch)
    second(batch)
    first(batch)
    assert (monitor.samples, monitor.last_error) == (1, None)
    assert monitor.counts["not recorded when its partner was called"] == 1
    assert monitor.counts["not a real tensor (meta, fake, vmap or grad)"] == 1
    torch.testing.assert_close(monitor.peek(), (first(batch) - second(batch)).detach())


def test_each_thread_and_each_task_has_pairs_of_its_own() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    monitor = PairMonitor(Collect(), second, first, map_=torch.sub)
    turns = threading.Barrier(2)

    def run(batch: Tensor) -> None:
        for module in (first, second):
            module(batch)
            turns.wait(20)

    async def go_on(batch: Tensor) -> None:
        for module in (first, second):
            module(batch)
            await asyncio.sleep(0)

    async def run_both() -> None:
        await asyncio.gather(*map(go_on, batches[2:]))

    batches = torch.arange(4.0)[:, None, None]
    threads = [threading.Thread(target=run, args=(batch,)) for batch in batches[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(run_both())
    monitor.deregister()
    assert monitor.counts == {"calls": 4}
    torch.testing.assert_close(monitor.peek().flatten().sort()[0], (first(batches) - second(batches)).detach().flatten().sort()[0])


def test_gates_look_at_the_module_itself() -> None:
    first, second = nn.Identity().eval(), nn.Identity()
    monitor = PairMonitor(Last(), second, first, eval_update=False, op_=lambda mine, other: other)
    first(torch.tensor(1.0))
    second(torch.tensor(2.0))
    assert monitor.peek() is None
    first.train()
    first(torch.tensor(1.0))
    second(torch.tensor(3.0))
    assert monitor.peek() == 3.0


def test_mistakes_say_what_to_do() -> None:
    layer = nn.LSTM(2, 2)
    with pytest.raises(TargetError, match=r"PairMonitor\(reducer, other\)"):
        PairMonitor(CKA(), None, layer)
    with pytest.raises(TargetError, match="as the other module; got str"):
        PairMonitor(CKA(), "layer")  # type: ignore[arg-type]
    monitor = PairMonitor(CKA(), nn.Identity(), layer)
    other = nn.Identity()
    monitor = PairMonitor(CKA(), other, layer)
    layer(torch.ones(1, 1, 2))
    with pytest.warns(RecordingWarning, match=r"returned \['tuple', 'Tensor'\]; pick a tensor of each with map_="):
        other(torch.ones(1, 2))
    assert monitor.peek() is None


def test_neither_module_is_kept_alive_nor_copied() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    monitor = PairMonitor(Collect(), second, first, op_=torch.add)
    batch = torch.randn(4, 3)
    first(batch), second(batch)
    recorder = Recorder(pair=PairMonitor(Last(), second, op_=torch.add)).modules(first)
    doubles = [pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor), pickle.loads(pickle.dumps(recorder))["pair"]]
    assert [double.other for double in doubles] == [None] * 3
    assert doubles[0].peek().equal(monitor.peek())
    dead = weakref.ref(first), weakref.ref(second)
    gc.disable()
    try:
        del first, second
        assert [ref() for ref in dead] == [None, None]
    finally:
        gc.enable()


def test_pairs_in_nets_that_were_compiled_before_are_recorded() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return out * 2

    theirs, alike, mine, x = Net(), Net(), nn.Identity(), torch.randn(4, 3)
    monitor = PairMonitor(Collect(), theirs.block, mine, op_=torch.add)
    compiled = torch.compile(theirs, backend="eager")
    torch.compile(alike, backend="eager")(x)  # a graph that fits both nets
    for _ in range(3):
        compiled(x), mine(x)
    assert monitor.samples == 3
