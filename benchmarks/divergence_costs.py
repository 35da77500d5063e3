"""What it costs to record a training so that it can be compared with another: digests, fingerprints, and PyTorch's DebugMode.

`python benchmarks/divergence_costs.py [threads]`, some five minutes; writes results/divergence_costs.json. The transformer of 44
leaf modules of `compiled.py` trains with AdamW. Trainings take turns, each with a copy of the net and an optimizer of its own.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from compiled import NETWORKS, separate
from measure import alternate, write
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode

from recorders import BackwardMonitor, ForwardMonitor, ParameterMonitor, Recorder, presets
from reducers import Collect, Digest, Fingerprints, PerObservation, Reducer

NETS = {"4 x 64 tokens of width 768": "transformer", "16 x 128 tokens of width 256": "transformer of width 256, 16 x 128 tokens"}


def of_leaves(reducer: Reducer) -> Recorder:
    """Outputs and their gradients of all leaf modules, and parameters."""
    return Recorder(output=ForwardMonitor(reducer), gradient=BackwardMonitor(reducer), weights=ParameterMonitor(reducer))


DIGESTS = PerObservation(Digest(), Collect())
RECORDED: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda net: None,
    "digests of outputs, gradients, parameters": lambda net: of_leaves(PerObservation(Digest(), Collect())).modules(
        net, leaves=True
    ),
    "fingerprints of outputs, gradients, parameters": lambda net: of_leaves(Fingerprints()).modules(net, leaves=True),
    "presets.fingerprints(), all modules and inputs": lambda net: presets.fingerprints().modules(net),
    "presets.fingerprints(every=10)": lambda net: presets.fingerprints(every=10).modules(net),
}


def training(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, hashed: bool = False) -> Callable[[], None]:
    """A step; `hashed` by DebugMode, of which each step begins anew, because it keeps all that it saw."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step() -> None:
        torch.autograd.backward(call(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    def hashed_step() -> None:
        with DebugMode(), DebugMode.log_tensor_hashes(hash_inputs=False):
            step()

    return hashed_step if hashed else step


def rows(title: str, network: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net, x = NETWORKS[network]()
    found = []
    for execution in ("eager", "compiled"):
        functions: dict[str, Callable[[], None]] = {}
        held = []
        names = [*RECORDED, "DebugMode with hashes of outputs"] if execution == "eager" else list(RECORDED)
        for name in names:
            own = copy.deepcopy(net)
            held.append(RECORDED[name](own) if name in RECORDED else None)
            call = separate(own)
            run = torch.compile(call, dynamic=False) if execution == "compiled" else call
            functions[name] = training(own, run, x, name not in RECORDED)
        times = alternate(functions, seconds=20.0, rounds=40, least=12)
        for name, time in times.items():
            row = {
                "network": title,
                "execution": execution,
                "recorded": name,
                "ms": time,
                "x bare": time["median"] / times["bare"]["median"],
            }
            found.append(row)
            print(f"{title:30} {execution:9} {name:50} {time['median']:8.1f} ms  {row['x bare']:5.2f} x bare", flush=True)
        for recorder in held:
            if recorder is not None:
                recorder.deregister()
    return found


def main() -> None:
    """Prints the rows, and writes them."""
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    found = [row for title, network in NETS.items() for row in rows(title, network)]
    write("divergence_costs", rows=found, what="float32, AdamW; one step of a training")


if __name__ == "__main__":
    main()
