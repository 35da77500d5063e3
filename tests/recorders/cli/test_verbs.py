"""One grammar for all verbs: where output goes, JSON, exit statuses, names of any bytes, completion, and verbs that are gone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import forge
from paths import ROOT

from recorders import CallMonitor, Inspector, Recorder, Stream, Timeline, load, merge
from recorders.cli import Status, main
from recorders.cli.app import GONE, VERBS
from recorders.recordings.display import printable
from reducers import Summary

pytest.importorskip("rich")

ODD = "a\x1b[2J\u202e\x9b\ud800[bold]"
"""A name that would clear a terminal, turn the text around, and cannot be encoded."""

Printed = pytest.CaptureFixture[str]


def run(capsys: Printed, *arguments: str | Path, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status, capsys.readouterr()
    printed = capsys.readouterr()
    return printed.out, printed.err


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    recorder = Recorder(loss=CallMonitor(Summary()))
    return Path(recorder.push("loss", 0.5).push("loss", 1.5).save(tmp_path / "run"))


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    with Inspector(lenses=[], timeline=tmp_path / "run.db") as inspector:
        for epoch in inspector.range(3):
            inspector.push_loss(1 / (1 + epoch))
    return tmp_path / "run.db"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    with Stream(tmp_path / "acts", shard_bytes=1) as stream:
        for step in range(2):
            with stream.given(ids=[2 * step, 2 * step + 1]):
                stream.put("out/0", torch.full((2, 3), float(step)))
                stream.put("labels", torch.arange(2))
    return tmp_path / "acts"


@pytest.mark.parametrize("verb", GONE)
def test_a_verb_that_is_gone_names_the_one_that_does_its_work(verb: str, capsys: Printed) -> None:
    assert verb not in VERBS
    told = run(capsys, verb, "run", status=Status.WRONG_ARGUMENTS)[1]
    assert f"there is no verb {verb!r} any more: recorders {GONE[verb]}" in told
    assert GONE[verb].split()[0] in VERBS


def test_every_verb_takes_json_and_every_verb_is_in_the_table(capsys: Printed) -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    for verb in (*VERBS, "completion"):
        assert "--json" in run(capsys, verb, "--help")[0]
        assert f"| `recorders {verb}" in page


def test_the_table_of_statuses_is_what_the_command_ends_with() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert {int(row) for row in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == set(Status)


def test_statuses(recording: Path, tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    run(capsys, "show", recording, status=Status.DONE)
    run(capsys, "show", tmp_path / "none", status=Status.FAILED)
    run(capsys, "show", recording, "--every", "0", status=Status.WRONG_ARGUMENTS)
    monkeypatch.setattr("recorders.cli.show.open_source", lambda path: signal.raise_signal(signal.SIGINT))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(capsys, "show", recording, status=Status.INTERRUPTED)[1] == "recorders: interrupted\n"
    finally:
        signal.signal(signal.SIGINT, usual)

    def closed(path: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("recorders.cli.show.open_source", closed)
    assert run(capsys, "show", recording, status=Status.PIPE_CLOSED) == ("", "")


def test_an_error_as_json_is_one_object_on_the_standard_error(recording: Path, capsys: Printed) -> None:
    for arguments, kind, status in (
        (["show", f"{recording}x"], "RecordingNotFoundError", 1),
        (["show", str(recording), "-n", "nothing"], "SelectionError", 1),
        (["show", str(recording), "--at", "x"], "UsageError", 2),
        (["check"], "UsageError", 2),
        (["watch", "run.db"], "UsageError", 2),
        (["report", str(recording), "--to", "png"], "NotARecordingError", 1),
    ):
        out, err = run(capsys, *arguments, "--json", status=status)
        assert out == ""
        found = json.loads(err)["error"]
        assert found["type"] == kind
        assert found["message"]


def test_a_warning_as_json_is_an_object_too(tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    monkeypatch.setattr("recorders.cli.show.open_source", lambda path: warnings.warn("odd \x1b", UserWarning, stacklevel=1))
    monkeypatch.setattr("recorders.cli.show._show", lambda *arguments: None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert json.loads(run(capsys, "show", "x", "--json")[1]) == {"warning": {"type": "UserWarning", "message": "odd \x1b"}}
        assert run(capsys, "show", "x")[1] == "recorders: warning: odd \\x1b\n"


def test_json_of_verbs_that_write_says_where(recording: Path, timeline: Path, tmp_path: Path, capsys: Printed) -> None:
    page, table, both = tmp_path / "page.html", tmp_path / "table.csv", tmp_path / "both"
    other = load(recording).save(tmp_path / "other")
    assert json.loads(run(capsys, "report", timeline, "--to", page, "--json")[0]) == {"written": [str(page)]}
    assert json.loads(run(capsys, "export", recording, "--to", table, "--json")[0]) == {"written": [str(table)]}
    assert json.loads(run(capsys, "merge", recording, other, "--to", both, "--json")[0]) == {
        "written": [str(both)],
        "subrecorders": 1,
    }
    assert json.loads(run(capsys, "check", both, "--repair", tmp_path / "mended", "--json")[0]) == {
        "written": [str(tmp_path / "mended")],
        "left_out": {},
    }
    assert load(tmp_path / "mended").samples["loss"] == 4


def test_a_dash_is_the_standard_output(recording: Path, timeline: Path, capsys: Printed, tmp_path: Path) -> None:
    for target in ("-", "html:-"):
        page, _ = run(capsys, "report", timeline, "--to", target)
        assert page.startswith("<!doctype html>")
        assert page.rstrip().endswith("</html>")
    for target in (["--to", "-"], ["--to", "csv:-"], ["--to", "csv"], []):
        lines = run(capsys, "export", recording, *target)[0].splitlines()
        assert lines[:2] == ["name,leaf,statistic,index,value", "loss,,count,,2.0"]
    for arguments in (
        ["merge", recording, recording, "--to", "-"],
        ["check", recording, "--repair", "-"],
        ["demo", "--to", "-"],
        ["report", timeline, "--to", "png:-"],
        ["export", recording, "--to", "parquet:-"],
    ):
        assert "standard output" in run(capsys, *arguments, status=2)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.db"]


def test_a_target_without_a_kind_is_told_one(timeline: Path, tmp_path: Path, capsys: Printed) -> None:
    target = tmp_path / "page"
    assert f"give a kind, as in html:{target}" in run(capsys, "report", timeline, "--to", target, status=2)[1]
    assert "takes one run" in run(capsys, "report", timeline, timeline, "--to", "png", status=2)[1]


def test_a_timeline_as_it_was_at_a_tick(timeline: Path, capsys: Printed) -> None:
    found = json.loads(run(capsys, "show", timeline, "--at", "1", "--json")[0])
    assert found["ticks"] == [0, 1]
    assert found["series"]["Loss/train"]["mean"]["values"] == [1.0, 0.5]
    assert "0.5" in run(capsys, "show", timeline, "--at", "1")[0].splitlines()[1]
    assert "no tick 7 in" in run(capsys, "show", timeline, "--at", "7", status=1)[1]


def test_a_stream_is_shown_checked_and_followed(stream: Path, capsys: Printed) -> None:
    lines = run(capsys, "show", stream)[0].splitlines()
    assert [line.split() for line in lines[1:]] == [["out/0", "float32", "[3]", "1", "4"], ["labels", "int64", "[]", "1", "4"]]
    found = json.loads(run(capsys, "show", stream, "-n", "out/*", "--json")[0])
    assert found["places"] == {"out/0": {"rows": 4, "dtype": "float32", "shape": [3], "id_columns": 1}}
    assert (found["kind"], found["shards"], found["batches"]) == ("stream", 2, 2)
    assert "whole: 8 rows of 2 places in 2 shards, 2 batches" in run(capsys, "check", stream)[0]
    threading.Timer(0.3, lambda: more(stream)).start()
    grown = run(capsys, "show", stream, "--follow", "--every", "0.1", "--until", "3", "--json")[0].splitlines()
    assert [json.loads(line)["batches"] for line in grown] == [2, 3]
    assert "a page shows timelines" in run(capsys, "report", stream, status=1)[1]
    for arguments in (["diff", stream, stream], ["export", stream], ["show", stream, "--at", "1"]):
        assert "is a stream" in run(capsys, *arguments, status=1)[1]


def more(stream: Path) -> None:
    with Stream(stream) as going_on:
        going_on.put("out/0", torch.ones(2, 3))


def test_a_damaged_stream_is_told_by_shard_and_place(stream: Path, capsys: Printed) -> None:
    victim = next(stream.glob("00000001-*-labels.safetensors"))
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    assert "'labels' in shard 1" in run(capsys, "check", stream, status=1)[1]
    out, _ = run(capsys, "check", stream, "--json", status=1)
    assert list(json.loads(out)[str(stream)]["damaged"]) == ["'labels' in shard 1"]
    (stream / "index.jsonl").write_text("{}\n")
    assert "first line" in run(capsys, "check", stream, status=1)[1]


def test_a_timeline_is_followed_as_lines_of_json(timeline: Path, capsys: Printed) -> None:
    def grow() -> None:
        with Timeline(timeline) as growing:
            growing.append(3, {"Loss/train": {"mean": 0.25}})

    threading.Timer(0.3, grow).start()
    lines = run(capsys, "show", timeline, "--follow", "--every", "0.1", "--until", "3", "--json")[0].splitlines()
    assert [json.loads(line)["tick"] for line in lines] == [0, 1, 2, 3]
    assert json.loads(lines[-1])["values"] == {"Loss/train": {"mean": 0.25}}


def test_a_wrong_path_names_what_is_beside_it(recording: Path, timeline: Path, stream: Path, capsys: Printed) -> None:
    told = run(capsys, "show", recording.with_name("runs"), status=1)[1]
    assert "did you mean 'run' or 'run.db'?" in told
    assert f"in {recording.parent} there are ['acts', 'run', 'run.db']" in told


def test_names_of_any_bytes_are_printed_escaped(tmp_path: Path, capsys: Printed) -> None:
    recorder = Recorder(**{ODD: CallMonitor(Summary())})
    run_, other, odd = tmp_path / "run", tmp_path / "other", tmp_path / "odd \x1b]0;"
    recorder.push(ODD, 1.0).save(run_)
    recorder.push(ODD, 9.0).save(other)
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.append(0, {ODD.replace("\ud800", ""): {"mean\x1b": 1.0}})
    arguments: Any = (
        (["show", run_], 0),
        (["show", run_, "-n", "\x1b"], 1),
        (["show", run_, "--json"], 0),
        (["show", tmp_path / "run.db"], 0),
        (["show", tmp_path / "run.db", "--json"], 0),
        (["show", odd], 1),
        (["check", odd, run_], 1),
        (["diff", run_, other], 0),
        (["diff", run_, other, "--json"], 0),
        (["merge", run_, other, "--to", odd], 0),
        (["check", odd, "--repair", tmp_path / "mended \x1b"], 0),
        (["\x1b"], 2),
        (["show", "--\x1b"], 2),
    )
    for each, status in arguments:
        for text in run(capsys, *each, status=status):
            assert text == printable(text), each
    assert printable(ODD) == "a\\x1b[2J\\u202e\\x9b\\ud800[bold]"


@pytest.mark.slow
def test_a_full_disk_behind_the_standard_output_is_one_line(recording: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "recorders.cli", "show", str(recording)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "recorders: [Errno 28] No space left on device\n")


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    ask = f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _recorders; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_options_and_choices(capsys: Printed) -> None:
    script, _ = run(capsys, "completion", "bash")
    assert completed(script, "recorders", "s") == ["show"]
    assert completed(script, "recorders", "") == [*VERBS, "completion"]
    assert completed(script, "recorders", "show", "--fo") == ["--follow"]
    assert completed(script, "recorders", "show", "run", "--at", "3", "--js") == ["--json"]
    assert completed(script, "recorders", "completion", "z") == ["zsh"]
    assert completed(script, "recorders", "show", "run") == []  # then bash offers files


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_completion(shell: str, capsys: Printed) -> None:
    script, _ = run(capsys, "completion", shell)
    assert all(verb in script for verb in VERBS)
    assert "--follow" in script or "-l follow" in script
    if shell == "fish":
        assert all(line.startswith("complete -c recorders -n '") for line in script.splitlines())
    else:
        assert script.startswith("autoload -Uz compinit bashcompinit")
    if program := shutil.which(shell):
        subprocess.run([program, "-n", "/dev/stdin"], input=script, text=True, check=True)


@pytest.mark.slow
def test_without_rich_json_is_printed_all_the_same(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('No module', name='rich')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "recorders.cli", "show", str(recording)]
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "loss" in json.loads(done.stdout)["subrecorders"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "recorders: rich is not installed: pip install torch-recorders[cli]\n")


def test_a_path_may_be_a_url_of_anything(recording: Path, timeline: Path, stream: Path, tmp_path: Path, capsys: Printed) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(f"{tmp_path}/", f"/{tmp_path.name}/", recursive=True)
    for name, kind in {"run": "recording", "run.db": "timeline", "acts": "stream"}.items():
        assert json.loads(run(capsys, "show", f"{url}/{name}", "--json")[0])["kind"] == kind
        assert "whole: " in run(capsys, "check", f"{url}/{name}")[0]
    assert "does not grow" in run(capsys, "show", f"{url}/run.db", "--follow", status=1)[1]
    assert f"nothing at {url}/none" in run(capsys, "show", f"{url}/none", status=1)[1]
    assert run(capsys, "report", f"{url}/run.db", "--to", "-")[0].startswith("<!doctype html>")


def test_a_forged_line_of_a_packed_recording_is_one_failure_among_others(tmp_path: Path, capsys: Printed) -> None:
    recorder = Recorder(loss=CallMonitor(Summary()), other=CallMonitor(Summary())).push("loss", 0.5)
    bad, good = recorder.save(tmp_path / "bad", layout="packed"), recorder.save(tmp_path / "good", layout="packed")
    forge(Path(bad), lambda manifest: manifest["subrecorders"][0].update(samples=-1))
    out, errors = run(capsys, "check", bad, good, status=1)
    assert f"{good}: whole: 2 subrecorders, 1 observations" in out
    assert f"{bad}: FAILED: 1 parts are damaged, the others are whole: loss: " in errors
    assert "'samples' must be a count and is -1" in errors


def test_ticks_that_a_training_wrote_anew_are_followed_again(tmp_path: Path, capsys: Printed) -> None:
    path = tmp_path / "run.db"
    with Timeline(path) as growing:
        growing.append(0, {"loss": {"mean": 9.0}})
        growing.append(1, {"loss": {"mean": 8.0}})

    def go_back() -> None:
        with Timeline(path) as growing:
            growing.forget(1)
            growing.append(1, {"loss": {"mean": 5.0}})
            growing.append(2, {"loss": {"mean": 4.0}})

    threading.Timer(0.5, go_back).start()
    printed = run(capsys, "show", path, "--follow", "--every", "0.1", "--until", "2", "--json")[0]
    found = [(line["tick"], line["values"]["loss"]["mean"]) for line in map(json.loads, printed.splitlines())]
    assert found == [(0, 9.0), (1, 8.0), (1, 5.0), (2, 4.0)]


def test_one_recording_is_not_merged_with_itself_whatever_its_path_is(recording: Path, tmp_path: Path, capsys: Printed) -> None:
    copied, linked = shutil.copytree(recording, tmp_path / "copied"), tmp_path / "linked"
    linked.symlink_to(recording, target_is_directory=True)
    for other in (f"{recording}/", copied, linked, f"file://{recording}"):
        told = run(capsys, "merge", recording, other, "--to", tmp_path / "both", status=1)[1]
        assert "the same recording, or copies of it: it would count twice" in told
    with pytest.raises(ValueError, match=r"merge\(missing='eror'\)"):
        merge([recording, copied], missing="eror")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"load\(damaged='skp'\)"):
        load(recording, damaged="skp")  # type: ignore[arg-type]


def test_a_bound_that_is_no_number_is_refused_and_a_table_is_data_too(recording: Path, capsys: Printed) -> None:
    for bound in ("nan", "-1"):
        assert "--fail-over" in run(capsys, "diff", recording, recording, "--fail-over", bound, status=2)[1]
    found = json.loads(run(capsys, "export", recording, "--json")[0])
    assert found["columns"] == ["name", "leaf", "statistic", "index", "value"]
    assert ["loss", "", "count", "", 2.0] in found["rows"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe of POSIX")
def test_a_table_that_nobody_reads_on_is_a_closed_pipe(tmp_path: Path) -> None:
    recorder = Recorder(**{f"loss {number}": CallMonitor(Summary()) for number in range(400)})
    for name in recorder:
        recorder.push(name, 0.5)
    recorder.save(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-m", "recorders.cli", "show", tmp_path / "run"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(120) == Status.PIPE_CLOSED


def test_a_timeline_that_append_filled_is_reported_with_a_chart_of_each_statistic(tmp_path: Path, capsys: Printed) -> None:
    with Timeline(tmp_path / "run.db") as timeline:
        for tick in range(3):
            timeline.append(tick, {"loss": {"mean": 1.0 + tick, "share": 0.25}, "deep/layer": {"mean": 7.0}}, step=10 * tick)
    before = (tmp_path / "run.db").read_bytes()
    text = run(capsys, "report", tmp_path / "run.db", "--to", "text")[0]
    assert text.split("\n")[:4] == ["mean, tick 0", "layer       mean", "loss           1", "deep/layer     7"]
    assert "share, tick 2\nlayer  mean\nloss   0.25" in text
    page = run(capsys, "report", tmp_path / "run.db", "--to", "-")[0]
    assert "deep/layer" in page
    pytest.importorskip("matplotlib")
    drawn = run(capsys, "report", tmp_path / "run.db", "--to", f"png:{tmp_path / 'figures'}")[0]
    assert [Path(line).name for line in drawn.split()] == ["mean.png", "share.png"]
    assert (tmp_path / "run.db").read_bytes() == before


NARROW = """loss
  monitor       CallMonitor
  result        mean 0.5, var nan, min
                0.5, max 0.5, ...
  observations  1
encoder.layers.10.attention.output.proje
ction
  monitor       CallMonitor"""


def test_tables_on_narrow_terminals_are_blocks_of_lines(tmp_path: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "encoder.layers.10.attention.output.projection"
    for folder, value in (("one", 0.5), ("other", 0.75)):
        recorder = Recorder(loss=CallMonitor(Summary())).add(name, CallMonitor(Summary()))
        recorder.push(name, value).push("loss", value).save(tmp_path / folder)
    wide = run(capsys, "diff", tmp_path / "one", tmp_path / "other")[0]
    for width in (0, 1, 20, 40, 59):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = run(capsys, "show", tmp_path / "one")[0].splitlines()
        told = run(capsys, "diff", tmp_path / "one", tmp_path / "other")[0]
        if width == 0:
            assert told == wide
        if width == 40:
            assert "\n".join(line.rstrip() for line in shown).startswith(NARROW)
            assert "\n  statistic  mean" in told
            assert "\n  change     " in told
