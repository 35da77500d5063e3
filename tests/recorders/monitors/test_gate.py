"""The gate: which observations are recorded, and the reasons that are counted for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import BackwardMonitor, CallMonitor, Cell, Clock, ForwardMonitor, MonitorConstructor, ParameterMonitor, Recorder
from recorders.monitors.gate import Gate
from recorders.monitors.options import DEFAULTS
from reducers import Count, Mean, Norm

QUESTIONS: dict[str, tuple[dict[str, Any], bool]] = {  # options under which nothing passes, and whether a graph counts the reason
    "not recorded in train mode": ({"train_update": False}, False),
    "not recorded in eval mode": ({"eval_update": False}, False),
    "not recorded with gradients on": ({"train_update": False, "phase": "grad"}, False),
    "not recorded with gradients off": ({"eval_update": False, "phase": "grad"}, False),
    "not in its steps": ({"steps": range(5, 6)}, False),
    "condition was false": ({"condition": lambda: False}, True),
    "not due (every)": ({"every": 1000}, True),
    "filtered out": ({"filter_": lambda output, inputs: False}, True),
}


@pytest.mark.parametrize("reason", QUESTIONS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_question_of_the_gate_is_counted_by_its_reason_eager_and_compiled(
    reason: str, compiled: bool, fresh_compiler: None
) -> None:
    options, counted = QUESTIONS[reason]
    layer = nn.Linear(2, 2)
    layer.train("eval" not in reason)
    monitor = ForwardMonitor(Count(), layer, **options)
    net: Callable[[Tensor], Tensor] = nn.Sequential(layer)
    if compiled:
        net = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.set_grad_enabled("gradients off" not in reason):
        for _ in range(3):
            net(torch.ones(1, 2))
    refused = monitor.counts.get(reason, 0)
    assert monitor.samples == (1 if reason == "not due (every)" else 0)
    assert refused == 3 - monitor.samples if counted or not compiled else refused == 0
    assert set(monitor.counts) <= {"calls", reason}


def test_the_first_no_is_the_one_that_is_counted() -> None:
    asked = []
    gate = Gate({**DEFAULTS, "train_update": False, "condition": lambda: bool(asked.append(1)), "every": 2})
    assert gate.refusal(training=True) == "not recorded in train mode"
    assert (gate.refusal(training=False), asked) == ("condition was false", [1])
    gate.active = False
    assert (gate.refusal(training=False), asked) == ("not in its steps", [1])


def test_every_counts_each_stream_and_only_what_came_that_far() -> None:
    gate = Gate({**DEFAULTS, "every": 2})
    assert [gate.refusal(True, stream) == "" for stream in ("a", "b", "a", "a", "b")] == [True, True, False, True, False]
    gate.active = False
    gate.refusal(True, "a")
    gate.active = True
    assert gate.refusal(True, "a") == "not due (every)"
    gate.clear()
    assert gate.refusal(True, "a") == ""


@pytest.mark.parametrize(
    "make",
    [
        lambda: ForwardMonitor(Mean(), filtre_=None),  # type: ignore[call-arg]
        lambda: BackwardMonitor(Mean(), every_steps=3),  # type: ignore[call-arg]
        lambda: ParameterMonitor(Norm(), whenn="tick"),  # type: ignore[call-arg]
        lambda: CallMonitor.partialconstructor(Mean(), Every=2),  # type: ignore[call-arg]
    ],
)
def test_a_misspelled_option_is_an_error_that_lists_the_options(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"got \['\w+'\]; .* takes \['.*'filter_'"):
        make()


def test_verbs_are_the_same_everywhere() -> None:
    monitor = CallMonitor(Mean())
    recorder = Recorder(loss=CallMonitor(Mean()))
    cell = Cell(Mean())
    for value in (1.0, 3.0):
        monitor.push(value)
        recorder.push("loss", value)
        cell.push(torch.tensor(value))
    assert monitor.peek() == monitor.compute() == cell.peek() == cell.compute() == 2
    assert recorder.compute() == recorder.snapshot().compute() == {"loss": 2.0}
    assert recorder.snapshot()["loss"].peek() == recorder.snapshot()["loss"].compute() == 2
    assert (monitor.samples, recorder.samples["loss"], recorder.snapshot().samples["loss"]) == (2, 2, 2)
    monitor.reset()
    recorder.reset()
    cell.reset()
    assert (monitor.peek(), recorder.compute(), cell.state) == (None, {}, {})
    assert isinstance(monitor.constructor, MonitorConstructor)
    assert isinstance(monitor.clock, Clock)
