"""The demo, end to end and small: what it prints, what it writes, what it refuses, and what it does when interrupted."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from recorders import CallMonitor, NotARecordingError, Recorder, StorageError, load
from recorders.cli import main
from recorders.cli.tutorial import PLANTED, demo, network, watch
from recorders.watch.diagnosis.findings import findings
from recorders.watch.overview import Layer, overview
from recorders.watch.spread import Spread
from recorders.watch.visualizers.overview import overview_figure, overview_table
from reducers import Mean

WIDTH = 80


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(out: Path, epochs: int = 1, seed: int = 0) -> tuple[bool, str]:
    """Whether it finished, and what it printed, into something that is no terminal."""
    printed = io.StringIO()
    return demo(out, epochs, seed, Console(file=printed, width=WIDTH, highlight=False)), printed.getvalue()


@contextmanager
def interrupted_at(call: int) -> Iterator[None]:
    """Ctrl-C during the given forward of the whole net."""
    calls = 0

    def interrupt(module: Any, args: Any, output: Any) -> None:
        nonlocal calls
        calls += isinstance(module, torch.nn.Linear)
        if calls == call:
            raise KeyboardInterrupt

    handle = torch.nn.modules.module.register_module_forward_hook(interrupt)
    try:
        yield
    finally:
        handle.remove()


def test_demo_prints_a_table_and_says_where_everything_is(tmp_path: Path) -> None:
    out = tmp_path / "new" / "demo"
    finished, text = run(out)
    assert finished
    lines = text.splitlines()
    layers = [layer.name for layer in overview(load(out / "recording"))]
    assert layers[:3] == ["conv1", "norm1", "relu1"]
    assert [words[0] for line in lines if (words := line.split()) and words[0] in layers] == layers
    assert "Nothing wrong found in 10 layers." in text
    assert "test accuracy: " in text
    assert "28 steps twice make 56" in text
    assert f"recording: {out / 'recording'}" in lines
    assert f"figure: {out / 'overview.png'}" in lines
    assert all(len(line) <= WIDTH for line in lines if str(tmp_path) not in line)
    assert text.isascii() or "\u2501" in text  # but for the progress bar

    recording = load(out / "recording")
    assert recording.samples["loss"] == 28
    assert recording["output/conv2"].peek()["activity"]["rate"].shape == (32,)
    assert findings(recording) == []
    assert (out / "overview.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_it_prints_to_go_on_with_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run(tmp_path / "it's here")
    code = next(line for line in text.splitlines() if line.startswith("load it: ")).removeprefix("load it: ")
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["recording"].samples["loss"] == 28
    command = next(line for line in text.splitlines() if line.startswith("look into it: ")).removeprefix("look into it: ")
    program, *arguments = shlex.split(command)
    assert (program, main(arguments)) == ("recorders", 0)
    assert "output/conv2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_seed_gives_the_same_recording_and_another_seed_another(tmp_path: Path) -> None:
    losses = []
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(tmp_path / folder, seed=seed)
        losses.append(load(tmp_path / folder / "recording")["loss"].peek()["curve"])
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


@pytest.mark.slow
def test_a_second_run_replaces_the_first_and_leaves_other_files(tmp_path: Path) -> None:
    run(tmp_path / "demo")
    (tmp_path / "demo" / "notes.txt").write_text("mine")
    run(tmp_path / "demo", epochs=2)
    assert load(tmp_path / "demo" / "recording").samples["loss"] == 56
    assert (tmp_path / "demo" / "notes.txt").read_text() == "mine"


def test_a_foreign_folder_is_refused_untouched_before_any_work(tmp_path: Path) -> None:
    foreign, file, other = tmp_path / "foreign", tmp_path / "file", tmp_path / "other"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    file.write_text("mine")
    Recorder(loss=CallMonitor(Mean())).save(other / "recording")
    for out, reason in (
        (foreign, "thesis.tex"),
        (file, "a file"),
        (file / "below", "a file"),
        (other, "no recording of an earlier demo"),
    ):
        with pytest.raises(NotARecordingError, match=reason):
            run(out)
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    assert file.read_text() == "mine"
    assert list(load(other / "recording")) == ["loss"]


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "recording" / "manifest.json").write_text("{}")
    with pytest.raises(StorageError, match="choose another folder"):
        run(tmp_path)


@pytest.mark.slow
def test_what_is_wrong_is_printed_with_its_remedy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> torch.nn.Sequential:
        net = network()
        torch.nn.init.constant_(net.get_submodule("norm2").bias, -100.0)
        return net

    monkeypatch.setattr("recorders.cli.tutorial.network", broken)
    _, text = run(tmp_path)
    assert "relu2: 32 of 32 units are dead: they were never active." in text
    assert "Nothing wrong" not in text
    assert text.partition(PLANTED[:22])[0].count("leaky activation") == 1


def test_interrupted_it_saves_what_was_recorded(tmp_path: Path) -> None:
    with interrupted_at(20):
        finished, text = run(tmp_path)
    assert not finished
    assert "Interrupted after 19 steps: what was recorded until then is saved." in text
    assert "not measured yet" in text
    assert load(tmp_path / "recording").samples["loss"] == 19


@pytest.mark.slow
def test_the_sick_net_has_what_was_planted_and_nothing_else(tmp_path: Path) -> None:
    _, text = run(tmp_path, seed=1)
    told = text.partition(PLANTED[:22])[2].partition("test accuracy")[0].splitlines()
    layers = ("conv", "norm", "relu", "tanh2", "pool", "head")
    assert [line.rstrip() for line in told if line.startswith(layers)] == [
        "conv3: the weights never changed: no optimizer step changed its parameters.",
        "tanh2: 32 of 32 units are saturated: nearly all outputs lie at the ends of the",
        "relu1: 12 of 16 units are dead: they were never active.",
    ]


def test_interrupted_with_the_sick_net_it_says_so(tmp_path: Path) -> None:
    with interrupted_at(28 + 1 + 5):  # steps, the test of the healthy net, steps
        finished, text = run(tmp_path)
    assert not finished
    assert "Interrupted: the sick net was not trained to the end." in text
    assert load(tmp_path / "recording").samples["loss"] == 28


@pytest.mark.slow
def test_interrupted_before_the_first_step_it_keeps_the_older_recording(tmp_path: Path) -> None:
    run(tmp_path)
    with interrupted_at(1):
        finished, text = run(tmp_path)
    assert not finished
    assert "nothing saved" in text
    assert load(tmp_path / "recording").samples["loss"] == 28


def test_the_table_holds_odd_layers(tmp_path: Path) -> None:
    spread = Spread(4, 0.5, 0.25, -1.0, 1.0, 0, 2)
    layers = [
        Layer("[red]block[/red]", output=spread, dead=torch.tensor([True, False]), rate=torch.tensor([0.0, 1.0])),
        Layer("silent", silent={"output": "never called"}),
    ]
    printed = io.StringIO()
    Console(file=printed, width=WIDTH).print(overview_table(layers))
    first, second = printed.getvalue().splitlines()[2:]
    assert first.split() == ["[red]block[/red]", "0.5", "0.25", "50%", "1/2", "-", "-", "-"]
    assert second.split() == ["silent", *"-------"]


def test_the_figure_draws_frozen_broken_and_missing_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = network()
    net.get_submodule("conv1").requires_grad_(False)
    recorder = watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with recorder:
        for scale in (1.0, float("nan")):
            loss = net(torch.rand(4, 1, 8, 8)).mean() * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.push("loss", loss)
    for layers in (overview(recorder), []):
        figure = overview_figure(layers, recorder["loss"].peek()["curve"], torch.zeros(0), epoch=2, title="odd")
        figure.savefig(tmp_path / "odd.png")
    assert (tmp_path / "odd.png").stat().st_size > 10_000


@pytest.mark.slow
def test_panels_are_labelled_and_show_each_layer(tmp_path: Path) -> None:
    run(tmp_path)
    recording = load(tmp_path / "recording")
    layers = overview(recording)
    figure = overview_figure(layers, recording["loss"].peek()["curve"], recording["accuracy"].peek(), 28, "title")
    loss, accuracy, outputs, updates, activity, *_ = figure.axes
    assert loss.get_ylabel()
    assert accuracy.get_ylabel()
    assert len(loss.lines[0].get_xdata()) == 28
    names = [layer.name for layer in layers]
    assert [tick.get_text() for tick in outputs.get_yticklabels()] == names
    assert [tick.get_text() for tick in activity.get_yticklabels()] == names
    weighted = [layer.name for layer in layers if layer.update is not None]
    assert [line.get_label() for line in updates.lines] == ["rule of thumb", *weighted]
    assert all(axes.get_xlabel() for axes in (accuracy, outputs, updates, activity))
