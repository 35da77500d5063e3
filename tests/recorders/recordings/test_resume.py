"""A run that is saved, killed and resumed ends bit for bit as one that was saved at the same steps and went on."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import laws
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import CASES, Case
from resumed import KINDS, Run, facts
from safetensors.torch import load_file
from torch import nn

from recorders import (
    CallMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    load,
)
from recorders.errors import MergeError, NotARecordingError, RecordingNotFoundError, RecordingWarning
from recorders.recordings.storage.commit import Commit
from reducers import EMA, Count, Mean, Moments, Norm, Product, Quantile, Scan, Summary

STEPS, AT = 23, 9


REDUCERS = [Mean(), Moments(), Summary(), Quantile(), Norm(), EMA(alpha=0.1), Product(mean=Mean(), moments=Moments("... c -> c"))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: type(reducer).__name__)
@pytest.mark.parametrize("layout", ["folder", "packed", "state_dict"])
def test_resumed_is_uninterrupted(tmp_path: Path, kind: str, reducer: Any, layout: Any) -> None:
    def make() -> Recorder:
        return KINDS[kind](reducer)

    whole, apart = Run(make).train(0, STEPS, saves=[AT]), Run(make).train(0, STEPS)
    first = Run(make).train(0, AT)
    second = Run(make)
    if layout == "state_dict":
        torch.save(first.recorder.state_dict(), tmp_path / "recorder.pt")
        second.recorder.load_state_dict(torch.load(tmp_path / "recorder.pt", weights_only=True))
    else:
        first.recorder.save(tmp_path / "run", layout=layout)
        second.recorder.resume(tmp_path / "run")
    second.net.load_state_dict(first.net.state_dict())
    second.train(AT, STEPS)
    first.train(AT, STEPS)
    assert facts(first.recorder) == facts(second.recorder) == facts(whole.recorder)
    assert second.recorder.clock.step == whole.recorder.clock.step == STEPS
    for name, monitor in apart.recorder.items():  # that was never saved: all but the rounding
        assert monitor.samples == whole.recorder[name].samples
        laws.close(monitor.leaves(), whole.recorder[name].leaves(), rtol=1e-9, atol=1e-12)


def test_what_was_recorded_before_a_resume_is_replaced_whatever_it_is(tmp_path: Path) -> None:
    recorder = Recorder(scan=CallMonitor(Scan(torch.add, initial=0.0)), shape=CallMonitor(Mean("c -> c")))
    for row, scale in ((torch.ones(3), 1.0), (torch.ones(5), 2.0)):
        with recorder:
            recorder["scan"].push(row * scale)
            recorder["shape"].push(row * scale)
        recorder.save(tmp_path / str(len(row)))
        saved = recorder.compute()
        recorder.reset()
    with recorder:
        recorder["shape"].push(torch.ones(3))
        recorder["scan"].push(torch.ones(3))
    recorder.resume(tmp_path / "5")
    torch.testing.assert_close(recorder.compute(), saved)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saves", [(), (3, 4, 11)], ids=["never saved", "saved"])
def test_looking_midway_changes_nothing_and_saves_at_the_same_steps_are_alike(
    kind: str, saves: tuple[int, ...], tmp_path: Path
) -> None:
    def make() -> Recorder:
        return KINDS[kind](Product(moments=Moments(), summary=Summary(), quantile=Quantile()))

    whole, looked = Run(make).train(0, STEPS, saves=saves), Run(make)
    for step in range(STEPS):
        if step in saves:
            looked.recorder.save(tmp_path / "run")
            looked.recorder.save(tmp_path / "run")  # the second finds nothing that waits
        looked.train(step, step + 1)
        looked.recorder.snapshot()
        looked.recorder.compute()
        repr(looked.recorder[0].peek())
    assert facts(looked.recorder) == facts(whole.recorder)


def test_a_file_holds_nothing_that_waits(tmp_path: Path) -> None:
    run = Run(lambda: KINDS["forward"](Mean())).train(0, 5)
    assert all(monitor.buffer.stored.has_pending for monitor in run.recorder.values())
    run.recorder.save(tmp_path / "run")
    assert not any(monitor.buffer.stored.has_pending for monitor in run.recorder.values())
    saved = load(tmp_path / "run")
    assert {name: part.samples for name, part in saved.items()} == {"0": 5, "2": 5}
    for part in saved.values():
        assert part.progress is not None
        assert part.progress.counts == {"": 5}
    assert {key for file in tmp_path.rglob("*.safetensors") for key in load_file(file)} == {
        *("state/sum", "state/count", "state/nonfinite", "value")
    }


@pytest.mark.parametrize("case", [case for case in CASES if case.merges], ids=str)
def test_every_reducer_goes_on_bit_for_bit(tmp_path: Path, case: Case) -> None:
    def push(recorder: Recorder, begin: int, end: int) -> Recorder:
        for index in range(begin, end):
            generator = torch.Generator().manual_seed(index)
            values = (
                torch.randn(6, *case.trailing, generator=generator) * 10
                if case.takes_floats
                else torch.randint(0, 2, (6, *case.trailing), generator=generator)
            )
            recorder.push("x", values.to(case.dtypes[0]))
        return recorder

    def new() -> Recorder:
        return Recorder(x=CallMonitor(case.reducer))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)  # of results that a file cannot hold
        whole = push(new(), 0, 5)
        whole.save(tmp_path / "run")
        push(whole, 5, 11)
        again = push(new().resume(load(tmp_path / "run", reducers=case.reducer)), 5, 11)
    assert facts(again) == facts(whole)


@pytest.mark.parametrize("kind", [ParameterMonitor, ParameterGradientMonitor, ParameterUpdateMonitor])
@pytest.mark.parametrize("at", [1, 2])
def test_each_optimizer_keeps_its_phase(tmp_path: Path, kind: Any, at: int) -> None:
    def make() -> tuple[list[torch.optim.Optimizer], Recorder, nn.Module]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters()]
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        return optimizers, Recorder(kind(Count(), every=3)).modules(net).attach(optimizers[0]), net

    def steps(optimizers: list[torch.optim.Optimizer], begin: int, end: int) -> None:
        for step in range(begin, end):
            optimizers[0].step()
            if step % 2 == 0:
                optimizers[1].step()

    whole, first, second = make(), make(), make()
    steps(whole[0], 0, 11)
    steps(first[0], 0, at)
    first[1].save(tmp_path / "run")
    second[1].resume(tmp_path / "run")
    steps(second[0], at, 11)
    assert facts(second[1]) == facts(whole[1])
    assert whole[1].samples[""] == 4


def test_nothing_there_is_an_error_that_lists_what_is(tmp_path: Path) -> None:
    run = Run(lambda: KINDS["forward"](Mean())).train(0, 3)
    run.recorder.save(tmp_path / "epoch-1")
    (tmp_path / "other").mkdir()
    before = facts(run.recorder)
    with pytest.raises(RecordingNotFoundError) as caught:
        run.recorder.resume(tmp_path / "epoch-2")
    for said in ("nothing at", "epoch-2", "did you mean 'epoch-1'", "there are ['epoch-1']", "missing='start'"):
        assert said in str(caught.value)
    with pytest.raises(RecordingNotFoundError, match="no recording in"):
        run.recorder.resume(tmp_path / "other" / "deeper" / "run")
    with pytest.raises(ValueError, match="missing='stop'"):
        run.recorder.resume(tmp_path / "epoch-1", missing="stop")  # type: ignore[arg-type]
    with pytest.raises(NotARecordingError):
        run.recorder.resume(tmp_path / "other", missing="start")
    assert facts(run.recorder) == before


def test_a_script_may_ask_for_a_fresh_start(tmp_path: Path) -> None:
    run = Run(lambda: KINDS["forward"](Mean())).train(0, 3)
    before = facts(run.recorder)
    assert run.recorder.resume(tmp_path / "none", missing="start") is run.recorder
    with Commit(tmp_path / "killed") as commit:
        commit.write("0.safetensors", [b"half"])
        shutil.copytree(tmp_path / "killed", tmp_path / "left")  # what a first save leaves that is killed now
    assert run.recorder.resume(tmp_path / "left", missing="start") is run.recorder
    with pytest.raises(NotARecordingError):
        run.recorder.resume(tmp_path / "left")
    assert facts(run.recorder) == before


def test_other_names_change_nothing(tmp_path: Path) -> None:
    run = Run(lambda: KINDS["forward"](Mean())).train(0, 3)
    other = Recorder(ForwardMonitor(Mean())).modules(nn.Sequential(nn.Linear(5, 7)))
    other.save(tmp_path / "run")
    before = facts(run.recorder)
    with pytest.raises(MergeError, match="names differ"):
        run.recorder.resume(tmp_path / "run")
    with pytest.raises(MergeError, match="reducers differ"):
        Run(lambda: KINDS["forward"](Norm())).train(0, 2).recorder.resume(run.recorder.snapshot())
    assert facts(run.recorder) == before


@pytest.mark.parametrize("forged", [{}, {"a": 1}, {"recording": 3}, {"recording": b""}, {"recording": b"no file of torch.save"}])
def test_what_is_no_state_dict_is_refused(forged: dict[str, Any]) -> None:
    run = Run(lambda: KINDS["forward"](Mean())).train(0, 5)
    with pytest.raises(MergeError, match="no state dict of a recorder"):
        run.recorder.load_state_dict(forged)
    assert run.recorder[0].samples == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_holds_it(tmp_path: Path) -> None:
    whole = Run(lambda: KINDS["forward"](Moments())).train(0, STEPS, saves=[AT])
    first = Run(lambda: KINDS["forward"](Moments())).train(0, AT)
    dcp.save({"net": first.net.state_dict(), "recorder": first.recorder.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    second = Run(lambda: KINDS["forward"](Moments()))
    states = {"net": second.net.state_dict(), "recorder": second.recorder.state_dict()}
    dcp.load(states, checkpoint_id=tmp_path, no_dist=True)
    second.recorder.load_state_dict(states["recorder"])
    assert facts(second.train(AT, STEPS).recorder) == facts(whole.recorder)


def test_a_recorder_that_was_resumed_from_one_file_has_a_state_dict(tmp_path: Path) -> None:
    """The tensors of that file share memory, of which PyTorch writes no views of several dtypes."""
    recorder = Recorder(CallMonitor(Moments()))
    recorder[0].push(torch.arange(4.0))
    recorder.save(tmp_path / "run", layout="packed")
    other = Recorder(CallMonitor(Moments())).resume(tmp_path / "run")
    assert len(other.state_dict()["recording"]) < 2 * len(recorder.state_dict()["recording"])
    torch.testing.assert_close(other.compute(), recorder.compute())
