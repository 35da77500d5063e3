"""Does the main jobs of the packages as on another system, as far as that can be shown on this one.

    python tests/elsewhere.py win32

What that system lacks is taken away: modules and functions of Python, and the loops in C++; so is each package that a plain install
does not bring. PyTorch and what it needs are imported before, and stay those of this system; so do its paths and its files.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

LACKING = {
    "win32": {
        "modules": ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"),
        "os": (
            *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fdatasync", "fork", "getegid", "geteuid"),
            *("getgid", "getuid", "killpg", "mkfifo", "posix_fadvise", "pread", "pwrite", "register_at_fork", "sched_getaffinity"),
            *("sched_yield", "setsid", "statvfs", "sysconf", "uname"),
        ),
    },
    "darwin": {
        "modules": (),
        "os": ("copy_file_range", "fdatasync", "memfd_create", "posix_fadvise", "posix_fallocate", "sched_getaffinity"),
    },
}


INSTALLED = {
    *("einops", "filelock", "fsspec", "functorch", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "recorders", "reducers"),
    *("optree", "safetensors", "sympy", "torch", "torchgen", "typing_extensions"),
}
"""What a plain install brings; and optree, which torch imports if its metadata are there."""


class OnlyInstalled(PathFinder):
    """Finds no other packages."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        name = fullname.partition(".")[0]
        known = name in INSTALLED | sys.stdlib_module_names or name.startswith("_")
        return super().find_spec(fullname, path, target) if known else None


def take_away(system: str) -> None:
    """Make Python look like that of another system; what is imported already stays."""
    for name in LACKING[system]["os"]:
        if hasattr(os, name):
            delattr(os, name)
    for name in LACKING[system]["modules"]:
        sys.modules[name] = None  # type: ignore[assignment]  # which makes its import fail
    sys.platform = system


def import_all() -> list[str]:
    """Import all modules; return those that cannot be, for want of a package that is optional."""
    import recorders
    import reducers

    failed = []
    for package in (reducers, recorders):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".lib" in module.name and ".library" not in module.name:
                continue  # a library, which is no module
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                failed.append(f"{module.name} needs {error.name}")
    return failed


def work() -> None:
    """Record, save, load, merge, and write a page, a timeline and a stream."""
    import torch
    from torch import nn

    from recorders import (
        ForwardMonitor,
        ParameterGradientMonitor,
        ParameterUpdateMonitor,
        Recorder,
        Stream,
        StreamDataset,
        Timeline,
        load,
        visualizers,
    )
    from reducers import Mean, Norm, Summary
    from reducers.kernels.cpp import library

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kinds = {"out": ForwardMonitor(Summary()), "grad": ParameterGradientMonitor(Norm()), "update": ParameterUpdateMonitor(Norm())}
    with Recorder(**kinds).modules(net) as recorder, Stream("stream") as stream:
        for number in range(3):
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            stream.put("rows", torch.full((2, 3), float(number)))
    recorder.save("run")
    recorder.save("run")  # over the first one
    merged = load("run").merge(load("run"))
    assert merged["out/0"].peek()["count"] == 2 * recorder["out/0"].peek()["count"]
    assert visualizers.write_report("report.html", recorder).is_file()
    with Timeline("timeline.sqlite") as timeline:
        timeline.append(0, {"loss": {"mean": 1.0}})
    assert len(StreamDataset("stream")) == 6
    with Recorder(ForwardMonitor(Mean())).modules(net, types=nn.Linear) as compiled:
        torch.compile(net, backend="aot_eager", fullgraph=True)(torch.randn(16, 4))
    assert compiled["0"].samples == 1
    assert library.state().startswith("the loops in C++ are for Linux, so PyTorch's own operations")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # the folder tests/recorders would hide the package
    sys.meta_path[sys.meta_path.index(PathFinder)] = OnlyInstalled
    os.chdir(tempfile.mkdtemp())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        import torch

        torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))  # which imports all that it needs
        take_away(sys.argv[1])
        for line in import_all():
            print(line)
        work()
    print("all done")
