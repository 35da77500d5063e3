"""What is chosen of a timeline, tables of it, tensors beside its numbers, and thinning it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recorders.errors import MissingExtraError, SelectionError, StorageError, TickError
from recorders.recordings.export import Backend
from recorders.watch.timeline import Row, Timeline


@pytest.fixture
def timeline() -> Timeline:
    found = Timeline()
    for tick in range(20):
        rows = {f"{i}.weight": {"mean": tick + i / 8, "max": 2.0 * tick} for i in range(20)}
        found.append(tick, {**rows, "loss": {"mean": -tick}} if tick % 2 else rows, None if tick < 2 else 10 * tick)
    return found


def test_rows_by_name_statistic_and_tick(timeline: Timeline) -> None:
    assert timeline.select("0.*", "mean", slice(10, 12)) == [Row(10, "0.weight", "mean", 10.0), Row(11, "0.weight", "mean", 11.0)]
    assert timeline.select(["loss", "1.weight"], ticks=[3, 4, 99]) == [
        Row(3, "1.weight", "mean", 3.125),
        Row(4, "1.weight", "mean", 4.125),
        Row(3, "1.weight", "max", 6.0),
        Row(4, "1.weight", "max", 8.0),
        Row(3, "loss", "mean", -3.0),
    ]
    assert len(timeline.select()) == sum(len(ticks) for courses in timeline.values() for ticks, _ in courses.values())
    assert timeline.select(ticks=slice(50, None)) == []
    with pytest.raises(SelectionError, match=r"no name 'los'.*0\.weight"):
        timeline.select("los")
    with pytest.raises(SelectionError, match=r"no statistic 'med'.*'max'"):
        timeline.select(statistics=["mean", "med"])
    with pytest.raises(SelectionError, match=r"ticks=3: give a slice of ticks, or several, such as \[3\]"):
        timeline.select(ticks=3)  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="no step"):
        timeline.select(ticks=slice(0, 10, 2))


def test_some_ticks_are_read_without_the_others(timeline: Timeline) -> None:
    """The others are made unreadable: whoever reads them fails."""
    with timeline._connection.writing() as db:
        db.execute("UPDATE ticks SET numbers = '{}' WHERE tick > 9")
    assert timeline.select("0.*", ticks=slice(0, 10)) == [
        *(Row(tick, "0.weight", "mean", float(tick)) for tick in range(10)),
        *(Row(tick, "0.weight", "max", 2.0 * tick) for tick in range(10)),
    ]


def test_a_table_for_pandas(timeline: Timeline) -> None:
    pandas = pytest.importorskip("pandas")
    frame = timeline.to_frame("pandas", names="0.*", statistics="mean", ticks=slice(0, 3))
    assert list(frame.columns) == ["tick", "step", "name", "statistic", "value"]
    assert frame["step"].isna().tolist() == [True, True, False]
    assert frame.iloc[2].tolist() == [2, 20, "0.weight", "mean", 2.0]
    assert timeline.to_frame("pandas", ticks=[]).empty
    assert isinstance(
        timeline.to_frame("pandas").pivot(index="tick", columns=["name", "statistic"], values="value"), pandas.DataFrame
    )


def test_a_table_for_polars(timeline: Timeline) -> None:
    pytest.importorskip("polars")
    frame = timeline.to_frame("polars", names="0.*", statistics="mean", ticks=slice(1, 3))
    assert frame.rows() == [(1, None, "0.weight", "mean", 1.0), (2, 20, "0.weight", "mean", 2.0)]
    assert timeline.to_frame("polars", ticks=[]).is_empty()


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_missing_libraries_are_named_with_their_extra(
    library: Backend, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"torch-recorders\[{library}\]"):
        timeline.to_frame(library)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex128, torch.uint16])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(2, 3, 4).to(dtype)
    kept = {"whole": whole, "a view": whole[:, ::2].mT, "empty": whole[:0], "one": whole[1, 1, 1], "../\u00e9": whole[0]}
    with Timeline(tmp_path / "run.db") as timeline:
        timeline.append(0, {"loss": {"mean": 1.0}}, tensors=kept)
        timeline.append(1, {"loss": {"mean": 2.0}})
    with Timeline(tmp_path / "run.db", read_only=True) as timeline:
        assert timeline.tensors() == {name: [0] for name in kept}
        for name, tensor in kept.items():
            found = timeline.tensor(name, 0)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.view(torch.uint8 if found.ndim else dtype).equal(
                tensor.contiguous().view(torch.uint8 if found.ndim else dtype)
            )
        with pytest.raises(SelectionError, match=r"no tensor 'whole' at tick 1.*\[\]"):
            timeline.tensor("whole", 1)


def test_tensors_that_cannot_be_stored_are_refused_and_nothing_is_written() -> None:
    with Timeline() as timeline:
        for wrong, error in ((torch.zeros(2**18 + 1), StorageError), (torch.eye(2).to_sparse(), StorageError), (3.0, TypeError)):
            with pytest.raises(error):
                timeline.append(0, {"loss": {"mean": 1.0}}, tensors={"x": wrong})  # type: ignore[dict-item]
        assert timeline.ticks() == []
        timeline.append(0, {}, tensors={"x": torch.zeros(2**18)})
        assert timeline.forget(0) == 1
        assert timeline.tensors() == {}


def test_old_ticks_are_thinned_and_their_space_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Timeline(path) as timeline:
        for tick in range(60):
            timeline.append(tick, {f"layer{i}": {"mean": tick + i / 8} for i in range(200)})
        before = path.stat().st_size
        assert timeline.compact(every=10, before=50) == 45
        assert timeline.compact(every=10, before=50) == 0
        assert timeline.ticks() == [0, 10, 20, 30, 40, *range(50, 60)]
        assert timeline.series("layer8", "mean")[1] == [tick + 1 for tick in timeline.ticks()]
        assert timeline.verify() == {}
        assert path.stat().st_size < before / 2
    with Timeline(tmp_path / "fresh.db") as fresh:  # a file that never had the others is no smaller
        for tick in (0, 10, 20, 30, 40, *range(50, 60)):
            fresh.append(tick, {f"layer{i}": {"mean": tick + i / 8} for i in range(200)})
    assert path.stat().st_size <= (tmp_path / "fresh.db").stat().st_size
    with Timeline(path) as timeline, pytest.raises(TickError, match="at least 1"):
        timeline.compact(every=0, before=1)
