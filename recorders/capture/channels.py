"""Which axis of a layer's output is that of its channels, by the type of the layer."""

from __future__ import annotations

from torch import nn

__all__ = ["channel_axis", "channel_pattern", "register_channel_axis"]

_second = dict.fromkeys((nn.GroupNorm, nn.LocalResponseNorm, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Unflatten), 1)
_TOKENS = (nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_BLOCKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_axes: dict[type[nn.Module], int] = {**_second, **dict.fromkeys((nn.Linear, nn.Bilinear, *_TOKENS, *_BLOCKS), -1)}
_FILES = ("conv", "batchnorm", "instancenorm", "pooling", "padding", "upsampling", "pixelshuffle", "channelshuffle")  # of torch: 1
_NAMES = {"LayerNorm2d": 1, **dict.fromkeys(("RMSNorm", "LayerNorm", "Conv1D", "Linear", "PatchEmbed", "PatchEmbeddings"), -1)}
"""Classes of other libraries, by the ends of their names."""


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


def channel_axis(module: nn.Module) -> int | None:
    """The axis of a module's output that the pattern `"channels"` keeps; None if its type does not tell: then a monitor takes 1.

    - 1 for convolutions, batch, group and instance norms, pooling, padding and channel dropout, as PyTorch defines them.
    - The last for linear layers, layer norms, RMS norms (those of `transformers` too), embeddings, attention, recurrent layers and
      the transformer layers of PyTorch.
    - No other type tells: activations, dropout, `Identity`, `Flatten`, containers and layers of your own.

    `register_channel_axis` says it for further types. If nobody says it and the first observation has more than two axes, there is
    one warning, which names these types and what to write. So there is if a convolution gets no batch: it returns (c, h, w) then,
    of which axis 1 is the height. Inside a compiled graph there is none, because only lifts leave it.

    >>> [channel_axis(layer) for layer in (nn.Conv2d(1, 8, 3), nn.Linear(32, 10), nn.ReLU())]
    [1, -1, None]
    """
    if getattr(module, "data_format", None) == "channels_first":  # layer norms of ConvNeXt
        return 1
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
