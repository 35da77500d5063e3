"""What the documents say of reducers is true."""

from __future__ import annotations

import doctest

import laws
import torch
from paths import ROOT

import reducers

GUIDE = ROOT / "docs" / "adding-a-reducer.md"


def test_the_guide_runs() -> None:
    tried = doctest.testfile(str(GUIDE), module_relative=False)
    assert tried.attempted >= 8
    assert tried.failed == 0


def test_the_reducer_of_the_guide_obeys_the_laws() -> None:
    namespace: dict[str, object] = {"__name__": __name__}
    for example in doctest.DocTestParser().get_examples(GUIDE.read_text())[:5]:
        exec(example.source, namespace)
    above = namespace["Above"](threshold=0.5)  # type: ignore[operator]
    xs = [torch.randn(size, 3, generator=torch.Generator().manual_seed(size)) for size in (4, 2, 1)]
    laws.associative(above, xs, (1, 2))
    laws.identity(above, xs)
    laws.stream_is_merge(above, xs)
    laws.split_invariant(above, xs)
    laws.commutative(above, xs, (2, 0, 1))
    laws.pure(above, xs)
    laws.resumable(above, xs, 2)
    laws.compiled(above, xs, graphs=3)


def test_every_public_reducer_explains_itself_with_an_example() -> None:
    for name in reducers.__all__:
        thing = getattr(reducers, name)
        if isinstance(thing, type) and issubclass(thing, reducers.Reducer) and thing not in (reducers.Reducer, reducers.Statistic):
            assert ">>>" in (thing.__doc__ or ""), name
            assert "Returns:" in thing.__doc__ or "==" in thing.__doc__, name
