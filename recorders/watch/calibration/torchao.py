"""Scales of inputs, as torchao takes them for static quantisation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Subrecording
from recorders.watch.calibration.ranges import PLAIN, Scheme, only, qparams, ranges
from reducers.errors import ArgumentError


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
    with written_whole(Path(as_path(path))) as draft:
        save_file(tensors, draft, {"format": "pt"})
