"""Nothing of the compiler is imported until something is compiled; what it must know of this package is told in time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from paths import ROOT

from recorders._torch import CAPTURES_IN_GRAPHS

COMPILER = """
import sys, threading
import torch

def compiler():
    roots = ("torch._dynamo", "torch._inductor", "triton", "sympy", "mpmath")
    return {name for name in sys.modules if any(name == root or name.startswith(root + ".") for root in roots)}
"""


def run(script: str, folder: Path, *arguments: str) -> str:
    """What a fresh process prints."""
    file = folder / "script.py"
    file.write_text(COMPILER + textwrap.dedent(script))
    command = [sys.executable, str(file), *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


EAGER = """
before, beside = compiler(), set(sys.modules)
import recorders, reducers
assert compiler() == before, sorted(compiler() - before)[:5]
new = {name for name in set(sys.modules) - beside if name.split(".")[0] not in ("recorders", "reducers")}
assert len(new) < 30 and not [name for name in new if name.startswith("torch.") and name != "torch.utils._device"], sorted(new)

net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
recorder = recorders.Recorder(
    out=recorders.ForwardMonitor(reducers.Product(all=reducers.Summary(), each=reducers.Quantile("b c -> c"))),
    back=recorders.BackwardMonitor(reducers.Masked(reducers.Sum()), given="mask", op_=lambda grad, output: grad * output),
    into=recorders.BackwardInputMonitor(reducers.EMA(alpha=0.1)),
    seldom=recorders.ForwardMonitor(reducers.TopK(k=2), every_step=3),
).modules(net)
change = recorders.DifferenceMonitor(reducers.Mean(), "running_mean", net[1])
for step in range(10):
    with recorder.given(mask=torch.ones(5, dtype=torch.bool)):
        net(torch.randn(5, 3)).sum().backward()
    recorder.step()
with torch.no_grad(), torch.autocast("cpu"):
    net(torch.randn(5, 3))
print(recorder.report(), change.peek(), recorder.overhead())
recorder.save(sys.argv[1])
assert recorder.samples["out/0"] == 11 and recorder.samples["seldom/0"] == 4
assert compiler() == before, sorted(compiler() - before)[:5]
"""


def test_nothing_of_the_compiler_is_imported_while_an_eager_net_is_recorded(tmp_path: Path) -> None:
    run(EAGER, tmp_path, str(tmp_path / "recording"))


@pytest.mark.slow
def test_optimizer_steps_import_no_more_than_without_a_recorder(tmp_path: Path) -> None:
    script = """
    import sqlite3
    net = torch.nn.Linear(3, 2)
    if sys.argv[1] == "recorded":
        import recorders, reducers
        recorder = recorders.Recorder(
            out=recorders.ForwardMonitor(reducers.Mean(), every_step=2),
            weights=recorders.ParameterMonitor(reducers.Norm()),
            updates=recorders.ParameterUpdateMonitor(reducers.Norm()),
        ).modules(net)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(5):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    print(len(compiler()), sorted(compiler())[:3])
    """
    assert run(script, tmp_path, "recorded") == run(script, tmp_path, "bare")


TRAINING = """
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))

def record(net):
    import recorders, reducers
    recorder = recorders.Recorder(
        out=recorders.ForwardMonitor(reducers.Summary()),
        back=recorders.BackwardMonitor(reducers.Moments()),
        some=recorders.ForwardMonitor(reducers.Mean(), every_step=2),
    ).modules(net, types=(torch.nn.Linear, torch.nn.BatchNorm1d))
    recorder.change = recorders.DifferenceMonitor(reducers.Mean(), "running_mean", net[1])
    return recorder

def train(call, recorder=None, steps=4):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = call(torch.randn(5, 3)).square().sum()
        loss.backward()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step()
    return losses

def compare(recorder, steps=4):
    eager, other = make(), None
    other = record(eager)
    train(eager, other, steps)
    for name in recorder:
        assert recorder.samples[name] == other.samples[name] > 0, (name, recorder.samples[name], other.samples[name])
        mine, theirs = recorder[name].peek(), other[name].peek()
        for key in theirs if isinstance(theirs, dict) else [None]:
            a, b = (mine, theirs) if key is None else (mine[key], theirs[key])
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    assert recorder.change.samples == steps
    torch.testing.assert_close(recorder.change.peek(), other.change.peek())

def compiled(net):
    return torch.compile(net, backend="aot_eager", fullgraph=True)

def check_graphs(most):
    from torch._dynamo.utils import counters
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] <= most, counters
"""

ORDERS = {
    "the recorder first": """
        net = make()
        recorder = record(net)
        assert not compiler()
        losses = train(compiled(net), recorder)
        check_graphs(2)
        compare(recorder)
        assert losses == train(compiled(make()))
    """,
    "Dynamo first": """
        import torch._dynamo
        net = make()
        recorder = record(net)
        train(compiled(net), recorder)
        check_graphs(2)
        compare(recorder)
    """,
    "compiled and run first": """
        net = make()
        call = compiled(net)
        train(call, steps=1)
        net.load_state_dict(make().state_dict())
        net.zero_grad()
        recorder = record(net)
        train(call, recorder)
        compare(recorder)
    """,
    "in another thread": """
        net = make()
        recorder = record(net)
        failed = []
        def work():
            try:
                train(compiled(net), recorder)
            except BaseException as error:
                failed.append(error)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not failed, failed
        check_graphs(2)
        compare(recorder)
    """,
    "imported while another thread imports Dynamo": """
        import importlib
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        net = make()
        recorder = record(net)
        thread.join()
        train(compiled(net), recorder)
        compare(recorder)
    """,
    "if another import hook finds Dynamo before ours": """
        net = make()
        recorder = record(net)
        sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "__module__", "") != "reducers._torch"]
        train(compiled(net), recorder)
        compare(recorder)
    """,
    "while hooks are out": """
        import recorders, reducers
        net = make()
        recorder = recorders.Recorder(some=recorders.ForwardMonitor(reducers.Mean(), every_step=4)).modules(net)
        train(net, recorder, steps=6)
        assert not net[0]._forward_hooks and not compiler()
        train(compiled(net), recorder, steps=6)
        assert {recorder.samples[name] for name in recorder} == {3}, recorder.report()
    """,
    "after an export": """
        net = make().eval()
        recorder = record(net)
        for strict in (False, True):
            program = torch.export.export(net, (torch.ones(2, 3),), strict=strict)
            assert "torch_recorders" not in str(program.graph)
            torch.testing.assert_close(program.module()(torch.ones(2, 3)), net(torch.ones(2, 3)))
        net.train()
        recorder.reset()
        train(compiled(net), recorder)
        assert all(recorder.samples[name] for name in recorder)
    """,
    "reducers alone": """
        import reducers
        assert not compiler()
        reducer = reducers.Product(all=reducers.Summary("b c -> c"), slow=reducers.EMA(alpha=0.1))
        update = torch.compile(reducer.update, backend="aot_eager", fullgraph=True)
        x = torch.randn(5, 3)
        mine, theirs = reducer.compute(update({}, x)), reducer.compute(reducer.update({}, x))
        for key in theirs["all"]:
            torch.testing.assert_close(mine["all"][key], theirs["all"][key])
    """,
}


@pytest.mark.slow
@pytest.mark.skipif(not CAPTURES_IN_GRAPHS, reason="recording in graphs needs a later torch")
@pytest.mark.parametrize("order", ORDERS)
def test_graphs_are_recorded_whoever_comes_first(order: str, tmp_path: Path) -> None:
    run(textwrap.dedent(TRAINING) + textwrap.dedent(ORDERS[order]), tmp_path)
