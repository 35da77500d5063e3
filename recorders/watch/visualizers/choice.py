"""Choosing visualizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from recorders.errors import LensError
from recorders.recordings.plugins import names_of_plugins, plugin
from recorders.watch.visualizers.html import HtmlVisualizer
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer
from recorders.watch.visualizers.mlflow import MlflowVisualizer
from recorders.watch.visualizers.tensorboard import TensorBoardVisualizer
from recorders.watch.visualizers.text import TextVisualizer
from recorders.watch.visualizers.tracker import TrackerVisualizer
from recorders.watch.visualizers.trackio import TrackioVisualizer
from recorders.watch.visualizers.visualizer import Visualizer
from recorders.watch.visualizers.wandb import WandbVisualizer

Visualizers: TypeAlias = "str | Visualizer | Iterable[str | Visualizer] | None"

KINDS: dict[str, Callable[..., Visualizer]] = {
    "text": TextVisualizer,
    "matplotlib": MatplotlibVisualizer,
    "html": HtmlVisualizer,
    "tensorboard": TensorBoardVisualizer,
    "trackio": TrackioVisualizer,
    "mlflow": MlflowVisualizer,
    "tracker": lambda given: TrackerVisualizer(*given.split(":", 1)),
    "wandb": WandbVisualizer,
}
TRACKERS = {"aim", "clearml", "comet_ml", "dvclive", "swanlab"}
"""Trackers that are visualizers by way of accelerate only: their names stand after "tracker:"."""
TARGETS = {
    "matplotlib": "a folder",
    "html": "a file",
    "tensorboard": "a folder",
    "wandb": "a project",
    "trackio": "a project",
    "mlflow": "an experiment",
    "tracker": "a name that accelerate knows",
}
"""What may follow the name of a visualizer and a colon."""


def as_visualizers(given: Visualizers) -> tuple[Visualizer, ...]:
    """One visualizer or several, made by name or used as given.

    Names are "text", "matplotlib" or "matplotlib:folder", "html" or "html:report.html", "tensorboard" or "tensorboard:runs/x",
    "wandb" or "wandb:project", "trackio" or "trackio:project", "mlflow" or "mlflow:experiment", "tracker:aim" or
    "tracker:aim:project", and so for other trackers that accelerate knows: a target comes after a colon. Other names are those by
    which installed packages offer visualizers, by the entry points `recorders.visualizers`; they get the target, if there is one.

    Raises `LensError` if a name is unknown or a target does not fit it, or if an object has no `show`, `MissingExtraError` if a
    library is not installed, and `PluginError` if another package fails.

    >>> as_visualizers("html:runs/report.html")[0].path.name
    'report.html'
    """
    if given is None:
        return ()
    if isinstance(given, (str, Visualizer)):
        return (_made(given),)
    return tuple(_made(one) for one in given)


def _made(given: str | Visualizer) -> Visualizer:
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, type) or not isinstance(given, Visualizer):
        raise LensError(f"a visualizer is an object with show(tick, charts), or one of {_known()}; got {given!r}")
    return given


def _named(given: str) -> Visualizer:
    """A visualizer by its name: one of this package, or one that another package offers, which decides what a target is."""
    kind, colon, target = given.partition(":")
    if kind not in KINDS:
        made: Visualizer | None = plugin("visualizers", kind, Visualizer, *([target] if colon else []))
        if made is None and kind in TRACKERS:
            raise LensError(f'no visualizer {given!r}, which is a tracker: write "tracker:{given}"')
        if made is None:
            raise LensError(f"no visualizer {given!r}; choose from {_known()}, or give an object with show(tick, charts)")
        return made
    if (colon or kind == "tracker") and not (target and kind in TARGETS):
        takes = f"takes {TARGETS[kind]} after the colon" if kind in TARGETS else "takes no target"
        raise LensError(f"no visualizer {given!r}: {kind!r} {takes}")
    return KINDS[kind](target) if target else KINDS[kind]()


def _known() -> str:
    return ", ".join(map(repr, (*KINDS, *names_of_plugins("visualizers"))))
