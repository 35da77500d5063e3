"""The progress bar of an inspector's loops."""

from __future__ import annotations

import pytest
from terminal import Terminal, in_terminal

from recorders import Inspector, lenses
from recorders.errors import RecordingWarning
from recorders.watch import showing
from recorders.watch.visualizers.visualizer import Pace


def always_due(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(showing, "_PAUSE", 0.0)
    monkeypatch.setattr(showing, "_SHARE", float("inf"))
    return in_terminal(monkeypatch, 100, 30)


def test_the_bar_shows_how_far_and_the_last_losses_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = always_due(monkeypatch)
    inspector = Inspector(lenses=lenses.LossMetrics())
    for epoch in inspector.range(4, progress=True):
        inspector.push_loss(4.0 - epoch)
        if epoch == 1:  # what is not pushed in each epoch stays
            inspector.push_loss(7.0, train=False)
            inspector.push_metric("accuracy", 0.5)
        if epoch == 3:
            (line, _) = terminal.lines
            assert line.startswith(" 75%|███████▌  | 3/4 [00:0")
            assert line.endswith(", train loss=2, eval loss=7, accuracy=0.5]")
    assert terminal.lines[0].startswith("100%|██████████| 4/4 [00:0")
    assert "train loss=1," in terminal.lines[0]
    assert "write" not in vars(terminal)


def test_nothing_is_shown_if_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = always_due(monkeypatch)
    inspector = Inspector(lenses=lenses.LossMetrics())
    for _ in inspector.range(3):
        inspector.push_loss(1.0)
    assert terminal.written == 0


def test_items_without_a_length_and_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = always_due(monkeypatch)
    inspector = Inspector(lenses=lenses.LossMetrics())
    for number in inspector.iter(iter(range(10)), progress=True):
        inspector.push_loss(1.0)
        if number == 2:
            break
    assert terminal.lines[0].startswith("2 ticks [00:0")
    assert "write" not in vars(terminal)
    assert list(inspector.iter([], progress=True)) == []


def test_a_bar_that_fails_warns_once_and_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("the terminal is gone")

    always_due(monkeypatch)
    inspector = Inspector(lenses=lenses.LossMetrics())
    monkeypatch.setattr(showing.ProgressBar, "_draw", broken)
    with pytest.warns(RecordingWarning, match="ProgressBar failed at the beginning: OSError") as caught:
        assert list(inspector.range(3, progress=True)) == [0, 1, 2]
    assert len(caught) == 1


def test_work_is_due_after_the_pause_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    pace = Pace(pause=5.0, share=0.02)
    for took, wait in ((0.01, 5.0), (1.0, 50.0)):
        assert pace.due
        with pytest.raises(OSError), pace.measured():
            now += took
            raise OSError
        now += 0.99 * wait
        assert not pace.due
        now += 0.02 * wait
