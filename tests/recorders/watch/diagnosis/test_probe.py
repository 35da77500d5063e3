"""Probe: each relation is found in a planted net and not in its healthy twin; nothing of the user's program changes."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recorders import Checkup, ForwardMonitor, Recorder, findings, presets
from recorders.watch.diagnosis import limits
from recorders.watch.diagnosis.probe import copied
from recorders.watch.diagnosis.probe.probing import Probed, probed
from reducers import Mean

TOKENS, LENGTH = 8, 10


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def shown(result: Probed) -> list[tuple[str, str]]:
    return [(one.kind, one.layer) for one in result.found]


def mlp(middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Sequential(nn.ReLU(), nn.Linear(8, 3)))


def vectors(count: int = 8) -> Tensor:
    return torch.randn(count, 6)


def texts(count: int = 8) -> Tensor:
    return torch.randint(TOKENS, (count, LENGTH + 1))


# Samples


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(0),
        lambda x: x - x.mean(0),
        lambda x: F.normalize(x, dim=0),
        lambda x: x.reshape(8, -1).t(),
        lambda x: x.flip(0),
        lambda x: x.cumsum(0),
    ],
)
def test_samples_that_mix_are_found_where_they_do(function: Callable[[Tensor], Tensor]) -> None:
    assert shown(probed(mlp(Apply(function)), vectors())) == [("samples-mix", "1")]


@pytest.mark.parametrize("middle", [nn.ReLU(), nn.Softmax(1), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Dropout(0.5)])
def test_samples_that_do_not_mix_are_no_fault(middle: nn.Module) -> None:
    result = probed(mlp(middle), vectors())
    assert result.found == []
    assert "samples that mix" in result.examined[0]
    assert result.unexamined == []


def test_a_batch_that_a_recurrent_net_reads_as_time_is_found() -> None:
    class Rows(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 8, batch_first=batch_first), nn.Linear(8, 3)

        def forward(self, images: Tensor) -> Any:
            states, _ = self.lstm(images.squeeze(1))
            return self.head(states[:, -1])

    images = torch.randn(8, 1, 6, 5)
    assert shown(probed(Rows(False), images)) == [("samples-mix", "lstm")]
    assert probed(Rows(True), images).found == []


def test_a_net_with_time_first_mixes_no_samples() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(x)[0])

    assert probed(First(), torch.randn(7, 8, 5)).found == []
    assert probed(First(), torch.randn(7, 4, 5)).found == []
    result = probed(First(), torch.randn(7, 1, 5))
    assert result.found == []
    assert "samples that mix: the example may be one sequence" in result.unexamined


def test_a_sequence_without_samples_is_at_most_a_warning() -> None:
    (found,) = probed(nn.LSTM(6, 8), vectors()).found
    assert (found.kind, found.severity) == ("samples-mix", "warning")
    assert "takes an input of two axes for one sequence" in found.what


def test_the_transformers_of_pytorch_mix_no_samples_in_either_layout() -> None:
    for batch_first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        assert [one.kind for one in probed(net, torch.randn(6, 7, 8)).found if one.severity != "notice"] == []


def test_what_the_loss_needs_of_a_whole_batch_may_be_an_output() -> None:
    def with_load(x: Tensor) -> dict[str, Tensor]:
        return {"logits": x, "load": x.softmax(1).mean(0), "balance": x.mean()}

    assert probed(nn.Sequential(nn.Linear(6, 4), Apply(with_load)), vectors()).found == []


def test_similarities_of_all_pairs_are_meant_to_mix() -> None:
    result = probed(nn.Sequential(nn.Linear(6, 4), Apply(lambda x: x @ x.t())), vectors())
    assert result.found == []
    assert "samples that mix: no output grows with the number of samples" in result.unexamined


def test_a_batch_norm_without_running_statistics_is_meant_to_mix() -> None:
    result = probed(mlp(nn.BatchNorm1d(8, track_running_stats=False)), vectors())
    assert result.found == []
    assert any("normalises over the batch" in line for line in result.unexamined)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        if edges.shape[0] == edges.shape[1]:
            return self.layer(edges @ x)
        return torch.zeros(len(x), 3).index_add(0, edges[1], self.layer(x)[edges[0]])


def test_nodes_of_a_graph_are_meant_to_mix() -> None:
    edges = torch.randint(8, (2, 20))
    assert probed(Graph(), (vectors(), edges)).found == []
    assert probed(Graph(), (vectors(), (torch.rand(8, 8) > 0.5).float())).found == []


def test_offsets_of_bags_are_not_samples() -> None:
    words, offsets = torch.randint(20, (30,)), torch.tensor([0, 5, 9, 20])
    result = probed(nn.EmbeddingBag(20, 4), (words, offsets))
    assert result.found == []
    assert "samples that mix: the tensors of the example differ in the size of axis 0: 4, 30" in result.unexamined


def test_a_mask_that_all_samples_share_does_not_hide_what_mixes() -> None:
    class Masked(nn.Module):
        def __init__(self, mixes: bool) -> None:
            super().__init__()
            self.attention, self.mixes = nn.MultiheadAttention(8, 2, batch_first=True), mixes

        def forward(self, x: Tensor, mask: Tensor) -> Any:
            y, _ = self.attention(x, x, x, attn_mask=mask)
            return y - y.mean(0) if self.mixes else y

    arguments = (torch.randn(6, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1))
    assert ("samples-mix", "(net)") in shown(probed(Masked(True), arguments))
    assert probed(Masked(False), arguments).found == []


# Chance and earlier calls


@pytest.mark.parametrize(
    "dropout", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, lambda x, p, training: nn.Dropout(p).train()(x)]
)
def test_dropout_that_acts_in_evaluation_is_found(dropout: Callable[..., Tensor]) -> None:
    (found,) = probed(mlp(Apply(lambda x: dropout(x, 0.1, True))), vectors()).found
    assert (found.kind, found.layer, found.cause, found.severity) == ("random-in-evaluation", "1", "dropout", "warning")


def test_dropout_of_an_attention_that_acts_in_evaluation_is_found() -> None:
    net = mlp(Apply(lambda x: F.scaled_dot_product_attention(*[x.unflatten(1, (4, 2))] * 3, dropout_p=0.2).flatten(1)))
    assert ("random-in-evaluation", "1") in shown(probed(net, vectors()))


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: x + torch.randn_like(x),
        lambda x: x + torch.rand(8),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: x + random.random() + np.random.rand(),
        lambda x: F.dropout(x, 0.1, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: x[:, torch.rand(8).argsort()],
    ],
)
def test_noise_that_is_drawn_on_purpose_is_no_fault(noise: Callable[[Tensor], Tensor]) -> None:
    assert probed(mlp(Apply(noise)), vectors()).found == []


def test_a_generator_of_the_net_does_not_move_and_is_no_state() -> None:
    net = mlp(nn.ReLU())
    net.generator = torch.Generator().manual_seed(3)  # type: ignore[assignment]
    net.register_forward_hook(lambda module, args, output: output + torch.randn(3, generator=module.generator))
    before = net.generator.get_state()  # type: ignore[operator,union-attr]
    assert probed(net, vectors()).found == []
    assert torch.equal(before, net.generator.get_state())  # type: ignore[operator,union-attr]


class Keeping(nn.Module):
    """Keeps what came out, and adds it in the next call, in some mode."""

    def __init__(self, modes: tuple[bool, ...] = (True, False), *, detached: bool = True, of_all: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.modes, self.detached, self.of_all = modes, detached, of_all
        self.state: tuple[Tensor, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        if self.state is not None and self.training in self.modes:
            found = found + self.state[0]
        kept = found.mean(0) if self.of_all else found
        self.state = (kept.detach() if self.detached else kept,)
        return found


@pytest.mark.parametrize("modes", [(True,), (False,), (True, False)])
@pytest.mark.parametrize("detached", [True, False])
def test_a_state_that_is_carried_over_is_found(modes: tuple[bool, ...], detached: bool) -> None:
    net = Keeping(modes, detached=detached)
    assert shown(probed(net, vectors())) == [("carries-state", "(net)")]
    x = vectors()
    net.train()(x).sum().backward()  # in the course of a training it keeps a state of a whole batch
    for count in (8, 5):  # also if the example is no batch like the last
        found = probed(net, vectors(count)).found
        assert [(one.kind, one.severity, one.cause) for one in found] == [("carries-state", "warning", "carried-state")]


def test_the_state_of_a_recurrent_net_with_layers_first_is_found() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.hidden = nn.GRU(5, 8, 2, batch_first=True), None

        def forward(self, x: Tensor) -> Any:
            y, self.hidden = self.gru(x, self.hidden)
            return y[:, -1]

    net, x = Stateful(), torch.randn(16, 6, 5)
    net(x)
    assert shown(probed(net, torch.randn(12, 6, 5))) == [("carries-state", "gru")] or shown(probed(net, torch.randn(12, 6, 5))) == [
        ("carries-state", "(net)")
    ]


@pytest.mark.parametrize(
    "keeps",
    [
        nn.BatchNorm1d(8),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.BatchNorm1d(8, momentum=None),
    ],
)
def test_statistics_in_buffers_are_no_state(keeps: nn.Module) -> None:
    assert probed(mlp(nn.Sequential(nn.ReLU(), keeps)), vectors()).found == []


def test_outputs_that_are_kept_to_be_looked_at_are_no_state() -> None:
    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        module.last, module.calls = output.detach(), getattr(module, "calls", 0) + 1  # type: ignore[assignment]

    net = mlp(nn.ReLU())
    net[1].register_forward_hook(keep)  # type: ignore[index]
    net(vectors())
    assert probed(net, vectors()).found == []


# Texts


class Attention(nn.Module):
    def __init__(self, kind: str, scale: float | None = None) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))
        self.multi = nn.MultiheadAttention(12, 2, batch_first=True)
        self.kind, self.scale = kind, scale

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.scale is not None:
            q = q * self.scale
        if self.kind == "fused":
            kept = None if hidden is None else ~hidden
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=kept)[:, 0]
        if self.kind == "multi":
            found: Tensor = self.multi(q, k, v, attn_mask=hidden)[0]
            return found
        scores = q @ k.transpose(1, 2) / 12**0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return (scores.softmax(-2 if self.kind == "queries" else -1)) @ v


class Texts(nn.Module):
    """A transformer of one block."""

    def __init__(self, kind: str = "written", *, mask: str = "past", places: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(TOKENS, 12), nn.Embedding(LENGTH, 12)
        self.attention = Attention(kind, scale)
        self.head = nn.Linear(12, TOKENS)
        self.mask, self.places = mask, places

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        if self.places:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        x = x + self.attention(x, {"past": ones.triu(1), "future": ones.tril(-1), "none": None}[self.mask])
        return self.head(x)


@pytest.mark.parametrize("kind", ["written", "fused", "multi"])
@pytest.mark.parametrize("mask", ["past", "future", "none"])
def test_a_net_that_sees_the_next_token_is_found(kind: str, mask: str) -> None:
    text = texts()
    found = probed(Texts(kind, mask=mask), text[:, :-1], text[:, 1:]).found
    if mask == "past":
        assert found == []
    else:
        assert [(one.kind, one.layer, one.cause) for one in found] == [
            ("sees-the-future", "attention.multi" if kind == "multi" else "attention", "mask")
        ]


def test_a_softmax_over_queries_is_told_from_a_mask() -> None:
    text = texts()
    (found,) = probed(Texts("queries"), text[:, :-1], text[:, 1:]).found
    assert (found.kind, found.cause) == ("sees-the-future", "wrong-axis")


def test_positions_that_are_averaged_without_attention_are_no_matter_of_masks() -> None:
    text = texts()
    net = nn.Sequential(nn.Embedding(TOKENS, 12), Apply(lambda x: x - x.mean(1, keepdim=True)), nn.Linear(12, TOKENS))
    (found,) = probed(net, text[:, :-1], text[:, 1:]).found
    assert (found.kind, found.layer, found.cause) == ("sees-the-future", "1", "wrong-axis")


def test_a_convolution_that_is_padded_on_both_sides_lacks_a_mask() -> None:
    text = texts()
    turned = Apply(lambda x: x.transpose(1, 2))
    net = nn.Sequential(nn.Embedding(TOKENS, 12), turned, nn.Conv1d(12, 12, 3, padding=1), nn.ReLU(), turned, nn.Linear(12, TOKENS))
    (found,) = probed(net, text[:, :-1], text[:, 1:]).found
    assert (found.kind, found.layer, found.cause) == ("sees-the-future", "2", "mask")


def test_heads_that_are_joined_by_a_reshape_are_told_from_a_mask() -> None:
    class Joined(Texts):
        def forward(self, tokens: Tensor) -> Any:
            x = self.embedding(tokens)
            heads = torch.unflatten(x, -1, (3, 4)).transpose(1, 2)
            read = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return self.head(x + read.reshape(x.shape))

    text = texts()
    (found,) = probed(Joined(), text[:, :-1], text[:, 1:]).found
    assert (found.kind, found.cause) == ("sees-the-future", "wrong-axis")


@pytest.mark.parametrize("masked", [True, False])
def test_a_decoder_that_sees_the_next_token_is_found(masked: bool) -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(TOKENS, 12), nn.Linear(12, TOKENS)
            self.places = nn.Embedding(LENGTH, 12)
            self.transformer = nn.Transformer(12, 2, 1, 1, 24, dropout=0.0, batch_first=True)

        def placed(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))

        def forward(self, source: Tensor, before: Tensor) -> Tensor:
            mask = torch.ones(before.shape[1], before.shape[1], dtype=torch.bool).triu(1) if masked else None
            return self.head(self.transformer(self.placed(source), self.placed(before), tgt_mask=mask))

    text, source = texts(), texts()[:, :-1]
    found = probed(Translator(), (source, text[:, :-1]), text[:, 1:]).found
    assert [one.kind for one in found] == ([] if masked else ["sees-the-future"])
    assert all(one.layer == "transformer.decoder.layers.0.self_attn" for one in found)


def test_a_loss_that_shifts_the_target_tells_a_net_that_predicts_from_one_that_tags() -> None:
    text = texts()[:, :-1]
    net = Texts(mask="none")
    logits = net(text).detach()
    ahead = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten()))
    same = float(F.cross_entropy(logits.flatten(0, 1), text.flatten()))
    assert abs(ahead - same) > 0.01
    assert [one.kind for one in probed(net, text, text, ahead).found] == ["sees-the-future"]
    assert probed(net, text, text, same).found == []
    assert probed(Texts(), text, text, ahead).found == []


def test_a_net_that_tags_may_see_all() -> None:
    text = texts()
    net = Texts(mask="none")
    for target in (None, text[:, :-1] % 3, torch.zeros(8, dtype=torch.long), text[:, :-1]):
        assert probed(net, text[:, :-1], target).found == []


@pytest.mark.parametrize("values", [2, 5])
def test_forecasts_of_values_are_predictions_of_what_comes_next(values: int) -> None:
    series = torch.randn(8, LENGTH + 1, values)

    class Recurrent(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.gru = nn.GRU(values, 8, batch_first=True, bidirectional=both)
            self.head = nn.Linear(16 if both else 8, values)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.gru(x)[0])

    assert probed(Recurrent(False), series[:, :-1], series[:, 1:]).found == []
    assert shown(probed(Recurrent(True), series[:, :-1], series[:, 1:])) == [("sees-the-future", "gru")]


def trained(net: nn.Module, target: Callable[[Tensor], Tensor]) -> nn.Module:
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        text = texts(32)
        optimizer.zero_grad()
        F.cross_entropy(net(text[:, :-1]).flatten(0, 1), target(text).flatten()).backward()
        optimizer.step()
    return net


def test_a_target_that_is_the_input_is_found_once_the_net_repeats_it() -> None:
    text = texts()
    (found,) = probed(trained(Texts(), lambda text: text[:, :-1]), text[:, :-1], text[:, :-1]).found
    assert (found.kind, found.layer, found.cause) == ("targets-are-inputs", "target", "labels-do-not-fit")
    shifts_in_its_loss = trained(Texts(), lambda text: text[:, 1:])
    assert probed(shifts_in_its_loss, text[:, :-1], text[:, :-1]).found == []


@pytest.mark.parametrize("kind", ["written", "fused", "multi"])
@pytest.mark.parametrize(("scale", "found"), [(500.0, "attention-saturated"), (1e-6, "attention-uniform"), (4.0, None)])
def test_scores_of_the_wrong_scale_are_found(kind: str, scale: float, found: str | None) -> None:
    result = probed(Texts(kind, mask="none", scale=scale), texts()[:, :-1])
    assert [one.kind for one in result.found] == ([] if found is None else [found])
    assert all(one.layer in ("attention", "attention.multi") and one.cause == "attention-scale" for one in result.found)


def test_a_softmax_that_weighs_nothing_is_no_attention() -> None:
    net = nn.Sequential(nn.Embedding(TOKENS, 12), Apply(lambda x: (1e4 * x).softmax(-1)))
    assert probed(net, texts()).found == []


@pytest.mark.parametrize("kind", ["written", "fused", "multi"])
@pytest.mark.parametrize("pooled", [True, False])
def test_positions_that_are_missing_are_found(kind: str, pooled: bool) -> None:
    for places in (True, False):
        net: nn.Module = Texts(kind, mask="none", places=places)
        net = nn.Sequential(net, Apply(lambda x: x.mean(1))) if pooled else net
        found = probed(net, texts()[:, :-1]).found
        assert [(one.kind, one.severity) for one in found] == ([] if places else [("order-has-no-effect", "warning")])


def test_a_bag_of_words_without_attention_has_no_order_and_is_no_fault() -> None:
    assert probed(nn.Sequential(nn.Embedding(TOKENS, 12), Apply(lambda x: x.mean(1))), texts()).found == []


def test_a_set_of_vectors_has_no_order_which_is_a_notice() -> None:
    net = nn.Sequential(Apply(lambda x: F.scaled_dot_product_attention(x, x, x)), nn.Linear(8, 3), Apply(lambda x: x.mean(1)))
    (found,) = probed(net, torch.randn(6, 7, 8)).found
    assert (found.kind, found.severity) == ("order-has-no-effect", "notice")


@pytest.mark.parametrize("places", [True, False])
def test_places_of_patches_that_are_missing_are_found(places: bool) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.positions = nn.Conv2d(3, 12, 2, 2), nn.Parameter(torch.randn(16, 12))
            self.attention, self.head = Attention("written"), nn.Linear(12, 4)

        def forward(self, images: Tensor) -> Any:
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = x + self.positions if places else x
            return self.head((x + self.attention(x, None)).mean(1))

    assert shown(probed(Patches(), torch.randn(6, 3, 8, 8))) == ([] if places else [("order-has-no-effect", "(net)")])


def test_positions_that_are_zero_at_the_start_are_not_missing() -> None:
    net = Texts(mask="none")
    nn.init.zeros_(net.positions.weight)
    result = probed(net, texts()[:, :-1])
    assert result.found == []
    assert any("a parameter is zero" in line for line in result.unexamined)


# Inputs without effect


@pytest.mark.parametrize(
    ("read", "missing"),
    [(lambda x: x[:, :2], True), (lambda x: x[:, -1:], True), (lambda x: x[:, ::3], True), (lambda x: x, False)],
)
def test_features_that_have_no_effect_are_found(read: Callable[[Tensor], Tensor], missing: bool) -> None:
    net = nn.Sequential(Apply(read), nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3))
    net(vectors())
    assert shown(probed(net, vectors())) == ([("ignores-inputs", "0")] if missing else [])


@pytest.mark.parametrize("pooled", [True, False])
def test_images_of_which_only_means_over_an_axis_are_read_are_found(pooled: bool) -> None:
    net = nn.Sequential(nn.AvgPool2d((1, 8) if pooled else (8, 1)), nn.Flatten(), nn.Linear(8, 10))
    assert shown(probed(net, torch.randn(6, 1, 8, 8))) == ([("ignores-inputs", "0")] if pooled else [])


def test_a_set_of_vectors_may_be_pooled() -> None:
    net = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), Apply(lambda x: x.mean(1)), nn.Linear(16, 3))
    assert probed(net, torch.randn(6, 12, 9)).found == []


@pytest.mark.parametrize("length", [8, 200])
@pytest.mark.parametrize("index", [0, -1])
def test_a_state_that_is_read_too_early_is_found_and_one_that_fades_is_not(length: int, index: int) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(x)[0][:, index])

    assert shown(probed(Reads(), torch.randn(6, length, 5))) == ([("ignores-inputs", "head")] if index == 0 else [])


@pytest.mark.parametrize(("halves", "unread"), [((0, 0), "backward"), ((1, 1), "forward"), ((0, 1), None)])
def test_a_direction_that_is_not_read_is_found(halves: tuple[int, int], unread: str | None) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 4, 2, batch_first=True, bidirectional=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            parts = self.lstm(x)[0].chunk(2, -1)
            return self.head(torch.cat([parts[half] for half in halves], -1))

    found = probed(Both(), torch.randn(6, 7, 5)).found
    assert [(one.kind, one.layer) for one in found] == ([("ignores-inputs", "lstm")] if unread else [])
    assert all(f"the {unread} direction" in one.what for one in found)


class Padded(nn.Module):
    """Means of the embeddings that a mask keeps."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.inverted = nn.Embedding(TOKENS, 12), nn.Linear(12, 3), inverted

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        kept = attention_mask.bool() if padding_mask is None else ~padding_mask  # type: ignore[union-attr]
        kept = (~kept if self.inverted else kept).unsqueeze(2)
        return self.head((self.embedding(tokens) * kept).sum(1) / kept.sum(1).clamp(min=1))


@pytest.mark.parametrize("inverted", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("shortest", [2, 5])
def test_a_mask_that_is_inverted_is_found(inverted: bool, zeros: bool, shortest: int) -> None:
    tokens = torch.randint(1, TOKENS, (8, LENGTH))
    padding = torch.arange(LENGTH) >= torch.randint(shortest, shortest + 4, (8, 1))
    tokens = tokens.masked_fill(padding, 0) if zeros else tokens
    equal = [("equal-outputs", "embedding")] if zeros else []  # all padding is alike
    expected = [*equal, ("mask-inverted", "head")] if inverted else []
    assert shown(probed(Padded(inverted), {"tokens": tokens, "padding_mask": padding})) == expected
    assert shown(probed(Padded(inverted), {"tokens": tokens, "attention_mask": (~padding).long()})) == expected


def test_positions_beyond_the_length_of_each_sample_are_padding() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(TOKENS, 12), nn.Linear(12, 3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Any:
            kept = (torch.arange(tokens.shape[1]) < lengths[:, None]).unsqueeze(2)
            return self.head((self.embedding(tokens) * kept).sum(1))

    result = probed(Cut(), (torch.randint(TOKENS, (8, 40)), torch.randint(3, 9, (8,))))
    assert result.found == []


def test_inputs_that_chance_chooses_are_not_examined() -> None:
    def masked(x: Tensor) -> Tensor:
        return x[:, torch.rand(x.shape[1]).argsort()[:3]].mean(1)

    result = probed(nn.Sequential(nn.Embedding(TOKENS, 6), Apply(masked)), texts())
    assert result.found == []
    assert any("draws random numbers" in line for line in result.unexamined)


# Structure


class GraphAttention(nn.Module):
    """Scores are sums of two numbers, through a leaky ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.first, self.second, self.head = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 1), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.values(x)
        shares = F.leaky_relu(self.first(h) + self.second(h).transpose(1, 2), 0.2).softmax(-1)
        return self.head(F.elu(shares @ h))


def narrow_convolutions() -> nn.Module:
    """Two blocks that narrow their channels without an activation function, as in MobileNet."""

    def block(channels: int) -> list[nn.Module]:
        wide = [nn.Conv2d(channels, 24, 1), nn.BatchNorm2d(24), nn.ReLU6()]
        each = [nn.Conv2d(24, 24, 3, groups=24, padding=1), nn.BatchNorm2d(24), nn.ReLU6()]
        return [*wide, *each, nn.Conv2d(24, 8, 1), nn.BatchNorm2d(8)]

    last = [nn.Conv2d(8, 24, 1), nn.BatchNorm2d(24), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*block(3), *block(8), *last, nn.Linear(24, 3))


class Adapted(nn.Module):
    """A layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 8, bias=False), nn.Linear(8, 24, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + 2 * self.up(self.down(x))


class Projected(nn.Module):
    """Returns what its projector gives, which its predictor reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.predictor = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 16))

    def forward(self, x: Tensor) -> Any:
        projected = self.projector(x)
        return self.predictor(projected), projected.detach()


class Unscaled(nn.Module):
    """Attention whose scores nobody scales, as its weights begin small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)
        self.query, self.key, self.value = (nn.Linear(12, 12, bias=False) for _ in range(3))
        nn.init.normal_(self.query.weight, std=(12 * 12) ** -0.5)
        nn.init.normal_(self.key.weight, std=12**-0.5)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(x)
        return self.head(x + (self.query(h) @ self.key(h).transpose(1, 2)).softmax(-1) @ self.value(h))


class OneKey(nn.Module):
    """Attention to what may be one key, and its shares."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        shares = (self.query(x) @ self.key(memory).transpose(1, 2) / 12**0.5).softmax(-1)
        return self.query(x) + shares @ self.value(memory), shares


class NormedLast(nn.Module):
    """A transformer that projects its inputs, and normalises after its attention."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.project, self.norm, self.head = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 3)
        self.attention = Attention("fused" if fused else "written")

    def forward(self, x: Tensor) -> Any:
        h = self.project(x) + torch.linspace(-1, 1, x.shape[1])[:, None]
        return self.head(self.norm(h + self.attention(h, None)))


class Autoencoder(nn.Module):
    """Its code is two numbers, drawn in training."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(16, 2), nn.Linear(16, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> Any:
        h = self.encoder(x)
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(code), mean, log_variance


class WithStates(nn.Module):
    """Returns logits and the hidden states that they are of, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.5)), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Any:
        states = self.body(x)
        return {"states": states, "logits": self.head(states)}


def reparametrised() -> nn.Module:
    weight_norm, spectral_norm = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        weight_norm(nn.Linear(6, 12)), nn.ReLU(), weight_norm(nn.Linear(12, 12)), nn.ReLU(), spectral_norm(nn.Linear(12, 3))
    )


def next_token(shift: int) -> tuple[nn.Module, Any, Any, float]:
    """A causal net, texts, and targets that are ahead of them, or that the loss shifts."""
    net, given = Texts(mask="past"), texts()
    x, y = given[:, :-1], given[:, :-1] if shift else given[:, 1:]
    logits = net(x).detach().transpose(1, 2)
    return net, x, y, float(F.cross_entropy(logits[:, :, :-shift] if shift else logits, y[:, shift:]))


class Messages(nn.Module):
    """Adds a projection of each node to what its neighbours send it, and reads the sum by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.sent, self.read = nn.Linear(6, 12), nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        received = torch.zeros(len(x), 12)
        received.index_add_(0, torch.arange(len(x)), self.sent(x).relu())
        return self.read(received + self.own(x))


HEALTHY: dict[str, Callable[[], tuple[Any, ...]]] = {
    "attention with a leaky ReLU before its softmax": lambda: (GraphAttention(), torch.randn(8, 5, 6), torch.randint(3, (8, 5))),
    "narrow convolutions": lambda: (narrow_convolutions(), torch.randn(8, 3, 6, 6), torch.randint(3, (8,))),
    "an adapter of low rank": lambda: (nn.Sequential(Adapted(), nn.ReLU(), nn.Linear(24, 3)), torch.randn(32, 24)),
    "a projector whose outputs are returned": lambda: (Projected(), torch.randn(32, 6)),
    "unscaled attention with small weights": lambda: (Unscaled(), torch.randn(8, 5, 12), torch.randint(3, (8, 5))),
    "attention to one key": lambda: (OneKey(), (torch.randn(8, 5, 12), torch.randn(8, 1, 12)), torch.randn(8, 5, 12)),
    "attention to one key, without a target": lambda: (OneKey(), (torch.randn(8, 5, 12), torch.randn(8, 1, 12))),
    "a projection before attention": lambda: (NormedLast(fused=False), torch.randn(8, 5, 12), torch.randint(3, (8, 5))),
    "a projection before fused attention": lambda: (NormedLast(fused=True), torch.randn(8, 5, 12), torch.randint(3, (8, 5))),
    "messages that a projection is added to": lambda: (Messages(), torch.randn(32, 6), torch.randint(3, (32,))),
    "parametrised weights": lambda: (reparametrised(), torch.randn(32, 6), torch.randint(3, (32,))),
    "a code of two numbers": lambda: (Autoencoder(), torch.randn(32, 12), torch.randn(32, 12)),
    "a causal net": lambda: next_token(0),
    "a causal net whose loss shifts": lambda: next_token(1),
    "counts that a ReLU gives": lambda: (
        nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1), nn.ReLU()),
        torch.randn(32, 6),
        torch.randint(5, (32, 1)).float(),
    ),
    "states with dropout beside logits": lambda: (WithStates(), torch.randn(32, 6), torch.randint(3, (32,))),
    "states with dropout, without a target": lambda: (WithStates(), torch.randn(32, 6)),
}
"""Nets that are meant as they are: what `probed` is given of each."""


@pytest.mark.parametrize("name", HEALTHY)
def test_what_people_build_on_purpose_is_no_fault(name: str) -> None:
    result = probed(*HEALTHY[name]())
    assert [one for one in result.found if one.severity != "notice"] == []
    assert "activation functions between layers" in result.examined[0]


# Samples that a net no longer tells apart


def killed() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.constant_(net[0].bias, -50.0)  # type: ignore[arg-type]
    return net


def scaled_by_zero() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    nn.init.zeros_(net[2].weight)  # type: ignore[arg-type]
    return net


def flat() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Linear(8, 3))
    nn.init.constant_(net[0].bias, 60.0)  # type: ignore[arg-type]
    return net


class ReadsOnePlace(nn.Module):
    """Reads a place of what its first layer gives that does not depend on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.place, self.last = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        places = torch.stack((self.place.expand(len(x), 8), self.first(x)), 1)
        return self.last(places[:, 0])


@pytest.mark.parametrize(
    ("make", "place", "cause"),
    [
        (killed, "1", "dead-units"),
        (scaled_by_zero, "2", "normalisation"),
        (flat, "1", "saturation"),
        (ReadsOnePlace, "first", "bottleneck"),
    ],
)
def test_the_module_is_named_that_makes_all_samples_equal(make: Callable[[], nn.Module], place: str, cause: str) -> None:
    assert [(one.layer, one.cause) for one in probed(make(), vectors()).found if one.kind == "equal-outputs"] == [(place, cause)]


@pytest.mark.parametrize("batches", [3, 100])
def test_a_batch_norm_that_has_seen_few_batches_is_not_judged(batches: int) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.03), nn.Linear(8, 3))
    norm: Any = net[1]
    nn.init.constant_(norm.bias, 5.0)
    norm.weight.data *= 1e-6
    for _ in range(batches):
        net(vectors())
    result = probed(net, vectors())
    assert ("equal-outputs" in {one.kind for one in result.found}) == (batches == 100)
    line = "samples that differ: the running statistics of 1 still are near those that it began with"
    assert (line in result.unexamined) == (batches == 3)


def test_equal_samples_and_outputs_of_zero_tell_nothing() -> None:
    net = mlp(nn.ReLU())
    assert "equal-outputs" not in {one.kind for one in probed(net, torch.ones(8, 6)).found}
    nn.init.zeros_(net[2][1].weight)  # type: ignore[index]
    nn.init.zeros_(net[2][1].bias)  # type: ignore[index]
    assert "equal-outputs" not in {one.kind for one in probed(net, vectors()).found}


def test_samples_of_one_class_may_have_one_output() -> None:
    x = vectors()
    x[:, 0] = torch.where(torch.arange(len(x)) < len(x) // 2, 1, -1)
    net = nn.Sequential(nn.Linear(6, 6), Apply(lambda y: torch.cat((y[:, :1].mul(1e3).tanh(), y[:, :1].sign()), 1)))
    nn.init.eye_(net[0].weight)
    assert "equal-outputs" not in {one.kind for one in probed(net, x).found}
    x[:, 0] = 1
    assert "equal-outputs" in {one.kind for one in probed(net, x).found}


def test_positions_that_are_asked_for_one_place_only_are_named() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(TOKENS, 12), nn.Embedding(LENGTH, 12)
            self.attention = Attention("written")

        def forward(self, text: Tensor) -> Any:
            return self.attention(self.tokens(text) + self.positions(torch.zeros_like(text)), None).mean(1)

    (found,) = (one for one in probed(Placed(), texts()[:, :-1]).found if one.kind == "order-has-no-effect")
    assert (found.layer, found.cause) == ("positions", "inputs-constant")


# Attention, classes and what nets are given


@pytest.mark.parametrize("fused", [True, False])
def test_scores_that_are_multiplied_by_the_root_are_not_scaled(fused: bool) -> None:
    def attend(x: Tensor, scale: float) -> Tensor:
        q = k = v = 2 * x
        return F.scaled_dot_product_attention(q, k, v, scale=scale) if fused else ((q @ k.mT) * scale).softmax(-1) @ v

    for scale, kinds in ((16**0.5, ["attention-unscaled"]), (16**-0.5, [])):
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Apply(lambda x, by=scale: attend(x, by)), nn.Linear(16, 3))
        found = [one.kind for one in probed(net, torch.randn(8, 5, 6), torch.randint(3, (8, 5))).found if one.severity != "notice"]
        assert [kind for kind in found if kind == "attention-unscaled"] == kinds


def test_scores_that_training_made_large_are_no_fault() -> None:
    """Queries and keys have learned one direction, which counts; shuffled weights do not know of it."""

    direction = torch.randn(64).sign()

    class Learned(nn.Module):
        def __init__(self, learned: bool) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(64, 16), nn.Linear(64, 16)
            signs = torch.randn(16).sign()
            for one in (self.query, self.key):
                one.weight.data = torch.outer(signs, direction) / 64 if learned else torch.randn(16, 64) / 3

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT).softmax(-1) @ x

    x = torch.randn(8, 5, 1) * direction + 0.3 * torch.randn(8, 5, 64)
    for learned in (True, False):
        found = [one.kind for one in probed(Learned(learned), x).found if one.kind == "attention-unscaled"]
        assert found == ([] if learned else ["attention-unscaled"])


def test_a_softmax_over_frames_is_found_without_a_target_of_their_number() -> None:
    for axis, kinds in ((1, ["softmax-axis"]), (2, [])):
        net = nn.Sequential(nn.GRU(6, 8, batch_first=True), Apply(lambda given: given[0]), nn.Linear(8, 5), nn.LogSoftmax(axis))
        assert [one.kind for one in probed(net, torch.randn(8, 7, 6), torch.randint(5, (8, 3))).found] == kinds


def test_a_class_that_is_ignored_is_told_from_one_that_is_seldom_right() -> None:
    x, y = torch.eye(6).repeat(10, 1), torch.arange(6).repeat(10)
    blind = nn.Linear(6, 6)
    nn.init.eye_(blind.weight)
    nn.init.zeros_(blind.bias)
    assert probed(blind, x, y).found == []
    with torch.no_grad():
        blind.bias[0] = -9
    (found,) = probed(blind, x, y).found
    assert (found.kind, found.layer, found.cause) == ("class-ignored", "loss", "wrong-loss")
    assert found.what == "the net never says class 0, which 10 of 60 labels are; of the others 100% are right"
    assert probed(blind, x, y.where(y != 0, -100)).found == []  # which is left out on purpose
    with torch.no_grad():
        blind.bias[1:4] = -9
    assert probed(blind, x, y).found == []  # it has not learned yet


def test_a_decoder_that_is_given_the_target_in_training_alone_repeats_nothing() -> None:
    class Decoder(nn.Module):
        def forward(self, text: Tensor, given: Tensor) -> Tensor:
            return F.one_hot(given if self.training else text, TOKENS).float()

    text = texts()
    assert "targets-are-inputs" not in {one.kind for one in probed(Decoder(), (text.float(), text), text).found}


def test_a_state_goes_on_from_one_piece_of_a_text_to_the_next() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru, self.head = nn.Embedding(TOKENS, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, TOKENS)
            self.state: Any = None

        def forward(self, text: Tensor) -> Any:
            y, state = self.gru(self.embed(text), self.state if self.training else None)
            self.state = state.detach()
            return self.head(y)

    text = texts()
    for target, severity in ((text[:, 1:], "notice"), (torch.randint(TOKENS, text[:, 1:].shape), "warning")):
        assert [(one.kind, one.severity) for one in probed(Reader(), text[:, :-1], target).found] == [("carries-state", severity)]


def test_what_several_layers_read_is_no_layer_without_an_activation_function() -> None:
    class Messages(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            self.embed, self.own, self.others, self.both = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), both

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return (self.own(h) + (self.others(h).flip(1) if self.both else 0)).relu()

    for both, kinds in ((True, []), (False, ["linear-net"])):
        assert [one.kind for one in probed(Messages(both), torch.randn(8, 5, 6)).found] == kinds


@pytest.mark.parametrize("beside", [True, False])
def test_two_units_that_all_passes_through_are_found(beside: bool) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down, self.up, self.last = nn.Linear(6, 24), nn.Linear(24, 2), nn.Linear(2, 24), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Any:
            h = self.first(x).relu()
            return self.last((self.up(self.down(h).relu()) + (h if beside else 0)).relu())

    found = probed(Narrow(), vectors(), torch.randint(3, (8,))).found
    assert [(one.kind, one.layer) for one in found] == ([] if beside else [("bottleneck", "down")])
    assert probed(Narrow(), vectors(), vectors()).found == []  # a code of the inputs


def test_a_number_for_each_item_beside_its_vector_is_its_bias() -> None:
    class Factors(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.users, self.items, self.offsets = nn.Embedding(20, 4), nn.Embedding(30, width), nn.Embedding(30, 1)

        def forward(self, user: Tensor, item: Tensor) -> Any:
            return (self.users(user) * self.items(item)).sum(1) + self.offsets(item)[:, 0]

    for width, kinds in ((4, []), (1, ["bottleneck"])):
        net = Factors(width)
        with presets.health().modules(net) as recorder:
            for _ in range(3):
                net(torch.randint(20, (8,)), torch.randint(30, (8,)))
        assert [one.kind for one in findings(recorder) if one.kind == "bottleneck"] == kinds


# Odd inputs


@dataclass
class Outputs:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


@pytest.mark.parametrize(
    "function", [lambda x: {"a": x.softmax(0)}, lambda x: Outputs(x.softmax(0), (x,)), lambda x: [x, (x, x.softmax(0))]]
)
def test_outputs_may_be_nested(function: Callable[[Tensor], Any]) -> None:
    assert shown(probed(nn.Sequential(nn.Linear(6, 4), Apply(function)), vectors())) == [("samples-mix", "1")]


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("missing")


class NotCopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("net", "example", "why"),
    [
        (Raises(), vectors(), "KeyError: 'missing'"),
        (NotCopied(), vectors(), "TypeError: cannot pickle 'generator' object"),
        (nn.Linear(6, 3), torch.randn(8, 5), "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (nn.Linear(6, 3), {"wrong": vectors()}, "TypeError"),
        (nn.Linear(6, 3), "text", "the example holds no tensor"),
        (nn.Linear(6, 3), (), "the example holds no tensor"),
        (nn.Linear(6, 3), {}, "the example holds no tensor"),
        (Apply(lambda x: x.argmax(1)), vectors(), "it returns no floating-point tensor"),
        (Apply(lambda x: "text"), vectors(), "it returns no floating-point tensor"),
        (nn.Linear(6, 3, device="meta"), vectors(), "its parameters hold no numbers"),
    ],
)
def test_what_cannot_be_examined_is_one_line(net: nn.Module, example: Any, why: str) -> None:
    result = probed(net, example)
    assert (result.found, result.examined) == ([], [])
    (line,) = result.unexamined
    assert line.startswith(f"relations of the net: {why}")
    assert "\n" not in line


@pytest.mark.parametrize(
    "example",
    [
        torch.randn(1, 6),
        torch.randn(0, 6),
        torch.randn(2, 6),
        torch.randn(3, 6),
        torch.randn(6),
        torch.full((8, 6), float("nan")),
        torch.zeros(8, 6),
        torch.randn(8, 6, requires_grad=True),
        torch.randn(5, 7, 6),
    ],
)
def test_examples_of_any_size_raise_no_alarm(example: Tensor) -> None:
    assert probed(mlp(nn.ReLU()), example).found == []
    assert probed(mlp(nn.ReLU()), (example,)).found == []
    assert probed(mlp(nn.ReLU()), {"input": example}).found == []


def test_numbers_and_scalars_beside_tensors_are_left_alone() -> None:
    net = Apply(lambda x, t, flag: x * t if flag else x.softmax(0))
    assert probed(net, (vectors(), torch.tensor(2.0), True)).found == []
    assert shown(probed(net, (vectors(), torch.tensor(2.0), False))) == [("samples-mix", "(net)")]


def test_a_tuple_that_is_one_argument_is_given_as_one() -> None:
    net = nn.Sequential(Apply(lambda pair: pair[0] - pair[1]), nn.Linear(6, 3))
    assert probed(net, (vectors(), vectors())).found == []
    mixing = nn.Sequential(Apply(lambda pair: (pair["a"] - pair["b"]).softmax(0)), nn.Linear(6, 3))
    assert shown(probed(mixing, {"a": vectors(), "b": vectors()})) == [("samples-mix", "0")]


def test_a_net_that_runs_on_whole_batches_only_is_examined() -> None:
    net = nn.Sequential(nn.Linear(6, 4), Apply(lambda x: x.view(8, 4)), Apply(lambda x: F.dropout(x, 0.5)))
    assert shown(probed(net, vectors())) == [("random-in-evaluation", "2")]


def test_an_input_that_is_changed_in_place_stays_as_it_is() -> None:
    x = vectors()
    before = x.clone()
    assert probed(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), x).found == []
    assert torch.equal(x, before)


def test_nets_above_the_limit_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied, "PROBE", limits.PROBE._replace(bytes=100))
    (line,) = probed(mlp(nn.ReLU()), vectors()).unexamined
    assert line == "relations of the net: its parameters take 332 bytes; nets of more than 100 are not copied"


# Nothing changes


def state_of(net: nn.Module) -> list[Any]:
    tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in net.modules()]
    return [
        [tensor.detach().clone() for tensor in tensors],
        [tensor._version for tensor in tensors],
        [module.training for module in net.modules()],
        hooks,
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    ]


def assert_equal(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0) if isinstance(one, Tensor) else None
        if isinstance(one, list) and one and isinstance(one[0], Tensor):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        elif not isinstance(one, Tensor):
            assert one == other


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_training_changes(training: bool) -> None:
    net = nn.Sequential(
        nn.Embedding(TOKENS, 12, max_norm=1.0),
        nn.TransformerEncoderLayer(12, 2, 16, dropout=0.2, batch_first=True),
        Apply(lambda x: F.dropout(x, 0.1).transpose(1, 2)),
        nn.BatchNorm1d(12),
        Apply(lambda x: x + torch.randn_like(x) + random.random() + np.random.rand()),
    )
    x = texts()
    recorder = presets.health().modules(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    net.train(training)
    net[1].eval()
    before, samples, step = state_of(net), recorder.samples, recorder.clock.step
    found = findings(recorder, example=x, target=x)
    assert any(line.startswith("relations of the net") for line in found.examined)
    assert_equal(before, state_of(net))
    assert (recorder.samples, recorder.clock.step) == (samples, step)
    recorder.deregister()


def test_the_copy_is_gone_afterwards() -> None:
    made: list[weakref.ref[nn.Module]] = []

    class Told(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            new = Told(6, 3)
            made.append(weakref.ref(new))
            return new

    probed(Told(6, 3), vectors())
    gc.collect()
    assert made
    assert [ref() for ref in made if ref() is not None] == []


def test_it_works_within_the_modes_of_the_user() -> None:
    net = mlp(Apply(lambda x: x.softmax(0)))
    expected = [("samples-mix", "1")]
    with torch.inference_mode():
        assert shown(probed(net, vectors())) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert shown(probed(net, vectors())) == expected
        assert torch.is_autocast_enabled("cpu")
    with torch.device("cpu"), torch.no_grad():
        assert shown(probed(net, vectors())) == expected
        assert not torch.is_grad_enabled()


def test_a_user_hook_belongs_to_the_net() -> None:
    net = mlp(nn.Tanh())
    net[1].register_forward_hook(lambda module, args, output: output.softmax(0))  # type: ignore[index]
    assert shown(probed(net, vectors())) == [("samples-mix", "1")]


def test_a_wrapped_net_is_examined_under_the_names_of_the_one_inside() -> None:
    net = mlp(Apply(lambda x: x.softmax(0)))
    assert shown(probed(nn.DataParallel(net), vectors())) == [("samples-mix", "1")]
    recorder = presets.health().modules(nn.DataParallel(net))
    assert ("samples-mix", "1") in [(one.kind, one.layer) for one in findings(recorder, example=vectors())]
    recorder.deregister()


@pytest.mark.slow
def test_a_compiled_net_is_run_eagerly_and_not_compiled_again() -> None:
    torch.compiler.reset()
    net = mlp(nn.Sequential(nn.Tanh(), Apply(lambda x: x.softmax(0))))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with presets.health().modules(net) as recorder:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(4):
            optimizer.zero_grad()
            compiled(vectors()).square().mean().backward()
            optimizer.step()
            if step == 2:
                made, samples = len(graphs), recorder.samples
                found = findings(recorder, example=vectors())
                assert ("samples-mix", "1.1") in [(one.kind, one.layer) for one in found]
                assert recorder.samples == samples
        assert len(graphs) == made
        assert recorder["output/0"].samples == 4
    assert shown(probed(compiled, vectors())) == [("samples-mix", "1.1")]
    torch.compiler.reset()


# Findings and checkups


def test_findings_without_an_example_run_nothing() -> None:
    calls = []
    net = mlp(Apply(lambda x: calls.append(1) or x.softmax(0)))  # type: ignore[func-returns-value]
    with presets.health().modules(net) as recorder:
        net(vectors())
        found = findings(recorder)
    assert len(calls) == 1
    assert "samples-mix" not in {one.kind for one in found}


def test_an_example_needs_a_recorder() -> None:
    with presets.health().modules(net := mlp(nn.ReLU())) as recorder:
        net(vectors())
    with pytest.raises(TypeError, match="example= needs a recorder"):
        findings(recorder.sync(), example=vectors())


def test_a_recorder_of_any_kind_knows_its_net() -> None:
    net = mlp(Apply(lambda x: x.softmax(0)))
    recorder = Recorder(ForwardMonitor(Mean())).modules(net)
    assert "samples-mix" in {one.kind for one in findings(recorder, example=vectors())}
    recorder.deregister()
    del net
    gc.collect()
    assert any("no longer exists" in line for line in findings(recorder, example=vectors()).unexamined)


def test_a_checkup_with_an_example_runs_the_net() -> None:
    net = mlp(Apply(lambda x: x.softmax(0)))
    with presets.health().modules(net) as recorder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkup = Checkup(recorder, example=vectors())
        for _ in range(10):
            net(vectors())
            checkup.step()
    assert "samples-mix" in [one.kind for one in checkup.found]
    assert any("the outputs of samples change" in str(one.message) for one in told)


def test_copies_of_a_net_with_monitors_record_nothing() -> None:
    net = mlp(nn.ReLU())
    with presets.health().modules(net) as recorder:
        copy.deepcopy(net)(vectors())
        assert not any(recorder.samples.values())


class Residual(nn.Module):
    """Adds to what it reads what a layer makes of it, some of it without a graph."""

    def __init__(self, cut: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.cut = nn.Linear(6, 6), cut

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cut(self.layer(x).tanh())


def cut_half(x: Tensor) -> Tensor:
    return torch.cat((x[:, :3].detach(), x[:, 3:]), 1)


def without_graph(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


@pytest.mark.parametrize("cut", [cut_half, Tensor.detach, without_graph])
def test_a_part_of_the_way_that_is_cut_is_found(cut: Callable[[Tensor], Tensor]) -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Residual(cut), nn.Linear(6, 3))
    (found,) = [one for one in probed(net, vectors()).found if one.kind == "gradient-cut"]
    assert (found.layer, found.severity, found.cause) == ("2.layer", "warning", "detached")
    before = copy.deepcopy(net.state_dict())
    net[2].cut = lambda x: x
    assert "gradient-cut" not in {one.kind for one in probed(net, vectors()).found}
    assert all(bool((value == before[name]).all()) for name, value in net.state_dict().items())


def test_a_cut_is_told_of_the_layer_before_it_in_a_deep_net() -> None:
    for at in (17, 18):
        blocks = [nn.Sequential(Residual(lambda x: x), *[Apply(cut_half)] * (number == at)) for number in range(40)]
        (found,) = [one for one in probed(nn.Sequential(*blocks), vectors()).found if one.kind == "gradient-cut"]
        assert found.layer == f"{at}.0.layer"


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Quantised(nn.Module):
    """A vector quantisation: what it gives is one of its codes, and its gradient is passed straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        code = self.codes[torch.cdist(x, self.codes).argmin(1)]
        return x + (code - x).detach()


@pytest.mark.parametrize("middle", [Apply(Rounded.apply), Apply(Reversed.apply), Quantised(), nn.Dropout(0.5), nn.BatchNorm1d(8)])
def test_gradients_that_are_meant_to_differ_are_no_cut(middle: nn.Module) -> None:
    assert "gradient-cut" not in {one.kind for one in probed(mlp(middle), vectors()).found}


def test_rows_of_padding_get_no_gradients_on_purpose() -> None:
    text = torch.cat((torch.zeros(8, 4, dtype=torch.long), texts()), 1)
    net = nn.Sequential(nn.Embedding(TOKENS, 6, padding_idx=0), nn.Flatten(), nn.Linear(15 * 6, 3))
    nn.init.normal_(net[0].weight)
    assert "gradient-cut" not in {one.kind for one in probed(net, text).found}


def test_a_head_that_is_kept_from_what_it_reads_is_a_notice() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.policy, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x).relu()
            return self.policy(h), self.value(h.detach())

    found = [(one.kind, one.layer, one.severity) for one in probed(TwoHeads(), vectors()).found]
    assert ("gradient-cut", "trunk", "notice") in found


class Variational(nn.Module):
    """In training mode its code is drawn, around means that may be detached."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.encoder, self.decoder, self.detached = nn.Linear(6, 8), nn.Linear(4, 6), detached

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        if not self.training:
            return self.decoder(mean), mean, spread
        drawn = (mean.detach() if self.detached else mean) + 0.5 * spread.exp() * torch.randn_like(mean)
        return self.decoder(drawn), mean, spread


@pytest.mark.parametrize("detached", [True, False])
def test_a_cut_in_training_mode_alone_is_found_if_a_part_of_the_way_is_left(detached: bool) -> None:
    found = [(one.layer, one.severity) for one in probed(Variational(detached), vectors()).found if one.kind == "gradient-cut"]
    assert found == [("encoder", "warning")] * detached


@pytest.mark.parametrize("alone", [True, False])
def test_attention_that_reads_no_other_position_is_found(alone: bool) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend, self.head = (
                nn.Embedding(TOKENS, 8),
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Linear(8, 4),
            )

        def forward(self, text: Tensor) -> Tensor:
            x, mask = self.embed(text), torch.eye(text.shape[1]) == 0
            given, _ = self.attend(x, x, x, attn_mask=mask if alone else None)
            return self.head(x + given)

    found = probed(Tagger(), texts()).found
    assert [(one.layer, one.cause) for one in found if one.kind == "ignores-inputs"] == [("attend", "mask")] * alone


@pytest.mark.parametrize("last", [nn.SiLU(), nn.GELU()])
def test_an_activation_of_hidden_layers_at_the_end_is_found(last: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3), last)
    for target in (None, vectors()[:, :3], torch.randint(3, (8,))):
        assert shown(probed(net, vectors(), target)) == [("rectified-outputs", "3")]
        assert shown(probed(net[:3], vectors(), target)) == []
    assert shown(probed(net, vectors(), torch.rand(8, 3) + 1)) == []  # which is never below 0


@pytest.mark.parametrize(("middle", "kinds"), [(nn.Softmax(1), [("softmax-axis", "1")]), (nn.Sigmoid(), [])])
def test_a_softmax_between_layers_is_found(middle: nn.Module, kinds: list[tuple[str, str]]) -> None:
    assert shown(probed(nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)), vectors())) == kinds


def test_a_first_layer_that_reads_a_mean_of_all_is_found() -> None:
    images = torch.randn(8, 1, 8, 8)
    for size, kinds in ((8, [("bottleneck", "2")]), (4, [])):
        net = nn.Sequential(nn.AvgPool2d(size), nn.Flatten(), nn.Linear((8 // size) ** 2, 10))
        assert shown(probed(net, images)) == kinds


def test_hooks_on_backward_passes_are_not_called_and_change_no_gradient_of_the_copy() -> None:
    net, calls = mlp(nn.Identity()), []

    def halve(module: nn.Module, given: Any, output: Any) -> Any:
        calls.append(module)
        return tuple(one if one is None else 0.5 * one for one in given)

    net[1].register_full_backward_hook(halve)
    assert "gradient-cut" not in {one.kind for one in probed(net, vectors()).found}
    assert calls == []
    net(vectors()).sum().backward()
    assert len(calls) == 1
    before = [parameter.grad.clone() for parameter in net.parameters()]
    probed(net, vectors())
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(net.parameters(), before, strict=True))
