"""Recording within workers of vLLM. `test_vllm_engine.py` runs an engine, where one is installed.

`Forwards` makes forwards of a model as `GPUModelRunner` of vLLM 0.33 does. If the Python parts of vLLM can be imported, the context
of a forward is theirs, and so is what mixes the extension into a worker and calls it; the context is also tested as it is written
here after theirs.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from world import Place, World, returned

from recorders import ForwardMonitor, Recorder, load, register_layouts
from recorders.errors import RecorderError
from recorders.integrations.vllm import RecorderExtension
from reducers import Count, GroupBy, Masked, Summary


class Layer(nn.Module):
    """As layers of vLLM: (tokens, features), and a residual, which the next layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return self.down(self.up(residual).relu()), residual


def hidden(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0] + out[1]


class Model(nn.Module):
    """With the signature that vLLM calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 8), nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None) -> Tensor:
        x, residual = self.embed(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return hidden((x, residual))


def masked(model: nn.Module) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Masked(Summary("t d -> d")), op_=hidden, given="mask"),
        phase=ForwardMonitor(GroupBy(Count("t d -> "), 2), op_=hidden, given="phase"),
        position=ForwardMonitor(GroupBy(Count("t d -> ")), op_=hidden, given="position"),
    ).modules(model, types=Layer)


def sampled(model: nn.Module) -> Recorder:
    return Recorder(ForwardMonitor(Count(), every_step=2)).modules(model, types=Layer)


def nothing(model: nn.Module) -> None:
    return None


@dataclass
class ForwardContext:
    """The fields of vLLM's that are read, as in vllm/forward_context.py of 0.33."""

    no_compile_layers: dict[str, Any]
    attn_metadata: Any
    slot_mapping: Any
    is_padding: Tensor | None = None


def stand_in() -> ModuleType:
    """A module with the functions of vllm/forward_context.py that are called."""
    module: Any = ModuleType("vllm.forward_context")
    module.ForwardContext, module.current = ForwardContext, None
    module.get_forward_context = lambda: module.current

    @contextmanager
    def override(context: Any) -> Any:
        before, module.current = module.current, context
        yield
        module.current = before

    module.override_forward_context = override
    return module


class Plain:
    """A worker of vLLM, as far as the extension uses it."""

    def __init__(self, *, enforce_eager: bool = True, stages: int = 1) -> None:
        torch.manual_seed(0)
        self.model_config = SimpleNamespace(enforce_eager=enforce_eager)
        self.parallel_config = SimpleNamespace(pipeline_parallel_size=stages)
        self.model = Model()

    def get_model(self) -> nn.Module:
        return self.model


class Mixed(Plain, RecorderExtension):
    """vLLM appends the extension to the bases of its worker."""


class Forwards:
    """Makes forwards as the runner does: persistent buffers, of which each forward gets a part that is padded."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.ids = torch.zeros(64, dtype=torch.int32)
        self.positions = torch.zeros(64, dtype=torch.int64)
        self.is_padding = torch.zeros(64, dtype=torch.bool)

    @torch.inference_mode()
    def run(self, model: nn.Module, requests: list[tuple[int, int]], padded: int, *, warm_up: bool = False) -> Tensor:
        """A forward of requests, each with its first position and the number of its tokens; returns what the model does."""
        starts = torch.tensor([0, *[count for _, count in requests]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tokens = int(starts[-1])
        positions = torch.cat([torch.arange(first, first + count) for first, count in requests])
        self.positions.fill_(7)  # of an earlier forward
        self.positions[:tokens] = positions
        self.ids[:padded] = torch.arange(padded) + 3
        self.is_padding[:tokens], self.is_padding[tokens:padded] = False, True
        metadata = None if warm_up else {"layers.0.attn": SimpleNamespace(num_actual_tokens=tokens, query_start_loc=starts)}
        made = self.context.ForwardContext({}, metadata, {}, is_padding=self.is_padding[:padded])
        with self.context.override_forward_context(made):
            out: Tensor = model(input_ids=self.ids[:padded], positions=self.positions[:padded], inputs_embeds=None)
        return out


@pytest.fixture(params=["vLLM's own context", "one like it"])
def forwards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Forwards:
    if request.param == "one like it":
        context: Any = stand_in()
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    else:
        context = pytest.importorskip("vllm.forward_context", exc_type=ImportError)
    return Forwards(context)


SCHEDULE = [([(0, 5), (0, 3)], 8), ([(5, 1), (3, 1)], 4), ([(6, 1), (4, 1), (0, 6)], 16), ([(7, 1), (5, 1), (6, 1)], 4)]
"""Two requests, then a third, while the others decode; and how many rows each forward is padded to."""


def test_tokens_count_and_padding_and_warming_up_do_not(forwards: Forwards, tmp_path: Path) -> None:
    worker, plain = Mixed(), Plain()
    names = worker.start_recording(f"{__name__}.masked")
    assert names == [f"{group}/layers.{layer}" for group in ("out", "phase", "position") for layer in (0, 1)]
    outputs = []
    for requests, padded in SCHEDULE:
        forwards.run(worker.model, [(0, 3)], 8, warm_up=True)
        out = forwards.run(worker.model, requests, padded)
        assert torch.equal(out, forwards.run(plain.model, requests, padded))
        outputs.append(out[: sum(count for _, count in requests)])
    assert worker.save_recording(str(tmp_path / "run")) == str(tmp_path / "run")
    found, there = load(tmp_path / "run").compute(), torch.cat(outputs).double()
    assert "out/layers.1" in worker.show_recording()
    assert found["out/layers.1"]["count"].unique().tolist() == [len(there)] == [21]
    torch.testing.assert_close(found["out/layers.1"]["mean"], there.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(found["out/layers.1"]["max"].double(), there.amax(0))
    assert (found["phase/layers.0"] / 8).tolist() == [5 + 3 + 6, 2 + 2 + 3]
    assert (found["position/layers.0"] / 8).tolist() == [3, 3, 3, 3, 3, 3, 2, 1]


def test_every_n_th_forward_of_requests(forwards: Forwards) -> None:
    worker = Mixed()
    worker.start_recording(f"{__name__}.sampled")
    for requests, padded in SCHEDULE:
        forwards.run(worker.model, requests, padded)
    assert worker._recorder_of_vllm().samples == {"layers.0": 2, "layers.1": 2}


def test_the_model_is_as_before_when_recording_has_stopped(forwards: Forwards) -> None:
    worker = Mixed()
    worker.start_recording(f"{__name__}.masked")
    with pytest.raises(RecorderError, match="on already"):
        worker.start_recording(f"{__name__}.masked")
    worker.stop_recording()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in worker.model.modules())
    forwards.run(worker.model, *SCHEDULE[0])
    for method in (worker.show_recording, worker.stop_recording, lambda: worker.save_recording("run")):
        with pytest.raises(RecorderError, match="call start_recording first"):
            method()
    worker.start_recording(f"{__name__}.masked")


@pytest.mark.parametrize(
    ("changed", "make", "message"),
    [
        ({"enforce_eager": False}, "masked", "enforce_eager=True"),
        ({"stages": 2}, "masked", "pipeline_parallel_size=1"),
        ({}, "nothing", "returned a NoneType"),
    ],
)
def test_what_cannot_be_recorded_is_told(forwards: Forwards, changed: dict[str, Any], make: str, message: str) -> None:
    with pytest.raises(RecorderError, match=message):
        Mixed(**changed).start_recording(f"{__name__}.{make}")


class Reduced(nn.Module):
    """A linear layer with some of the columns: what the ranks make of it is added up, as by `RowParallelLinear` of vLLM."""

    def __init__(self, whole: nn.Linear, columns: slice) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(whole.weight[:, columns].clone()), whole.bias

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        dist.all_reduce(out)
        return out + self.bias


def spread(model: nn.Module) -> Recorder:
    """Says which outputs are copies and which are parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    copies, parts = ("layers.0", "layers.1"), ("layers.0.up", "layers.1.up")
    register_layouts(model, mesh, outputs=dict.fromkeys(copies, Replicate()) | dict.fromkeys(parts, Shard(-1)))
    return whole(model)


def whole(model: nn.Module) -> Recorder:
    summary = ForwardMonitor(Masked(Summary("t d -> d")), given="mask")
    return Recorder(summary).modules(model, names=["layers.?", "layers.?.up"])


def tensor_parallel(place: Place, path: str) -> None:
    """A worker of several, each with a part of the layers."""
    worker, (rank, _) = Mixed(), place
    for layer in worker.model.layers:
        own = slice(8 * rank, 8 * rank + 8)
        layer.down = Reduced(layer.down, own)
        layer.up.weight, layer.up.bias = nn.Parameter(layer.up.weight[own]), nn.Parameter(layer.up.bias[own])
    context: Any = stand_in()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        patch.setitem(sys.modules, "vllm.forward_context", context)
        worker.start_recording(f"{__name__}.spread")
        for requests, padded in SCHEDULE:
            Forwards(context).run(worker.model, requests, padded)
        worker.save_recording(path)


@pytest.mark.slow
def test_tensor_parallel_workers_save_what_one_would(forwards: Forwards, pair: World, tmp_path: Path) -> None:
    worker = Mixed()
    worker.start_recording(f"{__name__}.whole")
    for requests, padded in SCHEDULE:
        forwards.run(worker.model, requests, padded)
    returned(pair.run(tensor_parallel, str(tmp_path / "run")))
    found, expected = load(tmp_path / "run").compute(), worker._recorder_of_vllm().compute()
    close = {"rtol": 1e-4, "atol": 1e-6}
    assert found["layers.0"]["0"]["count"].unique().tolist() == [21]  # once, not for each copy
    for name in ("layers.0", "layers.1"):
        torch.testing.assert_close(found[name], expected[name], **close)
        parts = [found[f"{name}.up"][f"part {rank} of 2"] for rank in (0, 1)]
        together = {key: torch.cat([part[key] for part in parts]) for key in expected[f"{name}.up"]}
        torch.testing.assert_close(together, expected[f"{name}.up"], **close)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # that vLLM raises while it is imported
def test_vllm_itself_mixes_it_into_its_worker_and_calls_it_by_name() -> None:
    base = pytest.importorskip("vllm.v1.worker.worker_base", exc_type=ImportError)
    serial = pytest.importorskip("vllm.v1.serial_utils", exc_type=ImportError)

    class Own(base.WorkerBase):  # type: ignore[misc,name-defined]
        def __init__(self, vllm_config: Any) -> None:
            vars(self).update(vars(Plain()))

        def get_model(self) -> nn.Module:
            model: nn.Module = self.model
            return model

    sys.modules[__name__].Own = Own  # type: ignore[attr-defined]
    parallel = SimpleNamespace(worker_cls=f"{__name__}.Own", worker_extension_cls="recorders.integrations.vllm.RecorderExtension")
    config = SimpleNamespace(parallel_config=parallel, enable_trace_function_call_for_thread=lambda: None)
    wrapper = base.WorkerWrapperBase()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "worker_receiver_cache_from_config", lambda *_: None)
        patch.setattr(base, "set_current_vllm_config", lambda _: pytest.MonkeyPatch.context())
        wrapper.init_worker([{"vllm_config": config}])
    names = serial.run_method(wrapper, "start_recording", (f"{__name__}.masked",), {})
    assert len(names) == 6
    forwards = Forwards(sys.modules["vllm.forward_context"])
    forwards.run(wrapper.worker.model, *SCHEDULE[0])
    assert "out/layers.1" in serial.run_method(wrapper, "show_recording", (), {})
    serial.run_method(wrapper, "stop_recording", (), {})
