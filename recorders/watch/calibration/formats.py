"""Files of ranges and importances for other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recorders.errors import SelectionError, require
from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Subrecording
from recorders.watch.calibration.ranges import PLAIN, Scheme, asked_ranges, importance, only, qparams, ranges, weight_of
from reducers.errors import ArgumentError


def to_compressed_tensors(
    recording: Mapping[str, Subrecording],
    path: str | os.PathLike[str],
    *,
    inputs: Scheme | None = PLAIN,
    outputs: Scheme | None = None,
    weights: Scheme | None = None,
    net: nn.Module | None = None,
) -> dict[str, Any]:
    """Writes scales and zero points into a safetensors file, and returns the `quantization_config` that goes with them.

    Of each layer there are `<layer>.input_scale` and `.input_zero_point`, and the same with `output` and `weight`: scales in
    float32, zero points in int8, or in int16 for more than 8 bits; float8 has none. Their shapes are those that compressed-tensors
    gives its parameters: (1,) for a tensor, (rows, 1) for rows of a weight, (rows, groups) for its groups.
    `compressed_tensors.quantization` reads the file by `load_pretrained_quantization_parameters(net, path)`, after
    `apply_quantization_config(net, config)`. The weights of the network are not in the file. Its metadata have the configuration as
    JSON, under `quantization_config`.

    Args:
        recording: what a recorder of `presets.calibration` recorded.
        path: of the file, which is replaced if it is there.
        inputs: how inputs become integers, per tensor; None leaves them out.
        outputs: the same of outputs, per tensor.
        weights: the same of weights, per tensor, channel or group; it needs `net`.
        net: the network that was recorded.

    Returns:
        the configuration, as data: for `QuantizationConfig.model_validate`, or `config.json` of a checkpoint.

    Raises:
        SelectionError: nothing was recorded of what is asked for.
        ArgumentError: there are no scales of that granularity, no finite numbers, nothing to write, or `net` is missing.
        StorageError: `path` is none.
    """
    for name, given in (("inputs", inputs), ("outputs", outputs)):
        if given is not None:
            only(name, given, ("tensor",), "compressed-tensors")
    schemes = {"input": inputs, "output": outputs, "weight": weights}
    found = asked_ranges(recording, net, "to_compressed_tensors", schemes)
    tensors: dict[str, Tensor] = {}
    for side, by_layer in found.items():
        scheme = schemes[side]
        assert scheme is not None
        for layer, each in by_layer.items():
            for name, value in qparams(each, scheme).items():
                shaped = value.unsqueeze(-1) if value.ndim == 0 or scheme.per == "channel" else value
                tensors[f"{layer}.{side}_{name}"] = shaped.contiguous()
    config = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {
            "group_0": {
                "targets": sorted({layer for by_layer in found.values() for layer in by_layer}),
                "input_activations": _arguments(inputs),
                "output_activations": _arguments(outputs),
                "weights": _arguments(weights),
            }
        },
    }
    _write(path, tensors, quantization_config=json.dumps(config))
    return config


def _arguments(scheme: Scheme | None) -> dict[str, Any] | None:
    if scheme is None:
        return None
    common = {"num_bits": scheme.bits, "type": "float" if scheme.float8 else "int", "symmetric": scheme.symmetric, "dynamic": False}
    return common | ({"strategy": scheme.per} if isinstance(scheme.per, str) else {"strategy": "group", "group_size": scheme.per})


def to_imatrix(
    recording: Mapping[str, Subrecording],
    path: str | os.PathLike[str],
    names: Mapping[str, str] | Callable[[str], str | None],
    *,
    chunk_size: int = 512,
    datasets: Sequence[str] = ("calibration",),
) -> None:
    """Writes the sums of the squares of each channel of the inputs of layers into a GGUF file, as `llama-imatrix` does.

    `llama-quantize --imatrix` takes it. Of each tensor there are `<name>.in_sum2`, of shape (1, channels), and `<name>.counts`, of
    shape (1, 1): over how many positions was added. Both are float32. The keys are `general.type`, `imatrix.datasets`,
    `imatrix.chunk_count` and `imatrix.chunk_size`. Layers that share an input, such as query, key and value, have an entry each.

    Args:
        recording: what a recorder of `presets.calibration` recorded.
        path: of the file, which is replaced if it is there.
        names: from the name of a layer to that of its weight in the GGUF file of the model, such as "blk.0.attn_q.weight"; as a
            mapping, or as a function that returns None for layers to leave out.
        chunk_size: tokens in a chunk, of which llama.cpp shows the number.
        datasets: what was recorded, as texts to show.

    Raises:
        SelectionError: no inputs were recorded, or none of a layer with a name; a layer in the mapping was not recorded, or two
            layers have one name.
        MissingExtraError: gguf is not installed.
        StorageError: `path` is none.

    Reference: `tools/imatrix/imatrix.cpp` of https://github.com/ggml-org/llama.cpp.
    """
    name_of = names.get if isinstance(names, Mapping) else names
    inputs, found, layers = importance(recording), {}, dict[str, str]()
    if isinstance(names, Mapping) and (unknown := [layer for layer in names if layer not in inputs]):
        raise SelectionError(f"no inputs of the layers {unknown[:5]} were recorded; there are {[*inputs][:5]}")
    for layer, each in inputs.items():
        if (name := name_of(layer)) is not None:
            if (other := layers.setdefault(name, layer)) != layer:
                raise SelectionError(f"{other!r} and {layer!r} are both called {name!r} in GGUF, which would hold one of them")
            found[name] = each
    if not found:
        raise SelectionError(f"no layer has a name in GGUF: {[*inputs][:5]}")
    gguf, numpy = require("gguf", "gguf"), require("numpy", "gguf")
    chunks = -(-max(each.positions for each in found.values()) // chunk_size)
    with written_whole(Path(as_path(path))) as draft:
        writer = gguf.GGUFWriter(draft, arch="imatrix")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, list(datasets))
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, chunks)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, chunk_size)
        for name, (squares, positions) in sorted(found.items()):
            writer.add_tensor(f"{name}.in_sum2", squares.float().unsqueeze(0).numpy())
            writer.add_tensor(f"{name}.counts", numpy.full((1, 1), positions, dtype=numpy.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def to_modelopt(
    recording: Mapping[str, Subrecording],
    path: str | os.PathLike[str],
    *,
    inputs: Scheme | None = PLAIN,
    outputs: Scheme | None = None,
    weights: Scheme | None = None,
    net: nn.Module | None = None,
) -> None:
    """Writes the largest magnitude of each quantizer into a safetensors file, under its key in a state dict of ModelOpt.

    The keys are `<layer>.input_quantizer._amax`, `.output_quantizer._amax` and `.weight_quantizer._amax`; the tensors are float32,
    of shape () for a tensor, and for channels (rows, 1), or (rows, 1, 1, 1) for a convolution. After `mtq.quantize` has put
    quantizers with these buffers into a network, `net.load_state_dict(safetensors.torch.load_file(path), strict=False)` fills them.

    Args:
        recording: what a recorder of `presets.calibration` recorded.
        path: of the file, which is replaced if it is there.
        inputs: how inputs become integers, per tensor; None leaves them out.
        outputs: the same of outputs.
        weights: the same of weights, per tensor or channel; it needs `net`.
        net: the network that was recorded.

    Raises:
        SelectionError: nothing was recorded of what is asked for.
        ArgumentError: a scheme is not symmetric, or of another granularity, nothing is to be written, or `net` is missing.
        StorageError: `path` is none.
    """
    for side, scheme in (("inputs", inputs), ("outputs", outputs), ("weights", weights)):
        if scheme is not None:
            only(side, scheme, ("tensor", "channel") if side == "weights" else ("tensor",), "ModelOpt")
            if not scheme.symmetric:
                raise ArgumentError(f"ModelOpt has one magnitude for both ends of the {side}: use Scheme(symmetric=True)")
    schemes = {"input": inputs, "output": outputs, "weight": weights}
    found = asked_ranges(recording, net, "to_modelopt", schemes)
    tensors: dict[str, Tensor] = {}
    for side, by_layer in found.items():
        for layer, (low, high) in by_layer.items():
            largest = torch.maximum(-low, high).float()
            if net is not None and side == "weight" and largest.ndim:
                largest = largest.reshape(-1, *[1] * (weight_of(net, layer).ndim - 1))
            tensors[f"{layer}.{side}_quantizer._amax"] = largest
    _write(path, tensors)


def to_torchao(
    recording: Mapping[str, Subrecording],
    path: str | os.PathLike[str],
    *,
    inputs: Scheme = PLAIN,
    dimensions: int = 2,
) -> None:
    """Writes the scale and the zero point of the input of each layer into a safetensors file.

    They are `<layer>.act_quant_scale`, float32, and `<layer>.act_quant_zero_point`, int8: the arguments of
    `torchao.quantization.Int8StaticActivationInt8WeightConfig`, or for float8, which has no zero point, of
    `Float8StaticActivationFloat8WeightConfig`. Both quantise weights by themselves. The tensors have as many dimensions as
    the inputs, each of length 1, because torchao compares them.

    Args:
        recording: what a recorder of `presets.calibration` recorded.
        path: of the file, which is replaced if it is there.
        inputs: how inputs become integers: of 8 bits, per tensor.
        dimensions: how many dimensions the inputs have: 2 for (batch, channels), 3 for (batch, time, channels).

    Raises:
        SelectionError: no inputs were recorded.
        ArgumentError: a scheme is not of 8 bits, or not per tensor.
        StorageError: `path` is none.
    """
    only("inputs", inputs, ("tensor",), "torchao")
    if inputs.bits != 8:
        raise ArgumentError(f"torchao has static scales for 8 bits, and none for {inputs.bits}")
    tensors: dict[str, Tensor] = {}
    for layer, found in ranges(recording, "input", inputs).items():
        for name, value in qparams(found, inputs).items():
            tensors[f"{layer}.act_quant_{name}"] = value.reshape([1] * dimensions)
    _write(path, tensors)


def _write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], **metadata: str) -> None:
    with written_whole(Path(as_path(path))) as draft:
        save_file({**tensors}, draft, {"format": "pt", **metadata})
