"""RecorderExtension: records and reduces inside the workers of vLLM; nothing leaves them but states."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.entering import guarded
from recorders.errors import RecorderError
from recorders.recorder.recorder import Recorder

__all__ = ["RecorderExtension"]

NOWHERE = -1
"""The position and the phase of a row that is no token."""


class RecorderExtension:
    """What vLLM mixes into its workers: `LLM(..., worker_extension_cls="recorders.integrations.vllm.RecorderExtension")`.

    Its methods are called in each worker by `llm.collective_rpc("start_recording", args=("package.module.function",))`. They
    were tried in an engine of vLLM 0.32 on a CPU, and beside the Python parts of 0.33.

    vLLM joins the tokens of all requests along one axis: a layer returns (tokens, features). Some rows are padding, and some
    forwards warm up and compute no request. Monitors may take these by `given=`, each of shape (tokens,):
        "mask": whether the row is a token of a request.
        "position": the position of the token in its request, from 0; -1 if the row is none.
        "phase": 1 if the request has this one token in this forward, which decodes; 0 if it has several, which are of its prefill,
            or candidates that speculative decoding verifies; -1 if the row is none. It needs attention metadata with
            `query_start_loc`, as most backends have it.

    The clock of the recorder counts the forwards of requests: `every_step=10` records every 10th.
    """

    def start_recording(self, make: str) -> list[str]:
        """Puts a recorder on the model of this worker.

        Args:
            make: the name of a function that takes the model and returns a `Recorder` whose modules are selected, such as
                "package.module.function". Each worker imports it.

        Returns:
            the names of the subrecorders.

        Raises:
            RecorderError: vLLM compiles the model; its layers are spread over pipeline stages; a recorder is on already; or the
                function returns something else.
        """
        worker: Any = self
        if not worker.model_config.enforce_eager:
            raise RecorderError(
                "vLLM compiled its model before it could be recorded, and its CUDA graphs call no hooks: start it with "
                "enforce_eager=True"
            )
        if worker.parallel_config.pipeline_parallel_size > 1:
            raise RecorderError("the stages of a pipeline hold different layers, which are not merged: pipeline_parallel_size=1")
        if getattr(self, "_recorded_forwards", None) is not None:
            raise RecorderError("a recorder is on already: call stop_recording first")
        module, _, name = make.rpartition(".")
        model = worker.get_model()
        recorder = getattr(importlib.import_module(module), name)(model)
        if not isinstance(recorder, Recorder):
            raise RecorderError(f"{make} returned a {type(recorder).__name__}; return a Recorder whose modules are selected")
        self._recorded_forwards: _Forwards | None = _Forwards(recorder, model)
        return list(recorder)

    def save_recording(self, path: str) -> str:
        """Saves what all workers recorded into one folder, which `recorders.load(path)` reads; see `Recorder.save_sharded`.

        Raises:
            RecorderError: nothing was started.
        """
        return str(self._recorder_of_vllm().save_sharded(path, overwrite=True))

    def show_recording(self) -> str:
        """Returns the recorder of this worker as a table.

        Raises:
            RecorderError: nothing was started.
        """
        return str(self._recorder_of_vllm())

    def stop_recording(self) -> None:
        """Takes the hooks off, and drops what was recorded since it was saved.

        Raises:
            RecorderError: nothing was started.
        """
        self._recorder_of_vllm().deregister()
        if self._recorded_forwards is not None:
            self._recorded_forwards.stop()
        self._recorded_forwards = None

    def _recorder_of_vllm(self) -> Recorder:
        forwards = getattr(self, "_recorded_forwards", None)
        if forwards is None:
            raise RecorderError("nothing is recorded: call start_recording first")
        recorder: Recorder = forwards.recorder
        return recorder


class _Forwards:
    """Gives the recorder what vLLM knows of each forward of its model, and advances its clock."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.recorder = recorder
        self._context = importlib.import_module("vllm.forward_context").get_forward_context
        self._given = ExitStack()
        self._wanted = {name for monitor in recorder.values() for name in monitor.given}
        self._hooks = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def stop(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        guarded("the vLLM extension", self._tell, kwargs)

    def _after(self, *_: Any) -> None:
        self._given.close()
        guarded("the vLLM extension", self._end)

    def _end(self) -> None:
        if self._context().attn_metadata is not None:
            self.recorder.clock.advance()

    def _tell(self, kwargs: dict[str, Any]) -> None:
        if self._wanted:
            positions = kwargs["positions"]
            positions = positions[0] if positions.ndim == 2 else positions  # of images and text: the first axis is time
            self._given.enter_context(self.recorder.given(**_values(self._context(), positions, self._wanted)))


def _values(context: Any, positions: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
    """What is wanted of what is known of a forward. All of it is new, as vLLM writes into its own tensors again at the next one."""
    metadata, rows = context.attn_metadata, positions.shape[0]
    if metadata is None:  # a forward that warms up
        mask = torch.zeros_like(positions, dtype=torch.bool)
    elif context.is_padding is None:
        mask = torch.ones_like(positions, dtype=torch.bool)
    else:
        mask = ~context.is_padding[:rows]
    values = {"mask": mask} if "mask" in wanted else {}
    if "position" in wanted:
        values["position"] = positions.masked_fill(~mask, NOWHERE)
    if "phase" in wanted:
        starts = getattr(next(iter(metadata.values()), None), "query_start_loc", None) if isinstance(metadata, dict) else None
        if metadata is None:
            values["phase"] = torch.full_like(positions, NOWHERE)
        elif starts is not None:
            ends, numbers = starts[1:].contiguous(), torch.arange(rows, device=starts.device, dtype=starts.dtype)
            lengths = starts.diff()[torch.searchsorted(ends, numbers, right=True).clamp(max=len(starts) - 2)]
            values["phase"] = (lengths == 1).long().masked_fill(~mask, NOWHERE)
    return values
