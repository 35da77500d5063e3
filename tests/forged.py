"""Recordings whose files were forged or damaged, and what loading gives for them: typed errors or data."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from recorders.errors import RecordingWarning, StorageError
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage.load import load
from recorders.recordings.storage.save import save
from reducers import Count, Mean, Product, Reducer, Sum


def observe(reducer: Reducer, *batches: Tensor) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for batch in batches:
        state = reducer.update(state, batch)
    return state


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    shape = tuple(tensor.shape)
    pairs = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.dtype, shape, bytes(pairs.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())


def tree_bits(result: Any) -> Any:
    return {key: tree_bits(node) for key, node in result.items()} if isinstance(result, Mapping) else bits(result)


def facts(recording: Recording) -> Any:
    """All that a file keeps, comparable bit for bit."""
    return [
        (
            name,
            part.monitor,
            part.attr,
            part.samples,
            repr(part.reducer),
            part.recipe,
            tree_bits(part.states),
            tree_bits(part.leaves()),
        )
        for name, part in recording.items()
    ], dict(recording.aliases)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("generation-*/*"))


def forge(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the manifest says, and makes its checksums right again."""
    path = root / "manifest.json"
    data = json.loads(path.read_bytes())
    reducers = data["reducers"]
    for entry in data["subrecorders"]:
        entry["reducer"] = reducers[entry["reducer"]]
    change(data)
    data.pop("crc32", None)
    lines = data.pop("subrecorders", None)
    if isinstance(lines, list):
        data["reducers"] = reducers = [entry["reducer"] for entry in lines if isinstance(entry, dict) and "reducer" in entry]
        numbered = iter(range(len(reducers)))
        for entry in lines:
            if isinstance(entry, dict) and "reducer" in entry:
                entry["reducer"] = next(numbered)
        texts = [line_of(entry) for entry in lines]
        first, rest = f'{json.dumps(data)[:-1]}, "subrecorders": [', "\n" + f",{chr(10)}".join(texts) + "\n]}\n"
    else:
        first, rest = json.dumps(data if lines is None else {**data, "subrecorders": lines}), ""
    begins = re.match(r'\{"format": "[^"]*", "schema": -?[0-9]+, ', first)
    if begins is not None:
        first = begins[0] + f'"crc32": "{zlib.crc32(first[begins.end() :].encode()):08x}", ' + first[begins.end() :]
    path.write_text(first + rest)


def line_of(entry: Any) -> str:
    """A line of a manifest, with the checksum that it needs."""
    if not isinstance(entry, dict):
        return json.dumps(entry)
    entry.pop("crc32", None)
    rest = json.dumps(entry)[1:]
    return f'{{"crc32": "{zlib.crc32(rest.encode()):08x}", {rest}'


def forge_file(root: Path, content: bytes) -> None:
    """Puts other bytes into the first file, and makes the manifest agree."""
    files(root)[0].write_bytes(content)
    forge(root, lambda data: data["subrecorders"][0].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))


def sample(scale: float = 1.0) -> Recording:
    both = Product(mean=Mean("b c -> c"), n=Count())
    state = observe(both, torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * scale)
    leaves = {"logits": observe(Sum(), torch.arange(4.0) * scale), "hidden/0": observe(Sum(), torch.ones(2)), "empty": {}}
    return Recording(
        {
            "out/encoder": Subrecording(both, {"": state}, samples=2, monitor="ForwardMonitor"),
            "state": Subrecording(Sum(), leaves, samples=3, monitor="StateMonitor", attr="neuron.voltage", module="LIF"),
            "never": Subrecording(Mean(), {}, samples=0, monitor="ForwardMonitor"),
        },
        {"out/tied": "out/encoder"},
    )


def outcome(root: Path) -> Any:
    """What loading gives: facts, or None for one of the typed errors; anything else is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordingWarning)
            return facts(load(root))
    except StorageError:
        return None


def damaged_bytes_are_never_believed(folder: Path, data: st.DataObject) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)
    root = save(sample(), folder / "run")
    target = data.draw(st.sampled_from([root / "manifest.json", *files(root)]), label="file")
    raw = bytearray(target.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4, unique=True)):
            raw[place] ^= data.draw(st.integers(1, 255))
    target.write_bytes(raw)
    assert outcome(root) is None


def forged_manifests_give_a_typed_error_or_data(folder: Path, data: st.DataObject) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)
    root = save(sample(), folder / "run")
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    )

    def change(manifest: dict[str, Any]) -> None:
        node: Any = manifest
        while isinstance(node, (dict, list)) and node:
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            if not isinstance(node[key], (dict, list)) or data.draw(st.booleans()):
                node[key] = data.draw(junk)
                return
            node = node[key]

    forge(root, change)
    result = outcome(root)
    assert result is None or len(result[0]) <= 3


def forged_files_give_a_typed_error_or_data(folder: Path, data: st.DataObject) -> None:
    root = save(sample(), folder / "run")
    raw = bytearray(files(root)[0].read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=6)):
        raw[place] = data.draw(st.integers(0, 255))
    forge_file(root, bytes(raw))
    result = outcome(root)
    assert result is None or len(result[0]) == 3
