"""What there is to know of gradients before they are judged: which turn at a threshold, and which are of a shared parameter."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from recorders.watch.divergence.runs.apart import Apart, largest, or_zero
from recorders.watch.divergence.runs.run import RunTracks, TrackName

_TURNS = 4.0
"""How many times the square root of the share of its elements that turn may a gradient be apart. It bounds what one turns, too."""


def switched(apart: Apart) -> Mapping[str, Tensor]:
    """How far the gradient of what each module gets may be apart, because elements near a threshold went the other way, [steps].

    ReLU and max pooling hand a gradient on or do not. If what they get is apart by a share of its size, about this share of the
    elements is on the other side of the threshold, and one at least may be; the gradient then is apart by the square root of the
    share. If what a module gets, and what is in it, is equal, bit for bit, nothing turns.
    """
    steps = len(apart.steps)
    own: dict[str, Tensor] = {}
    for module in apart.a.modules:
        turning = []
        for role in ("input", "output"):
            for leaf, gap in apart.by_role.get(role, {}).get(module, {}).items():
                number = apart.a.tracks[TrackName(role, module, leaf)].count
                one = 1 / max(int(number.max()), 1) if len(number) else 0.0
                share = or_zero(gap.relative()).clamp(max=1.0)
                turning.append(torch.where(gap.known & ~gap.same, share.clamp(min=one), 0.0))
        own[module] = or_zero(largest(turning, steps)) if turning else torch.zeros(steps, dtype=torch.float64, device="cpu")
    inside = {
        module: [turned for name, turned in own.items() if not module or name == module or name.startswith(f"{module}.")]
        for module in own
    }
    return {module: _TURNS * largest(turned, steps).sqrt() for module, turned in inside.items()}


def holders(run: RunTracks) -> Mapping[TrackName, Sequence[str]]:
    """The modules that hold the parameter of each gradient; several if they share it, as an embedding and a head do."""
    by_digests: dict[Hashable, list[TrackName]] = {}
    for place, gradient in run.tracks.items():
        value = run.tracks.get(place._replace(role="weight"))
        if place.role == "weight gradient" and len(gradient) and gradient.digest is not None:
            values = () if value is None or value.digest is None else tuple(value.digest.tolist())
            by_digests.setdefault((tuple(gradient.digest.tolist()), values), []).append(place)
    return {place: [one.module for one in places] for places in by_digests.values() for place in places}


def addends(run: RunTracks, place: TrackName) -> float:
    """Of how many samples the gradient of a parameter is the sum, as that of a bias."""
    reaches = [int(track.count.max()) for track in run.of("gradient", place.module).values() if len(track)]
    own = run.tracks[place].count
    return max(reaches, default=0) / max(int(own.max()), 1) if len(own) else 1.0
