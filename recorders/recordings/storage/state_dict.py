"""A recording as a state dict, and back, for checkpoints that others write."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recorders.errors import CorruptRecordingError, MergeError
from recorders.recordings.recording import Recording
from recorders.recordings.storage.codec import Contents, Recipes, rebuilt
from recorders.recordings.storage.entry import Entry

__all__ = ["from_state_dict", "to_state_dict"]

FORMAT = 1


def to_state_dict(recording: Recording) -> dict[str, Any]:
    """The recording as `{"recording": bytes}`, for `torch.save` and `torch.distributed.checkpoint`.

    It is one entry, whatever was recorded, because a distributed checkpoint loads the keys and shapes that the program has already,
    and a fresh recorder has none. The bytes are those of `torch.save`, of tensors and plain data, and are read with
    `weights_only=True`. Results are not in them, because they are computed from the states.

    >>> import torch
    >>> from recorders import Subrecording
    >>> from reducers import Mean
    >>> part = Subrecording(Mean(), {"": Mean().update({}, torch.ones(2))}, samples=1)
    >>> from_state_dict(to_state_dict(Recording({"loss": part}))).compute()
    {'loss': tensor(1., dtype=torch.float64)}
    """
    recipes, parts = Recipes(), {}
    for name, part in recording.items():
        contents = Contents(part, results=part.reducer is None)
        recipe, versions = recipes.of(part)
        parts[name] = {
            "monitor": part.monitor,
            "attr": part.attr,
            "module": part.module,
            "samples": part.samples,
            "reducer": recipe,
            "states": contents.states,
            "values": contents.values,
            "versions": dict(versions),
            "progress": contents.progress,
            "placement": contents.placement,
            # Copies, because PyTorch writes all memory of a view, and refuses views of one memory in two dtypes.
            "tensors": {key: tensor.clone() for key, tensor in contents.tensors.items()},
        }
    whole = {"format": FORMAT, "step": recording.step, "aliases": dict(recording.aliases), "subrecorders": parts}
    file = io.BytesIO()
    torch.save(whole, file)
    return {"recording": file.getvalue()}


def from_state_dict(state_dict: Mapping[str, Any]) -> Recording:
    """The recording of which `to_state_dict` made this.

    Raises:
        MergeError: it is something else.
    """
    recipes, parts = Recipes(), {}
    try:
        whole = torch.load(io.BytesIO(state_dict["recording"]), weights_only=True, map_location="cpu")
        if whole["format"] != FORMAT:
            raise MergeError(f"a state dict of format {whole['format']!r:.50}; this version reads {FORMAT}")
        for name, told in whole["subrecorders"].items():
            facts = {key: value for key, value in told.items() if key != "tensors"}
            tensors: Mapping[str, Tensor] = told["tensors"]
            entry = Entry(name=name, file="", bytes=0, sha256="", dtypes={}, **facts)
            parts[name] = rebuilt(entry, recipes, tensors.__getitem__, "this state dict")
        return Recording(parts, whole["aliases"], whole["step"])
    except (KeyError, TypeError, AttributeError, RuntimeError, EOFError, pickle.UnpicklingError, CorruptRecordingError) as error:
        raise MergeError(f"this is no state dict of a recorder: {type(error).__name__}: {error}") from error
