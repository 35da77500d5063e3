"""Which axis of a layer's output is that of its channels, by the type of the layer or by the layers that come before it."""

from __future__ import annotations

from einops.parsing import ParsedExpression
from torch import nn

from recorders.capture.contents import modules_in

_second = dict.fromkeys((nn.GroupNorm, nn.LocalResponseNorm, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Unflatten), 1)
_TOKENS = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_axes: dict[type[nn.Module], int] = {**_second, **dict.fromkeys((nn.Linear, nn.Bilinear, *_TOKENS), -1)}
_FILES = ("conv", "batchnorm", "instancenorm", "pooling", "padding", "upsampling", "pixelshuffle", "channelshuffle")  # of torch: 1
_NAMES = {
    "LayerNorm2d": 1,
    **dict.fromkeys(("RMSNorm", "LayerNorm", "Conv1D", "Linear", "PatchEmbed", "PatchEmbeddings", "Dense"), -1),
}
"""Classes of other libraries, by the ends of their names."""
_ELLIPSIS = "\u2026"  # the einops parser replaces "..." by this
_FORMATS = {"channels_first": 1, "channels_last": -1}


def register_channel_axis(kind: type[nn.Module], axis: int) -> None:
    """Says which axis of the output of a kind of layer is that of its channels; subclasses of it have the same.

    Args:
        kind: a class of modules; what was known of it is replaced.
        axis: the axis, counted from the front from 0 or from the back from -1.

    Raises:
        TypeError: `kind` is no class of modules, or `axis` is no integer.

    >>> class Spikes(nn.Module):
    ...     '''Its outputs are (time, batch, channels, height, width).'''
    >>> register_channel_axis(Spikes, 2)
    >>> channel_axis(Spikes())
    2
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_channel_axis({kind!r}, ...): give a class of modules, such as nn.Linear")
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise TypeError(f"register_channel_axis({kind.__name__}, {axis!r}): give the axis as an integer, such as 1 or -1")
    _axes[kind] = axis


def channel_axis(module: nn.Module, net: nn.Module | None = None) -> int | None:
    """The axis of a module's output that the pattern `"channels"` keeps; None if it is not known: then a monitor takes 1.

    - By type: 1 for convolutions, batch, group and instance norms, pooling, padding and channel dropout, as PyTorch defines them;
      the last for linear layers, layer norms, RMS norms (those of transformers too), embeddings, attention and recurrent layers.
    - A module that contains others has that of the last of them.
    - `Rearrange` and `Reduce` of einops have the innermost part of the axis where their pattern puts it.
    - All others (activations, dropout, `Identity`, `Flatten`, layers of your own) leave the axis where it is: they have that of
      what comes before them in their container, or else of what comes after, or else of what comes before the container. If such a
      container is no `Sequential` and its order tells nothing, because a layer is made before or after all others, it is 1 in a
      mix of convolutions and linear layers, which holds for 2-d outputs too, and the last if there are layers for tokens.

    `register_channel_axis` extends the types. If the axis is not known and the first observation has more than two axes, there is a
    warning. So there is if a convolution gets no batch: it returns (c, h, w) then, of which axis 1 is the height. Inside a compiled
    graph there is none, because only lifts leave it.

    Args:
        module: the layer.
        net: the network that contains it, which tells what comes before it.

    >>> net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10), nn.ReLU())
    >>> [channel_axis(layer, net) for layer in net]
    [1, 1, 1, -1, -1]
    >>> channel_axis(net[1]) is None  # alone it tells nothing
    True
    """
    return channel_axes(module if net is None else net).get(id(module))


def channel_axes(net: nn.Module) -> dict[int, int]:
    """The axis of every module of a network for which it is known, by the id of the module; see `channel_axis`."""
    return _Walk(net).found


def own_axis(module: nn.Module) -> int | None:
    """The axis that the type of the module settles; None if it settles none."""
    for format_, axis in _FORMATS.items():  # layer norms of ConvNeXt, layers of Keras
        if getattr(module, "data_format", None) == format_:
            return axis
    for kind in type(module).__mro__:
        if kind in _axes:
            return _axes[kind]
        package, _, file = kind.__module__.rpartition(".")
        if file in _FILES and package.startswith("torch."):
            return 1
        for end, axis in _NAMES.items():
            if kind.__name__.endswith(end):
                return axis
    return None


def channel_pattern(axis: int) -> str:
    """The einops pattern that keeps this axis.

    >>> channel_pattern(1), channel_pattern(-1), channel_pattern(2), channel_pattern(-2)
    ('b c ... -> c', '... c -> c', 'b a1 c ... -> c', '... c a1 -> c')
    """
    others = [f"a{number}" for number in range(1, abs(axis))]
    axes = ["...", "c", *others] if axis < 0 else [*(["b", *others] if axis else []), "c", "..."]
    return f"{' '.join(axes)} -> c"


class _Walk:
    """One walk through a network, each module once.

    Attributes:
        found: the axis of each module for which it is known, by its id.
    """

    def __init__(self, net: nn.Module) -> None:
        self.found: dict[int, int] = {}
        self._placed: set[int] = set()
        self._known: dict[int, tuple[bool, bool]] = {}
        self._place(net, None)

    def _place(self, module: nn.Module, before: int | None) -> int | None:
        """Finds the axes of a module and of all in it, and returns its own; `before` is the axis of what comes before it."""
        if id(module) not in self._placed:
            self._placed.add(id(module))
            own, children = own_axis(module), _children(module)
            inside = self._place_all(module, children, before) if children else _behind(module, before)
            axis = inside if own is None else own
            if axis is not None:
                self.found[id(module)] = axis
        return self.found.get(id(module))

    def _place_all(self, module: nn.Module, children: list[nn.Module], before: int | None) -> int | None:
        """Finds the axes of the children of a module, and returns that of its output."""
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for at, child in enumerate(children):
                if before is None and not self._kinds(child)[0]:  # the first layers of a net: what they are fed, the next gets too
                    before = next((own for later in children[at:] if (own := own_axis(later)) is not None), None)
                before = self._place(child, before)
            return before
        settled = [at for at, child in enumerate(children) if self._kinds(child)[0]]
        behind: dict[int, int | None] = {}  # the axis behind each child that settles one, by its position
        last = before
        for at in settled:
            last = behind[at] = self._place(children[at], last)
        among = {axis for axis in behind.values() if axis is not None}
        mixed = len(among) > 1 and not any(self._kinds(child)[1] for child in children)
        whole = max(among) if mixed else last
        for at, child in enumerate(children):
            if at in behind:
                before = behind[at]
            else:
                between = bool(settled) and settled[0] < at < settled[-1]
                self._place(child, before if between else whole)
        return whole

    def _kinds(self, module: nn.Module) -> tuple[bool, bool]:
        """Whether a layer in the module settles an axis, and whether one is for tokens."""
        if id(module) not in self._known:
            self._known[id(module)] = False, False  # a module may hold one that holds it
            own = own_axis(module)
            inside = [(own is not None, own == -1 and not isinstance(module, nn.Linear)), *map(self._kinds, _children(module))]
            self._known[id(module)] = any(settles for settles, _ in inside), any(tokens for _, tokens in inside)
        return self._known[id(module)]


def _children(module: nn.Module) -> list[nn.Module]:
    return list(modules_in(module).values())


def _behind(module: nn.Module, before: int | None) -> int | None:
    """The axis behind a layer that has no channels of its own."""
    name, dims, pattern = type(module).__name__, getattr(module, "dims", None), getattr(module, "pattern", None)
    if name == "Permute" and isinstance(dims, (list, tuple)) and before is not None:  # of torchvision
        place = [dim % len(dims) for dim in dims].index(before % len(dims))
        return -1 if place == len(dims) - 1 else place
    if name in ("Rearrange", "Reduce"):  # layers of einops
        return _rearranged(pattern, before) if before is not None and isinstance(pattern, str) else None
    return before


def _rearranged(pattern: str, axis: int) -> int | None:
    """Where an einops pattern has the innermost part of an axis of what it is given; None if it drops it, or does not name it.

    >>> _rearranged("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", 1), _rearranged("b n (h d) -> b h n d", -1)
    (-1, -1)
    >>> _rearranged("b ... c -> b c ...", -1), _rearranged("b c h w -> b h w", 1)
    (1, None)
    """
    given, returned = (
        [part if isinstance(part, list) else [part] for part in ParsedExpression(side.strip()).composition]
        for side in pattern.split("->")
    )
    counted = given[axis:] if axis < 0 else given[: axis + 1]
    if not counted or [_ELLIPSIS] in counted or not -len(given) <= axis < len(given) or not given[axis]:
        return None
    place = next((at for at, part in enumerate(returned) if given[axis][-1] in part), None)
    if place is None:
        return None
    return place - len(returned) if place == len(returned) - 1 or [_ELLIPSIS] in returned[:place] else place
