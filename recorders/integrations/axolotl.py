"""A recorder as a plugin of axolotl."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from recorders.errors import RecorderError, require
from recorders.integrations.transformers import RecorderCallback
from recorders.recorder.recorder import Recorder
from recorders.watch import presets

__all__ = ["RecorderArguments", "RecorderPlugin"]


class RecorderArguments(require("pydantic", "axolotl").BaseModel):  # type: ignore[misc]
    """What the configuration of axolotl may say of the recorder.

    Attributes:
        recorder: a function that makes the recorder from the model, as `package.module.function`; without it, `presets.health()` of
            all modules.
        recorder_on_finding, recorder_against: see `RecorderCallback`.
    """

    recorder: str | None = None
    recorder_on_finding: str | None = None
    recorder_against: str | None = None


class RecorderPlugin(require("axolotl.integrations.base", "axolotl").BasePlugin):  # type: ignore[misc]
    """Records while axolotl trains; see `recorders.integrations.transformers.RecorderCallback`. In the configuration::

        plugins:
          - recorders.integrations.axolotl.RecorderPlugin
        recorder: my_package.my_module.new_recorder  # a function of the model; else presets.health()
        recorder_on_finding: warn

    Each rank saves what it recorded in each checkpoint, and at the end in `output_dir`, in `recorder/rank-0`.

    Raises:
        MissingExtraError: axolotl is not installed.
        RecorderError: there is no function of that name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._callback: RecorderCallback | None = None

    def get_input_args(self) -> str:
        return f"{__name__}.{RecorderArguments.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        on_finding, against = (cfg.get(f"recorder_{name}") for name in ("on_finding", "against"))
        self._callback = RecorderCallback(_function(cfg.get("recorder")), on_finding, against)
        return [self._callback]

    def post_train(self, cfg: Any, model: Any) -> None:
        if self._callback is not None:
            self._callback.save(cfg["output_dir"])


def _function(path: str | None) -> Any:
    """The function of that name, which makes a recorder from a model."""
    if path is None:
        return _healthy
    package, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecorderError(f"recorder: {path!r}: no such function, as package.module.function: {error}") from error


def _healthy(model: nn.Module) -> Recorder:
    return presets.health().modules(model)
