"""`generate` of transformers: prefill and decoding, positions and requests, beside what plain hooks see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from recorders import ForwardMonitor, Recorder
from recorders.errors import RecorderError, RecordingWarning, TargetError
from recorders.integrations.generating import generating
from reducers import Count, GroupBy, Masked, Max, Mean, PerObservation, Summary

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[7, 9, 11, 13, 15, 17], [0, 0, 8, 10, 12, 14]])
MASK = (IDS != 0).long()
NEW = 6
GREEDY = {"do_sample": False}
TOKENS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}


FAST = ("a dynamic cache", "a static cache", "chunks of the prefill")


def marked(ways: Iterable[str], fast: Sequence[str]) -> list[Any]:
    """Parameters, of which all but the fast ones are slow."""
    return [pytest.param(way, marks=[] if way in fast else pytest.mark.slow) for way in ways]


def new_model(kind: str = "llama", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **TOKENS)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **TOKENS)).eval()


def run(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    torch.manual_seed(1)  # of sampling
    tokens: Tensor = model.generate(**{"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": NEW, **kwargs})
    return tokens


def layers(model: nn.Module, **monitors: ForwardMonitor) -> Recorder:
    """Of the second block."""
    return Recorder(**monitors).modules(model, names="transformer.h.1" if hasattr(model, "transformer") else "model.layers.1")


@contextmanager
def seen(model: Any) -> Iterator[list[Tensor]]:
    """What the second block returns, by plain hooks."""
    block = model.transformer.h[1] if hasattr(model, "transformer") else model.model.layers[1]
    found: list[Tensor] = []
    hook = block.register_forward_hook(lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out))
    yield found
    hook.remove()


WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a dynamic cache": ("llama", 1, GREEDY),
    "GPT-2": ("gpt2", 1, GREEDY),
    "a static cache": ("llama", 1, {**GREEDY, "cache_implementation": "static"}),
    "no cache": ("llama", 1, {**GREEDY, "use_cache": False}),
    "chunks of the prefill": ("llama", 3, {**GREEDY, "prefill_chunk_size": 2}),
    "sampling": ("llama", 1, {"do_sample": True, "num_return_sequences": 2}),
    "beams": ("llama", 1, {"num_beams": 3}),
    "an assistant": ("llama", 1, {**GREEDY, "assistant_model": "another"}),
    "candidates of the prompt": ("llama", 1, {**GREEDY, "prompt_lookup_num_tokens": 2}),
}
"""By name: the model, how many forwards the prefill takes, and how it generates."""


@pytest.mark.parametrize("way", marked(WAYS, FAST))
def test_prefill_and_decoding_are_recorded_apart_and_the_tokens_are_the_same(way: str) -> None:
    kind, prefills, how = WAYS[way]
    model, ids = new_model(kind), IDS
    if "assistant_model" in how:
        how = {**how, "assistant_model": new_model(seed=3)}
    if way in ("an assistant", "candidates of the prompt"):
        ids = torch.tensor([[7, 9, 7, 9, 7, 9]])  # of one request, as they need it
    expected = run(model, ids, **how)
    recorder = layers(
        model,
        prefill=ForwardMonitor(PerObservation(Summary()), steps=[0]),
        decode=ForwardMonitor(PerObservation(Summary()), steps=slice(1, None)),
    )
    with seen(model) as outputs, recorder, generating(recorder, model):
        tokens = run(model, ids, **how)
    assert torch.equal(tokens, expected)
    assert len(outputs) > prefills
    for group, there in {"prefill": outputs[:prefills], "decode": outputs[prefills:]}.items():
        found = next(one for name, one in recorder.items() if name.startswith(group)).peek()
        assert found["count"].tolist() == [x.numel() for x in there]
        assert found["max"].tolist() == [x.max().item() for x in there]
        torch.testing.assert_close(found["mean"], torch.stack([x.double().mean() for x in there]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found["var"], torch.stack([x.double().var() for x in there]), rtol=1e-10, atol=0)
    assert not [row for row in recorder.report().rows if row.reason]


def ending(model: nn.Module) -> int:
    """A token that the second request generates before its last and the first one does not."""
    first, second = run(model, eos_token_id=None, **GREEDY)[:, IDS.shape[1] :].tolist()
    return next(token for token in second[1:-2] if token not in first and token != second[0])


@pytest.mark.parametrize("how", marked(["dynamic", "static"], ["dynamic"]))
def test_padding_and_what_comes_after_the_end_of_a_request_are_left_out(how: str) -> None:
    model = new_model()
    end = ending(model)
    kwargs = {**GREEDY, "eos_token_id": end, "cache_implementation": how}
    alone = []
    for row in IDS:  # each request by itself has neither padding nor anything after its end
        with seen(model) as outputs:
            run(model, row[row != 0][None], **kwargs)
        alone.append(torch.cat([x[0] for x in outputs]).double())
    assert len(alone[0]) == 6 + NEW - 1
    assert len(alone[1]) < 4 + NEW - 1
    recorder = layers(
        model,
        all=ForwardMonitor(Masked(Summary("b t d -> d")), given="mask"),
        request=ForwardMonitor(GroupBy(Summary("b t d -> d"), groups=2), given="request"),
        position=ForwardMonitor(GroupBy(Mean("b t d -> d")), given="position"),
    )
    with recorder, generating(recorder, model):
        run(model, **kwargs)
    name = "model.layers.1"
    both = torch.cat(alone)
    found, by_request, by_position = (recorder[f"{group}/{name}"].peek() for group in ("all", "request", "position"))
    close = {"rtol": 1e-4, "atol": 1e-5}  # padding changes the rounding of what the model computes in float32
    assert found["count"].unique().tolist() == [len(both)]
    torch.testing.assert_close(found["mean"], both.mean(0), **close)
    torch.testing.assert_close(found["var"], both.var(0), **close)
    assert by_request["count"][:, 0].tolist() == [len(one) for one in alone]
    torch.testing.assert_close(by_request["mean"], torch.stack([one.mean(0) for one in alone]), **close)
    positions = [torch.stack([one[p] for one in alone if p < len(one)]).mean(0) for p in range(len(alone[0]))]
    torch.testing.assert_close(by_position, torch.stack(positions), **close)


COUNTS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "a batch": (GREEDY, [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1], [11, 9]),
    "chunks": ({**GREEDY, "prefill_chunk_size": 4}, [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1], [11, 9]),
    "beams": ({"num_beams": 2}, [4, 4, 4, 4, 4, 4, 4, 4, 4, 2, 2], [22, 18]),
    "without a cache": ({**GREEDY, "use_cache": False}, [12, 12, 12, 12, 11, 10, 8, 6, 4, 2, 1], [51, 39]),
}
"""By name: how it generates; how many tokens there are by position and by request."""


@pytest.mark.parametrize("way", marked(COUNTS, ["chunks"]))
def test_each_token_counts_at_its_position_and_for_its_request(way: str) -> None:
    how, positions, requests = COUNTS[way]
    model = new_model()
    recorder = layers(
        model,
        position=ForwardMonitor(GroupBy(Count("b t d -> "), 11), given="position"),
        request=ForwardMonitor(GroupBy(Count("b t d -> ")), given="request"),
    )
    with recorder, generating(recorder, model):
        run(model, eos_token_id=None, **how)
        run(model, eos_token_id=None, **how)  # the requests of a later call have later numbers
    found = {group: (recorder[f"{group}/model.layers.1"].peek() / 32).tolist() for group in ("position", "request")}
    assert found == {"position": [2 * number for number in positions], "request": [*requests, *requests]}


def test_settings_of_a_generation_config_count_too() -> None:
    model = new_model()
    config = transformers.GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=2, min_new_tokens=2)
    recorder = layers(model, request=ForwardMonitor(GroupBy(Count("b t d -> ")), given="request"))
    with recorder, generating(recorder, model):
        model.generate(IDS, config, attention_mask=MASK)  # type: ignore[operator]
    assert (recorder["request/model.layers.1"].peek() / 32).tolist() == [2 * 7, 2 * 5]


@pytest.mark.slow
def test_embeddings_in_place_of_tokens() -> None:
    model = new_model()
    recorder = layers(model, position=ForwardMonitor(GroupBy(Count("b t d -> ")), given="position"))
    with recorder, generating(recorder, model), torch.no_grad():
        embeds = model.get_input_embeddings()(IDS)  # type: ignore[operator]
        model.generate(inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=3, **GREEDY)  # type: ignore[operator]
    assert (recorder["position/model.layers.1"].peek() / 32).tolist() == [2, 2, 2, 2, 2, 2, 1, 1]


@pytest.mark.slow
def test_every_n_th_forward_and_the_step_of_before() -> None:
    model = new_model()
    recorder = layers(model, out=ForwardMonitor(PerObservation(Max()), every_step=2))
    recorder.clock.step = 40
    with seen(model) as outputs, recorder, generating(recorder, model):
        for _ in range(2):
            run(model, **GREEDY)
    assert recorder[0].peek().tolist() == [x.max().item() for x in [*outputs[:NEW:2], *outputs[NEW::2]]]
    assert recorder.clock.step == 40


@pytest.mark.slow
def test_two_recorders_at_once_have_steps_of_their_own() -> None:
    model = new_model()
    first, second = (layers(model, out=ForwardMonitor(Count(), steps=steps)) for steps in ([0], [1, 2]))
    with first, second, generating(first, model), generating(second, model):
        run(model, **GREEDY)
    assert (first[0].samples, second[0].samples) == (1, 2)
    assert "generate" not in vars(model)


def test_the_model_is_left_as_it_was() -> None:
    model = new_model()
    before = dict(vars(model))
    recorder = layers(model, out=ForwardMonitor(Mean()))
    with pytest.raises(ZeroDivisionError), recorder, generating(recorder, model):
        raise ZeroDivisionError
    assert vars(model).keys() == before.keys()


def test_a_failure_costs_a_warning_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    expected = run(model, **GREEDY)
    recorder = layers(model, out=ForwardMonitor(Masked(Mean()), given="mask"))
    monkeypatch.setattr(recorder.clock, "advance", lambda: 1 / 0)
    with pytest.warns(RecordingWarning) as caught, recorder, generating(recorder, model):
        tokens = run(model, **GREEDY)
    assert torch.equal(tokens, expected)
    assert any("ZeroDivisionError" in str(one.message) for one in caught)


def test_mistakes_are_told() -> None:
    model, net = new_model(), nn.Linear(2, 2)
    recorder = layers(model, out=ForwardMonitor(Mean()))
    with pytest.raises(TargetError, match="Linear has no `generate`"), generating(recorder, net):
        pass
    recorder.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RecorderError, match="a recorder of its own"), generating(recorder, model):
        pass


def counted(model: nn.Module, how: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
    """The tokens of three batches, and what the compiler counted."""
    torch._dynamo.reset()
    counters.clear()
    tokens = [run(model, ids, **how) for ids in (IDS, IDS, IDS[:, 2:])]
    found = {name: sum(counters[name].values()) for name in ("graph_break", "recompiles")}
    return tokens, {**found, "graphs": counters["stats"]["unique_graphs"]}


@pytest.mark.slow
def test_compiled_decoding_is_recorded_in_as_many_graphs_as_without() -> None:
    settings = transformers.CompileConfig(mode="default", fullgraph=True)
    settings._compile_all_devices = True  # or transformers compiles on accelerators alone
    static = {**GREEDY, "cache_implementation": "static"}
    monitors = {
        "prefill": ForwardMonitor(Summary(), steps=[0]),
        "decode": ForwardMonitor(Summary(), steps=slice(1, None)),
        "request": ForwardMonitor(GroupBy(Count("b t d -> ")), given="request"),
        "masked": ForwardMonitor(Masked(Summary()), given="mask"),
    }
    expected, graphs = counted(new_model(), {**static, "compile_config": settings})
    results = []
    for how in (static, {**static, "compile_config": settings}):
        model = new_model()
        recorder = layers(model, **monitors)
        with recorder, generating(recorder, model):
            tokens, found = counted(model, how)
        assert all(map(torch.equal, tokens, expected))
        results.append(recorder.compute())
    assert found == graphs
    assert graphs["graphs"] > 0 == graphs["graph_break"]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
