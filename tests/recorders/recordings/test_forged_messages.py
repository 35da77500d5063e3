"""Messages of other ranks that nobody can have sent: each gives a SyncError that says what is wrong, and costs little memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import Place, World

import recorders.recordings.distributed.sync as module
from recorders import Recording, Subrecording
from recorders.recordings.distributed import fitting
from recorders.recordings.distributed.message import misfits, pack, parse, payload_size, unpack
from recorders.recordings.distributed.sync import sync
from reducers import Mean, Moments, Product

REDUCER = Product(mean=Mean(), moments=Moments("b c -> c"))
CPU = torch.device("cpu")


def sound() -> Recording:
    return Recording({"fc": Subrecording(REDUCER, {"": REDUCER.update({}, torch.ones(2, 3))}, 1)}, {"alias": "fc"})


def packed() -> tuple[bytes, torch.Tensor]:
    return pack(sound(), CPU, "error", "sync(to='all', missing='error')")


def problem(raw: bytes, size: int | None = None) -> str:
    """What is wrong with a manifest, found as `sync` finds it; "" if nothing."""
    try:
        manifest = parse(raw)
    except ValueError as error:
        return str(error)
    if "error" in manifest:
        return str(manifest["error"])
    mine = parse(packed()[0])
    if found := list(fitting.differences([mine, manifest], [0, 1], "error")):
        return found[0]
    return next(fitting.forgeries(sound(), [mine, manifest], [payload_size(mine), size or payload_size(manifest)], [0, 1]), "")


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from paths(value, (*path, key))


def replaced(path: tuple[Any, ...], change: Callable[[Any], Any]) -> bytes:
    """The sound manifest, with the part at `path` changed."""
    tree = json.loads(packed()[0])
    if not path:
        return json.dumps(change(tree)).encode()
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change(place[path[-1]])
    return json.dumps(tree).encode()


VALUES = [None, True, 0, -1, 2**70, 1.5, "", "x", "float32 -1", [], [[]], {}, {"": None}, {"x": []}, {"x": {"y": {"z": 0}}}]
PATHS = list(paths(json.loads(packed()[0])))
SPECS = [
    *("", " ", "float32 ", "float32  3", "float32 -3", "float32 3.0", "float32 x", "float32 1e9", "float32,3", "float32 3 ", "3"),
    *("Tensor", "nn", "load 3", "float33 3", "qint8 3", "__class__", "float32\n3", "float32 \u0663", "os", "FLOAT32 3"),
    *("float32" + " 1" * 65, "float32" + " 1" * 100_000, f"float32 {2**63}", f"float32 {2**62}", "float32 9999999999999999999"),
    *(f"float64 {2**31} {2**31}", f"float32 0 {2**62}", f"float32 {2**40} {2**40} 0", "float32 " + "9" * 10_000),
    *("float16 3", "bool", "int64 3", "complex64 3", "float64 3", "float64 4", "float64 3 3", "float64 0", "float64 1 1 1"),
    *("float64 3 sum", "float64 3 max", "float64 sum 3", "int64 3 max", "int64 3 mean", "bool 3 sum", "complex128 min", "sum"),
    *("bits8 3", "float4_e2m1fn_x2 3", "uint8 1000000000000", "float64 1000000000000"),
]
LEAF = ("subrecorders", "fc", "states", "")
KEYS = list(json.loads(packed()[0])["subrecorders"]["fc"]["states"][""])


def forgeries() -> Iterator[bytes]:
    for path in PATHS:
        for value in VALUES:
            if value != {} or path not in (("subrecorders", "fc", "states"), LEAF, ("aliases",)):  # a rank may have no data
                yield replaced(path, lambda _, value=value: value)
    for key in KEYS:
        own = json.loads(packed()[0])["subrecorders"]["fc"]["states"][""][key]
        for spec in SPECS:
            if spec != own:
                yield replaced((*LEAF, key), lambda _, spec=spec: spec)
        yield replaced(LEAF, lambda state, key=key: {other: spec for other, spec in state.items() if other != key})
        yield replaced(LEAF, lambda state, key=key: {**state, key + "?": state[key]})
    raw = packed()[0]
    yield from (b"", b"{", b"null", b"[]", b'"x"', b"NaN", b"\xff\xfe", raw[:-1], raw + b"}", raw[1:])
    yield from (b"[" * 1_000_000, b'{"subrecorders":' * 100_000, b"9" * 100_000, b'{"error": 3}', b'{"error": "x", "call": "y"}')
    for path in [(), ("subrecorders",), ("subrecorders", "fc")]:
        yield replaced(path, lambda tree: {**tree, "more": {}})
        for key in json.loads(raw) if not path else ():
            yield replaced(path, lambda tree, key=key: {name: part for name, part in tree.items() if name != key})


def test_every_forged_manifest_is_refused_with_a_reason() -> None:
    assert problem(packed()[0]) == ""
    forged = list(dict.fromkeys(forgeries()))
    assert len(forged) >= 200
    silent = [raw[:300] for raw in forged if problem(raw) == ""]
    assert silent == []
    assert max(len(problem(raw)) for raw in forged) < 2000


@pytest.mark.parametrize("size", [-1, 1, 7, 10**15, 2**63 - 1])
def test_a_payload_of_another_size_than_its_tensors_is_refused(size: int) -> None:
    assert f"rank 1 sends {size} bytes of states, and its manifest names" in problem(packed()[0], size)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_and_any_json_are_refused_or_sound(data: st.DataObject) -> None:
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(SPECS)
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
    path = data.draw(st.sampled_from(PATHS))
    raw = data.draw(st.binary(max_size=60) | tree.map(lambda value: replaced(path, lambda _: value)))
    assert isinstance(problem(raw), str)


def test_a_negative_number_of_observations_is_refused() -> None:
    raw, payload = packed()
    payload[:8] = 255
    with pytest.raises(ValueError, match="-1 observations"):
        unpack(sound(), parse(raw), payload)


def test_a_recipe_that_nobody_can_have_sent_is_refused() -> None:
    raw, _ = pack(sound(), CPU, "keep", "sync(to='all', missing='keep')")
    for recipe in [{}, {"type": 3}, {"type": "os.system"}, {"type": "Mean", "pattern": 7}, {"type": "Histogram", "bins": 10**12}]:
        tree = json.loads(raw)
        tree["subrecorders"]["fc"]["part"][0] = recipe
        assert list(misfits(Recording({}), parse(json.dumps(tree).encode())))


def forged(place: Place, raw: bytes, size: int) -> Any:
    """Rank 1 sends what it is told; the others send what is sound."""
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                module, "pack", lambda *_: (raw, torch.empty(size, dtype=torch.uint8, device="meta"))
            )  # a size is all that is asked of it
        return list(sync(sound(), group))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "size", "reason"),
    [
        (replaced((*LEAF, KEYS[0]), lambda _: "float64 1000000000000"), 10**6, "rank 1, subrecorder 'fc': "),
        (b"[" * 100_000, 8, "rank 1 cannot send what it recorded: its manifest is malformed: it is nested too deeply"),
        (packed()[0], 10**15, "rank 1 sends 1000000000000000 bytes of states, and its manifest names"),
    ],
)
def test_a_forged_message_is_an_error_on_every_rank(world: World, raw: bytes, size: int, reason: str) -> None:
    answers = world.run(forged, raw, size)
    assert [answer.kind for answer in answers] == ["SyncError"] * 3, answers
    assert all(reason in answer.text for answer in answers), answers[0].text


def too_much(place: Place) -> Any:
    rank, group = place
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr("recorders.recordings.distributed.exchange._free", lambda: 100)
        return list(sync(sound(), group))


@pytest.mark.slow
def test_more_than_a_rank_has_memory_for_is_an_error_on_every_rank(world: World) -> None:
    answers = world.run(too_much)
    assert [answer.kind for answer in answers] == ["SyncError"] * 3
    assert all("rank 2 needs" in answer.text and "100 are free" in answer.text for answer in answers)
