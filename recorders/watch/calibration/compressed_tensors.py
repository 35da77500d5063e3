"""Scales and zero points as compressed-tensors reads them, and with it vLLM and llm-compressor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Subrecording
from recorders.watch.calibration.ranges import PLAIN, Scheme, asked_ranges, only, qparams

_FORMAT = "compressed-tensors"


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
            only(name, given, ("tensor",), _FORMAT)
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
        "quant_method": _FORMAT,
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
    with written_whole(Path(as_path(path))) as draft:
        save_file(tensors, draft, {"format": "pt", "quantization_config": json.dumps(config)})
    return config


def _arguments(scheme: Scheme | None) -> dict[str, Any] | None:
    if scheme is None:
        return None
    common = {"num_bits": scheme.bits, "type": "float" if scheme.float8 else "int", "symmetric": scheme.symmetric, "dynamic": False}
    return common | ({"strategy": scheme.per} if isinstance(scheme.per, str) else {"strategy": "group", "group_size": scheme.per})
