"""Which axis the channels of a layer are: by its type, by what is around it, and by what users say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn

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


class Classic(nn.Module):
    """A network that applies one activation, made last, to outputs of four and of two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.act = nn.Conv2d(1, 4, 3), nn.Linear(144, 10), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.fc(self.act(self.conv(x)).flatten(1)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.up, self.down = nn.GELU(), nn.Linear(4, 8), nn.Linear(8, 4)


class Vision(nn.Module):
    """A convolution makes tokens, on which blocks work."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm, self.blocks = nn.Conv2d(3, 4, 4), nn.LayerNorm(4), nn.ModuleList([Block(), Block()])
        self.drop = nn.Dropout()


def test_activations_take_the_axis_of_what_is_around_them() -> None:
    classic, vision = Classic(), Vision()
    assert (channel_axis(classic.act, classic), channel_axis(classic, classic)) == (1, 1)
    assert [channel_axis(vision.get_submodule(name), vision) for name in ("blocks.1.act", "drop", "blocks")] == [-1, -1, -1]
    convolutions = nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(2, 3), nn.Tanh())
    assert [channel_axis(layer, convolutions) for layer in convolutions] == [1, 1, 1, 1, 1, -1, -1]
    moved = nn.Sequential(nn.Conv2d(1, 2, 3), named("Permute"), nn.ReLU(), named("Rearrange"), nn.ReLU())
    moved[1].dims = [0, 2, 3, 1]
    assert [channel_axis(layer, moved) for layer in moved] == [1, -1, -1, None, None]


@pytest.mark.parametrize(
    ("first", "moves", "axis"),
    [
        (nn.Conv2d(1, 2, 3), Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2), -1),
        (nn.Conv2d(1, 2, 3), Reduce("b c h w -> b h w", "mean"), None),
        (nn.Linear(2, 6), Rearrange("b n (h d) -> b h n d", h=2), -1),
        (nn.Linear(2, 6), Rearrange("b n (q h d) -> q b n h d", q=3, h=2), -1),
        (nn.Linear(2, 6), Rearrange("b h w c -> b c h w"), 1),
        (nn.Linear(2, 6), Rearrange("b ... c -> b c ..."), 1),
        (nn.Linear(2, 6), Rearrange("b ... -> b ..."), None),
        (nn.Linear(2, 6), Rearrange("b s c -> s c b"), 1),
        (nn.Conv1d(1, 2, 3), Rearrange("b ... t -> b t ..."), None),
    ],
    ids=str,
)
def test_a_layer_of_einops_moves_the_axis_as_its_pattern_says(first: nn.Module, moves: nn.Module, axis: int | None) -> None:
    net = nn.Sequential(first, moves, nn.ReLU())
    assert [channel_axis(layer, net) for layer in net[1:]] == [axis, axis]


def test_wrappers_are_looked_through() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    wrapper = nn.DataParallel(net)
    assert channel_axis(net[1], wrapper) == channel_axis(wrapper) == -1


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


def test_a_flat_network_of_many_layers_takes_one_walk() -> None:
    class Flat(nn.Module):
        pass

    net = Flat()
    for number in range(2000):
        net.add_module(str(number), nn.ReLU() if number % 2 else nn.Linear(1, 1))
    asked = []
    own = channels.own_axis
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "own_axis", lambda module: (asked.append(module), own(module))[1])
        found = channels.channel_axes(net)
    assert len(found) == 2001
    assert len(asked) < 5 * 2001  # each a few times, not each for each
