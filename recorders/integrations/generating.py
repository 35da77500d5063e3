"""generating: tells a recorder where in a request each forward of the `generate` of Hugging Face's transformers is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recorders.capture.entering import guarded
from recorders.errors import RecorderError, TargetError
from recorders.recorder.recorder import Recorder

__all__ = ["generating"]

NOWHERE = -1
"""The position and the request of a token that is none: of padding, and of a request that has ended."""


@contextmanager
def generating(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Tells the recorder, until the block ends, where in a request each forward of `model.generate` is.

    The clock of the recorder counts the forwards of each `generate`: step 0 is the prefill, all chunks of it, and step n is the
    n-th forward after it, which gets the n-th new token of each request. So `steps=[0]` records the prefill, `steps=slice(1, None)`
    the decoding, and `every_step=16` every 16th forward. At the end of the block the step is what it was before.

    Monitors may take these by `given=`, each of shape (rows, tokens) as the forward has them:
        "mask": whether the token is one of a request: not of padding, and not computed for a request after its end token.
        "position": the position of the token in its request, from 0; -1 if it is none.
        "request": the number of its request, from 0 in the order of the prompts in this block; -1 if it is none. The beams of a
        request, and the sequences that are returned for it, have one number.

    Candidates of assisted decoding count as tokens, whether they are accepted or not; those of the first forward belong to the
    prefill. Beams count as long as `generate` computes them.

    Args:
        recorder: a recorder of its own for generating: no optimizer advances its clock.
        model: the model whose `generate` is called, by one thread at a time.

    Raises:
        RecorderError: the clock of the recorder counts the steps of an optimizer.
        TargetError: the model has no `generate`.
    """
    if recorder.clock.attached:
        raise RecorderError(
            "the clock of this recorder counts the steps of an optimizer, and would count forwards of `generate` too: record what "
            "is generated with a recorder of its own"
        )
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "prepare_inputs_for_generation"):
        raise TargetError(f"{type(model).__name__} has no `generate` of transformers")
    step, told = recorder.clock.step, _Requests(recorder, model)
    with _instead(model, "generate", told.generate), _instead(model, "prepare_inputs_for_generation", told.prepare):
        try:
            yield
        finally:
            recorder.clock.step = step


@contextmanager
def _instead(model: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Calls of this method of the model go to `method`, which gets the method first, until the block ends."""
    own, before = name in vars(model), getattr(model, name)

    @functools.wraps(before)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(before, *args, **kwargs)

    setattr(model, name, call)
    try:
        yield
    finally:
        if own:
            setattr(model, name, before)
        else:
            delattr(model, name)


class _Requests:
    """Sets the step and what is given before each forward of `generate`.

    `generate` calls `prepare_inputs_for_generation` before each of its forwards, outside of what it compiles, and tells it which
    of them are the prefill.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder: Recorder = recorder
        self._model: Any = model
        self._given = ExitStack()
        self._numbered = 0  # requests of earlier calls of `generate`
        self._begin()

    def _begin(self, copies: int = 1, ends: Any = None) -> None:
        """Begins a call of `generate` with so many rows for each request, which one of these tokens ends."""
        self._copies, self._ends = copies, None if ends is None else torch.as_tensor(ends, device="cpu")
        self._rows = self._seen = self._new = 0  # rows; tokens of the prefill; forwards after it
        self._wanted = {name for monitor in self._recorder.values() for name in monitor.given} & {"mask", "position", "request"}

    def generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `generate`."""
        guarded("generating", self._start, args, kwargs)
        try:
            return generate(*args, **kwargs)
        finally:
            self._given.close()
            self._numbered += self._rows // self._copies

    def _start(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        configs = [*args[1:2], kwargs.get("generation_config"), self._model.generation_config]

        def setting(name: str) -> Any:
            known = (value for config in configs if (value := getattr(config, name, None)) is not None)
            return kwargs[name] if name in kwargs else next(known, None)

        self._begin(max(setting("num_beams") or 1, setting("num_return_sequences") or 1), setting("eos_token_id"))
        self._recorder.clock.step = 0

    def prepare(self, prepare: Callable[..., Any], ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Calls `prepare_inputs_for_generation`."""
        inputs = prepare(ids, *args, **kwargs)
        guarded("generating", self._tell, ids, inputs, kwargs)
        return inputs

    def _tell(self, ids: Tensor, inputs: Mapping[str, Any], kwargs: Mapping[str, Any]) -> None:
        """Sets the step of the coming forward, and what is given in it."""
        self._given.close()
        prefix = "decoder_" if self._model.config.is_encoder_decoder else ""
        tokens = inputs[f"{prefix}input_ids"] if inputs.get(f"{prefix}input_ids") is not None else inputs["inputs_embeds"]
        self._rows, width = tokens.shape[:2]
        if kwargs.get("is_first_iteration") or not self._seen:
            self._seen += width
        else:
            self._new += 1
            self._recorder.clock.advance()
        if self._wanted:
            values = self._facts(ids, width, inputs.get(f"{prefix}position_ids"), kwargs.get(f"{prefix}attention_mask"))
            self._given.enter_context(self._recorder.given(**{name: values[name] for name in self._wanted}))

    def _facts(self, ids: Tensor, width: int, positions: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
        """Returns what can be given, each of shape (rows, width)."""
        rows, device = self._rows, ids.device
        if mask is None or mask.ndim != 2:  # generate leaves out a mask without padding
            mask = torch.ones(rows, max(self._seen + self._new, ids.shape[1]), dtype=torch.bool, device=device)
        if positions is None or positions.ndim != 2:
            positions = mask.long().cumsum(1)[:, -width:] - 1
        real = mask[:, -width:].bool()
        if self._new and self._ends is not None:
            self._ends = self._ends.to(device)
            ended = torch.isin(ids[:, -self._new :], self._ends).cumsum(1).bool()[:, -width:]
            real = real & ~nn.functional.pad(ended, (width - ended.shape[1], 0))
        requests = self._numbered + torch.arange(rows, device=device)[:, None] // self._copies
        numbers = {"position": positions, "request": requests}
        return {"mask": real} | {name: one.expand(rows, width).masked_fill(~real, NOWHERE) for name, one in numbers.items()}
