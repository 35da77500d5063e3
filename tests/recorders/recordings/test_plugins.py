"""What other packages offer by entry points: real distributions on `sys.path`, good ones and broken ones side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recorders import CallMonitor, Inspector, PluginError, Recorder, RecordingWarning, import_reducers, load, merge, replay
from recorders.cli import main
from recorders.errors import LensError
from recorders.watch.visualizers.choice import as_visualizers
from reducers import Reducer
from reducers.core.reducer import registry

Install = Callable[..., Path]

SHOWS = """
class Cinema:
    def __init__(self, target="nowhere"):
        self.target, self.ticks = target, []

    def show(self, tick, charts):
        self.ticks.append(tick)
        print(f"tick {tick} in {self.target}")
"""

LENSES = """
from recorders.watch.lenses import OutputNorm

def Sharpness():
    return OutputNorm()
"""

REDUCERS = """
from dataclasses import dataclass
from reducers import Mean

@dataclass(frozen=True)
class Twice(Mean):
    def read(self, state):
        return 2 * super().read(state)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution: a module, and a `.dist-info` with its entry points."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.syspath_prepend(str(root))

    def one(package: str, code: str, points: str) -> Path:
        (root / f"{package}.py").write_text(code)
        info = root / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        monkeypatch.delitem(sys.modules, package, raising=False)
        return root

    yield one
    for name in [name for name in registry if name.startswith("acme_")]:
        del registry[name]
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def timeline(path: Path) -> Path:
    with Inspector(lenses=[], timeline=path) as inspector:
        for epoch in inspector.range(2):
            inspector.push_loss(1 / (1 + epoch))
    return path


def test_a_visualizer_is_used_by_its_name_everywhere(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme_show", SHOWS, "[recorders.visualizers]\ncinema = acme_show:Cinema\n")
    assert "acme_show" not in sys.modules
    with Inspector(lenses=[], show="cinema:a b") as inspector:
        for _ in inspector.range(1):
            inspector.push_loss(1.0)
    replay(timeline(tmp_path / "run.db"), ["cinema"])
    assert main(["report", str(tmp_path / "run.db"), "--to", "cinema:c"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tick 0 in a b",
        *(f"tick {tick} in nowhere" for tick in range(2)),
        *(f"tick {tick} in c" for tick in range(2)),
        "c",
    ]


def test_a_lens_is_used_by_its_name_and_so_are_ours(install: Install) -> None:
    install("acme_lenses", LENSES, "[recorders.lenses]\nSharpness = acme_lenses:Sharpness\n")
    assert [lens.name for lens in Inspector(lenses="Sharpness").lenses] == [
        lens.name for lens in Inspector(lenses="OutputNorm").lenses
    ]
    assert len(Inspector(lenses=["Saturation", "Sharpness"]).lenses) == 3
    with pytest.raises(LensError, match=r"no lens 'Sharp'; there are \['AttentionEntropy', .*'Sharpness'\]"):
        Inspector(lenses="Sharp")
    with pytest.raises(LensError, match="takes lenses"):
        Inspector(lenses=[3])  # type: ignore[list-item]


def test_a_reducer_is_imported_only_if_somebody_asks(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme_stats", REDUCERS, "[recorders.reducers]\nTwice = acme_stats:Twice\n")
    (found,) = import_reducers().values()
    assert issubclass(found, Reducer)
    for name in ("a", "b"):
        Recorder(loss=CallMonitor(found())).push("loss", 1.0).save(tmp_path / name)
    del registry["acme_stats:Twice"], sys.modules["acme_stats"]
    with pytest.warns(RecordingWarning, match="import the module 'acme_stats'"):
        assert load(tmp_path / "a")["loss"].peek() == 2.0  # as it was saved
    assert "acme_stats" not in sys.modules
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["merge", *both, "--to", str(tmp_path / "c")]) == 1
    assert "acme_stats" not in sys.modules
    assert main(["merge", *both, "--to", str(tmp_path / "d"), "--plugins"]) == 0
    assert "acme_stats" in sys.modules
    assert merge(both).compute() == {"loss": 2.0}
    assert load(tmp_path / "d").samples["loss"] == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("code", "points", "told"),
    [
        ("raise RuntimeError('no licence')", "cinema = acme_broken:Cinema", "RuntimeError: no licence; mend or remove"),
        ("", "cinema = acme_broken:Cinema", "AttributeError"),
        ("", "cinema = acme_none:Cinema", "ModuleNotFoundError"),
        ("def Cinema():\n    raise OSError('no projector')", "cinema = acme_broken:Cinema", "failed: OSError: no projector"),
        ("Cinema = list", "cinema = acme_broken:Cinema", r"makes no Visualizer, but \[\]"),
        ("raise SystemExit(3)", "cinema = acme_broken:Cinema", "SystemExit"),
    ],
)
def test_a_broken_plug_in_names_its_package_and_breaks_no_other(code: str, points: str, told: str, install: Install) -> None:
    install("acme_broken", code, f"[recorders.visualizers]\n{points}\n[recorders.lenses]\n")
    install("acme_show", SHOWS, "[recorders.visualizers]\ntheatre = acme_show:Cinema\n")
    with pytest.raises(PluginError, match=f"'cinema', which the package acme_broken offers .*{told}"):
        as_visualizers("cinema")
    assert type(as_visualizers("theatre")[0]).__name__ == "Cinema"
    assert type(as_visualizers("text")[0]).__name__ == "TextVisualizer"
    with pytest.raises(LensError, match="'wandb', 'cinema', 'theatre'"):
        as_visualizers("opera")


def test_broken_reducers_are_told_and_the_others_are_imported(install: Install) -> None:
    install("acme_broken", "Odd = 3", "[recorders.reducers]\nGone = acme_broken:Gone\nOdd = acme_broken:Odd\n")
    install("acme_stats", REDUCERS, "[recorders.reducers]\nTwice = acme_stats:Twice\n")
    with pytest.raises(PluginError, match=r"'Gone', which the package acme_broken .*; 'Odd', .* is no class of reducers, but 3"):
        import_reducers()
    assert "acme_stats:Twice" in registry


def test_packages_whose_metadata_cannot_be_read_offer_nothing(install: Install) -> None:
    root = install("acme_odd", "", "this is no list of entry points\n[recorders.visualizers]\nnothing")
    install("acme_show", SHOWS, "[recorders.visualizers]\ncinema = acme_show:Cinema\n")
    (root / "acme_nothing-1.0.dist-info").mkdir()
    assert type(as_visualizers("cinema")[0]).__name__ == "Cinema"


def test_one_name_of_two_packages_is_an_error_that_names_both(install: Install) -> None:
    install("acme_show", SHOWS, "[recorders.visualizers]\ncinema = acme_show:Cinema\n")
    install("acme_other", SHOWS, "[recorders.visualizers]\ncinema = acme_other:Cinema\ntext = acme_other:Cinema\n")
    with pytest.raises(PluginError, match="acme_other and acme_show both offer 'cinema'"):
        as_visualizers("cinema")
    assert type(as_visualizers("text")[0]).__name__ == "TextVisualizer"  # names of this package go first
    assert not any(name.startswith("acme_") for name in sys.modules)


def test_an_error_of_a_plug_in_is_one_line_on_the_command_line(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        "acme_broken", "1 / 0", "[recorders.visualizers]\ncinema = acme_broken:Cinema\n[recorders.reducers]\nx = acme_broken:X\n"
    )
    run = str(timeline(tmp_path / "run.db"))
    assert main(["report", run, "--to", "cinema", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["type"] == "PluginError"
    assert main(["show", run, "--plugins"]) == 1
    assert "the package acme_broken" in capsys.readouterr().err
    assert main(["show", run]) == 0
    assert capsys.readouterr().err == ""
