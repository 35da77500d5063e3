"""The text of a page: what it holds is what the timeline holds, whatever the names are."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from pages import charted, filled, held, unpacked
from torch import nn

from recorders import BackwardMonitor, CallMonitor, ForwardMonitor, Inspector, Recorder, lenses, presets
from recorders.errors import LensError, NotARecordingError, RecordingNotFoundError
from recorders.watch.charts import Chart, ChartView
from recorders.watch.diagnosis.finding import Finding, Findings, fault
from recorders.watch.lenses import Across
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.html import Run, columns, html_report, write_report
from recorders.watch.visualizers.html.columns import MISSING
from reducers import Activity, Mean, Product, Summary

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "';window.hacked = 1;//\u2028\u2029",
    "{{script}} {{report}}",
    "<!--<script>",
    "__proto__",
)


class Tags(HTMLParser):
    """The elements of a page, and the text in each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_holds_the_numbers_of_the_timeline() -> None:
    report = held(html_report(filled()))
    values = unpacked(report)
    assert report["runs"][0]["ticks"] == [0, 1, 2, 3, 4]
    assert values["Norm", "mean", "net.b"] == [2, 4, 6, 8, 10]
    assert values["Norm", "max", "other"] == [8, 16, 24, 32, 40]
    assert values["Loss", "mean", "train"] == pytest.approx([1 / (tick + 1) for tick in range(5)], rel=1e-7)
    assert ("Norm", "nonfinite", "net.a") not in values


def test_values_missing_or_not_finite_stay_apart() -> None:
    given = {0: math.nan, 1: math.inf, 2: -math.inf, 4: 1e300, 5: -2.5}
    rows = {"N/a": {tick: {"mean": value} for tick, value in given.items()}, "N/b": {tick: {"mean": 0.0} for tick in range(6)}}
    text = html_report(charted([Chart("N", ("x",), ranges=None)], rows))
    found = unpacked(held(text))["N", "mean", "a"]
    assert math.isnan(found[0])
    assert found[1:4] == [math.inf, -math.inf, MISSING]
    assert found[4] == pytest.approx(1.7e38)
    assert found[5] == -2.5


def test_many_values_are_rounded_to_twelve_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorders.watch.visualizers.html.page.EXACT", 10)
    torch.manual_seed(0)
    given = (torch.randn(300, dtype=torch.float64).exp() ** 8).tolist()
    odd = [0.0, math.nan, math.inf, -math.inf, 1.7e38, -1e-39]
    timeline = charted([Chart("N", ("x",), ranges=None)], {"N/a": {t: {"mean": v} for t, v in enumerate(given + odd)}})
    found = unpacked(held(html_report(timeline)))["N", "mean", "a"]
    assert found[:300] == pytest.approx(given, rel=2**-12)
    assert found[300] == 0
    assert math.isnan(found[301])
    assert found[302:304] == [math.inf, -math.inf]
    assert math.isfinite(found[304])
    assert abs(found[305]) < 1e-38


def test_too_many_ticks_are_joined_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorders.watch.visualizers.html.page.VALUES", 12)
    rows = {
        "N/a": {
            tick: {"mean": float(tick), "std": 0.0, "min": tick - 1.0, "max": tick + 1.0, "nonfinite": float(tick == 5)}
            for tick in range(7)
        },
        "N/b": {tick: {"mean": math.nan if tick == 1 else 1.0} for tick in (0, 1, 6)},
    }
    report = held(html_report(charted([Chart("N", ("x",), ranges="min-max")], rows)))
    values = unpacked(report)
    assert (report["runs"][0]["every"], report["runs"][0]["ticks"], report["runs"][0]["last"]) == (4, [0, 4], 6)
    assert values["N", "mean", "a"] == [1.5, 5.0]
    assert values["N", "min", "a"] == [-1.0, 3.0]
    assert values["N", "max", "a"] == [4.0, 7.0]
    assert values["N", "nonfinite", "a"] == [0.0, 1.0]
    assert math.isnan(values["N", "mean", "b"][0])
    assert values["N", "mean", "b"][1] == 1.0
    assert values["N", "min", "b"] == [MISSING, MISSING]


def test_hostile_names_are_data_and_no_markup() -> None:
    findings = [Finding(name, name, name, name, kind=name) for name in HOSTILE]
    text = html_report(Run(filled(HOSTILE), HOSTILE[0], findings), title=HOSTILE[0])
    plain = Tags(html_report(filled())).found
    assert [tag for tag, _ in Tags(text).found] == [tag for tag, _ in plain]
    assert not [value for tag in Tags(text).found for value in tag[1].values() if value and "hacked" in value]
    report = held(text)
    assert report["layers"][: len(HOSTILE)] == list(HOSTILE)
    assert report["title"] == report["runs"][0]["name"] == HOSTILE[0]
    assert [finding["what"] for finding in report["runs"][0]["findings"]] == list(HOSTILE)
    assert text.isascii() or not set("\u2028\u2029") & set(text)


def test_the_page_may_load_nothing_and_run_its_own_script_only() -> None:
    tags = Tags(html_report(filled())).found
    (policy,) = [attributes["content"] or "" for tag, attributes in tags if attributes.get("http-equiv")]
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].startswith("'sha256-")
    assert rules["require-trusted-types-for"] == "'script'"
    assert not [attributes for _, attributes in tags if attributes.get("src") or (attributes.get("href") or "data:,") != "data:,"]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]


def test_two_runs_share_charts_and_layers() -> None:
    report = held(html_report(Run(filled(("a", "c")), "one"), Run(filled(("a", "b", "c"), ticks=2), "two", ())))
    assert report["layers"] == ["a", "b", "c", "train"]
    assert [run["name"] for run in report["runs"]] == ["one", "two"]
    assert [run["findings"] for run in report["runs"]] == [None, []]
    first, second = unpacked(report), unpacked(report, 1)
    assert first["Norm", "mean", "b"] == [MISSING] * 5
    assert second["Norm", "mean", "b"] == [2, 4]


def test_charts_that_compare_are_told_and_not_stored() -> None:
    norm = Chart("N", ("x",), ranges=None)
    charts = [norm, Chart("Shares", (), across=(Across("N", "share"),)), Chart("Worst", (), across=(Across("N", "max"),))]
    report = held(html_report(charted(charts, {"N/a": {0: {"mean": 1.0}}, "N/b": {0: {"mean": 3.0}}})))
    assert [chart["overall"] for chart in report["charts"]] == [False, False, True]
    assert [part["statistics"] for part in report["runs"][0]["charts"]] == [["mean"], [], []]


@pytest.mark.parametrize("ticks", [0, 1])
def test_a_timeline_of_no_tick_or_one_has_a_page(ticks: int) -> None:
    report = held(html_report(filled(ticks=ticks)) if ticks else html_report(empty()))
    assert report["runs"][0]["count"] == ticks


def empty() -> Run:
    timeline = Timeline()
    return Run(timeline, charts=[ChartView(Chart("Norm", ("x",)), timeline, ("a", "b"))])


def test_a_recording_is_shown_once_with_its_findings(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    nn.init.constant_(net[0].bias, -100.0)
    output = ForwardMonitor(Product(stats=Summary("b c -> c"), activity=Activity("b c -> c")))
    recorder = Recorder(output=output, gradient=BackwardMonitor(Summary()), loss=CallMonitor(Summary())).modules(net, leaves=True)
    with recorder:
        loss = net(torch.ones(8, 2)).sum()
        loss.backward()
        recorder.push("loss", loss)
    recorder.save(tmp_path / "run")
    for source in (recorder, tmp_path / "run"):
        report = held(html_report(source))
        values = unpacked(report)
        assert values["Dead units", "mean", "1"] == [1.0]
        assert values["Output", "max", "1"] == [0.0]
        assert ("Loss and metrics", "mean", "loss") in values
        assert "dead" in report["runs"][0]["findings"][0]["what"]


def test_paths_of_timelines_are_runs_with_their_names(tmp_path: Path) -> None:
    for name in ("a.db", "b.db"):
        charted([Chart("N", ("x",))], {"N/a": {0: {"mean": 1.0}}}, str(tmp_path / name)).close()
    written = write_report(tmp_path / "new" / "report.html", tmp_path / "a.db", tmp_path / "b.db", title="Both")
    report = held(written.read_text())
    assert [run["name"] for run in report["runs"]] == ["a.db", "b.db"]
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingNotFoundError, match="nothing at"):
        html_report(tmp_path / "gone.db")
    assert not (tmp_path / "gone.db").exists()
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(NotARecordingError):
        html_report(tmp_path / "text")
    with pytest.raises(LensError, match="holds no charts"):
        html_report(Timeline())
    with pytest.raises(LensError, match="Summary and Activity"):
        html_report(Recorder(ForwardMonitor(Mean())).modules(nn.Linear(2, 2)))
    with pytest.raises(LensError, match="got 3"):
        html_report(filled(), filled(), filled())
    with pytest.raises(LensError, match="got 7"):
        html_report(7)  # type: ignore[arg-type]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")

    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_report(page, filled())
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_statistics_are_those_that_lines_and_ranges_need() -> None:
    view = ChartView(Chart("N", (), lines="median", ranges=("std", "Q1-Q3")), Timeline(), ())
    assert columns.statistics_of(view) == ("median", "mean", "std", "Q1", "Q3", "nonfinite")


def test_findings_of_a_timeline_tell_since_when() -> None:
    timeline = charted(
        [Chart("Dead Units", ("x",), ranges=None)], {"Dead Units/layer": {tick: {"mean": tick / 4} for tick in range(4)}}
    )
    assert "75% of the units are dead: they were never active, since tick 3" in html_report(timeline)


def test_findings_and_notices_name_their_page_in_the_repository() -> None:
    known, own = fault("dead-units", "net.b", "all are dead"), Finding("net.a", "odd", "why", "remedy", kind="of-my-own")
    found = Findings([known, own, replace(own, kind="")], [], notices=[known, own])
    (run,) = held(html_report(Run(filled(), "", found)))["runs"]
    assert [one["page"] for one in run["findings"]] == ["docs/findings/dead-units.md", "", ""]
    assert run["notes"] == ["Notice: net.b: all are dead (see docs/findings/dead-units.md)", "Notice: net.a: odd"]


def trained(optimizer_steps: int = 2) -> tuple[Recorder, Inspector]:
    """Three ReLUs and linear layers between them, seen by lenses that watch the former or the latter."""
    net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    chosen = [lenses.DeadUnits(), lenses.UpdateRatio(), lenses.NonFinite()]
    with presets.health().modules(net) as recorder, Inspector(net, chosen, optimizer=optimizer) as inspector:
        for _ in inspector.range(2):
            for _ in range(optimizer_steps):
                net(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
    return recorder, inspector


def test_layers_are_in_network_order_and_have_their_class() -> None:
    recorder, inspector = trained()
    kinds = ["Linear", "ReLU"] * 3 + ["Linear"]
    report = held(html_report(inspector.timeline))
    assert report["layers"] == list("0123456")
    assert report["kinds"] == kinds
    report = held(html_report(recorder))
    assert report["layers"] == ["(net)", *"0123456"]  # the net is one layer, not one of each group
    assert report["kinds"] == ["Sequential", *kinds]


def test_the_page_and_its_findings_count_the_same_layers() -> None:
    recorder, inspector = trained()
    for source, count in ((recorder, 8), (inspector.timeline, 7)):
        report = held(html_report(source))
        (examined,) = [note for note in report["runs"][0]["notes"] if note.startswith("Examined: ")]
        assert examined.startswith(f"Examined: NaN and infinity: {count} of {count} layers; ")
        assert len(report["layers"]) == count


def test_ticks_are_named_as_the_timeline_names_them() -> None:
    _, epochs = trained()
    steps = Inspector(net := nn.Linear(2, 2), lenses.NonFinite())
    for _ in range(3):
        net(torch.ones(2, 2))
        steps.step().tick()
    found = {name: held(html_report(one))["runs"][0]["axis"] for name, one in (("a", epochs.timeline), ("b", steps.timeline))}
    assert (found, held(html_report(filled()))["runs"][0]["axis"]) == ({"a": "epoch", "b": "step"}, "tick")


def test_no_chart_of_a_lens_is_called_a_warning() -> None:
    made = [lenses.DeadUnits(), lenses.UpdateRatio(), lenses.Saturation(), lenses.Outliers(), lenses.OutputActivation()]
    made += [lenses.ParameterGradientActivation()]
    assert not [chart.title for lens in made for chart in lens.charts if "warning" in chart.title.lower()]


def test_the_number_of_values_is_told_as_it_is() -> None:
    assert f"If there are more than {columns.VALUES // 10**6} million," in str(html_report.__doc__)
