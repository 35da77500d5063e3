"""Which axis the channels of a layer are: by its type, and by what users say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from recorders import channel_axis, register_channel_axis
from recorders.capture import channels

TYPES: list[tuple[nn.Module, int | None]] = [
    (nn.Conv1d(2, 3, 1), 1),
    (nn.ConvTranspose2d(2, 3, 1), 1),
    (nn.BatchNorm3d(2), 1),
    (nn.GroupNorm(1, 2), 1),
    (nn.InstanceNorm2d(2), 1),
    (nn.AdaptiveAvgPool2d(1), 1),
    (nn.ZeroPad2d(1), 1),
    (nn.Dropout2d(), 1),
    (nn.Linear(2, 3), -1),
    (nn.LayerNorm(2), -1),
    (nn.RMSNorm(2), -1),
    (nn.Embedding(2, 3), -1),
    (nn.MultiheadAttention(2, 1), -1),
    (nn.GRU(2, 3), -1),
    (nn.ReLU(), None),
    (nn.Dropout(), None),
    (nn.Identity(), None),
    (nn.Sequential(nn.Linear(2, 3)), None),
    (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), -1),
]


@pytest.mark.parametrize(("layer", "axis"), TYPES, ids=lambda value: type(value).__name__)
def test_the_type_of_a_layer_settles_its_axis(layer: nn.Module, axis: int | None) -> None:
    assert channel_axis(layer) == axis


def named(name: str, base: type = nn.Module, **members: Any) -> nn.Module:
    made: nn.Module = type(name, (base,), members)()
    return made


def test_classes_of_other_libraries_are_known_by_name() -> None:
    assert channel_axis(named("LlamaRMSNorm")) == channel_axis(named("T5LayerNorm")) == channel_axis(named("Conv1D")) == -1
    assert channel_axis(named("LayerNorm2d")) == 1
    first = named("ConvNextLayerNorm")
    first.data_format = "channels_first"
    assert channel_axis(first) == 1


class Block(nn.Module):
    """A layer of the user's own."""


@pytest.fixture
def table() -> Iterator[None]:
    before = dict(channels._axes)
    yield
    channels._axes.clear()
    channels._axes.update(before)


def test_users_extend_and_change_the_table(table: None) -> None:
    register_channel_axis(Block, 2)
    assert channel_axis(type("Further", (Block,), {})()) == 2
    register_channel_axis(nn.ReLU, 1)
    assert channel_axis(nn.ReLU()) == 1
    for wrong, axis in ((nn.ReLU(), 1), (int, 1), (nn.ReLU, "1"), (nn.ReLU, True)):
        with pytest.raises(TypeError, match="register_channel_axis"):
            register_channel_axis(wrong, axis)  # type: ignore[arg-type]
