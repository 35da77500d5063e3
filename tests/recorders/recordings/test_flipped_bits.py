"""One flipped bit in any file of a recording is noticed; what was not whole is neither read nor sealed again as other numbers."""

from __future__ import annotations

import contextlib
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from recorders import (
    MergeError,
    RecorderError,
    Recording,
    RecordingWarning,
    SelectionError,
    Subrecording,
    load,
    repair,
    save,
    verify,
)
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.save import versions, write_rank
from recorders.recordings.storage.schema import MANIFEST, encode_ranks
from recorders.recordings.storage.tools import from_state_dict, to_state_dict
from reducers import Max, Moments, Sum

Kind = Literal["folder", "packed", "ranks"]
KINDS: tuple[Kind, ...] = ("folder", "packed", "ranks")


def recording() -> Recording:
    generator = torch.Generator().manual_seed(0)
    parts = {}
    reducers = {"a": Moments(correction=1), "b": Moments(correction=1), "c": Max(), "d": Max(), "e": Sum()}
    for name, reducer in reducers.items():
        state = reducer.update({}, torch.rand(7, generator=generator))
        parts[name] = Subrecording(reducer, {"": state}, samples=1, monitor="ForwardMonitor", module="Linear")
    return Recording(parts, {"also": "a"}, step=3)


@pytest.fixture
def made(tmp_path: Path, kind: Kind) -> Path:
    root = tmp_path / "run"
    if kind != "ranks":
        save(recording(), root, layout=kind)
        return root
    with Commit(root) as commit:
        files = [write_rank(recording(), commit, rank, "folder", []) for rank in (0, 1)]
        commit.publish(encode_ranks(commit.generation, versions(), files))
    return root


def facts(found: Recording) -> dict[str, Any]:
    """All that a recording says, without what it does not know."""
    said: dict[str, Any] = {f"alias {alias}": name for alias, name in found.aliases.items()}
    for name, part in found.items():
        said[f"{name} samples"], said[f"{name} on"] = part.samples, (part.monitor, part.module)
        if part.reducer is not None:
            said[f"{name} reducer"] = part.reducer
        said.update({f"{name} state {leaf} {key}": x for leaf, state in part.states.items() for key, x in state.items()})
        said.update({f"{name} result {path}": x for path, x in flat(part.leaves())})
    return said


def flat(result: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        yield path, result
    else:
        for key, item in result.items():
            yield from flat(item, f"{path}/{key}")


def differences(found: Recording, whole: dict[str, Any]) -> list[str]:
    """What a recording says that was not saved."""
    return [
        key
        for key, value in facts(found).items()
        if key not in whole
        or not (torch.equal(value, whole[key]) if isinstance(value, Tensor) else value == whole[key])
        or (isinstance(value, Tensor) and value.dtype != whole[key].dtype)
    ]


def check(root: Path, target: Path, rank: int | None, sealing: bool = True) -> None:
    """What is done with a recording of which a bit has flipped; of one of many ranks, each has its own numbers."""
    whole = facts(recording())
    with pytest.raises(RecorderError):  # the checksum of the whole, or of a file
        load(root)
    acts = [lambda: load(root, damaged="skip", ranks=rank), lambda: verify(root), lambda: repair(root, target)]
    for act in acts if sealing else acts[:2]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecordingWarning)
                found: Any = act()
        except (RecorderError, SelectionError):
            continue
        if isinstance(found, Recording):
            assert differences(found, whole) == []
            assert found.damaged or rank is not None
            assert found.step in (3, None)
            continue
        assert found, "it is taken as whole"
        if target.exists():
            for one in (None,) if rank is None else (0, 1):
                with contextlib.suppress(SelectionError):  # one that is lost
                    assert differences(load(target, ranks=one), whole) == []
            shutil.rmtree(target)


def flips(path: Path, chosen: Any) -> Iterator[None]:
    """Flips one bit of a file after another, and puts it back."""
    raw = path.read_bytes()
    for bit in chosen:
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        yield
    path.write_bytes(raw)


def bits(path: Path, first_line: bool, count: int, seed: int) -> Any:
    raw = path.read_bytes()
    size = len(raw.split(b"\n")[0]) + 1 if first_line else len(raw)
    return range(8 * size) if count < 0 else random.Random(seed).sample(range(8 * size), min(count, 8 * size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("head", "rest"), [(40, 40), pytest.param(-1, 400, marks=pytest.mark.long)], ids=["some", "all of the head"]
)
def test_a_flipped_bit_in_a_manifest_is_noticed(made: Path, kind: Kind, head: int, rest: int, tmp_path: Path) -> None:
    path, rank = made / MANIFEST, 0 if kind == "ranks" else None
    for first_line, count in ((True, head), (False, rest)):
        for number, _ in enumerate(flips(path, bits(path, first_line, count, seed=head))):
            check(made, tmp_path / "repaired", rank, sealing=count > 0 or number % 16 == 0)
    assert load(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.long)])
def test_a_flipped_bit_in_any_other_file_is_noticed(made: Path, kind: Kind, count: int, tmp_path: Path) -> None:
    rank = 0 if kind == "ranks" else None
    for path in sorted(next(made.glob("generation-*")).iterdir()):
        for _ in flips(path, bits(path, False, count, seed=count)):
            check(made, tmp_path / "repaired", rank)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joined", [True, False], ids=["lines joined", "a line cut in two"])
def test_lines_that_move_take_no_tensors_of_others(made: Path, kind: Kind, joined: bool, tmp_path: Path) -> None:
    path = made / MANIFEST
    raw = path.read_bytes()
    at = raw.index(b"\n", raw.index(b"\n") + 1) if joined else raw.index(b"\n") + 30
    path.write_bytes(raw[:at] + (b"" if joined else b"\n") + raw[at + joined :])
    check(made, tmp_path / "repaired", 0 if kind == "ranks" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_is_gone_is_missed(made: Path, kind: Kind, tmp_path: Path) -> None:
    path = made / MANIFEST
    first, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first, *rest[1:]]))
    check(made, tmp_path / "repaired", 0 if kind == "ranks" else None)


def test_a_damaged_first_line_keeps_results_and_no_reducers(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[2] / "fixtures" / "recording"
    shutil.copytree(fixture, tmp_path / "run")
    path = tmp_path / "run" / MANIFEST
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"step": 5', b'"step": 4', 1))
    with pytest.warns(RecordingWarning):
        found = load(tmp_path / "run", damaged="skip")
    whole = load(fixture)
    assert list(found) == list(whole)
    assert found.damaged.keys() == {"line 1 of the manifest"}
    assert found.step is None
    assert {part.reducer for part in found.values()} == {None}
    name = next(iter(whole))
    assert found.with_reducers({name: whole[name].reducer})[name].states.keys() == whole[name].states.keys()  # type: ignore[dict-item]


def test_a_flipped_bit_in_a_state_dict_is_noticed() -> None:
    raw = to_state_dict(recording())["recording"]
    assert differences(from_state_dict({"recording": raw}), facts(recording())) == []
    for bit in random.Random(0).sample(range(8 * len(raw)), 300):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MergeError, match="no state dict of a recorder"):
            from_state_dict({"recording": bytes(broken)})
    for cut in range(0, len(raw), 50):
        with pytest.raises(MergeError, match="no state dict of a recorder"):
            from_state_dict({"recording": raw[:cut]})
