"""Two processes with gloo: what the master rank of monitorch shows is what our merged recordings hold on every rank."""

from __future__ import annotations

import datetime
import multiprocessing
import pickle
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_monitorch import Kept, network, run_epoch
from torch import nn

from recorders import CallMonitor, Inspector, Recorder, lenses
from recorders.watch.lenses import statistics
from reducers import Summary

SIZE, SECONDS = 2, 60


def watch(rank: int, seed: int) -> tuple[Kept, dict[str, Any], str]:
    """One rank: other data than the other rank's; returns what theirs showed, what ours merged, and what theirs cannot merge."""
    from monitorch import lens as theirs
    from monitorch.inspector import PyTorchInspector

    torch.manual_seed(seed)
    net, kept = network(), Kept()
    there = PyTorchInspector(
        [theirs.LossMetrics(), theirs.OutputNorm(), theirs.ParameterGradientGeometry()], visualizer=kept, module=net
    )
    here = Inspector([lenses.OutputNorm(), lenses.ParameterGradientGeometry(when="accumulate", inplace=False)], net=net)
    pushed = Recorder(loss=CallMonitor(Summary()))
    torch.manual_seed(10 * seed + rank)
    run_epoch(
        net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.randn(4, 1, 4, 4, dtype=torch.float64) for _ in range(3 + rank)]
    )
    for value in torch.rand(2 + rank):
        there.push_loss(value, train=True)
        pushed.push("loss", value)
    there.tick_epoch()
    merged: dict[str, Any] = {"Loss": statistics(pushed.sync()["loss"].peek())}
    for recorder in here.recorders.values():
        for name, result in recorder.sync().compute().items():
            merged[name] = statistics(result["norm"] if isinstance(result, dict) and "norm" in result else result)
    small = nn.Sequential(nn.ReLU())
    there = PyTorchInspector([theirs.OutputNorm(inplace=False)], visualizer=Kept(), module=small)
    small(torch.ones(2, 3))
    try:
        there.tick_epoch()
    except AttributeError as error:
        return kept, merged, str(error)
    return kept, merged, ""


def serve(rank: int, seed: int, store: str, pipe: Connection) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=limit)
    pipe.send_bytes(pickle.dumps(watch(rank, seed)))
    dist.destroy_process_group()


@pytest.mark.row("master_rank, start_sync, finish_sync")
@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_merged(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monitorch")
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(SIZE):
        mine, other = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, seed, str(tmp_path / "store"), other), daemon=True))
        processes[-1].start()
        other.close()
        pipes.append(mine)
    try:
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(SECONDS), f"rank {rank} did not answer within {SECONDS} s"
            answers.append(pickle.loads(pipe.recv_bytes()))
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    (kept, merged, refused), (silent, same, _) = answers
    assert silent.lines == {}  # only the master shows there; here every rank gets the merged recording
    assert merged.keys() == same.keys()
    assert all(torch.equal(value, same[name][key]) for name, row in merged.items() for key, value in row.items())
    assert "Cannot sync <class 'list'>" in refused  # what is kept whole is merged here: the quartiles below
    assert merged["Loss"]["mean"].item() == pytest.approx(kept.lines[1]["Loss"]["Loss"]["train_loss mean"], abs=1e-9)
    for tag, group in (("Output Norm", "output"), ("Weight Gradient Norm", "weight"), ("Bias Gradient Norm", "bias")):
        for layer, values in kept.lines[1][tag].items():
            row, band = merged[f"{group}/{layer}"], kept.bands[1][tag][layer]
            assert row["mean"].item() == pytest.approx(values["mean"], abs=1e-9)
            assert (row["min"].item(), row["max"].item()) == pytest.approx(band["min", "max"], abs=1e-9)
            assert row["count"].item() == 7
    assert "median" in merged["weight/0"]
