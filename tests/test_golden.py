"""A recording that an earlier version wrote loads, says what it said then, and goes on.

`fixtures/recording-0.1` was written by the version before the packages got their present names: recipes name classes, not modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recorders import Recording, load
from reducers import from_recipe, to_recipe

PATH = Path(__file__).parent / "fixtures" / "recording-0.1"


@pytest.fixture(scope="module")
def golden() -> Recording:
    return load(PATH)


def test_every_subrecording_has_its_reducer_and_merges(golden: Recording) -> None:
    assert len(golden) > 50
    for name, part in golden.items():
        assert part.reducer is not None, name
        assert from_recipe(to_recipe(part.reducer)) == part.reducer
        assert part.merge(part).samples == 4


def flat(result: Any, name: str = "value") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Mapping):
        for key, item in result.items():
            yield from flat(item, f"{name}/{key}")
    else:
        yield name, result


def test_every_state_computes_what_it_computed_then(golden: Recording) -> None:
    files = sorted(PATH.glob("generation-*/*.safetensors"))
    assert len(files) == len(golden)
    for file, part in zip(files, golden.values(), strict=True):
        written = {name: tensor for name, tensor in load_file(file).items() if name.startswith("value")}
        assert written
        computed = dict(flat(part.peek()))
        assert computed.keys() == written.keys()
        for name, tensor in written.items():
            torch.testing.assert_close(computed[name], tensor, rtol=0, atol=0, equal_nan=True)
