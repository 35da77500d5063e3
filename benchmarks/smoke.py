"""Runs the main jobs of the package that is installed, each once, and prints what worked as one line of JSON.

    python benchmarks/smoke.py

Needs what a plain `pip install` brings, and README.md beside this folder. `versions.py` runs it in each environment, and
`.github/workflows/release.yml` on each system. Returns 1 if anything failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import recorders
from recorders import ForwardMonitor, ParameterGradientMonitor, Recorder, load, visualizers
from reducers import Mean, Norm, Summary
from reducers.kernels.cpp.library import state

ROOT = Path(__file__).parent.parent
COMPILES_FROM = (2, 13)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class NotSupported(Exception):
    """This version says by itself that it cannot do that."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def readme() -> None:
    """The blocks of README.md print what it shows; other builds of PyTorch may round differently."""
    found = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    assert found
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, namespace)
        texts = [NUMBER.sub("#", text).split() for text in (printed.getvalue(), shown)]
        assert texts[0] == texts[1], printed.getvalue()
        pairs = zip(*(NUMBER.findall(text) for text in (printed.getvalue(), shown)), strict=True)
        assert all(math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=0.005) for a, b in pairs), printed.getvalue()


def eager() -> None:
    """What is recorded of outputs and gradients is what plain PyTorch computes."""
    model, batches = net(), torch.randn(3, 16, 4)
    with Recorder(out=ForwardMonitor(Mean()), grad=ParameterGradientMonitor(Norm())).modules(model, names=["0", "2"]) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    found = recorder.compute()
    torch.testing.assert_close(float(found["out/2"]), model(batches).double().mean().item())
    last = model(batches[-1]).square().sum()
    gradient = torch.autograd.grad(last, model[2].weight)[0]
    assert recorder["grad/2"].samples == 3
    assert gradient.norm() <= found["grad/2"]["weight"]  # the norm over all steps
    assert recorder["out/0"].samples == 3


def compiled() -> None:
    """A compiled net records the same as an eager one."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < COMPILES_FROM:
        raise NotSupported
    model, batch = net(), torch.randn(16, 4)
    inductor = any(map(shutil.which, ("c++", "g++", "clang++"))) and sys.platform != "win32"
    with Recorder(ForwardMonitor(Summary())).modules(model, types=nn.Linear) as recorder:
        model(batch)
    with Recorder(ForwardMonitor(Summary())).modules(model, types=nn.Linear) as again:
        torch.compile(model, fullgraph=True, backend="inductor" if inductor else "aot_eager")(batch)
    torch.testing.assert_close(again.compute(), recorder.compute())
    assert set(recorder.compute()) == {"0", "2"}


def stored() -> None:
    """What is saved is loaded, and merges."""
    model = net()
    for number in range(2):
        with Recorder(ForwardMonitor(Summary())).modules(model) as recorder:
            model(torch.randn(16, 4) + number)
        recorder.save(f"run-{number}")
        torch.testing.assert_close(load(f"run-{number}").compute(), recorder.compute())
    one, other = load("run-0"), load("run-1")
    both = (one["0"].peek()["mean"] + other["0"].peek()["mean"]) / 2
    torch.testing.assert_close(one.merge(other)["0"].peek()["mean"], both)


def reported() -> None:
    """The report says what did not fire, and is written as a page."""
    model = net()
    with Recorder(ForwardMonitor(Summary())).modules(model) as recorder:
        model[0](torch.randn(16, 4))
    assert "2" in str(recorder.report())
    assert "</html>" in visualizers.write_report("report.html", recorder).read_text("utf-8")


def main() -> None:
    assert ROOT not in Path(recorders.__file__).parents, "this is the source, not what was installed"
    checks: tuple[Callable[[], None], ...] = (readme, eager, compiled, stored, reported)
    outcomes = {}
    os.chdir(tempfile.mkdtemp())
    for check in checks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # PyTorch's own, if it is not there
                warnings.filterwarnings("ignore", module="torch")
                check()
        except NotSupported:
            outcomes[check.__name__] = "not supported"
        except Exception as error:
            outcomes[check.__name__] = f"{type(error).__name__}: {error}"
        else:
            outcomes[check.__name__] = "passed"
    about = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(), "loops": state()}
    print(json.dumps({**about, "checks": outcomes}))
    sys.exit(any(outcome not in ("passed", "not supported") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
