"""What all trainers share, without any of them: several ranks, wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recorders import CallMonitor, ForwardMonitor, Recorder, merge
from recorders.errors import RecorderError, RecordingWarning, TrainingFaultError
from recorders.integrations import training
from recorders.integrations.training import Training
from recorders.watch.diagnosis import checkup as checkups
from recorders.watch.diagnosis.finding import Findings, fault
from reducers import Collect, Count

At = Callable[[int, int], None]
RISES = fault("loss-rises", "loss", "the loss rose")


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """Makes this process a rank of several."""
    return lambda rank, ranks: monkeypatch.setattr(training, "_place", lambda: (rank, ranks))


def new(calls: int = 0) -> Training:
    """A recorder after some steps of one call each."""
    recorder = Recorder(ForwardMonitor(Count())).modules(net := nn.Linear(2, 1))
    for _ in range(calls):
        net(torch.ones(1, 2))
        recorder.step()
    return Training(recorder)


def found(one: Training) -> tuple[int, int]:
    return one.recorder.clock.step, one.recorder[0].samples


def test_each_rank_saves_in_a_folder_of_its_own_and_goes_on_from_it(tmp_path: Path, at: At) -> None:
    for rank in range(3):
        at(rank, 3)
        new(rank + 1).save(tmp_path)
    assert merge(sorted((tmp_path / "recorder").iterdir())).samples[0] == 6
    for rank in range(3):
        at(rank, 3)
        resumed = new(9)
        resumed.resume(tmp_path)
        assert found(resumed) == (rank + 1, rank + 1)


@pytest.mark.parametrize(("ranks", "samples"), [(1, [6]), (2, [4, 2]), (4, [1, 2, 3, 0])])
def test_another_number_of_ranks_counts_everything_once(ranks: int, samples: list[int], tmp_path: Path, at: At) -> None:
    for rank in range(3):
        at(rank, 3)
        new(rank + 1).save(tmp_path)
    for rank in range(ranks):
        at(rank, ranks)
        resumed = new(9)
        resumed.resume(tmp_path)
        assert found(resumed)[1] == samples[rank]
        assert found(resumed)[0] > 0


def test_a_checkpoint_by_fewer_ranks_holds_nothing_of_an_earlier_one_by_more(tmp_path: Path, at: At) -> None:
    at(1, 2)
    new(1).save(tmp_path)
    at(0, 1)
    new(2).save(tmp_path)
    assert [path.name for path in (tmp_path / "recorder").iterdir()] == ["rank-0"]


def test_one_checkpoint_for_all_ranks_holds_what_one_recorded_and_says_so(at: At) -> None:
    at(0, 2)
    saved = new(3).state_dict()
    for rank, samples in ((0, 3), (1, 0)):
        at(rank, 2)
        resumed = new(1)
        with pytest.warns(RecordingWarning, match="the checkpoint holds what rank 0 of 2 recorded"):
            resumed.load_state_dict(saved)
        assert found(resumed) == (3, samples)


def test_batches_within_a_step_are_its_micro_batches() -> None:
    one, seen = new(), []
    for batch in range(4):
        one.begin_batch()
        seen.append(one.recorder.clock.micro_batch)
        if batch == 2:
            one.recorder.step()
    assert seen == [0, 1, 2, 0]


def test_a_rehearsal_leaves_nothing_behind() -> None:
    net = nn.Linear(2, 1)
    one = Training(Recorder(ForwardMonitor(Count())).modules(net))
    net(torch.ones(1, 2))
    one.begin_rehearsal()
    net(torch.ones(5, 2))
    one.recorder.step()
    assert found(one) == (1, 2)
    one.end_rehearsal()
    assert found(one) == (0, 1)


def test_before_a_training_there_is_no_recorder_and_nothing_to_tell(tmp_path: Path) -> None:
    one = Training(lambda net: new().recorder)
    one.begin_batch()
    one.save(tmp_path)
    one.end()
    assert one.state_dict() == {}
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecorderError, match="it is made from the net when the training begins"):
        _ = one.recorder


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a trainer takes a Recorder, or a function .* got dict"):
        Training({})  # type: ignore[arg-type]


def test_a_loss_is_pushed_if_there_is_a_place_for_it_and_the_user_pushes_none() -> None:
    recorder = Recorder(loss=CallMonitor(Collect()))
    one = Training(recorder)
    for given in (0.5, 2, torch.tensor(1.5), torch.tensor([2.5]), torch.zeros(2), None, True, {"loss": 1.0}):
        one.expect_loss()
        one.push_loss(given)
    assert recorder["loss"].peek().tolist() == [0.5, 2.0, 1.5, 2.5]
    one.expect_loss()
    recorder.push("loss", 7.0)
    one.push_loss(8.0)
    assert recorder["loss"].peek().tolist()[4:] == [7.0]
    for other in (new(), Training(Recorder(loss=ForwardMonitor(Count())).modules(nn.Linear(2, 1)))):
        other.expect_loss()
        other.push_loss(1.0)
        assert sum(other.recorder.samples.values()) == 0


def test_nobody_looks_for_faults_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkups, "findings", lambda recorder, **asked: pytest.fail("somebody looked"))
    one = new(100)
    assert not one.check()
    assert one.checkup is None


def test_a_fault_stops_one_rank_or_raises_and_several_ranks_go_on(monkeypatch: pytest.MonkeyPatch, at: At) -> None:
    monkeypatch.setattr(checkups, "findings", lambda recorder, **asked: Findings([RISES], []))
    for ranks in (1, 2):
        at(0, ranks)
        one = Training(new().recorder, "stop")
        stopped = []
        with pytest.warns(RecordingWarning) as told:
            for _ in range(12):
                one.recorder.step()
                stopped.append(one.check_alone())
        assert stopped == [False] * 9 + [ranks == 1] * 3
        assert str(told[0].message) == f"after 10 steps: {RISES}"
        assert len(told) == ranks
        assert one.check()
        assert one.checkup is not None
        assert one.checkup.found == [RISES]
    assert "if one of 2 ranks stopped, the others would wait" in str(told[1].message)
    one = Training(new(9).recorder, "raise")
    assert not one.check()
    one.recorder.clock.step = 20
    with pytest.raises(TrainingFaultError, match="the loss rose"):
        one.check()


def test_before_a_training_there_is_nothing_to_look_at() -> None:
    assert not Training(lambda net: new().recorder, "raise").check()


def test_something_else_than_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="choose 'warn', 'stop', 'raise', or None"):
        Training(new().recorder, "halt")  # type: ignore[arg-type]
