"""Recorders of pairs of modules of two nets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recorders import Recorder, SelectionError
from reducers import CKA, CrossCovariance


def nets() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2), *extra) for width, extra in ((4, []), (8, [nn.Tanh()]))
    ]


def test_modules_of_one_name_are_paired() -> None:
    first, second = nets()
    recorder = Recorder.pairs(first, second, CKA(), nn.Linear)
    assert list(recorder) == ["0", "2"]
    with recorder:
        for batch in torch.randn(4, 16, 3).unbind():
            first(batch), second(batch)
    assert [monitor.samples for monitor in recorder.values()] == [4, 4]
    assert 0 < recorder["2"].peek()["cka"] <= 1
    assert (recorder[0].module, recorder[0].other) == (first[0], second[0])
    assert repr(recorder).startswith("Recorder(PairMonitor(CKA(")
    assert recorder.report().silent == ()


def test_every_module_is_paired_with_every_one() -> None:
    first, second = nets()
    recorder = Recorder.pairs(first, second, CrossCovariance(), match="all", names=["0", "2"], exclude="x")
    assert list(recorder) == ["0~0", "0~2", "2~0", "2~2"]
    x = torch.randn(32, 3)
    first(x), second(x)
    recorder.deregister()
    expected = torch.cov(torch.cat((first[:1](x), second[:3](x)), dim=1).detach().double().T)[:4, 4:]
    torch.testing.assert_close(recorder["0~2"].peek()["covariance"], expected, rtol=1e-5, atol=1e-7)


def test_options_gate_and_a_net_may_be_compared_with_itself() -> None:
    first, _ = nets()
    with Recorder.pairs(first, first, CKA(), nn.Tanh, match="all", eval_update=False) as recorder:
        first(torch.randn(8, 3))
        first.eval()(torch.randn(8, 3))
    assert (list(recorder), recorder[0].samples) == (["1~1"], 1)
    assert recorder[0].peek()["cka"] == pytest.approx(1.0)


def test_what_cannot_be_paired_says_what_there_is() -> None:
    first, second = nets()
    with pytest.raises(SelectionError, match=r"net_a has \['a'\], net_b \['0', '1', '2', '3'\]; try match='all'"):
        Recorder.pairs(nn.ModuleDict({"a": nn.Tanh()}), second, CKA(), where=lambda name, module: name != "")
    with pytest.raises(SelectionError, match=r"pairs: net_b: the selection \(types="):
        Recorder.pairs(first, nn.Identity(), CKA(), nn.Linear)
    with pytest.raises(ValueError, match="'name', for modules of the same name"):
        Recorder.pairs(first, second, CKA(), match="index")  # type: ignore[arg-type]
