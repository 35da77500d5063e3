"""What recording costs on a GPU: training steps, memory bandwidth, what a call launches, and others beside us. One run, in turn.

It writes `results/gpu.json` after each row, in which each device has its sections. With `--only` the others that were measured on
this device stay. With `--quick`, or on a CPU, all networks and tensors are tiny and their figures mean nothing; then it writes
`results/gpu_quick.json`.

Run, with `pip install '.[bench]' wandb`, on a machine with a GPU: python benchmarks/gpu.py [--quick] [--only training]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_kernels
import gpu_peers
import gpu_training
import torch
from gpu_timing import Findings
from measure import RESULTS, versions, write

SECTIONS: dict[str, Callable[..., None]] = {
    "bandwidth": gpu_kernels.bandwidth,
    "training": gpu_training.training,
    "training-big": partial(gpu_training.training, name=gpu_training.BIG),
    "training-compiled": partial(gpu_training.training, execution="compiled"),
    "training-big-compiled": partial(gpu_training.training, name=gpu_training.BIG, execution="compiled"),
    "hashes": gpu_kernels.hashes,
    "calls": gpu_kernels.calls,
    "observations": gpu_peers.observations,
    "steps": gpu_peers.steps,
}
WHAT = {
    "training": f"a training step of {gpu_training.SMALL} parameters, as a multiple of the bare one; bf16 autocast, AdamW",
    "training-big": f"a training step of {gpu_training.BIG} parameters, as a multiple of the bare one; bf16, AdamW",
    "training-compiled": f"the same step of {gpu_training.SMALL} parameters, compiled",
    "training-big-compiled": f"the same step of {gpu_training.BIG} parameters, compiled",
    "bandwidth": f"an update of {gpu_kernels.BYTES >> 20} MB in a CUDA graph, as a share of the speed of a copy and of `x.sum()`",
    "hashes": f"digests and sketches of {gpu_kernels.BYTES >> 20} MB in a CUDA graph, as a multiple of `x.sum()`",
    "calls": f"one of {gpu_kernels.CALLS} recorded calls of a layer whose output has 25 MB",
    "observations": "one observation of the output of a layer that does nothing, as a multiple of x.sum()",
    "steps": "a training step of the 124 M network, observed by each, as a multiple of the bare one",
}
MINUTES = {
    "bandwidth": 2,
    "training": 2,
    "training-big": 3,
    "training-compiled": 6,
    "training-big-compiled": 8,
    "hashes": 1,
    "calls": 3,
    "observations": 3,
    "steps": 4,
}
"""About how long a section takes on one H100 beside 16 cores, kernels compiled included; the compiled ones are a guess."""


def plan() -> str:
    """The order of the sections, which is that of what they tell, and about how long each takes."""
    lines = [f"{name:22} {MINUTES[name]} min  {WHAT[name]}" for name in SECTIONS]
    return "\n".join([*lines, f"{'all':22} {sum(MINUTES.values())} min"])


def described(device: torch.device) -> dict[str, Any]:
    """The device, and what compiled for it."""
    if device.type != "cuda":
        return {"name": "a CPU: nothing of a GPU was measured"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory GB": properties.total_memory / 1e9,
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **versions("triton"),
    }


def stored(name: str) -> dict[str, Any]:
    """What was measured before, by the name of the device."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())["devices"] if path.exists() else {}
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny networks and tensors, to try that everything runs")
    parser.add_argument("--plan", action="store_true", help="print the sections, and about how long they take; measure nothing")
    parser.add_argument("--only", choices=list(SECTIONS), help="one section")
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: with --quick, what can be tried without a GPU"
    )
    chosen = parser.parse_args(arguments)
    if chosen.plan:
        print(plan())
        return 0
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(
            "there is no GPU here: nothing was measured; --device cpu --quick tries what can be tried without one", file=sys.stderr
        )
        return 2
    if chosen.device == "cpu" and not chosen.quick:
        parser.error("--device cpu takes --quick: without a GPU there is nothing to measure")
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device("cpu")
    warnings.filterwarnings("ignore", module=r"torch|monitorch|torchmetrics|wandb")  # theirs, of what is deprecated
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        print("triton is missing: the GPU's figures are those of plain PyTorch calls", file=sys.stderr)
    name, of = "gpu_quick" if chosen.quick else "gpu", described(device)
    devices = stored(name)
    sections = devices.get(of["name"], {}).get("sections", {}) if chosen.only else {}
    names = [chosen.only] if chosen.only else [name for name in SECTIONS if not (chosen.quick and "big" in name)]
    for section in names:
        print(f"== {section}: {WHAT[section]}", flush=True)

        def keep(found: Findings, section: str = section) -> None:
            sections[section] = {"what": WHAT[section], "rows": found.rows, "left_out": found.left_out}
            one = {"device": of, "torch": torch.__version__, "sections": sections}
            write(name, devices={**devices, of["name"]: one}, packages=versions("torchmetrics", "monitorch", "wandb"))

        SECTIONS[section](Findings(keep), device, chosen.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
