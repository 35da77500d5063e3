"""`value` has one depth for every operand and reducer; what is missing or ambiguous is an error that lists what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recorders import CallMonitor, ForwardMonitor, ParameterMonitor, Recorder, load
from recorders.errors import SelectionError
from reducers import Count, Mean, Product, Summary


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": 2 * x}


NET = nn.Sequential(nn.Linear(3, 2), Nested())


def recorder() -> Recorder:
    both = Product(mean=Mean(), nested=Product(all=Summary(), n=Count()))
    made = Recorder(out=ForwardMonitor(both), weight=ParameterMonitor(Mean(), when="tick"), loss=CallMonitor(Mean()))
    made.modules(NET, depth=1, exclude=nn.Sequential)
    with made:
        NET(torch.ones(2, 3))
        made.tick()
    made.push("loss", 3.0)
    return made


def test_one_depth_for_recorders_recordings_files_and_monitors(tmp_path: Path) -> None:
    made = recorder()
    saved = load(made.save(tmp_path / "run"))
    for one in (made, made.snapshot(), saved):
        assert one.value("loss").item() == 3
        torch.testing.assert_close(one.value("weight/0", leaf="bias"), NET[0].bias.double().mean())
        assert one.value("out/0", stat="mean") == one["out/0"].value(stat="mean") == one["out/0"].peek()["mean"]
        assert one.value("out/1", leaf="b", stat="nested.all.max") == one["out/1"].peek()["b"]["nested"]["all"]["max"]
        assert one.value("out/1", leaf="a", stat="nested.n") == 4


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("weight/0", {}, r"subrecorder 'weight/0' has the leaves \['weight', 'bias'\]: give one, such as leaf='weight'"),
        ("out/0", {}, r"'out/0' has the statistics \['mean', 'nested.all.count', .*\]: give one, such as stat='mean'"),
        (
            "out/0",
            {"stat": "nested.all.vra"},
            r"has no stat 'nested.all.vra': did you mean 'nested.all.var'\? there are \['mean', ",
        ),
        ("out/1", {"leaf": "c", "stat": "mean"}, r"'out/1' has no leaf 'c': there are \['a', 'b'\]"),
        ("out/1", {"leaf": "a", "stat": "max"}, r"subrecorder 'out/1', leaf 'a', has no stat 'max': "),
        ("loss", {"stat": "mean"}, "'loss' has one result, without statistics: leave stat='mean' out"),
        ("loss", {"leaf": "x"}, "'loss' has one result, without leaves: leave leaf='x' out"),
        ("lost", {}, "no subrecorder 'lost'; did you mean 'loss'"),
    ],
)
def test_errors_list_what_there_is(name: str, given: dict[str, str], reason: str) -> None:
    with pytest.raises(SelectionError, match=reason):
        recorder().value(name, **given)


def test_what_recorded_nothing_has_no_value() -> None:
    monitor = CallMonitor(Mean())
    assert monitor.peek() is monitor.compute() is None
    with pytest.raises(SelectionError, match=r"this subrecorder recorded nothing, so it has no value: report\(\)"):
        monitor.value()


def test_what_apply_makes_of_a_result_is_a_value() -> None:
    made = recorder().apply(lambda result: ("shown", result))
    assert made.value("loss")[0] == "shown"
