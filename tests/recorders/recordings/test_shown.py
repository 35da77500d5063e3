"""What prints, and what notebooks show: short text and tables, never walls of tensors."""

from __future__ import annotations

import re

import torch
from torch import nn

from recorders import CallMonitor, ForwardMonitor, Recorder
from recorders.recordings.recording import Subrecording
from recorders.recordings.shown import Table, brief
from reducers import Collect, Count, Product, Summary


def recorder() -> Recorder:
    net = nn.Sequential(nn.Linear(300, 300), nn.ReLU())
    made = Recorder(out=ForwardMonitor(Product(s=Summary("b c -> c"), n=Count())), loss=CallMonitor(Collect())).modules(net)
    net(torch.randn(4, 300))
    made.push("loss", 0.5)
    made.net = net  # type: ignore[attr-defined]  # which nothing else keeps alive
    return made


def cells(table: Table) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table._repr_html_())
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_recordings_print_in_one_line() -> None:
    recording = recorder().snapshot()
    assert repr(recording) == "<Recording of 4 subrecorders: 'loss', 'out', 'out/0', 'out/1'>"
    assert repr(recording["out/0"]).startswith("<ForwardMonitor(Product(s=Summary(pattern='b c -> c', correction=1), n=Count(")
    assert "on Linear: 1 observations, s.mean " in repr(recording["out/0"])
    assert len(repr(recording["out/0"])) < 300
    assert repr(Subrecording(None)) == "<Monitor(unknown): 0 observations, nothing>"


def test_recorders_and_recordings_are_tables_in_notebooks() -> None:
    made = recorder()
    found = cells(made.snapshot())
    assert found[0] == ["name", "monitor", "on", "result", "observations"]
    assert found[1] == ["loss", "CallMonitor", "", "0.5", "1"]
    assert found[3][0:3] == ["out/0", "ForwardMonitor", "Linear"]
    assert re.search(r"s\.mean .* to .* in 300", found[3][3])
    assert made._repr_html_() == made.snapshot()._repr_html_()
    assert cells(made.snapshot()["loss"]) == [["leaf", "result"], ["", "0.5"]]


def test_reports_plans_and_costs_are_tables_in_notebooks() -> None:
    made = recorder()
    report, plan, overhead = cells(made.report()), cells(made.plan(torch.ones(1, 300))), cells(made.overhead())
    assert [row[0] for row in report] == ["name", "loss", "out", "out/0", "out/1"]
    assert report[3][3:5] == ["1", "1"]
    assert plan[-1][3].endswith("bytes of state")
    assert [row[0] for row in overhead] == ["name", "all"]


def test_names_are_escaped() -> None:
    made = Recorder(**{"<script>alert(1)</script>": CallMonitor(Count())})
    assert "<script>" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()


def test_brief_texts() -> None:
    assert brief({"a": {"x": torch.zeros(())}, "b": torch.ones(10)}) == "a.x 0, b 1 in 10"
    assert brief({"s": {"mean": torch.tensor(2.0), "count": torch.tensor(3)}}) == "mean 2"
    assert brief({"count": torch.tensor(3)}) == "count 3"
    assert brief({str(i): torch.tensor(i) for i in range(6)}) == "0 0, 1 1, 2 2, 3 3, ..."
    assert brief(torch.tensor([float("nan"), 1.0])) == "nan 1"
    assert brief({}) == "nothing"
