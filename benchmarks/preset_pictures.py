"""The pictures of docs/presets.md: each is drawn of what the example above it recorded. `pictures.py` calls this."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from recorders.recordings.recording import Recording
from recorders.watch.calibration import ranges
from recorders.watch.overview import overview

PAGE = Path(__file__).parent.parent / "docs" / "presets.md"


@cache
def examples() -> dict[str, dict[str, Any]]:
    """The variables at the end of each example, by its heading."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    variables: dict[str, Any] = {"__name__": "__main__"}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        for block in re.findall(r"^```python\n(.*?)^```\n", part, flags=re.MULTILINE | re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), variables)
        found[part.splitlines()[0]] = (
            {**variables, "recording": variables["recorder"].snapshot()} if "recorder" in variables else {}
        )
    return found


def drawn(heading: str) -> Any:
    """The figure of one example."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    globals()[heading](axes, examples()[heading])
    axes.spines[["top", "right"]].set_visible(False)
    plt.close(figure)
    return figure


def results(example: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    recording: Recording = example["recording"]
    found = {name: part.peek() for name, part in recording.items()}
    return {name.removeprefix(f"{group}/"): result for name, result in found.items() if not group or name.startswith(f"{group}/")}


def bars(axes: Any, values: Mapping[str, float], label: str) -> None:
    axes.barh(list(values), list(values.values()), height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_ylabel("layer")


def health(axes: Any, example: Mapping[str, Any]) -> None:
    dead = {row.name: row.gone.double().mean().item() for row in overview(example["recording"]) if row.gone is not None}
    bars(axes, {name: share for name, share in dead.items() if name != "(net)"}, "share of dead units")
    axes.axvline(0.5, color="tab:red", linestyle="--", label="more is a fault")
    axes.legend()


def calibration(axes: Any, example: Mapping[str, Any]) -> None:
    found = ranges(example["recording"], "output")
    low, high = ([float(each) for each in ends] for ends in zip(*found.values(), strict=True))
    axes.barh(list(found), [end - start for start, end in zip(low, high, strict=True)], left=low, height=0.6)
    axes.invert_yaxis()
    axes.margins(x=0.05)
    axes.set_xlabel("range of the output")
    axes.set_ylabel("layer")


def outliers(axes: Any, example: Mapping[str, Any]) -> None:
    found = {name: each["features"] for name, each in results(example).items()}
    bars(axes, {name: float(each["largest"]) for name, each in found.items()}, "largest magnitude")
    axes.axvline(6, color="tab:red", linestyle="--", label="from here on a feature is an outlier")
    axes.legend()


def update_ratio(axes: Any, example: Mapping[str, Any]) -> None:
    for name, found in results(example).items():
        axes.plot(found["ratio"], label=f"layer {name}")
    axes.axhspan(1e-4, 1e-2, color="tab:green", alpha=0.12, label="usual")
    axes.set(yscale="log", xlabel="step", ylabel="update / weight")
    axes.legend(ncols=4)


def gradient_noise(axes: Any, example: Mapping[str, Any]) -> None:
    bars(
        axes, {name: float(found["mean"]) for name, found in results(example).items() if "mean" in found}, "noise scale in samples"
    )
    axes.axvline(float(example["scale"]), color="tab:red", linestyle="--", label="of the network")
    axes.legend()


def attention_entropy(axes: Any, example: Mapping[str, Any]) -> None:
    found = results(example)
    means = [float(each["mean"]) for each in found.values()]
    reach = [[abs(float(each[key]) - float(each["mean"])) for each in found.values()] for key in ("min", "max")]
    axes.errorbar(means, list(found), xerr=reach, fmt="o", capsize=4)
    axes.axvline(torch.tensor(8.0).log().item(), color="tab:grey", linestyle="--", label="log 8: all keys alike")
    axes.set(xlabel="entropy in nats: least, mean, most", xlim=(0, None), ylim=(len(found) - 0.5, -0.5))
    axes.legend()


def mup_coordinates(axes: Any, example: Mapping[str, Any]) -> None:
    sizes = example["sizes"]
    for step, label in enumerate(("before any step", "after one step")):
        axes.plot(list(sizes), [found["5"][step] for found in sizes.values()], "o-", label=label)
    axes.set(xscale="log", yscale="log", xlabel="width", ylabel="mean |output| of layer 5")
    axes.set_xticks(list(sizes), list(map(str, sizes)))
    axes.minorticks_off()
    axes.legend()


PICTURES = {
    f"preset-{heading.replace('_', '-')}.png": heading
    for heading in ("health", "calibration", "outliers", "update_ratio", "gradient_noise", "attention_entropy", "mup_coordinates")
}
