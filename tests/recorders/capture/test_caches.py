"""Compiled nets with monitors are found on disk by the next process, as without; and nothing is found that does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Monitor
from recorders.graphs.caching import content_of
from recorders.graphs.sinks import find_spec, key_in_graph, new_spec_key
from reducers import Mean, Moments, Product, Summary

PROGRAM = """
import json, sys, warnings
import torch
from torch import nn
from torch._dynamo.utils import counters
from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Mean, Moments, Summary

def halved(x, *rest):
    return (x / 2,)

def recorded(net, kind):
    reducer = {"Summary": Summary(), "Moments": Moments("b c -> c")}[kind]
    monitors = {"out": ForwardMonitor(reducer), "mapped": ForwardMonitor(Mean(), map_=halved), "back": BackwardMonitor(reducer)}
    return Recorder(**monitors).modules(net, leaves=True)

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

def train(net, call):
    for seed in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        call(x).square().sum().backward()

warnings.simplefilter("ignore")
net, plain = made(), made()
inside, eager = recorded(net, sys.argv[1]), recorded(plain, sys.argv[1])
train(net, torch.compile(net, fullgraph=True))
train(plain, plain)
assert set(inside.samples.values()) == {3}, inside.report()
for a, b in zip(inside.values(), eager.values(), strict=True):
    for key, value in a.states[""].items():
        assert torch.allclose(value.double(), b.states[""][key].double(), rtol=1e-4, atol=1e-5), (a.name, key)
found = counters["aot_autograd"]
print(json.dumps({name: found[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")} | {
    "graphs compiled": counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]}))
"""


def started(folder: Path, kind: str) -> dict[str, int]:
    """What the caches of the compiler said in a process of its own, in which a recorded net was compiled and trained."""
    told = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], check=False, capture_output=True, text=True, env={**os.environ, **told}, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_second_start_of_a_recorded_net_compiles_nothing(tmp_path: Path) -> None:
    first, again, other = (started(tmp_path, kind) for kind in ("Summary", "Summary", "Moments"))
    assert first == {"hit": 0, "miss": 1, "bypass": 0, "graphs compiled": 2}
    assert again == {"hit": 1, "miss": 0, "bypass": 0, "graphs compiled": 0}
    assert (other["hit"], other["miss"]) == (0, 1)  # it is not taken for that of another reducer


def content(monitor: Monitor) -> str | None:
    return content_of(monitor)


class Own(Mean):
    """What it does is not known to the package."""


def test_monitors_of_which_graphs_are_traced_alike_have_equal_contents() -> None:
    assert content(ForwardMonitor(Summary())) == content(ForwardMonitor(Summary(), nn.Identity())) is not None
    different = [
        ForwardMonitor(Summary()),
        ForwardMonitor(Summary("b c -> c")),
        ForwardMonitor(Moments()),
        BackwardMonitor(Summary()),
        ForwardMonitor(Summary(), every=2),
        ForwardMonitor(Summary(), every_step=2),
        ForwardMonitor(Summary(), train_update=False),
        ForwardMonitor(Product(a=Mean(), b=Summary())),
    ]
    contents = [content(monitor) for monitor in different]
    assert None not in contents
    assert len({*contents}) == len(different)


def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize(
    "monitor",
    [ForwardMonitor(Mean(), map_=halved), ForwardMonitor(Own()), ForwardMonitor(Product(a=Own(), b=Mean()))],
    ids=["a function", "a reducer of the user", "one within another"],
)
def test_what_is_not_ours_to_know_is_found_in_no_other_process(monitor: Any) -> None:
    assert content(monitor) is None
    assert new_spec_key(monitor, None) != new_spec_key(monitor, None)


def test_what_a_graph_has_of_its_process_is_found_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of accumulators, and which part of a tensor a rank holds."""
    monitor = ForwardMonitor(Summary())
    key = new_spec_key(monitor, content(monitor))
    assert key_in_graph(key, None) == key
    with_places = key_in_graph(key, torch.zeros(1))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert key_in_graph(key, None) == with_places != key
    assert find_spec(with_places) is monitor


def test_specs_of_equal_contents_are_told_apart_by_their_order() -> None:
    first, second = ForwardMonitor(Mean()), ForwardMonitor(Mean())
    keys = [new_spec_key(monitor, "the contents of this test") for monitor in (first, second)]
    assert [key[-2:] for key in keys] == ["_0", "_1"]
    assert keys[0][:-2] == keys[1][:-2]
    assert [find_spec(key) for key in keys] == [first, second]
