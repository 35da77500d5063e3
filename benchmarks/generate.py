"""What recording costs `generate` of transformers: a Llama of random weights, in turns with the bare one, eager and compiled.

The process has one thread, and its own time is measured, not that of a clock on the wall: what else the machine does counts less.
Each turn generates the same tokens, which is checked. Compiled is a static cache, of which transformers compiles the forwards after
the prefill. Run: python benchmarks/generate.py
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from measure import spread, versions, write
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from recorders import ForwardMonitor, Recorder
from recorders.integrations.generating import generating
from reducers import GroupBy, Masked, Mean, PerObservation, Summary

LAYERS, WIDTH, PROMPT, NEW = 8, 512, 64, 32
REQUESTS = 4
TURNS = 9
BARE = "bare"
Row = dict[str, Any]


def layers(model: nn.Module, **monitors: ForwardMonitor) -> Recorder:
    """Of each decoder layer."""
    return Recorder(**monitors).modules(model, types=LlamaDecoderLayer)


def apart(model: nn.Module) -> Recorder:
    prefill, decode = ForwardMonitor(Summary(), steps=[0]), ForwardMonitor(Summary(), steps=slice(1, None))
    return layers(model, prefill=prefill, decode=decode)


def in_stretches(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers stretches of 16 positions."""
    return x, position // 16  # -1 of no position stays -1


WHAT: dict[str, Callable[[nn.Module], Recorder | None]] = {
    BARE: lambda model: None,
    "`Mean` of each layer": lambda model: layers(model, out=ForwardMonitor(Mean())),
    "`Summary` of each layer": lambda model: layers(model, out=ForwardMonitor(Summary())),
    "`Summary` of each layer, prefill and decode apart": apart,
    "`Summary` of each leaf module": lambda model: Recorder(out=ForwardMonitor(Summary())).modules(model, leaves=True),
    "`Summary` of each layer, every 16th forward": lambda model: layers(model, out=ForwardMonitor(Summary(), every_step=16)),
    "`Summary` of each layer, by forward": lambda model: layers(model, out=ForwardMonitor(PerObservation(Summary()))),
    "`Masked(Summary)` of each layer": lambda model: layers(model, out=ForwardMonitor(Masked(Summary()), given="mask")),
    "`GroupBy(Mean, 4)` of each layer, by request": lambda model: layers(
        model, out=ForwardMonitor(GroupBy(Mean("b t d -> d"), 4), given="request")
    ),
    "`GroupBy(Mean, 8)` of each layer, by 16 positions": lambda model: layers(
        model, out=ForwardMonitor(GroupBy(Mean(), 8).premap(in_stretches), given="position")
    ),
}
"""By name: what puts monitors on a model."""


COMPILED = [name for name in WHAT if name != BARE and "GroupBy" not in name and "by forward" not in name]


def compiled() -> GenerationConfig:
    settings = CompileConfig(mode="default", fullgraph=True)
    settings._compile_all_devices = True  # transformers compiles on accelerators alone, unless a test asks for it
    return GenerationConfig(cache_implementation="static", compile_config=settings)


def generate(model: nn.Module, recorder: Recorder | None, prompts: Mapping[str, Tensor], config: GenerationConfig) -> Tensor:
    with ExitStack() as block:
        if recorder is not None:
            block.enter_context(generating(recorder, model))
        tokens: Tensor = model.generate(**prompts, generation_config=config)
    return tokens


def config_of(execution: str) -> GenerationConfig:
    config = compiled() if execution == "compiled" else GenerationConfig()
    config.update(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    return config


def turns(functions: Mapping[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """The milliseconds of each turn, by name; all generate the same tokens."""
    expected = functions[BARE]()
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(TURNS):
        for name, function in functions.items():
            started = time.process_time()
            tokens = function()
            spent[name].append((time.process_time() - started) * 1e3)
            if not torch.equal(tokens, expected):
                raise RuntimeError(f"{name}: other tokens than without a recorder")
    return spent


def rows(model: nn.Module, execution: str, names: Sequence[str]) -> list[Row]:
    """What each kind of recording costs, of bare generate in the same turn."""
    torch.manual_seed(1)
    ids = torch.randint(3, 4096, (REQUESTS, PROMPT))
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts["attention_mask"][1:, : PROMPT // 4] = 0  # all but the first are shorter
    functions, held = {}, {}
    for name in names:
        own = copy.deepcopy(model, {id(one): one for one in model.parameters()})  # the weights are shared, the hooks are not
        held[name] = WHAT[name](own)
        functions[name] = partial(generate, own, held[name], prompts, config_of(execution))
    graphs = {}
    torch._dynamo.reset()
    for name, function in functions.items():
        counters.clear()
        function()
        breaks = sum(counters["graph_break"].values())
        graphs[name] = {"graphs": counters["stats"]["unique_graphs"], "graph breaks": breaks}
    spent = turns(functions)
    found = []
    for name, recorder in held.items():
        if recorder is not None and recorder.report().silent:
            raise RuntimeError(f"{execution}, {name}: nothing was recorded by {recorder.report().silent}")
        ratio = statistics.median(ours / bare for ours, bare in zip(spent[name], spent[BARE], strict=True))
        token = {key: value / NEW for key, value in spread(spent[name]).items()}
        row = {"execution": execution, "what": name, "monitors": 0 if recorder is None else len(recorder), **graphs[name]}
        found.append({**row, "ms a token": token, "x bare": ratio})
        print(f"{execution:9} {name:52} {token['median']:7.2f} ms a token  {ratio:5.3f} x bare  {graphs[name]}", flush=True)
    return found


def main() -> None:
    warnings.filterwarnings("ignore", module="torch")  # the compiler's own, about the machine
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 1408, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **sizes)).eval()
    found = rows(model, "eager", list(WHAT))
    for name in COMPILED:  # two at a time: transformers compiles a function that all models share, with graphs up to a limit
        found += rows(model, "compiled", [BARE, name])
    parameters = sum(one.numel() for one in model.parameters())
    what = (
        f"a Llama of {LAYERS} layers, width {WIDTH}, {parameters / 1e6:.0f} M parameters, float32, one thread; "
        f"{REQUESTS} requests of {PROMPT} + {NEW} tokens"
    )
    write("generate", rows=found, turns=TURNS, what=what, versions=versions("transformers"))


if __name__ == "__main__":
    main()
