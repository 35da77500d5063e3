"""What prints, and what notebooks show: short text and tables, never walls of tensors."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from recorders import (
    CallMonitor,
    ForwardMonitor,
    MergeError,
    Recorder,
    Recording,
    SelectionError,
    Stream,
    Subrecording,
    Timeline,
)
from recorders.recorder.overhead import Overhead
from recorders.recordings.display import ShownAsTable, brief
from recorders.watch.diagnosis.finding import Findings, fault
from reducers import Collect, Count, Mean, Product, Summary


def recorder() -> Recorder:
    net = nn.Sequential(nn.Linear(300, 300), nn.ReLU())
    made = Recorder(out=ForwardMonitor(Product(s=Summary("b c -> c"), n=Count())), loss=CallMonitor(Collect())).modules(net)
    net(torch.randn(4, 300))
    made.push("loss", 0.5)
    made.net = net  # type: ignore[attr-defined]  # which nothing else keeps alive
    return made


def cells(table: ShownAsTable) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", table._repr_html_())
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_recordings_print_as_short_tables() -> None:
    recording = recorder().snapshot()
    lines = repr(recording).splitlines()
    assert lines[0] == "Recording of 4 subrecorders at step 0"
    assert [line.split("  ")[0] for line in lines[1:]] == ["name", "loss", "out", "out/0", "out/1"]
    assert (repr(recording.keys()), repr(recorder().keys())) == ("['loss', 'out', 'out/0', 'out/1']",) * 2
    assert repr(recording["out/0"]).startswith("<ForwardMonitor(Product(s=Summary(pattern='b c -> c', correction=1), n=Count(")
    assert "on Linear: 1 observations, s.mean " in repr(recording["out/0"])
    assert len(repr(recording["out/0"])) < 300
    assert repr(Subrecording(None)) == "<Monitor(unknown): 0 observations, nothing>"


def test_recorders_and_recordings_are_tables_in_notebooks() -> None:
    made = recorder()
    found = cells(made.snapshot())
    assert found[0] == ["name", "monitor", "on", "result", "observations"]
    assert found[1] == ["loss", "CallMonitor", "", "0.5", "1"]
    assert cells(made) == found
    assert "<caption" in made._repr_html_()
    assert found[3][0:3] == ["out/0", "ForwardMonitor", "Linear"]
    assert re.search(r"s\.mean .* to .* in 300", found[3][3])
    assert cells(made.snapshot()["loss"]) == cells(made["loss"]) == [["result"], ["0.5"]]


def test_reports_plans_and_costs_are_tables_in_notebooks() -> None:
    made = recorder()
    report, plan = cells(made.report()), cells(made.plan(torch.ones(1, 300)))
    assert [row[0] for row in report] == ["name", "loss", "out", "out/0", "out/1"]
    assert report[3][3:5] == ["1", "1"]
    assert plan[-1][3].endswith("bytes of state")
    assert "nothing was measured" in made.overhead()._repr_html_()


def test_names_are_escaped() -> None:
    made = Recorder(**{"<script>alert(1)</script>": CallMonitor(Count())})
    assert "<script>" not in made._repr_html_()
    assert "&lt;script&gt;" in made._repr_html_()


def test_no_terminal_obeys_a_name_and_any_name_is_printed() -> None:
    part = Recorder(loss=CallMonitor(Mean())).push("loss", 1.0)["loss"].snapshot()
    found = Recording({"layer\x1b[2J \ud800": replace(part, monitor="\x1b[3J", module="\x07")})
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(found)
    for text in (repr(found), found._repr_html_(), console.file.getvalue()):  # type: ignore[attr-defined]
        assert r"layer\x1b[2J \ud800" in text
        assert text.encode().isascii()
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "\x1b" not in repr(replace(part, monitor="\x1b[3J"))


def test_brief_texts() -> None:
    assert brief({"a": {"x": torch.zeros(())}, "b": torch.ones(10)}) == "a.x 0, b 1 in 10"
    assert brief({"s": {"mean": torch.tensor(2.0), "count": torch.tensor(3)}}) == "mean 2"
    assert brief({"count": torch.tensor(3)}) == "count 3"
    assert brief({str(i): torch.tensor(i) for i in range(6)}) == "0 0, 1 1, 2 2, 3 3, ..."
    assert brief(torch.tensor([float("nan"), 1.0])) == "nan 1"
    assert brief({}) == "nothing"


LAYERS = 1000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Each class that is shown, with a thousand layers; what notebooks and terminals show of it is asked for once."""
    folder = tmp_path_factory.mktemp("many")
    net = nn.Sequential(*(nn.Identity() for _ in range(LAYERS)))
    made = Recorder(ForwardMonitor(Summary("b c -> c"))).modules(net, nn.Identity)
    net(torch.ones(2, 3))
    nested = CallMonitor(Summary())
    nested.push({f"<b>{place}": torch.ones(3) for place in range(LAYERS)})
    timeline = Timeline(folder / "run.db")
    timeline.append(0, {f"layer [{place}]": {"mean": 0.5} for place in range(LAYERS)})
    with Stream(folder / "stream") as stream:
        stream._writer.rows = {f"place {place}": 1 for place in range(LAYERS)}  # as writing a thousand files takes a second
        yield {
            "recorder": made,
            "recording": made.snapshot(),
            "subrecording": nested.snapshot(),
            "monitor": nested,
            "report": made.report(),
            "plan": made.plan(),
            "overhead": Overhead(0.002, 0.1, dict.fromkeys(made, 0.001), steps=72, every_step=1),
            "timeline": timeline,
            "findings": Findings(
                [fault("dead-units", name, "3 of 3 units are dead") for name in made], ["saturated units: record"]
            ),
            "stream": stream,
        }
    timeline.close()


@pytest.mark.parametrize(
    "kind",
    ["recorder", "recording", "subrecording", "monitor", "report", "plan", "overhead", "timeline", "findings", "stream"],
)
def test_a_thousand_layers_are_short_in_all_three_forms(many: dict[str, Any], kind: str) -> None:
    shown = many[kind]
    text = repr(shown)
    assert len(text) < 3000
    assert len(text.splitlines()) <= 23
    if kind not in ("subrecording", "monitor", "timeline"):  # which print in one line
        assert text.endswith("... and 980 more")
        assert len(text.splitlines()) == 23
    html = shown._repr_html_()
    assert html.count("<tr>") == 101
    assert html.endswith("<p>... and 900 more</p>")
    assert "<b>" not in html
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    printed = console.file.getvalue()
    assert "... and 900 more" in printed
    if kind == "timeline":
        assert "layer [3]" in printed  # no markup


def test_only_what_is_shown_is_computed() -> None:
    class Watched(Subrecording):
        def iter_leaves(self) -> Iterator[tuple[str, Any]]:
            computed.append(self.module)
            return super().iter_leaves()

    computed: list[str] = []
    recording = Recording({str(place): Watched(Count(), module=str(place)) for place in range(LAYERS)})
    assert len(repr(recording).splitlines()) == 23
    assert computed == [str(place) for place in range(20)]


def test_a_result_that_fails_is_shown_as_its_error() -> None:
    made = recorder().apply(lambda result: 1 / 0)
    assert "ZeroDivisionError: division by zero" in repr(made)


def test_names_in_messages_are_lists_of_bounded_length() -> None:
    recording = Recording({str(place): Subrecording(Count()) for place in range(LAYERS)})
    with pytest.raises(SelectionError, match=r"there are \['0', .*'19'\] and 980 more"):
        recording["x"]
    with pytest.raises(MergeError, match=r"and 980 more, only the second \[\]"):
        recording.merge(Recording({}))


def test_complex_numbers_are_shown() -> None:
    recorder = Recorder(a=CallMonitor(Mean()))
    assert "real 1, imag 2" in str(recorder.push("a", torch.tensor([1 + 2j])))
