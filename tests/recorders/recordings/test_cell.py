"""Cell: a reducer with its state, as a module."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from recorders import Cell
from reducers import Max, Mean, Moments, Product, ReducerTypeError, StateError, StateMismatchError


def filled(*batches: torch.Tensor) -> Cell:
    cell = Cell(Product(moments=Moments(), top=Max()))
    for batch in batches:
        cell.push(batch)
    return cell


A, B = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([-1.0, 4.0])


def values(cell: Cell) -> list[float]:
    result = cell.peek()
    return [*(value.item() for value in result["moments"].values()), result["top"].item()]


def test_push_peek_clear() -> None:
    cell = filled(A, B)
    assert values(cell) == pytest.approx([5, 2.4, 7.3, 7.3**0.5, 6])
    cell.clear()
    assert cell.state == {}
    assert cell.peek() is None


def test_merge_is_as_if_pushed_after() -> None:
    cell = filled(A)
    cell.merge(filled(B))
    assert values(cell) == pytest.approx(values(filled(A, B)))
    with pytest.raises(StateMismatchError, match="Mean"):
        cell.merge(Cell(Mean()))


def test_no_graph_is_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    cell = Cell(Mean().premap(lambda x: x * weight))
    cell.push(A * weight)
    assert not any(value.requires_grad for value in cell.state.values())


@pytest.mark.parametrize("narrow", [nn.Module.half, nn.Module.bfloat16, nn.Module.float, lambda module: module.to(torch.float16)])
def test_dtype_is_never_narrowed(narrow: object) -> None:
    cell = filled(A)
    holder = nn.Sequential(nn.Linear(1, 1), cell)
    narrow(holder)  # type: ignore[operator]
    assert cell.state["moments/mean"].dtype == torch.float64
    assert cell.state["top/max"].dtype == torch.float32
    assert values(cell) == values(filled(A))


def test_to_moves_the_state() -> None:
    cell = filled(A).to("meta")
    assert {value.device.type for value in cell.state.values()} == {"meta"}


def test_state_dict_fills_a_fresh_cell() -> None:
    module = nn.ModuleDict({"inner": filled(A), "empty": filled(), "linear": nn.Linear(2, 2)})
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = nn.ModuleDict({"inner": filled(), "empty": filled(B), "linear": nn.Linear(2, 2)})
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert fresh["empty"].state == {}
    fresh["inner"].push(B)
    assert values(fresh["inner"]) == values(filled(A, B))


def test_loading_takes_copies() -> None:
    cell, other = filled(A), filled()
    saved = cell.state_dict()
    other.load_state_dict(saved)
    for value in saved.values():
        value.zero_()
    assert values(other) == values(filled(A))


def test_the_state_given_out_is_a_copy_of_the_mapping() -> None:
    cell = filled(A)
    cell.state.clear()
    assert values(cell) == values(filled(A))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_copies_are_independent(copied: object) -> None:
    cell = filled(A)
    other = copied(cell)  # type: ignore[operator]
    cell.push(B)
    assert values(other) == values(filled(A))


def test_no_parameters_and_no_buffers() -> None:
    assert list(filled(A).parameters()) == []
    assert list(filled(A).buffers()) == []


def test_needs_a_reducer() -> None:
    with pytest.raises(ReducerTypeError, match=r"write Mean\(\), not Mean"):
        Cell(Mean)  # type: ignore[arg-type]


def test_a_call_returns_the_statistic_of_its_observation_and_reduces_it() -> None:
    cell = filled(A)
    assert cell(B)["top"] == 4.0
    assert values(cell) == values(filled(A, B))


@pytest.mark.parametrize(
    "entries",
    [
        {"state/sum": torch.ones(())},
        {"state/sum": torch.ones(3), "state/count": torch.ones((), dtype=torch.int64)},
        {"state/sum": torch.ones((), dtype=torch.bool), "state/count": torch.ones((), dtype=torch.int64)},
        {"state/sum": torch.ones((), dtype=torch.float64), "state/count": torch.ones(()), "state/more": torch.ones(())},
        {"state/sum": 1.0, "state/count": 1},
    ],
)
def test_a_state_that_the_reducer_cannot_have_is_not_loaded(entries: dict[str, Any]) -> None:
    cell = Cell(Mean())
    cell.push(torch.tensor([1.0, 2.0]))
    with pytest.raises(StateError, match=r"Mean.* has no such state"):
        cell.load_state_dict(entries)
    assert cell.peek().item() == 1.5
    cell.load_state_dict(Cell(Mean()).state_dict())
    assert cell.state == {}


def test_the_state_of_a_net_without_the_cell_is_missing_as_any_key_is() -> None:
    cell = nn.ModuleDict({"layer": nn.Linear(2, 2), "cell": Cell(Mean())})
    cell["cell"].push(torch.tensor([3.0]))
    found = cell.load_state_dict(nn.ModuleDict({"layer": nn.Linear(2, 2)}).state_dict(), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["cell.samples"], [])
    assert cell["cell"].peek().item() == 3.0
    with pytest.raises(RuntimeError, match=r"Missing key.*cell\.samples"):
        cell.load_state_dict(nn.ModuleDict({"layer": nn.Linear(2, 2)}).state_dict())
