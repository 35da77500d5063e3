"""The importance matrix that llama.cpp quantises by."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from recorders.errors import SelectionError, require
from recorders.recordings.atomic_files import as_path, written_whole
from recorders.recordings.recording import Subrecording
from recorders.watch.calibration.ranges import importance


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
    gguf, numpy = require("gguf", "gguf"), require("numpy", "gguf")
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
