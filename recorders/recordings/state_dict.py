"""A recording as one flat dict of tensors and plain data, and back, for checkpoints that others write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recorders.errors import CorruptRecordingError, MergeError
from recorders.recordings.contents import Contents, Recipes, rebuilt
from recorders.recordings.entry import Entry
from recorders.recordings.recording import Recording

__all__ = ["from_state_dict", "to_state_dict"]

FORMAT = 1


def to_state_dict(recording: Recording) -> dict[str, Any]:
    """The recording as `{"format", "step", "aliases", "subrecorders": {name: {"tensors": {...}, ...}}}`: tensors and plain data.

    Results are not in it, because they are computed from the states.

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
            "tensors": contents.tensors,
        }
    return {"format": FORMAT, "step": recording.step, "aliases": dict(recording.aliases), "subrecorders": parts}


def from_state_dict(state_dict: Mapping[str, Any]) -> Recording:
    """The recording of which `to_state_dict` made this.

    Raises:
        MergeError: it is something else.
    """
    recipes, parts = Recipes(), {}
    try:
        if state_dict["format"] != FORMAT:
            raise MergeError(f"a state dict of format {state_dict['format']!r:.50}; this version reads {FORMAT}")
        for name, told in state_dict["subrecorders"].items():
            facts = {key: value for key, value in told.items() if key != "tensors"}
            tensors: Mapping[str, Tensor] = told["tensors"]
            entry = Entry(name=name, file="", bytes=0, sha256="", dtypes={}, **facts)
            parts[name] = rebuilt(entry, recipes, tensors.__getitem__, "this state dict")
        return Recording(parts, state_dict["aliases"], state_dict["step"])
    except (KeyError, TypeError, AttributeError, CorruptRecordingError) as error:
        raise MergeError(f"this is no state dict of a recorder: {type(error).__name__}: {error}") from error
