"""The pattern "channels" of reducers that no monitor has placed."""

from __future__ import annotations

import pytest
import torch

from recorders import Cell
from reducers import CrossCovariance, Mean, PerObservation, Summary, WeightedMean
from reducers.core.recipe import from_recipe, to_recipe
from reducers.errors import PatternError


def test_an_update_says_what_is_missing_and_what_to_do() -> None:
    x = torch.ones(2, 3)
    updates = (
        lambda: Mean("channels").update({}, x),
        lambda: Mean("channels").update_all({}, torch.ones(4, 2, 3)),
        lambda: Cell(Mean("channels")).push(x),
        lambda: WeightedMean("channels").update({}, x, x),
        lambda: PerObservation(Mean("channels"), Summary()).update_all({}, torch.ones(4, 2, 3)),
        lambda: CrossCovariance("channels", "b d -> d").update({}, x, x),
    )
    for update in updates:
        with pytest.raises(PatternError, match=r"channel axis of a layer.* write the pattern, 'b c \.\.\. -> c'"):
            update()


def test_it_is_data_as_other_patterns_are() -> None:
    assert from_recipe(to_recipe(Mean("channels"))) == Mean("channels")
    with pytest.raises(PatternError, match="no '->'"):
        Mean("channel")
