"""`benchmarks/gpu.py` without a GPU: everything of it runs on tiny networks, and what needs a GPU is left out and said so."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

pytestmark = pytest.mark.slow

BENCHMARKS = str(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run on the CPU writes, on a machine without the other libraries."""
    folder = tmp_path_factory.mktemp("results")
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        patch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
        for name in ("torchmetrics", "monitorch"):
            patch.setitem(sys.modules, name, None)
        import gpu
        import measure

        patch.setattr(measure, "RESULTS", folder)
        patch.setattr(gpu, "RESULTS", folder)
        assert gpu.main(["--device", "cpu", "--quick"]) == 0
    (found,) = json.loads((folder / "gpu_quick.json").read_text())["devices"].values()
    assert [path.name for path in folder.iterdir()] == ["gpu_quick.json"]
    assert list(found["sections"]) == [name for name in gpu.SECTIONS if "big" not in name]
    assert gpu.WHAT.keys() == gpu.SECTIONS.keys() == gpu.MINUTES.keys()
    assert sum(gpu.MINUTES.values()) <= 45
    assert max(gpu.MINUTES.values()) <= 8
    return dict(found)


def rows(result: dict[str, Any], section: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result["sections"][section]["rows"]
    return found


def test_every_variant_steps_eager_and_one_compiled(result: dict[str, Any]) -> None:
    sections = rows(result, "training") + rows(result, "training-compiled")
    found = {(row["execution"], row["who"]): row for row in sections}
    assert [who for execution, who in found if execution == "eager"] == [
        "Summary of outputs",
        "Mean of outputs",
        "Summary of outputs and gradients",
        "norms of parameter gradients",
        "Summary of outputs, every 10th step",
        "digests of outputs",
        "fingerprints of outputs",
    ]
    assert [who for execution, who in found if execution == "compiled"] == ["Summary of outputs"]
    for row in found.values():
        assert 0 < row["bare ms"]["median"] < math.inf
        assert 0 < row["x bare"]["p10"] <= row["x bare"]["median"] <= row["x bare"]["p90"]


def test_every_reducer_is_measured_over_every_layout_and_called(result: dict[str, Any]) -> None:
    measured = {(row["who"], row["layout"], row["dtype"]) for row in rows(result, "bandwidth")}
    assert len(measured) == 8 * 4
    assert {row["who"] for row in rows(result, "hashes")} == {"Digest", "Sketch(k=64)", "Sketch", "Sketch(k=4096)"}
    called = {(row["who"], row["pattern"]) for row in rows(result, "calls")}
    assert len(called) == 10
    assert all("launches" not in row for row in rows(result, "calls"))  # nothing of a GPU is made up


def test_others_that_are_absent_and_what_needs_a_gpu_are_left_out_and_said_so(result: dict[str, Any]) -> None:
    reasons = {row["who"]: row["not run"] for section in result["sections"].values() for row in section["left_out"]}
    assert reasons["wandb.watch"] == "not installed"
    assert reasons["torchtitan's design"] == reasons["torchtitan's design, outputs"] == "needs a GPU and Triton"
    assert "torchmetrics" in reasons["torchmetrics, MeanMetric"]
    assert "monitorch" in reasons["monitorch, norm and activity of outputs"]
    expected = {"wandb.watch", "all"} | {who for who in reasons if who.startswith(("torchtitan", "torchmetrics", "monitorch"))}
    assert reasons.keys() == expected  # nothing else failed
    assert {row["who"] for row in rows(result, "steps")} >= {"torch-recorders, Summary of outputs", "by hand, output.mean()"}
    assert len({row["observation"] for row in rows(result, "observations")}) == 3


def test_the_tables_show_what_was_measured_and_nothing_if_nothing_was(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_tables

    assert gpu_tables.tables({}) == "Not measured yet: no GPU was at hand."
    on_gpu = [{"who": "Mean", "pattern": "b -> b", "launches": 2.0, "added bytes": 3e6, "waits": ""}]
    training = [{**row, "peak bytes": 5e6, "peak bytes, bare": 2e6, "bar": 1.03} for row in rows(result, "training")]
    sections = {**result["sections"], "calls": {"what": "one call", "rows": on_gpu, "left_out": []}}
    sections["training"] = {**sections["training"], "rows": training}
    text = gpu_tables.tables({"devices": {"one": {**result, "sections": sections}}})
    assert "| `Mean` | `b -> b` | 2.00 | 3.00 MB | no |" in text
    assert text.count("+3 MB, to be at most 1.03x") == len(training)
    assert "wandb.watch (not installed)" in text
    assert all(line.count(" | ") >= 2 for line in text.splitlines() if line.startswith("|"))


def test_the_networks_have_the_parameters_that_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_training

    counts = {
        name: sum(value.numel() for value in gpu_training.network(size, torch.device("meta")).parameters())
        for name, size in gpu_training.SIZES.items()
    }
    assert {name: round(count, -6) for name, count in counts.items()} == {"124 M": 124_000_000, "1 B": 1_016_000_000}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith("there is no GPU here")
    assert said.count("\n") == 1


INTERPRETED = """
import torch
from gpu_slots import Slots, STATISTICS
for size, dtype in ((1, torch.float32), (4096, torch.bfloat16), (5000, torch.float32)):
    slots = Slots(2, torch.device("cpu"))
    layer = torch.nn.Identity()
    slots.watch(layer, 1)
    xs = [torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1)]
    for x in xs:
        layer(x)
    slots.due.zero_()
    layer(xs[0] + 100)
    x = torch.cat(xs).double()
    wanted = {"min": x.min(), "max": x.max(), "sum": x.sum(), "squares": x.square().sum(), "count": torch.tensor(2.0 * size)}
    for name, value in slots.read(1).items():
        torch.testing.assert_close(value.double(), wanted[name].double(), rtol=1e-5, atol=1e-4)
    assert slots.read(0)["count"] == 0 and tuple(slots.read(1)) == STATISTICS
print("agree")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton (extra gpu-tests)")
def test_the_rebuilt_design_of_torchtitan_computes_its_statistics() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((BENCHMARKS, str(ROOT)))}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, cwd=Path.cwd())
    assert (run.stdout, run.returncode) == ("agree\n", 0), run.stderr
