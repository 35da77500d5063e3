"""What the documents say of reducers and presets is true."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import laws
import pytest
import torch
from cases import CASES, Case
from docstrings import said
from paths import ROOT
from torch import nn

import reducers
from recorders import presets

GUIDE = ROOT / "docs" / "adding-a-reducer.md"
EXAMPLES = ROOT / "docs" / "reducers.md"


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


def public() -> Iterator[tuple[str, Any]]:
    """The public reducers by name, but not their base classes; and the functions."""
    for name in reducers.__all__:
        thing = getattr(reducers, name)
        reducer = isinstance(thing, type) and issubclass(thing, reducers.Reducer)
        if inspect.isfunction(thing) or (reducer and thing not in (reducers.Reducer, reducers.Statistic)):
            yield name, thing


def returned(thing: Any) -> str:
    return said(thing, "Returns")


def test_each_public_reducer_has_an_example_and_says_what_it_returns() -> None:
    for name, thing in public():
        if isinstance(thing, type):
            assert ">>>" in (thing.__doc__ or ""), name
            assert returned(thing), name


def has_keys_of_its_own(reducer: reducers.Reducer) -> bool:
    """Whether the keys of the result are neither those of an inner reducer nor numbers of observations."""
    inner = any(isinstance(getattr(reducer, field.name), reducers.Reducer) for field in fields(reducer))  # type: ignore[arg-type]
    return not isinstance(reducer, (reducers.Product, reducers.Whole)) and (not inner or isinstance(reducer, reducers.Geometry))


@pytest.mark.parametrize("case", [case for case in CASES if has_keys_of_its_own(case.reducer)], ids=str)
def test_docstrings_name_every_key_of_a_result(case: Case) -> None:
    reducer, x = case.reducer, torch.rand(6, *case.trailing).to(case.dtypes[0])
    result = reducer.compute(reducer.update(reducer.update({}, x), x))
    named = set(re.findall(r"`(\w+)`", returned(type(reducer))))
    assert not isinstance(result, Mapping) or result.keys() <= named


def test_the_page_of_reducers_has_an_example_of_each() -> None:
    page = EXAMPLES.read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL))
    combinators = {"Premap": ".premap(", "Postmap": ".postmap(", "Prefilter": ".prefilter("}
    for name, thing in public():
        if isinstance(thing, type):
            assert combinators.get(name, f"{name}(") in code, name
        else:
            assert name in page, name


PRESETS: dict[str, dict[str, Any]] = {name: {} for name in presets.__all__} | {"gradient_noise": {"batch_size": 5}}


def keys(result: Any) -> set[str]:
    """The keys of nested mappings, but not the paths of leaves."""
    return {key for key in result if "." not in key}.union(*map(keys, result.values())) if isinstance(result, Mapping) else set()


@pytest.mark.parametrize("name", PRESETS)
def test_docstrings_of_presets_name_every_group_and_every_key(name: str) -> None:
    net: nn.Module = nn.MultiheadAttention(8, 2) if name == "attention_entropy" else nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    recorder = getattr(presets, name)(**PRESETS[name]).modules(net)
    optimizer = torch.optim.Adam(net.parameters())
    with recorder:
        for _ in range(3):
            x = torch.randn(5, 8, requires_grad=True)
            output = net(x, x, x)[0] if name == "attention_entropy" else net(x)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if name == "health":
                recorder.push("loss", output.mean())
                recorder.push("target", output)
    found = {part.partition("/")[0] for part in recorder}.union(*(keys(monitor.peek()) for monitor in recorder.values()))
    found -= {name for name, _ in net.named_modules()} | {name.rpartition(".")[2] for name, _ in net.named_parameters()}
    says = returned(getattr(presets, name))
    reducers_named = [thing for each, thing in public() if re.search(rf"`(reducers\.)?{each}`", says)]
    assert found <= set(re.findall(r"`(\w+)[/`]", "\n".join([says, *map(returned, reducers_named)])))
