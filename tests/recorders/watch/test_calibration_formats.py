"""Calibration that leaves: the loader of each library reads the file, and finds the numbers that the library itself would find.

None of these libraries is needed elsewhere: `bash .ci/packages calibration`, and `bash .ci/packages llm-compressor`, which asks for
an older release of another one.
"""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from recorders import MissingExtraError, SelectionError, presets
from recorders.recordings.recording import Recording
from recorders.watch.calibration import (
    Distribution,
    Scheme,
    entropy,
    importance,
    mse,
    percentile,
    ranges,
    to_compressed_tensors,
    to_imatrix,
    to_modelopt,
    to_torchao,
    weight_ranges,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what other libraries deprecate on import, and in use, is theirs


def library(name: str) -> ModuleType:
    """The module, or a skip if its package is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0])
        return importlib.import_module(name)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


@pytest.fixture
def net() -> Mlp:
    torch.manual_seed(0)
    return Mlp().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 16, generator=generator) ** 3 for _ in range(4)]


def record(net: nn.Module, batches: list[Tensor], **options: Any) -> Recording:
    with torch.inference_mode(), presets.calibration(**options).modules(net, types=nn.Linear) as recorder:
        for batch in batches:
            net(batch)
    return recorder.snapshot()


def values(net: Mlp, batches: list[Tensor]) -> dict[str, dict[str, Tensor]]:
    """All inputs, outputs and weights of each layer."""
    with torch.inference_mode():
        x = torch.cat(batches)
        hidden = torch.cat([net.first(batch) for batch in batches])
        out = torch.cat([net(batch) for batch in batches])
    first, second = net.first.weight.detach(), net.second.weight.detach()
    return {
        "first": {"input": x, "output": hidden, "weight": first},
        "second": {"input": hidden.relu(), "output": out, "weight": second},
    }


SCHEMES = [
    (Scheme(), Scheme(), Scheme(per="channel")),
    (Scheme(symmetric=False), None, Scheme(bits=4, per=8)),
    (Scheme(symmetric=False, bits=8), Scheme(symmetric=False), Scheme(per="tensor", symmetric=False)),
    (Scheme(bits=4), None, Scheme(bits=4, per="channel", symmetric=False)),
    (Scheme(method=percentile(99.5), symmetric=False), Scheme(method=mse), None),
    (Scheme(float8=True), Scheme(float8=True, method=percentile(99)), Scheme(float8=True, per="channel")),
]


@pytest.mark.parametrize(("inputs", "outputs", "weights"), SCHEMES)
def test_compressed_tensors_reads_the_scales_that_its_own_functions_compute(
    net: Mlp, batches: list[Tensor], tmp_path: Path, inputs: Scheme, outputs: Scheme | None, weights: Scheme | None
) -> None:
    theirs = library("compressed_tensors.quantization")
    recording = record(net, batches, per_channel=True)
    path = tmp_path / "scales.safetensors"
    config = to_compressed_tensors(recording, path, inputs=inputs, outputs=outputs, weights=weights, net=net)
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["quantization_config"]) == config
    theirs.apply_quantization_config(net, theirs.QuantizationConfig.model_validate(config), show_progress=False)
    theirs.load_pretrained_quantization_parameters(net, str(path), load_weight_qparams=True)
    compute = library("compressed_tensors.quantization.utils").calculate_qparams
    for layer in ("first", "second"):
        module = net.get_submodule(layer)
        for side, scheme in (("input", inputs), ("output", outputs), ("weight", weights)):
            if scheme is None:
                assert not hasattr(module, f"{side}_scale")
                continue
            found = weight_ranges(net, recording, scheme) if side == "weight" else ranges(recording, side, scheme)  # type: ignore[arg-type]
            arguments = getattr(module.quantization_scheme, {"weight": "weights"}.get(side, f"{side}_activations"))
            scale, zero_point = compute(*(end.float() for end in found[layer]), arguments)
            assert getattr(module, f"{side}_scale").reshape(-1).equal(scale.reshape(-1))
            zero_points = getattr(module, f"{side}_zero_point").reshape(-1)
            assert zero_points.float().equal(zero_point.reshape(-1).float())
    with torch.inference_mode():
        assert net(batches[0]).isfinite().all()


@pytest.mark.parametrize(("inputs", "outputs", "weights"), SCHEMES[:4])
def test_observers_of_llm_compressor_find_these_extremes(
    net: Mlp, batches: list[Tensor], inputs: Scheme, outputs: Scheme | None, weights: Scheme | None
) -> None:
    observers = library("llmcompressor.observers")
    arguments = library("compressed_tensors.quantization").QuantizationArgs
    recording = record(net, batches, per_channel=True)
    flatten = library("llmcompressor.observers.helpers").flatten_for_calibration
    for side, scheme in (("input", inputs), ("output", outputs), ("weight", weights)):
        if scheme is None:
            continue
        found = weight_ranges(net, recording, scheme) if side == "weight" else ranges(recording, side, scheme)  # type: ignore[arg-type]
        per = {"strategy": scheme.per} if isinstance(scheme.per, str) else {"strategy": "group", "group_size": scheme.per}
        args = arguments(num_bits=scheme.bits, symmetric=scheme.symmetric, **per)
        for layer, by_side in values(net, batches).items():
            observer = observers.Observer.load_from_registry("static_minmax", base_name=side, args=args)
            for piece in (by_side[side],) if side == "weight" else by_side[side].split(64):
                observer.update_statistics_from_observed(flatten(piece, side, args))
            assert observer.min_vals.reshape(-1).double().equal(found[layer].low.reshape(-1))
            assert observer.max_vals.reshape(-1).double().equal(found[layer].high.reshape(-1))


@pytest.mark.parametrize(("kind", "weighted"), [("memoryless_mse", False), ("imatrix_mse", True)])
@pytest.mark.parametrize("per", ["channel", 8])
def test_searches_of_llm_compressor_find_the_same_ranges_of_weights(
    net: Mlp, batches: list[Tensor], kind: str, weighted: bool, per: Any
) -> None:
    observers = library("llmcompressor.observers")
    strategy = {"strategy": per} if per == "channel" else {"strategy": "group", "group_size": per}
    same = {"norm": 2.0, "grid": 100, "maxshrink": 0.99, "patience": 100}  # the search that `mse` documents
    args = library("compressed_tensors.quantization").QuantizationArgs(num_bits=4, observer_kwargs=same, **strategy)
    flatten = library("llmcompressor.observers.helpers").flatten_for_calibration
    watching = {layer: observers.Observer.load_from_registry(kind, base_name="weight", args=args) for layer in ("first", "second")}
    for layer, observer in watching.items() if weighted else ():
        observer.attach(net.get_submodule(layer))
    recording = record(net, batches)
    found = weight_ranges(net, recording, Scheme(bits=4, per=per, method=mse, importance=weighted))
    for layer, observer in watching.items():
        observer.update_statistics_from_observed(flatten(values(net, batches)[layer]["weight"], "weight", args))
        largest = torch.maximum(-observer.min_vals, observer.max_vals).double()
        torch.testing.assert_close(found[layer].high.reshape(-1), largest.reshape(-1), rtol=1e-5, atol=0)


def gguf_name(layer: str) -> str | None:
    return {"first": "blk.0.ffn_up.weight", "second": "blk.0.ffn_down.weight"}.get(layer)


def test_gguf_reads_the_importance_matrix(net: Mlp, batches: list[Tensor], tmp_path: Path) -> None:
    gguf = library("gguf")
    recording = record(net, batches)
    path = tmp_path / "imatrix.gguf"
    to_imatrix(recording, path, gguf_name, chunk_size=100, datasets=("wiki", "code"))
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.type"] == "imatrix"
    assert (keys["imatrix.datasets"], keys["imatrix.chunk_count"], keys["imatrix.chunk_size"]) == (["wiki", "code"], 3, 100)
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert {str(tensor.tensor_type.name) for tensor in reader.tensors} == {"F32"}
    assert len(tensors) == 4
    for layer, by_side in values(net, batches).items():
        name = gguf_name(layer)
        assert tensors[f"{name}.counts"].tolist() == [[256.0]]
        squares = tensors[f"{name}.in_sum2"]
        assert squares.shape == (1, by_side["input"].shape[1])
        assert squares[0].equal(importance(recording)[layer].squares.float())
        torch.testing.assert_close(squares[0], by_side["input"].double().square().sum(0).float(), rtol=1e-6, atol=0)
    to_imatrix(recording, path, {"first": "blk.0.ffn_up.weight"})
    assert len(gguf.GGUFReader(path).tensors) == 2
    with pytest.raises(SelectionError, match="no layer has a name"):
        to_imatrix(recording, path, {})
    with pytest.raises(SelectionError, match=r"'first' and 'second' are both called 'blk\.0\.ffn_up\.weight'"):
        to_imatrix(recording, path, dict.fromkeys(("first", "second"), "blk.0.ffn_up.weight"))
    with pytest.raises(SelectionError, match=r"no inputs of the layers \['third'\] were recorded; there are"):
        to_imatrix(recording, path, {"first": "blk.0.ffn_up.weight", "third": "blk.1.ffn_up.weight"})


def test_without_gguf_the_error_says_what_to_install(net: Mlp, batches: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"torch-recorders\[gguf\]"):
        to_imatrix(record(net, batches), "x.gguf", gguf_name)


def test_quantizers_of_modelopt_load_what_they_would_find(net: Mlp, batches: list[Tensor], tmp_path: Path) -> None:
    mtq = library("modelopt.torch.quantization")
    recording = record(net, batches)
    path = tmp_path / "amax.safetensors"
    to_modelopt(recording, path, outputs=Scheme(), weights=Scheme(per="channel"), net=net)
    settings = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    settings["quant_cfg"] = outputs_too(settings["quant_cfg"])

    def calibrated(on: list[Tensor]) -> nn.Module:
        quantized: nn.Module = mtq.quantize(copy.deepcopy(net), settings, forward_loop=lambda model: [model(x) for x in on])
        return quantized

    theirs, ours = calibrated(batches), calibrated([batches[0] / 2])
    keys = {key for key in theirs.state_dict() if key.endswith("_amax")}
    assert keys == load_file(path).keys()
    assert any(not theirs.state_dict()[key].equal(ours.state_dict()[key]) for key in keys)
    assert ours.load_state_dict(load_file(path), strict=False).unexpected_keys == []
    for key in keys:
        assert theirs.state_dict()[key].equal(ours.state_dict()[key])
    with torch.inference_mode():
        assert theirs(batches[1]).equal(ours(batches[1]))


def outputs_too(settings: Any) -> Any:
    """The settings with quantizers of outputs."""
    enabled = {"num_bits": 8, "axis": None}
    return [*settings, {"quantizer_name": "*output_quantizer", "cfg": enabled, "enable": True}]


@pytest.mark.parametrize(("method", "options"), [("percentile", {"percentile": 99.0}), ("entropy", {})])
def test_calibrators_of_modelopt_agree_up_to_the_width_of_bins(
    net: Mlp, batches: list[Tensor], method: str, options: dict[str, float]
) -> None:
    calibrator = library("modelopt.torch.quantization.calib").HistogramCalibrator(num_bits=8)
    x = torch.cat(batches)
    calibrator.collect(x)
    expected = calibrator.compute_amax(method, **options).item()
    ours = {"percentile": percentile(99.0), "entropy": entropy}[method]
    found = ranges(record(net, batches), "input", Scheme(method=ours))["first"].high.item()
    assert found == pytest.approx(expected, rel=0.05)


def test_the_search_of_torchao_finds_the_same_range(net: Mlp, batches: list[Tensor]) -> None:
    ao, observing = library("torchao.quantization"), library("torchao.quantization.observer")
    kind = library("torchao.quantization.quant_primitives").MappingType.SYMMETRIC
    x = torch.cat(batches)
    observer = observing.AffineQuantizedMSEObserver(kind, torch.int8, ao.PerTensor(), eps=torch.finfo(torch.float32).eps)
    observer(x)
    assert mse(Distribution.of_tensor(x.flatten()), 8, True).high.item() == pytest.approx(observer.max_val.item(), rel=1e-5)
    found = ranges(record(net, batches), "input", Scheme(method=mse))["first"]
    losses = [observer.loss_fn(x, -end, end).item() for end in (found.high.float(), observer.max_val)]
    assert losses[0] <= 1.05 * losses[1]


def test_torchao_takes_scales_of_float8(net: Mlp, batches: list[Tensor], tmp_path: Path) -> None:
    ao, observing = library("torchao.quantization"), library("torchao.quantization.observer")
    kind = library("torchao.quantization.quant_primitives").MappingType.SYMMETRIC
    path = tmp_path / "scales.safetensors"
    to_torchao(record(net, batches), path, inputs=Scheme(float8=True))
    read = load_file(path)
    assert set(read) == {"first.act_quant_scale", "second.act_quant_scale"}
    for layer, by_side in values(net, batches).items():
        observer = observing.AffineQuantizedMinMaxObserver(
            kind, torch.float8_e4m3fn, ao.PerTensor(), eps=torch.finfo(torch.float32).eps, keepdim=True
        )
        observer(by_side["input"])
        assert read[f"{layer}.act_quant_scale"].equal(observer.calculate_qparams()[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_torchao_quantises_with_our_scales_as_with_its_observers(
    net: Mlp, batches: list[Tensor], tmp_path: Path, symmetric: bool
) -> None:
    ao, observing = library("torchao.quantization"), library("torchao.quantization.observer")
    mapping = library("torchao.quantization.quant_primitives").MappingType
    kind = mapping.SYMMETRIC if symmetric else mapping.ASYMMETRIC
    path = tmp_path / "scales.safetensors"
    to_torchao(record(net, batches), path, inputs=Scheme(symmetric=symmetric))
    read, found = load_file(path), {}
    for layer, by_side in values(net, batches).items():
        observer = observing.AffineQuantizedMinMaxObserver(
            mapping_type=kind,
            target_dtype=torch.int8,
            granularity=ao.PerTensor(),
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int8,
            keepdim=True,
        )
        for piece in by_side["input"].split(64):
            observer(piece)
        found[layer] = observer.calculate_qparams()
        for name, value in zip(("scale", "zero_point"), found[layer], strict=True):
            ours = read[f"{layer}.act_quant_{name}"]
            assert (ours.dtype, ours.shape) == (value.dtype, value.shape)
            assert ours.equal(value)

    def quantised(scales: dict[str, tuple[Tensor, Tensor]]) -> nn.Module:
        config = ao.Int8StaticActivationInt8WeightConfig
        by_layer = {
            layer: config(
                act_quant_scale=scale,
                act_quant_zero_point=None if symmetric else zero_point,
                granularity=[ao.PerTensor(), ao.PerRow()],
                act_mapping_type=kind,
                set_inductor_config=False,
            )
            for layer, (scale, zero_point) in scales.items()
        }
        copied = copy.deepcopy(net)
        ao.quantize_(copied, ao.FqnToConfig(by_layer), filter_fn=None)
        return copied

    ours_too = {layer: (read[f"{layer}.act_quant_scale"], read[f"{layer}.act_quant_zero_point"]) for layer in found}
    with torch.inference_mode():
        theirs, ours = quantised(found)(batches[1]), quantised(ours_too)(batches[1])
        assert theirs.equal(ours)
        assert not theirs.equal(net(batches[1]))
