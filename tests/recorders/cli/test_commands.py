"""The commands on recordings and timelines: what they print, write and end with."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from terminal import in_terminal
from torch import nn

from recorders import (
    CallMonitor,
    ForwardMonitor,
    Inspector,
    Recorder,
    RecordingWarning,
    Stream,
    Timeline,
    findings,
    learn,
    lenses,
    load,
    presets,
)
from recorders.cli import main
from recorders.watch.visualizers import live
from reducers import Activity, Collect, Count, Mean, Product, Summary

pytest.importorskip("rich")


def net(planted: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        made[2].weight.mul_(planted)
    return made


def recording(path: Path, planted: float = 1.0, seed: int = 1) -> Path:
    model = net(planted)
    torch.manual_seed(seed)
    kinds = {"out": ForwardMonitor(Summary("b c -> c")), "loss": CallMonitor(Product(all=Collect(), mean=Mean()))}
    with Recorder(**kinds).modules(model, leaves=True) as recorder:
        for _ in range(5):
            recorder.push("loss", model(torch.randn(200, 6)).square().mean())
        recorder.save(path)
    return path


def timeline(path: Path, scale: float = 1.0) -> Path:
    model = net()
    with Inspector(model, lenses.OutputNorm(), timeline=path) as inspector:
        for epoch in inspector.range(3):
            model(torch.randn(8, 6))
            inspector.push_loss(scale / (epoch + 1))
            inspector.push_metric("odd [name]", math.nan if epoch == 1 else 1.0)
    return path


Printed = pytest.CaptureFixture[str]


def said(capsys: Printed, *arguments: str | Path, status: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_show_a_recording(tmp_path: Path, capsys: Printed) -> None:
    text = said(capsys, "show", recording(tmp_path / "run"))
    assert "out/0" in text
    assert "ForwardMonitor" in text
    assert "Linear" in text
    assert "in 6" in text
    only = said(capsys, "show", tmp_path / "run", "--names", "out/*")
    assert "out/4" in only
    assert "loss" not in only
    assert "nothing is named 'x*'; there are ['loss', 'out/0'" in said(capsys, "show", tmp_path / "run", "-n", "x*", status=1)


def test_show_as_json(tmp_path: Path, capsys: Printed) -> None:
    found = json.loads(said(capsys, "show", recording(tmp_path / "run"), "--json"))
    loaded = load(tmp_path / "run")
    assert list(found["subrecorders"]) == list(loaded)
    assert found["subrecorders"]["loss"]["results"][""]["all"] == loaded["loss"].peek()["all"].tolist()
    assert found["subrecorders"]["out/0"]["observations"] == 5
    over_time = json.loads(said(capsys, "show", timeline(tmp_path / "run.db"), "--json"))
    assert over_time["ticks"] == [0, 1, 2]
    assert over_time["series"]["Loss/train"]["mean"] == {"ticks": [0, 1, 2], "values": [1.0, 0.5, pytest.approx(1 / 3)]}
    assert over_time["series"]["Metrics/odd [name]"]["mean"]["values"] == [1.0, "nan", 1.0]


def test_show_a_timeline_and_names_with_brackets(tmp_path: Path, capsys: Printed) -> None:
    text = said(capsys, "show", timeline(tmp_path / "run.db"))
    row = next(line for line in text.splitlines() if line.startswith("Metrics/odd [name]") and " mean " in line)
    assert row.split()[-2:] == ["3", "1"]
    assert "\u00d7" in row


def test_show_names_findings(tmp_path: Path, capsys: Printed) -> None:
    recorder = Recorder(loss=CallMonitor(Summary()))
    with pytest.warns(RecordingWarning, match=r"CallMonitor \(loss\): 100 % of 1 elements not finite"):
        recorder.push("loss", math.nan).save(tmp_path / "run")
    assert "1 of 1 values are NaN or infinite" in said(capsys, "show", tmp_path / "run")
    whole = json.loads(said(capsys, "show", recording(tmp_path / "other"), "--json"))
    part = json.loads(said(capsys, "show", tmp_path / "other", "--json", "-n", "loss"))
    assert whole["unexamined"] == part["unexamined"]  # what is shown does not change what was recorded


def test_paths_that_hold_nothing_are_left_as_they_are(tmp_path: Path, capsys: Printed) -> None:
    assert "there is nothing at" in said(capsys, "show", tmp_path / "none.db", status=1)
    (tmp_path / "empty.db").touch()
    assert "empty.db is empty" in said(capsys, "check", tmp_path / "empty.db", status=1)
    assert (tmp_path / "empty.db").stat().st_size == 0
    (tmp_path / "notes.txt").write_text("milk, bread\n" * 100)
    assert "is not a timeline" in said(capsys, "show", tmp_path / "notes.txt", status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db", "notes.txt"]


def test_diff_names_the_planted_layer_first(tmp_path: Path, capsys: Printed) -> None:
    one, other = recording(tmp_path / "a"), recording(tmp_path / "b", planted=5.0, seed=2)
    lines = said(capsys, "diff", one, other).splitlines()
    assert lines[1].startswith("out/2")
    assert len(said(capsys, "diff", one, other, "--top", "2").splitlines()) == 3
    found = json.loads(said(capsys, "diff", one, other, "--json"))
    assert found["changes"][0]["name"] == "out/2"
    assert (found["only_first"], found["only_second"]) == ([], [])
    said(capsys, "diff", one, other, "--fail-over", "0.5", status=1)
    assert "no difference in" in said(capsys, "diff", one, one, "--fail-over", "0")


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (
            {"x": Summary("b c -> c")},
            {"x": Summary("b c -> c")},
            "shapes differ: x count: shape [4] -> [8]; x mean: ",
        ),
        ({"x": Product(a=Count(), b=Count())}, {"x": Product(a=Count())}, "only in the first: ['x b']"),
        ({"x": Count()}, {"x": Count(), "y": Count()}, "only in the second: ['y']"),
    ],
    ids=["shape", "statistic", "layer"],
)
def test_diff_fails_if_a_shape_a_statistic_or_a_layer_is_not_the_same(
    first: dict[str, Any], second: dict[str, Any], line: str, tmp_path: Path, capsys: Printed
) -> None:
    for name, width, reducers in (("a", 4, first), ("b", 8 if line.startswith("shapes") else 4, second)):
        recorder = Recorder(**{key: CallMonitor(reducer) for key, reducer in reducers.items()})
        for key in reducers:
            recorder.push(key, torch.ones(2, width))
        recorder.save(tmp_path / name)
    both = str(tmp_path / "a"), str(tmp_path / "b")
    told = said(capsys, "diff", *both)  # which only shows
    assert line in told.replace("\n", " ")
    assert " statistics that both have in one shape" in told
    for limit in ("0", "100"):
        said(capsys, "diff", *both, "--fail-over", limit, status=1)
    data = json.loads(said(capsys, "diff", *both, "--json"))
    assert [bool(data["reshaped"]), bool(data["only_first"]), bool(data["only_second"])].count(True) == 1
    assert said(capsys, "diff", both[0], both[0], "--fail-over", "0").startswith("no difference in")


def test_diff_of_timelines_and_of_different_kinds(tmp_path: Path, capsys: Printed) -> None:
    one, other = timeline(tmp_path / "a.db"), timeline(tmp_path / "b.db", scale=100.0)
    lines = said(capsys, "diff", one, other).splitlines()
    assert lines[0].startswith("The runs part in Loss/train, at tick 0")
    assert "its mean is 100, and 1 in the first run" in lines[1]
    assert [line for line in lines if line.startswith("Loss/train")]
    assert said(capsys, "diff", one, other, "--tick", "1").splitlines()[1].startswith("Loss/train")
    assert "tick 9 in both" in said(capsys, "diff", one, other, "--tick", "9", status=1)
    assert "give two of one kind" in said(capsys, "diff", one, recording(tmp_path / "run"), status=1)


def test_merge_equals_merging_in_python(tmp_path: Path, capsys: Printed) -> None:
    one, other = recording(tmp_path / "a"), recording(tmp_path / "b", seed=2)
    said(capsys, "merge", one, other, "-o", tmp_path / "c")
    expected = load(one).merge(load(other))
    merged = load(tmp_path / "c")
    assert torch.equal(merged["out/0"].peek()["mean"], expected["out/0"].peek()["mean"])
    assert merged.samples["loss"] == 10
    assert "exists already" in said(capsys, "merge", one, other, "-o", tmp_path / "c", status=1)
    Recorder(more=CallMonitor(Mean())).push("more", 1.0).save(tmp_path / "d")
    assert "more" in said(capsys, "merge", one, tmp_path / "d", "-o", tmp_path / "e", status=1)
    said(capsys, "merge", one, tmp_path / "d", "-o", tmp_path / "e", "--keep")
    assert "more" in load(tmp_path / "e")


def test_check_tells_which_is_damaged(tmp_path: Path, capsys: Printed) -> None:
    run, kept = recording(tmp_path / "run"), timeline(tmp_path / "run.db")
    assert said(capsys, "check", run, kept).splitlines() == [
        f"{run}: whole: 6 subrecorders, 30 observations",
        f"{kept}: whole: 3 ticks of 4 names",
    ]
    victim = sorted(run.rglob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    assert victim.name in said(capsys, "check", kept, run, status=1)
    capsys.readouterr()
    assert main(["check", str(run), str(kept), "--json"]) == 1
    assert [entry["whole"] for entry in json.loads(capsys.readouterr().out).values()] == [False, True]


def test_export_writes_every_number(tmp_path: Path, capsys: Printed) -> None:
    said(capsys, "export", recording(tmp_path / "run"), "--to", tmp_path / "run.csv")
    with (tmp_path / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    results = load(tmp_path / "run")
    mean = {row["index"]: float(row["value"]) for row in rows if row["name"] == "out/0" and row["statistic"] == "mean"}
    assert mean == {str(place): value for place, value in enumerate(results["out/0"].peek()["mean"].tolist())}
    said(capsys, "export", timeline(tmp_path / "run.db"), "--to", tmp_path / "time.csv", "-n", "Loss/*")
    with (tmp_path / "time.csv").open() as file:
        assert {row["name"] for row in csv.DictReader(file)} == {"Loss/train"}
    assert "odd" not in (tmp_path / "time.csv").read_text()
    (tmp_path / "touched").touch()
    modes = [(tmp_path / name).stat().st_mode for name in ("time.csv", "touched")]
    assert modes[0] == modes[1]  # who may read other files may read this one
    said(capsys, "export", tmp_path / "run.db", "--to", tmp_path / "new" / "time.csv")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["time.csv"]


def test_export_to_parquet(tmp_path: Path, capsys: Printed) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = timeline(tmp_path / "run.db")
    said(capsys, "export", run, "--to", tmp_path / "run.parquet", "--to", tmp_path / "run.csv")
    found = parquet.read_table(tmp_path / "run.parquet")
    with Timeline(run) as kept:
        expected = sum(len(kept.series(name, one)[0]) for name in kept for one in kept.statistics(name))
    assert found.num_rows == expected
    assert [str(kind) for kind in found.schema.types] == ["int64", "string", "string", "double"]


def test_no_verb_writes_over_what_it_reads(tmp_path: Path, capsys: Printed) -> None:
    run, folder = timeline(tmp_path / "run.db"), recording(tmp_path / "run")
    (tmp_path / "link.csv").symlink_to(run)
    manifest, generation = folder / "manifest.json", next(folder.glob("generation-*/*"))
    before = [file.read_bytes() for file in (run, manifest, generation)]
    for source, target in [(run, run), (run, tmp_path / "link.csv"), (folder, manifest), (folder, generation), (folder, folder)]:
        for verb, kind in (("export", "csv"), ("export", "parquet"), ("report", "html")):
            text = said(capsys, verb, source, "--to", f"{kind}:{target}", status=2)
            assert "is what is read: give another file" in text
    assert [file.read_bytes() for file in (run, manifest, generation)] == before


def test_nothing_is_printed_beside_what_goes_to_the_standard_output(tmp_path: Path, capsys: Printed) -> None:
    run = recording(tmp_path / "run")
    alone = said(capsys, "export", run, "--to", "-")
    assert said(capsys, "export", run, "--to", tmp_path / "run.csv", "--to", "-") == alone
    data = json.loads(said(capsys, "export", run, "--to", tmp_path / "run.csv", "--to", "-", "--json"))
    assert list(data) == ["columns", "rows"]
    page = said(capsys, "report", run, "--to", tmp_path / "run.html", "--to", "-")
    assert page.endswith("</html>\n")
    assert "a page on the standard output is no JSON" in said(capsys, "report", run, "--to", "-", "--json", status=2)


def test_export_of_a_recording_to_parquet_has_the_rows_of_the_csv(tmp_path: Path, capsys: Printed) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = recording(tmp_path / "run")
    said(capsys, "export", run, "--to", tmp_path / "run.parquet", "--to", tmp_path / "run.csv")
    found = parquet.read_table(tmp_path / "run.parquet")
    with (tmp_path / "run.csv").open(newline="") as file:
        assert [{**row, "value": str(row["value"])} for row in found.to_pylist()] == list(csv.DictReader(file))
    assert [str(kind) for kind in found.schema.types] == ["string", "string", "string", "string", "double"]


def test_report_draws_the_charts(tmp_path: Path, capsys: Printed) -> None:
    pytest.importorskip("matplotlib")
    text = said(capsys, "report", timeline(tmp_path / "run.db"), "--to", f"png:{tmp_path / 'plots'}")
    assert text.splitlines() == [str(path) for path in map(Path, text.splitlines()) if path.stat().st_size > 1000]
    assert (tmp_path / "plots" / "loss.png").exists()
    assert "has no ticks: only --to html" in said(capsys, "report", recording(tmp_path / "run"), "--to", "png", status=1)


def test_report_writes_a_page_of_one_run_or_of_two(tmp_path: Path, capsys: Printed) -> None:
    one, other, run = timeline(tmp_path / "a.db"), timeline(tmp_path / "b.db"), recording(tmp_path / "run")
    assert said(capsys, "report", one, "-o", tmp_path / "one.html", "--title", "A <run>") == f"{tmp_path / 'one.html'}\n"
    assert "A &lt;run&gt;" in (tmp_path / "one.html").read_text()
    said(capsys, "report", one, other, "-o", tmp_path / "two.html")
    page = (tmp_path / "two.html").read_text()
    assert "a.db" in page
    assert "b.db" in page
    said(capsys, "report", run, "-o", tmp_path / "recording.html")
    assert "one run, or two" in said(capsys, "report", one, one, one, status=2)
    assert "there is nothing at" in said(capsys, "report", tmp_path / "none", status=1)


def test_report_shows_a_timeline_with_any_visualizer(tmp_path: Path, capsys: Printed) -> None:
    run, page, figures = timeline(tmp_path / "run.db"), tmp_path / "page.html", tmp_path / "figures"
    printed = said(capsys, "report", run, "--to", "text", "--to", f"html:{page}", "--to", f"matplotlib:{figures}")
    assert [f"Loss, epoch {tick}" in printed for tick in range(4)] == [True, True, True, False]
    assert page.read_text().startswith("<!doctype html>")
    assert (figures / "loss.png").stat().st_size > 1000
    assert "no visualizer 'cinema'" in said(capsys, "report", run, "--to", "cinema", status=1)
    assert "is a recording, which has no ticks" in said(capsys, "report", recording(tmp_path / "one"), "--to", "text", status=1)


def test_following_ends_when_a_tick_is_passed(tmp_path: Path, capsys: Printed) -> None:
    with Timeline(tmp_path / "run.db") as run:
        for tick in (0, 10, 20):  # of which none is 15
            run.append(tick, {"loss": {"mean": 0.125}})
    assert "0.125" in said(capsys, "show", tmp_path / "run.db", "--follow", "--until", "15")
    assert "not between 0 and" in said(capsys, "show", tmp_path / "run.db", "--follow", "--until", "-1", status=2)


def test_show_follows_a_timeline_that_grows_until_a_tick(tmp_path: Path, capsys: Printed) -> None:
    path = timeline(tmp_path / "run.db")

    def grow() -> None:
        with Timeline(path) as growing:
            growing.append(3, {"Loss/train": {"mean": 0.125}})

    threading.Timer(0.3, grow).start()
    assert "0.125" in said(capsys, "show", path, "--follow", "--every", "0.1", "--until", "3", "-n", "Loss/*")
    assert "does not grow" in said(capsys, "show", "--follow", recording(tmp_path / "run"), status=1)


def test_in_a_terminal_the_table_of_the_inspector_is_redrawn_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, terminal = timeline(tmp_path / "run.db"), in_terminal(monkeypatch, 100, 40)
    monkeypatch.setattr(live, "PAUSE", 0.0)

    def grow() -> None:
        with Timeline(path) as growing:
            growing.append(3, {"Loss/train": {"mean": 0.125}, "Loss/\x1b[2J": {"mean": 2.0}})

    threading.Timer(0.3, grow).start()
    assert main(["show", str(path), "--follow", "--every", "0.1", "--until", "3"]) == 0
    assert [line for line in terminal.lines if line.startswith("epoch")] == ["epoch 3"]
    assert [line.split()[:3] for line in terminal.lines if "train" in line] == [["train", "0.125", "█▄▃▁"]]


def test_a_timeline_without_charts_is_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = in_terminal(monkeypatch, 100, 40)
    with Timeline(tmp_path / "run.db") as growing:
        growing.append(0, {"own \x1b[2J": {"x": 0.5}})
    assert main(["show", str(tmp_path / "run.db"), "--follow", "--until", "0"]) == 0
    assert [line.split() for line in terminal.lines[1:] if line] == [["own", "\\x1b[2J", "x", "▄", "1", "0.5"]]


def test_following_ends_with_ctrl_c(tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("time.sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    try:
        assert "interrupted" in said(capsys, "show", "--follow", timeline(tmp_path / "run.db"), status=130)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_folder_from_many_ranks_is_a_recording_like_any_other(tmp_path: Path, capsys: Printed) -> None:
    root = shutil.copytree(ROOT / "tests" / "fixtures" / "recording-ranks", tmp_path / "run")
    samples = {name: part.samples for name, part in load(root).items()}
    rows = said(capsys, "show", root, "--names", "case 2").splitlines()
    assert any("case 2" in row and row.split()[-1] == str(samples["case 2"]) for row in rows)
    assert f"whole: {len(samples)} subrecorders, {sum(samples.values()):,} observations" in said(capsys, "check", root)
    said(capsys, "merge", root, ROOT / "tests" / "fixtures" / "recording", "--to", tmp_path / "merged", "--keep")
    assert load(tmp_path / "merged").samples["case 2"] == samples["case 2"] + load(root, ranks=3).samples["case 2"]
    (broken,) = root.glob("generation-*/00000-00002-case-2.safetensors")
    broken.unlink()
    assert "case 2 of rank 0" in said(capsys, "check", root, status=1)
    assert "left out 'case 2 of rank 0'" in said(capsys, "check", root, "--repair", tmp_path / "repaired")
    assert load(tmp_path / "repaired").samples["case 2"] == load(root, ranks=3).samples["case 2"]


def test_show_findings_says_only_what_is_likely_wrong(tmp_path: Path, capsys: Printed) -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU())
    nn.init.constant_(net[0].bias, -100.0)
    with torch.no_grad():
        net[2].bias.copy_(torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0]))
    with Recorder(out=ForwardMonitor(Activity())).modules(net, types=nn.ReLU) as recorder:
        net(torch.ones(8, 2))
    recorder.save(tmp_path / "run")
    assert main(["show", str(tmp_path / "run"), "--findings"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert lines[0] == "error: 1: 4 of 4 units are dead: they were never active"
    assert lines[1].startswith("  likely: units that are never active or ")
    assert lines[2].startswith("  try: ")
    assert lines[3] == "notice: 3: 1 of 5 units (0) are dead: they were never active"
    assert lines[6].startswith("1 likely faults; examined: ")
    assert len(lines) == 7
    assert main(["show", str(tmp_path / "run"), "--findings", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert sorted(found) == ["examined", "findings", "notices", "unexamined"]
    (fault,), (notice,) = found["findings"], found["notices"]
    assert (fault["severity"], fault["layer"], fault["kind"]) == ("error", "1", "dead-units")
    assert fault["causes"][0] == "dead-units"
    assert (notice["severity"], notice["layer"]) == ("notice", "3")
    whole = json.loads(said(capsys, "show", tmp_path / "run", "--json"))
    assert {key: whole[key] for key in found} == found


def test_show_findings_of_a_timeline_says_since_when(tmp_path: Path, capsys: Printed) -> None:
    with Inspector(lenses=[], timeline=tmp_path / "run.db") as inspector:
        for epoch in inspector.range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inspector.push_loss(math.nan if epoch else 1.0)
    assert main(["show", str(tmp_path / "run.db"), "--findings"]) == 1
    assert capsys.readouterr().out.startswith("error: train: values are NaN or infinite, since epoch 1\n")
    assert "no fault was found" in said(capsys, "show", tmp_path / "run.db", "--findings", "--at", "0")


def trained(rate: float, seed: int, path: Path) -> Path:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with presets.health().modules(net) as recorder:
        for _ in range(20):
            optimizer.zero_grad()
            net(torch.randn(32, 4)).square().mean().backward()
            optimizer.step()
    return recorder.save(path)


def test_show_compares_with_good_runs(tmp_path: Path, capsys: Printed) -> None:
    good = [trained(0.01, seed, tmp_path / f"good-{seed}") for seed in (0, 1)]
    learned = learn(*good, path=tmp_path / "good.json")
    other = trained(0.05, 2, tmp_path / "other")
    told = "warning: optimizer: learning rate in the early phase: 0.05; good runs: 0.01, and up to 0.02 is within the margin"
    for against in ([good[0]], good, [tmp_path / "good.json"]):
        options = [option for one in against for option in ("--against", str(one))]
        assert main(["show", str(other), "--findings", *options]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert f"{told}, since step 0" in lines
        assert "  likely: the learning rate is too high" in lines
        assert "learning rate in the early phase: 0.05" in " ".join(said(capsys, "show", other, *options).split())
    assert json.loads(said(capsys, "show", other, "--json", "--against", good[0]))["findings"]
    assert any("statistics" in one for one in findings(load(other), against=learned).examined)
    assert "only a recording is compared" in said(capsys, "show", timeline(tmp_path / "run.db"), "--against", good[0], status=1)
    assert "there is nothing at" in said(capsys, "show", other, "--against", tmp_path / "none.json", status=1)


def test_show_findings_ends_with_0_if_there_is_none_and_takes_no_part(tmp_path: Path, capsys: Printed) -> None:
    path = recording(tmp_path / "run")
    assert said(capsys, "show", path, "--findings").startswith("no fault was found; examined: ")
    for more in (["--follow"], ["--names", "loss"]):
        assert "leave --follow and --names out" in said(capsys, "show", path, "--findings", *more, status=2)
    with Stream(tmp_path / "stream") as stream:
        stream.put("out", torch.ones(2))
    assert "is a stream, in which nobody looks for faults" in said(capsys, "show", tmp_path / "stream", "--findings", status=1)
