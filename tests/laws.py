"""The laws of reducers as plain functions: each takes a reducer and observations, and raises AssertionError where it is broken."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import reducers
from reducers import Reducer, State, Statistic, from_recipe, to_recipe
from reducers.core.counted import uncounted
from reducers.core.patterns import arrange
from reducers.kernels.columns import column_dtypes
from reducers.kernels.dispatch import sweep

Stream = Sequence[Tensor]


def run(reducer: Reducer, xs: Stream, state: State | None = None) -> State:
    """The state after all observations, one after another."""
    return reduce(reducer.update, xs, reducer.init() if state is None else state)


def lifts(reducer: Reducer, xs: Stream) -> list[State]:
    """The state of each observation by itself."""
    return [reducer.update(reducer.init(), x) for x in xs]


def flat(result: Any, prefix: str = "") -> dict[str, Tensor]:
    """A result as a flat mapping from path to tensor."""
    if isinstance(result, Mapping):
        return {path: value for name, part in result.items() for path, value in flat(part, f"{prefix}/{name}").items()}
    return {prefix: torch.as_tensor(result)}


def same_bits(a: Any, b: Any) -> None:
    """Both hold the same keys, dtypes, shapes and values; NaN is equal to NaN."""
    left, right = flat(a), flat(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        torch.testing.assert_close(value, right[key], rtol=0, atol=0, equal_nan=True)


def close(a: Any, b: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Both hold the same keys, shapes and values but for rounding in float64; integers and flags are equal."""
    left, right = flat(a), flat(b)
    assert left.keys() == right.keys()
    for key, value in left.items():
        other = right[key]
        assert value.shape == other.shape, f"{key}: shapes {tuple(value.shape)} and {tuple(other.shape)}"
        wide = torch.complex128 if value.is_complex() or other.is_complex() else torch.float64
        torch.testing.assert_close(
            value.to(wide), other.to(wide), rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, k=key: f"{k}: {text}"
        )


def agree(reducer: Reducer, a: State, b: State) -> None:
    """Two states stand for the same observations."""
    assert bool(a) == bool(b)
    if a:
        close(reducer.compute(a), reducer.compute(b))


def associative(reducer: Reducer, xs: Stream, cuts: tuple[int, int]) -> None:
    """merge(merge(a, b), c) == merge(a, merge(b, c)); any of them may be empty."""
    first, second = sorted(cuts)
    a, b, c = (run(reducer, part) for part in (xs[:first], xs[first:second], xs[second:]))
    agree(reducer, reducer.merge(reducer.merge(a, b), c), reducer.merge(a, reducer.merge(b, c)))
    agree(reducer, reducer.merge(reducer.merge(a, b), c), run(reducer, xs))


def identity(reducer: Reducer, xs: Stream) -> None:
    """merge({}, a) == a == merge(a, {}), bit for bit."""
    state = run(reducer, xs)
    same_bits(reducer.merge(reducer.init(), state), state)
    same_bits(reducer.merge(state, reducer.init()), state)
    assert reducer.merge({}, {}) == {}


def stream_is_merge(reducer: Reducer, xs: Stream) -> None:
    """Updating is merging with what one observation makes."""
    agree(reducer, run(reducer, xs), reduce(reducer.merge, lifts(reducer, xs)))


def split_invariant(reducer: Reducer, xs: Stream) -> None:
    """How the data were cut into batches does not matter."""
    whole = torch.cat(list(xs))
    agree(reducer, run(reducer, xs), reducer.update({}, whole))
    agree(reducer, run(reducer, xs), run(reducer, whole.split(1)))


def together(reducer: Reducer, xs: Stream) -> None:
    """Observations of one shape reduced together, and states merged together, are those taken one after another."""
    alike = [x for x in xs if x.shape == xs[0].shape and x.dtype == xs[0].dtype] * 3
    stacked = torch.stack(alike)
    made = reducer.update_all(run(reducer, xs), stacked)
    assert stacked.untyped_storage().data_ptr() not in {value.untyped_storage().data_ptr() for value in made.values()}
    agree(reducer, made, run(reducer, alike, run(reducer, xs)))
    parts = [*lifts(reducer, xs), {}, *lifts(reducer, alike)]
    agree(reducer, reducer.merge_all(parts), reduce(reducer.merge, parts))
    assert reducer.merge_all([]) == {}


def counted(reducer: Reducer, states: Sequence[State], wanted: int | None) -> None:
    """Each state says how many elements were left out of it; None if none ever are."""
    for state in states:
        found = reducer.nonfinite(state)
        if wanted is None:
            assert found is None
            continue
        assert found is not None
        assert found.number.dtype == torch.int64
        assert found.number.shape == ()
        assert int(found.number) == wanted
        assert found.of is None or int(found.of) >= wanted


def commutative(reducer: Reducer, xs: Stream, order: Sequence[int]) -> None:
    """merge(a, b) == merge(b, a), and observations may come in any order."""
    parts = lifts(reducer, xs)
    agree(reducer, reduce(reducer.merge, parts), reduce(reducer.merge, [parts[i] for i in order]))
    agree(reducer, reducer.merge(parts[0], parts[-1]), reducer.merge(parts[-1], parts[0]))


def pure(reducer: Reducer, xs: Stream, merges: bool = True) -> None:
    """Nothing is written into inputs or states; states hold contiguous tensors of their own; results may be written into."""
    before, versions = [x.clone() for x in xs], [x._version for x in xs]
    states = [reducer.init()]
    for x in xs:
        states.append(reducer.update(states[-1], x))
    kept = [{key: value.clone() for key, value in state.items()} for state in states]
    marks = [[value._version for value in state.values()] for state in states]
    merged = [reducer.merge(state, states[-1]) for state in states] if merges else []
    for state in (*states, *merged):
        storages = [value.untyped_storage().data_ptr() for value in state.values()]
        assert len(set(storages)) == len(storages), f"two of {sorted(state)} share storage"
        assert not set(storages) & {x.untyped_storage().data_ptr() for x in xs}, "the state shares storage with an input"
        for key, value in state.items():
            assert type(value) is Tensor, f"{key} is no plain tensor"
            assert value.is_contiguous(), f"{key} is not contiguous"
            assert not value.requires_grad, f"{key} requires a gradient"
    scribble(reducer.compute(states[-1]))
    for state, copies, state_marks in zip(states, kept, marks, strict=True):
        same_bits(state, copies)
        assert state_marks == [value._version for value in state.values()], "a state was written to"
    for x, copied, version in zip(xs, before, versions, strict=True):
        same_bits(x, copied)
        assert x._version == version, "an input was written to"


def scribble(result: Any) -> None:
    """Overwrites a result, as the one who asked for it may."""
    for value in flat(result).values():
        value.zero_()


def typed(reducer: Reducer, xs: Stream) -> None:
    """Counts are int64, whatever is summed is wide, the device is the input's."""
    state = run(reducer, xs)
    for key, value in state.items():
        assert value.device == xs[0].device, key
        name = key.rpartition("/")[2]
        if name in {"count", "zeros", "nan", "inf", "active", "observations"}:
            assert value.dtype == torch.int64, f"{key} is {value.dtype}"
        if name in {"sum", "mean", "m2", "power", "deaths"}:
            assert value.dtype in {torch.int64, torch.float64, torch.complex128}, f"{key} is {value.dtype}"


def never_looks(reducer: Reducer, xs: Stream, merges: bool = True) -> None:
    """Off the CPU no value is looked at, which would make the host wait for a device: the meta device has none to look at."""
    there = run(reducer, [x.to("meta") for x in xs])
    merged = reducer.merge(there, there if merges else {})
    flat(reducer.compute(merged))
    reducer.update_all(there, torch.stack([x.to("meta") for x in xs if x.shape == xs[0].shape and x.dtype == xs[0].dtype]))
    flat(reducer.compute(reducer.merge_all([there] * (5 if merges else 1))))
    here = run(reducer, xs)
    assert {key: (value.shape, value.dtype) for key, value in there.items()} == {
        key: (value.shape, value.dtype) for key, value in here.items()
    }
    assert all(value.device.type == "meta" for value in merged.values())


def transformed(reducer: Reducer, xs: Stream, ys: Stream) -> None:
    """Inside vmap an update gives for each observation what it gives alone, and inside grad it raises nothing."""
    states = torch.vmap(lambda x: reducer.update({}, x))(torch.stack(list(xs)))
    states = torch.vmap(reducer.update)(states, torch.stack(list(ys)))
    for row, pair in enumerate(zip(xs, ys, strict=True)):
        agree(reducer, {key: value[row] for key, value in states.items()}, run(reducer, pair))
        if pair[0].is_floating_point():
            one = torch.func.grad(lambda x: reducer.update({}, x) and x.sum())(pair[0])
            assert one.eq(1).all()
    agree(reducer, run(reducer, xs), run(reducer, [x.clone() for x in xs]))  # nothing that was made inside is kept


def resumable(reducer: Reducer, xs: Stream, cut: int) -> None:
    """Saved to safetensors, loaded and continued is bit for bit what an uninterrupted run gives."""
    state = run(reducer, xs[:cut])
    paired = {key: torch.view_as_real(value) if value.is_complex() else value for key, value in state.items()}
    loaded = safetensors.torch.load(safetensors.torch.save(paired))  # files have no complex128, so it goes as pairs
    loaded = {key: torch.view_as_complex(value) if state[key].is_complex() else value for key, value in loaded.items()}
    same_bits(run(reducer, xs[cut:], loaded), run(reducer, xs))


def over_ranks(reducer: Reducer, xs: Stream, cuts: tuple[int, int]) -> None:
    """Ranks that hold consecutive parts, one of them nothing, together give what one would."""
    first, second = sorted(cuts)
    ranks = [run(reducer, part) for part in (xs[:first], xs[first:second], [], xs[second:])]
    agree(reducer, reduce(reducer.merge, ranks), run(reducer, xs))


def matches(reducer: Reducer, xs: Stream, reference: Callable[[list[Any]], Any]) -> None:
    """The result is that of the one-shot reference."""
    arrays = [x.to(torch.complex128 if x.is_complex() else torch.float64).numpy() for x in xs]
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = reference(arrays)
    found = reducer.compute(run(reducer, xs))
    if isinstance(found, Mapping):
        found = {key: value for key, value in found.items() if key != "eps"}  # of the dtype, which the reference does not see
    close(found, expected)


def copies(reducer: Reducer) -> None:
    """Pickled and deep copied it is equal to itself, and as hashable."""
    for copied in (pickle.loads(pickle.dumps(reducer)), copy.deepcopy(reducer)):
        assert copied == reducer
        assert hash(copied) == hash(reducer)


def written_as_data(reducer: Reducer) -> None:
    """Its repr and its recipe are the reducer again."""
    assert eval(repr(reducer), dict(vars(reducers))) == reducer
    assert from_recipe(json.loads(json.dumps(to_recipe(reducer)))) == reducer


def compiled(reducer: Reducer, xs: Stream, graphs: int) -> None:
    """Updating compiles to at most so many full graphs over the whole stream, and gives what eager updating gives."""
    made = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal made
        made += 1
        return graph

    torch._dynamo.reset()
    update = torch.compile(reducer.update, fullgraph=True, backend=backend)
    state = reduce(update, xs, reducer.init())
    agree(reducer, state, run(reducer, xs))
    assert made <= graphs, f"{made} graphs for {len(xs)} updates"


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def reduces(reducer: Reducer, xs: Stream, cut: int) -> None:
    """What `reductions_of` declares is what `merge` computes, also beside an empty state, and the rest merges without it."""
    whole = run(reducer, xs)
    for a, b in ((run(reducer, xs[:cut]), run(reducer, xs[cut:])), (whole, {}), ({}, whole)):
        declared = {**reducer.reductions_of(a), **reducer.reductions_of(b)}
        if any(a[key].shape != b[key].shape for key in declared if key in a and key in b):
            continue
        merged = reducer.merge(a, b)
        assert declared.keys() <= merged.keys()
        assert {key: declared[key] for key in declared} == dict(reducer.reductions_of(merged))
        for key, op in declared.items():
            sides = [state[key] for state in (a, b) if key in state]
            expected = reduce(REDUCTIONS[op], sides)
            assert merged[key].dtype == expected.dtype, key
            rounded = op == "sum" and expected.dtype in (torch.float64, torch.complex128)
            torch.testing.assert_close(merged[key], expected, rtol=1e-12 * rounded, atol=0, equal_nan=True)
        left, right = ({key: value for key, value in state.items() if key not in declared} for state in (a, b))
        try:
            rest = reducer.merge(left, right)
        except Exception as error:
            raise AssertionError(f"{sorted(left)} does not merge without {sorted(declared)}") from error
        same_bits(rest, {key: value for key, value in merged.items() if key not in declared})


def declared(reducer: Reducer, xs: Stream) -> None:
    """The fields of a statistic are the entries of its lifts, merge as they say, and are what kernels compute for their columns."""
    assert isinstance(reducer, Statistic)
    lifted = []
    for x in xs:
        kept, axes = arrange(x, reducer.pattern)
        state = reducer.lifted(kept, axes)
        lifted.append(state)
        assert uncounted(state).keys() == {key for key in reducer.fields if key != "nonfinite"}
        asked = tuple(reducer.columns.items()), reducer.threshold
        for kernel in (sweep(asked, kept, axes, {}), reducer.update({}, x)):
            if kernel is None:
                continue
            assert {key: value.dtype for key, value in kernel.items()} == {key: value.dtype for key, value in state.items()}
            close(kernel, state, 1e-5, 1e-5)
        if x.is_floating_point():
            wanted = column_dtypes(tuple(reducer.columns.values()), x.dtype)
            assert [state[key].dtype for key in reducer.columns] == [*wanted]
    merged = reducer.merge(*lifted)
    for key, field in reducer.fields.items():
        if field.reduction:
            torch.testing.assert_close(merged[key], REDUCTIONS[field.reduction](*(state[key] for state in lifted)))
    assert merged.keys() == lifted[0].keys()
    if reducer.divisible:
        agree(reducer, merged, reducer.lifted(*arrange(torch.cat(list(xs)), reducer.pattern)))


def by_element(reducer: Reducer, xs: Stream, cut: int) -> bool:
    """Whether each tensor of the state seems to merge by one of the reductions, as these observations show."""
    a, b = run(reducer, xs[:cut]), run(reducer, xs[cut:])
    merged = reducer.merge(a, b)
    return (
        all(
            any(torch.allclose(op(a[key], b[key]), value, rtol=1e-12, atol=0, equal_nan=True) for op in REDUCTIONS.values())
            for key, value in merged.items()
            if key in a and key in b and a[key].shape == b[key].shape == value.shape
        )
        and merged.keys() == a.keys() == b.keys()
    )
