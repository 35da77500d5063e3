"""The TensorBoard visualizer of monitorch beside ours: the same scalars in the files of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity_monitorch import watch_both

from recorders import lenses
from recorders.watch.replay import replay

theirs = pytest.importorskip("monitorch.lens")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def our_name(tag: str) -> str:
    """Their names are in lower case with underscores; a chart of activation is two charts here."""
    chart, middle, last = tag.split("/")
    chart = chart.replace("_", " ").title()
    if chart == "Warning Output Activations":
        line = "lowest Output Activation" if "activation" in last else "highest Output Death"
        return f"Extreme Output Activations Of All Layers/{line}"
    if chart == "Output Activations":
        return f"Output {last.removesuffix('_rate').title()}/{middle}/mean"
    return f"{chart}/{middle}/{ {'-std': 'mean-std', '+std': 'mean+std'}.get(last, last) }"


@pytest.mark.row("TensorBoardVisualizer")
@pytest.mark.parametrize("seed", range(3))
def test_tensorboard_has_the_same_scalars(seed: int, tmp_path: Path) -> None:
    """Both write float32. Theirs counts epochs from 1, and makes a run for each layer of a comparison; ours is one run."""
    board = pytest.importorskip("monitorch.visualizer.TensorBoardVisualizer").TensorBoardVisualizer(str(tmp_path / "theirs"))
    options: Any = {"line_aggregation": ["mean", "max"], "range_aggregation": ["std", "min-max"]}
    kept, our = watch_both(
        seed,
        lambda _: [theirs.OutputNorm(**options), theirs.OutputActivation()],
        [lenses.OutputNorm(**options), lenses.OutputActivation()],
    )
    for epoch, tags in kept.lines.items():
        for tag, lines in tags.items():
            if kept.tags[tag].type.name == "RELATIONS":
                board.plot_relations(epoch, tag, lines)
            else:
                board.plot_numerical_values(epoch, tag, lines, kept.bands[epoch].get(tag))
    board.writer.close()
    replay(our.timeline, f"tensorboard:{tmp_path / 'ours'}")

    wanted = {our_name(tag): values for tag, values in scalars(tmp_path / "theirs").items()}
    runs = {path.name: scalars(path) for path in (tmp_path / "theirs").iterdir() if path.is_dir()}
    assert len(runs) == 2
    for name, values in runs.items():
        wanted[f"Mean Output Norm Comparison/{name[-1]}"] = values["mean_output_norm_comparison/mean_output_norm_comparison"]
    found = scalars(tmp_path / "ours")
    assert found.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert found[tag] == pytest.approx({epoch - 1: value for epoch, value in values.items()}, rel=1e-5, abs=1e-5), tag
        assert len(values) == 3
    assert [path for path in (tmp_path / "ours").iterdir() if path.is_dir()] == []
