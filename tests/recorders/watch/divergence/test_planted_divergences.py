"""Faults that were planted in one of two twins: the module and the operator that are named."""

from __future__ import annotations

import pytest
from planted_divergences import PLANTED, Planted, batch, loss, renamed, twins

from recorders import Divergence, bisect


def found(planted: Planted, rewritten: bool) -> Divergence:
    first, second = twins(planted, rewritten)
    return bisect(first, second, batch(first), loss=loss)


@pytest.mark.parametrize("rewritten", [False, True], ids=["same names", "other names"])
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_module_and_the_operator_are_named(planted: Planted, rewritten: bool) -> None:
    divergence = found(planted, rewritten)
    assert divergence
    assert (divergence.phase, divergence.module) == (planted.phase, planted.module)
    assert divergence.module_b == (renamed(planted.module) if rewritten else planted.module)
    operator = divergence.operator or divergence.operator_b
    assert operator == planted.operator
    text = str(divergence)
    assert operator in text
    if not operator.startswith("blocks") and operator != "batchnorm" and planted.module == "blocks.1.attend":
        source = divergence.source or divergence.source_b
        assert source is not None
        assert source.file.endswith("planted_divergences.py")
        assert source.text in text
        assert source.text


def test_there_are_more_than_twenty_of_them_and_all_differ() -> None:
    assert len({planted.name for planted in PLANTED}) == len(PLANTED) >= 30


LINES = {
    "no scale of attention": "scores = scores / math.sqrt(WIDTH // HEADS)",
    "mask off by one": "seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(reach)",
    "base of rope": "speeds = base ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)",
    "no residual": 'x = attended if self.has("no residual") else x + attended',
    "no scale of embeddings": "x = x * math.sqrt(WIDTH)",
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_of_the_user_is_named(name: str) -> None:
    source = found(next(planted for planted in PLANTED if planted.name == name), False).source
    assert source is not None
    assert source.text == LINES[name]


WORDS = {
    "weight transposed": "its weight is transposed",
    "bias dropped": "its bias is missing in the second net",
    "eps of the layer norm": "its eps is 1e-05 in the first net, 0.0001 in the second",
    "p of dropout": "its p is 0.1 in the first net, 0.2 in the second",
    "stale buffer": "its running_mean differs",
    "softmax in bfloat16": "the second aten._to_copy.default to bfloat16",
    "no residual": "aten.add.Tensor, which the second does not call",
    "head not tied": "embed.weight and head.weight are one parameter in the first net only",
    "detached": "the gradient that it hands on differs",  # a sum: what comes along the other way is left
}


@pytest.mark.parametrize("name", WORDS)
def test_what_differs_is_said_in_words(name: str) -> None:
    divergence = found(next(planted for planted in PLANTED if planted.name == name), False)
    assert WORDS[name] in str(divergence)
