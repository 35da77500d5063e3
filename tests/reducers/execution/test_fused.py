"""Updates through the compiler give what updates without it give."""

from __future__ import annotations

import pickle
import warnings

import laws
import pytest
import torch
from torch import nn

import reducers.execution.fused
from recorders import BackwardMonitor, ForwardMonitor, Recorder
from reducers import Activity, Last, Max, Mean, Moments, Norm, PatternError, Product, Reducer, Summary
from reducers.execution.fused import Fused
from reducers.kernels.chunks import BIG

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of the compiler, about the machine


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_big_observations_are_lifted_by_a_compiled_function_with_the_same_results() -> None:
    reducer = Product(summary=Summary("b c ... -> c"), norm=Norm(), top=Max(), active=Activity(), last=Last().premap(torch.abs))
    fused = Fused(reducer)
    xs = [drawn(rows, 16, 8, 8) + 3 for rows in (16, 9, 1, 12)]
    xs[1][0, 0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        state = laws.run(fused, xs)
    laws.close(fused.compute(state), reducer.compute(laws.run(reducer, xs)), rtol=1e-6)
    laws.close(reducer.compute(reducer.merge(state, state)), fused.compute(fused.merge(state, state)))


@pytest.mark.parametrize("pattern", ["... ->", "b ... d -> d", "b c h w -> c", "b c h w -> h c"])
@pytest.mark.parametrize("kind", ["normal", "offset", "outlier first", "holes", "tiny", "huge", "constant"])
def test_one_loop_is_as_exact_as_several(kind: str, pattern: str) -> None:
    x = drawn(8, 4, 16, 32)
    x = {"offset": x + 1e4, "tiny": x * 1e-30, "huge": x * 1e30, "constant": torch.full_like(x, 0.1)}.get(kind, x)
    if kind == "outlier first":
        x[0, 0, 0, 0] = 1e4
    if kind == "holes":
        x[0, :2] = torch.nan
        x[1, 1] = torch.inf
    eager = Summary(pattern)
    state = eager.update({}, x.double())
    made = torch.compile(lambda x: eager.update({}, x), backend="aot_eager", fullgraph=True)(x)
    result, wanted = eager.compute(made), eager.compute(state)
    assert isinstance(result, dict)
    assert isinstance(wanted, dict)
    for key in ("count", "zeros", "nan", "inf"):
        assert result[key].equal(wanted[key]), key
    scale = wanted["var"].sqrt().clamp(min=1e-300)
    assert ((result["mean"] - wanted["mean"]).abs() <= 1e-9 * (scale + wanted["mean"].abs())).all()
    assert ((result["var"] - wanted["var"]).abs() <= 1e-9 * wanted["var"] + 1e-25 * wanted["mean"] ** 2).all()
    assert (result["var"] >= 0).all()


@pytest.mark.slow
def test_a_recorder_fuses_all_its_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    lift = reducers.execution.fused._lift
    monkeypatch.setattr(reducers.execution.fused, "_lift", lambda reducer, method: compiled.append(method) or lift(reducer, method))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    kinds = {"out": ForwardMonitor(Moments("b c -> c")), "grad": BackwardMonitor(Moments())}
    results = []
    for fuse in (False, True):
        recorder = Recorder(**kinds, fuse=fuse).modules(net, leaves=True)
        with recorder:
            for rows in (BIG // 64, BIG // 64, 4, 4, 4):
                net(drawn(rows, 64)).sum().backward()
        results.append(recorder.compute())
        assert recorder["out/0"].reducer == Moments("b c -> c")
        assert bool(compiled) == fuse
    laws.close(results[0], results[1], rtol=1e-6, atol=1e-7)
    copied = pickle.loads(pickle.dumps(recorder))["out/0"]
    assert copied.buffer.engine == Fused(copied.reducer)
    assert copied.peek()["count"].equal(recorder["out/0"].peek()["count"])


@pytest.mark.slow
def test_a_mistake_in_one_reducer_is_told_as_ever_and_leaves_the_others_fused() -> None:
    x = drawn(BIG)
    with pytest.raises(PatternError, match="needs 2 axes, got 1"):
        Fused(Max("b c -> c")).update({}, x)
    assert not reducers.execution.fused._compiler_errors
    assert Fused(Mean()).compute(Fused(Mean()).update({}, x)).item() == pytest.approx(x.double().mean().item(), abs=1e-9)


def test_where_nothing_can_be_compiled_there_is_one_warning_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)

    monkeypatch.setattr(reducers.execution.fused, "_compiler_errors", [])
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    reducers.execution.fused._lift.cache_clear()
    x = drawn(BIG)
    kinds: list[Reducer] = [Mean(), Max()]
    with pytest.warns(RuntimeWarning, match="updates are not fused: BackendCompilerFailed") as told:
        states = [Fused(reducer).update({}, x) for reducer in (*kinds, *kinds)]
    assert len(told) == 1
    assert [kind.compute(state) for kind, state in zip(kinds, states, strict=False)] == [
        kind.compute(kind.update({}, x)) for kind in kinds
    ]
    reducers.execution.fused._lift.cache_clear()
