"""The tasks of docs/other-tools.md in the other libraries and here: the numbers are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardMonitor, Recorder, cache
from reducers import Collect, FirstNonfinite, Mean, Summary

# What the other libraries warn of is not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gpt() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, attn_implementation="eager"
    )
    config.architectures = ["GPT2LMHeadModel"]
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def grad_is_on_again() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


def folder_of(net: Any, folder: Path) -> Path:
    """The net and a tokenizer, as the library reads them from the hub."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(50)}, unk_token="w0"))
    named = {f"{name}_token": "w0" for name in ("bos", "eos", "pad", "unk")}
    net.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("grad_is_on_again")
def test_transformer_lens_caches_the_same(gpt: Any, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = pytest.importorskip("transformer_lens")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bridge = lens.TransformerBridge.boot_transformers(str(folder_of(gpt, tmp_path)), device="cpu")
    queries = ForwardMonitor(Collect(), op_=lambda output: output.chunk(3, dim=-1)[0])
    with torch.no_grad(), Recorder(queries).modules(gpt, names="transformer.h.*.attn.c_attn") as recorder:
        _, theirs = bridge.run_with_cache(tokens)
        ours = cache(gpt, ["transformer.h.*"])(tokens)
    for block in range(2):
        ours_here, theirs_here = f"transformer.h.{block}", f"blocks.{block}"
        pairs = {
            "hook_resid_post": ours[ours_here],
            "hook_mlp_out": ours[f"{ours_here}.mlp"],
            "attn.hook_pattern": ours[f"{ours_here}.attn"][1],
        }
        for name, found in pairs.items():
            torch.testing.assert_close(found, theirs[f"{theirs_here}.{name}"], rtol=1e-4, atol=1e-6)
        collected = recorder[f"{ours_here}.attn.c_attn"].peek()
        torch.testing.assert_close(collected, theirs[f"{theirs_here}.attn.hook_q"].reshape(2, 8, 16), rtol=1e-4, atol=1e-6)


def test_nnsight_saves_the_same(gpt: Any, tokens: Tensor) -> None:
    nnsight = pytest.importorskip("nnsight")
    model = nnsight.NNsight(gpt)
    with model.trace(tokens, labels=tokens):
        hidden = model.transformer.h[0].output
        saved = hidden.save()
        with model.output.loss.backward():
            gradient = hidden.grad.save()
    assert torch.equal(cache(gpt, "transformer.h.0")(tokens)["transformer.h.0"], saved)
    with Recorder(BackwardMonitor(Collect())).modules(gpt, names="transformer.h.0") as recorder:
        gpt(tokens, labels=tokens).loss.backward()
    assert torch.equal(recorder["transformer.h.0"].peek(), gradient)


def test_captum_attributes_the_same(mlp: nn.Module, x: Tensor) -> None:
    attr = pytest.importorskip("captum.attr")
    assert torch.equal(cache(mlp, "1")(x)["1"], attr.LayerActivation(mlp, mlp[1]).attribute(x))  # type: ignore[index]
    theirs = attr.LayerGradientXActivation(mlp, mlp[1]).attribute(x, target=1)  # type: ignore[index]
    product = {"op_": lambda gradient, output: gradient * output}
    listed, average = BackwardMonitor(Collect(), **product), BackwardMonitor(Mean("b c -> c"), **product)
    with Recorder(listed=listed, average=average).modules(mlp, names="1") as recorder:
        mlp(x)[:, 1].sum().backward()
    assert torch.equal(recorder["listed/1"].peek(), theirs)
    torch.testing.assert_close(recorder["average/1"].peek(), theirs.double().mean(0))


@pytest.fixture
def torchlens() -> Iterator[Any]:
    """It replaces the functions of PyTorch at the first trace, of which the compiler would break graphs in later tests."""
    package = pytest.importorskip("torchlens")
    wrappers, bare = pytest.importorskip("torchlens.backends.torch.wrappers"), torch.ones
    yield package
    wrappers.unwrap_torch()
    assert torch.ones is bare


def test_torchlens_has_the_same_outputs(torchlens: Any, mlp: nn.Module, x: Tensor) -> None:
    trace = torchlens.trace(mlp, x)
    with Recorder(ForwardMonitor(Summary())).modules(mlp, leaves=True) as recorder:
        mlp(x)
    for name, label in {"0": "linear_1_1", "1": "relu_1_2", "2": "linear_2_3"}.items():
        assert torch.equal(cache(mlp, name)(x)[name], trace[label].out)
        torch.testing.assert_close(recorder[name].peek()["mean"], trace[label].out.double().mean())
    assert len(trace.to_pandas()) == 5  # with the input and the output
    assert "No non-finite" in str(trace.first_nonfinite())
    with Recorder(ForwardMonitor(FirstNonfinite())).modules(mlp, leaves=True) as recorder:
        mlp(x)
        mlp(x * torch.inf)
    assert [int(first) for first in recorder.compute().values()] == [1, 1, 1]
    assert "input_1" in str(torchlens.trace(mlp, x * torch.inf).first_nonfinite())


def test_wandb_has_the_calls_that_the_page_names() -> None:
    wandb = pytest.importorskip("wandb")
    assert callable(wandb.watch)
    assert callable(wandb.Histogram)
    assert callable(wandb.alert)


def test_the_page_names_the_versions_that_extras_ask_for() -> None:
    page, extras = (ROOT / "docs" / "other-tools.md").read_text(), (ROOT / "setup.cfg").read_text()
    for name in ("transformer-lens", "nnsight", "captum", "torchlens"):
        (version,) = re.findall(rf"^    {name}>=([\d.]+)$", extras, flags=re.MULTILINE)
        assert f"{name} {version}" in page
