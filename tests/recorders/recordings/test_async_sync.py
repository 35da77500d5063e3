"""`sync(async_op=True)`: the training goes on while states are on their way, and the result is that of the call, bit for bit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_distributed import bits, recorded, recording_of, refused
from torch import Tensor, nn
from world import Place, World, alike, returned

from recorders import ForwardMonitor, ParameterGradientMonitor, ParameterMonitor, Recorder, Recording, Subrecording, load
from recorders.recordings.distributed.collectives import Exchange
from recorders.recordings.distributed.sync import SyncHandle, sync, wait_at_exit
from reducers import Collect, Max, Mean, Moments, Product, Quantile

STEPS = 6
EVERYTHING = Product(moments=Moments("b c -> c"), quantile=Quantile(low=1e-3, high=1e3), top=Max(), all=Collect())


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(place: Place, when: str) -> Any:
    """Parameters after training under DDP, with collectives of the user, and what was synced of the first three steps."""
    rank, group = place
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitors = {"out": ForwardMonitor(EVERYTHING), "value": ParameterMonitor(EVERYTHING, attr="weight")}
    recorder = Recorder(**monitors, grad=ParameterGradientMonitor(Moments())).modules(model, types=nn.Linear)
    merged: Any = []
    losses = torch.zeros(STEPS)
    if when != "never":
        recorder.__enter__()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        dist.all_reduce(losses, group=group)
        if step == 2 and when == "at once":
            merged = [recorder.sync(group), recorder.sync(group, to=1), recorder.sync(group)]
        elif step == 2 and when == "later":
            merged = [
                recorder.sync(group, async_op=True),
                recorder.sync(group, to=1, async_op=True),
                recorder.sync(group, async_op=True),  # which nobody waits for until the end
            ]
        elif step == 4 and when == "later":
            merged[:2] = [merged[1].wait(), merged[0].wait()][::-1]
    if when == "later":
        merged[2] = merged[2].wait()
    if when != "never":
        recorder.__exit__(None, None, None)
        assert recorder["out/0"].samples == STEPS
    return [value.detach().clone() for value in model.parameters()], losses, [part and bits(part) for part in merged]


@pytest.mark.slow
def test_training_goes_on_and_changes_neither_itself_nor_the_result(world: World) -> None:
    never, at_once, later = (returned(world.run(trained, when, ranks=(0, 1))) for when in ("never", "at once", "later"))
    for rank in (0, 1):
        parameters, losses, _ = never[rank]
        for other_parameters, other_losses, _ in (at_once[rank], later[rank]):
            assert all(torch.equal(a, b) for a, b in zip(parameters, other_parameters, strict=True))
            assert torch.equal(losses, other_losses)
        assert later[rank][2] == at_once[rank][2]
    whole, one, _ = later[1][2]
    assert whole == one
    assert later[0][2][1] is None
    assert whole["out/0"][1] == 6


def fixed(place: Place, cuts: list[int]) -> Any:
    rank, group = place
    recorder = recorded(list(range(cuts[rank])))
    expected = bits(recorder.sync(group))
    handle = recorder.sync(group, async_op=True)
    recorder.reset()  # later observations, too, only concern later calls
    with torch.inference_mode():
        merged = handle.wait()
    states = [state for part in merged.values() for state in part.states.values()]
    assert not any(value.is_inference() for state in states for value in state.values())
    return bits(merged) == expected, handle.wait() is merged, handle.is_completed(), repr(handle), len(recorder.compute())


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[2, 3, 1], [0, 2, 0], [0, 0, 0]])
def test_what_is_merged_is_fixed_at_the_call(world: World, cuts: list[int]) -> None:
    assert alike(world.run(fixed, cuts)) == (True, True, True, "<SyncHandle, completed>", 0)


def held_back(place: Place) -> Any:
    """Rank 1 sends its states only after rank 0 has looked."""
    rank, group = place
    store = (group or dist.group.WORLD).get_group_store()
    send = Exchange.gather

    def late(*arguments: Any) -> Tensor:
        store.wait(["test/looked"])
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Exchange, "gather", late)
        handle = sync(recording_of(["a"], Mean()), group, async_op=True)
    before = handle.is_completed(), repr(handle)
    if rank == 0:
        store.set("test/looked", "yes")
    merged = handle.wait()
    return before, merged["a"].samples, handle.is_completed()


@pytest.mark.slow
def test_a_handle_tells_whether_all_has_arrived_without_waiting(world: World) -> None:
    first, second = returned(world.run(held_back, ranks=(0, 1)))
    assert first == ((False, "<SyncHandle, under way>"), 2, True)
    assert second[1:] == (2, True)


def started(place: Place, by_rank: list[Recording], options: Any) -> Any:
    return sync(by_rank[place[0]], place[1], async_op=True, **options) and "a handle"


@pytest.mark.slow
def test_ranks_that_do_not_fit_fail_at_the_call_on_every_rank(world: World) -> None:
    here, there = recording_of(["a"], Mean()), recording_of(["b"], Mean())
    assert "rank 0 records ['a'] and rank 2 records ['b']" in refused(world.run(started, [here, here, there], {}))
    unknown = Recording({"a": Subrecording(None)})
    assert "rank 1 cannot send" in refused(world.run(started, [here, unknown, here], {}))
    assert "neither 'all' nor a rank" in refused(world.run(started, [here] * 3, {"to": 5}))


def unmergeable(place: Place) -> Any:
    rank, group = place
    reducer = Mean("b c -> c")
    handle = sync(
        Recording({"fc": Subrecording(reducer, {"": reducer.update({}, torch.ones(2, 3 + rank))})}), group, async_op=True, to=1
    )
    errors = []
    for _ in range(2):
        try:
            errors.append(handle.wait())
        except Exception as error:
            errors.append(error)
    return [errors[0] is errors[1], type(errors[0]).__name__, handle.is_completed()]


def test_states_that_do_not_merge_are_an_error_of_every_wait(world: World) -> None:
    assert world.run(unmergeable) == [[True, "NoneType", True], [True, "SyncError", True], [True, "NoneType", True]]


def alone(place: Place, to: Any) -> Any:
    recording = recording_of(["a"], Mean())
    handle = sync(recording, place[1], to=to, async_op=True)
    return handle.is_completed(), handle.wait() is recording


def test_one_process_gets_a_handle_that_is_completed(world: World) -> None:
    assert world.run(alone, "all", ranks=(1,)) == world.run(alone, 1, ranks=(1,)) == [(True, True)]
    assert alone((0, None), "all") == (True, True)


def forgets(rank: int, folder: str, end: str) -> None:
    """Starts a sync, never waits for it, and ends its process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recorder = recorded([rank])
    handle = recorder.sync(async_op=True)
    if end == "dropped":
        del handle
        dist.all_reduce(torch.ones(3))
    recorder.save(f"{folder}/{rank}")
    if end != "exit":
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "destroyed", "dropped"])
def test_a_handle_that_nobody_waits_for_costs_nothing(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=forgets, args=(rank, str(tmp_path), end), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [load(tmp_path / str(rank))["out/0"].samples for rank in (0, 1)] == [1, 1]


class Under:
    """A collective that ends after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.slow
def test_a_process_ends_after_its_collectives_or_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{sync.__module__}._under_way", under_way := set())
    monkeypatch.setattr(f"{sync.__module__}.LONGEST_AT_EXIT_S", 0.1)
    work: Any = Under(3)
    SyncHandle([work], lambda: None)
    wait_at_exit()
    assert work.looks < 0
    never: Any = Under(float("inf"))
    waited_for = SyncHandle([never], lambda: 1)
    assert under_way == {never}
    wait_at_exit()
    assert waited_for.wait() == 1
    assert under_way == set()
