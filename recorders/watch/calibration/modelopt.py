"""The largest magnitudes that ModelOpt's quantizers clip at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Subrecording
from recorders.watch.calibration.ranges import PLAIN, Scheme, asked_ranges, only, weight_of
from reducers.errors import ArgumentError

_FORMAT = "ModelOpt"


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
            only(side, scheme, ("tensor", "channel") if side == "weights" else ("tensor",), _FORMAT)
            if not scheme.symmetric:
                raise ArgumentError(f"{_FORMAT} has one magnitude for both ends of the {side}: use Scheme(symmetric=True)")
    schemes = {"input": inputs, "output": outputs, "weight": weights}
    found = asked_ranges(recording, net, "to_modelopt", schemes)
    tensors: dict[str, Tensor] = {}
    for side, by_layer in found.items():
        for layer, (low, high) in by_layer.items():
            largest = torch.maximum(-low, high).float()
            if net is not None and side == "weight" and largest.ndim:
                largest = largest.reshape(-1, *[1] * (weight_of(net, layer).ndim - 1))
            tensors[f"{layer}.{side}_quantizer._amax"] = largest
    with written_whole(Path(as_path(path))) as draft:
        save_file(tensors, draft, {"format": "pt"})
