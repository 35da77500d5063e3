"""Monitors of outputs, inputs and pushed values: gates, callables, states, life cycle."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recorders import (
    CallMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    MergeError,
    MonitorConstructor,
    MonitorError,
    ParameterGradientMonitor,
    RecordingWarning,
    TargetError,
)
from reducers import Collect, Count, History, Last, Max, Mean, Product, Reducer, ReducerTypeError, Sum


def double(output: Tensor, inputs: Tensor) -> Tensor:
    return output * 2


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"logits": x * 2, "states": (x, x + 1), "note": "text"}


def test_output_is_recorded_as_it_was_when_the_module_returned_it() -> None:
    layer = nn.Linear(3, 2)
    monitor = ForwardMonitor(Collect(), layer)
    outputs = [layer(torch.randn(4, 3)).detach().clone() for _ in range(3)]
    torch.testing.assert_close(monitor.peek(), torch.cat(outputs), rtol=0, atol=0)
    assert monitor.samples == 3


def test_in_place_operation_after_the_module_does_not_change_what_was_recorded() -> None:
    torch.manual_seed(0)  # some of the outputs are negative
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    monitor = ForwardMonitor(Last(), net[0])
    x = torch.randn(5, 3)
    net(x)
    torch.testing.assert_close(monitor.peek(), torch.nn.functional.linear(x, net[0].weight, net[0].bias).detach())
    assert (monitor.peek() < 0).any()


def test_input_is_recorded_before_a_module_changes_it_in_place() -> None:
    relu = nn.ReLU(inplace=True)
    monitor = ForwardInputMonitor(Last(), relu)
    after = ForwardMonitor(Last(), relu, op_=lambda output, inputs: inputs)
    relu(torch.tensor([-1.0, 2.0]))
    assert monitor.peek().tolist() == [-1.0, 2.0]
    assert after.peek().tolist() == [0.0, 2.0]  # as its docstring says


def test_keyword_inputs_are_seen() -> None:
    layer = nn.Bilinear(2, 2, 1)
    monitor = ForwardInputMonitor(Last(), layer)
    layer(torch.zeros(1, 2), input2=torch.ones(1, 2))
    assert {path: value.tolist() for path, value in monitor.peek().items()} == {"0": [[0.0, 0.0]], "input2": [[1.0, 1.0]]}


def test_nested_outputs_give_each_tensor_a_state_of_its_own() -> None:
    net = Nested()
    monitor = ForwardMonitor(Mean(), net)
    net(torch.tensor([1.0, 3.0]))
    assert {path: value.item() for path, value in monitor.peek().items()} == {"logits": 4.0, "states.0": 2.0, "states.1": 3.0}
    keys = Mean().update({}, torch.ones(1)).keys()
    assert set(monitor.state) == {f"{path}/{key}" for path in ("logits", "states.0", "states.1") for key in keys}


def test_filter_map_and_op_get_the_operands_in_order_and_detached() -> None:
    layer = nn.Linear(2, 2)
    seen: list[tuple[bool, bool]] = []

    def keep(output: Tensor, inputs: Tensor) -> bool:
        seen.append((output.requires_grad, inputs.shape == (3, 2)))
        return bool(inputs.sum() > 0)

    mapped = ForwardMonitor(Sum(), layer, filter_=keep, map_=lambda output, inputs: (inputs * 10,))
    operated = ForwardMonitor(Sum(), layer, op_=lambda output, inputs: inputs, map_=None)
    layer(torch.ones(3, 2))
    layer(-torch.ones(3, 2))
    assert seen == [(False, True), (False, True)]
    assert mapped.peek() == 60.0
    assert mapped.samples == 1
    assert operated.peek() == 0.0
    assert operated.samples == 2


def test_op_is_not_used_where_map_is_given() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Sum(), layer, map_=lambda o, i: (o,), op_=lambda o, i: o * 100)
    layer(torch.ones(2))
    assert monitor.peek() == 2.0


def test_modes_gate() -> None:
    layer = nn.Identity()
    training = ForwardMonitor(Count(), layer, eval_update=False)
    evaluation = ForwardMonitor(Count(), layer, train_update=False)
    never = ForwardMonitor(Count(), layer, train_update=False, eval_update=False)
    layer(torch.ones(3))
    layer.eval()(torch.ones(5))
    assert (training.peek(), evaluation.peek(), never.peek()) == (3, 5, None)


def test_condition_and_every_gate() -> None:
    layer = nn.Identity()
    wanted = True
    conditional = ForwardMonitor(Collect(), layer, condition=lambda: wanted)
    seldom = ForwardMonitor(Collect(), layer, every=3)
    for step in range(7):
        wanted = step % 2 == 0
        layer(torch.tensor([float(step)]))
    assert conditional.peek().tolist() == [0, 2, 4, 6]
    assert seldom.peek().tolist() == [0, 3, 6]


def test_every_counts_the_calls_that_pass_the_gates_before_it() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Collect(), layer, eval_update=False, every=2)
    for step in range(8):
        layer.train(step % 2 == 0)(torch.tensor([float(step)]))
    assert monitor.peek().tolist() == [0, 4]


def test_prepend_goes_before_hooks_registered_earlier() -> None:
    layer = nn.Identity()
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    first, last = ForwardMonitor(Last(), layer, prepend=True), ForwardMonitor(Last(), layer)
    layer(torch.zeros(1))
    assert (first.peek().item(), last.peek().item()) == (0.0, 1.0)


def test_the_hook_returns_nothing_and_the_output_is_the_users_own() -> None:
    layer = Nested()
    bare = layer(torch.ones(1))
    ForwardMonitor(Last(), layer, op_=lambda output, inputs: output["logits"])
    monitored = layer(torch.ones(1))
    assert type(monitored) is type(bare)
    assert monitored["logits"].equal(bare["logits"])


def test_shared_reducer_gives_every_monitor_a_state_of_its_own() -> None:
    reducer = Mean()
    make = ForwardMonitor.partialconstructor(reducer)
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    monitors = [make(None, layer) for layer in layers]
    layers[0](torch.ones(1, 2))
    assert monitors[0].samples == 1
    assert monitors[1].peek() is None


def test_partialconstructor_drops_nothing_and_pickles() -> None:
    make = ForwardMonitor.partialconstructor(Sum(), op_=double, train_update=False, every=2, on_error="raise", prepend=True)
    again = pickle.loads(pickle.dumps(make))
    assert isinstance(again, MonitorConstructor)
    assert again == make
    layer = nn.Identity().eval()
    monitor = again(None, layer)
    for _ in range(3):
        layer(torch.ones(2))
    assert monitor.peek() == 8.0
    assert monitor.constructor == make
    with pytest.raises(TypeError, match="it takes"):
        ForwardMonitor.partialconstructor(Sum(), operation=double)


def test_signature_spells_out_every_argument() -> None:
    import inspect

    from recorders import ParameterGradientMonitor, StateMonitor

    for kind in (ForwardMonitor, StateMonitor, ParameterGradientMonitor):
        names = list(inspect.signature(kind).parameters)
        assert {
            "reducer",
            "module",
            "train_update",
            "eval_update",
            "prepend",
            "condition",
            "every",
            "filter_",
            "map_",
            "op_",
        } <= set(names)
        assert names[0] == "reducer"
    assert list(inspect.signature(StateMonitor).parameters)[:3] == ["reducer", "attr", "module"]


def test_deregister_keeps_data_and_register_goes_on() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Sum(), layer)
    layer(torch.ones(1))
    assert not monitor.deregister().registered
    layer(torch.ones(1))
    assert monitor.peek() == 1.0
    monitor.register().register()
    layer(torch.ones(1))
    assert monitor.peek() == 2.0
    other = nn.Identity()
    monitor.register(other)
    layer(torch.ones(1))
    other(torch.ones(1))
    assert monitor.peek() == 3.0


@pytest.mark.parametrize("reducer", [Mean("b c -> c"), History(Mean("b c -> c"), duration=2.0)], ids=["buffered", "at once"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_clear_may_keep_the_shapes(reducer: Reducer, compiled: bool) -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(reducer, layer, on_error="raise")
    run = torch.compile(layer, backend="eager", dynamic=False) if compiled else layer
    for _ in range(3):
        run(torch.ones(4, 3))
    for _ in range(2):
        monitor.clear(keepshape=True)
        assert monitor.peek() is None
        with pytest.raises(MonitorError, match=r"keeps shape .*3.* and now met .*2"):
            run(torch.ones(4, 2))
    for _ in range(3):
        run(torch.full((5, 3), 2.0))
    assert monitor.peek().tolist() == [2, 2, 2]
    monitor.clear()
    run(torch.ones(4, 2))
    assert monitor.peek().tolist() == [1, 1]


def test_clear_and_merge() -> None:
    layer = nn.Identity()
    left, right = ForwardMonitor(Sum(), layer), ForwardMonitor(Sum(), layer)
    layer(torch.ones(2))
    left.merge(right)
    assert (left.peek(), left.samples) == (4.0, 2)
    layer(torch.ones(2))
    assert (left.peek(), left.samples) == (6.0, 3)
    left.clear()
    assert (left.peek(), left.samples, left.state) == (None, 0, {})
    with pytest.raises(MergeError, match="reducers differ"):
        left.merge(ForwardMonitor(Mean(), layer))


def test_apply_shows_the_function_and_keeps_the_state() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Sum(), layer)
    layer(torch.ones(2))
    layer(torch.ones(2))
    monitor.apply(lambda result, samples: result / samples).apply(lambda result, samples: result + 1)
    assert monitor.peek() == 3.0
    assert monitor.state["sum"] == 4.0


def test_pushed_values_numbers_tensors_and_dicts() -> None:
    loss = CallMonitor(Mean())
    loss.push(1.0)
    loss.push(torch.tensor(2.0, requires_grad=True) * 1)
    loss.push(6)
    assert (loss.peek(), loss.samples) == (3.0, 3)
    metrics = CallMonitor(Max())
    metrics.push({"accuracy": 0.5, "loss": torch.tensor(3.0)})
    assert {name: value.item() for name, value in metrics.peek().items()} == {"accuracy": 0.5, "loss": 3.0}
    nested = CallMonitor(Max())
    nested.push([1.0, {"f1": np.float32(0.5)}])
    nested.push((2, {"f1": np.array([0.25, 0.75])}))
    assert {name: value.item() for name, value in nested.peek().items()} == {"0": 2.0, "1.f1": 0.75}


def test_pushes_pass_the_gates() -> None:
    layer = nn.Identity()
    monitor = CallMonitor(Sum(), layer, eval_update=False)
    monitor.push(1.0)
    layer.eval()
    monitor.push(10.0)
    assert monitor.peek() == 1.0


def test_four_threads_lose_no_updates() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Product(n=Count(), total=Sum()), layer)
    x = torch.ones(1)
    threads = [threading.Thread(target=lambda: [layer(x) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert monitor.samples == 2000
    assert monitor.peek()["total"] == 2000.0


def test_copies_and_pickles_of_a_hooked_model_carry_and_record_nothing() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    monitor = ForwardMonitor(Sum(), net[0], op_=lambda output, inputs: output)  # a lambda, which could not be pickled
    buffer = io.BytesIO()
    torch.save(net, buffer)
    assert b"recorders" not in buffer.getvalue()
    buffer.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(buffer, weights_only=False)]
    x = torch.ones(1, 2)
    for double in copies:
        torch.testing.assert_close(double(x), torch.relu(net[0].weight.sum(1) + net[0].bias)[None])
    assert monitor.samples == 0


def test_a_monitor_pickles_with_its_state_and_without_its_module() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Sum(), layer)
    layer(torch.ones(2))
    for double in (pickle.loads(pickle.dumps(monitor)), copy.deepcopy(monitor)):
        assert (double.peek(), double.samples, double.module, double.registered) == (2.0, 1, None, False)
        double.register(layer)
        layer(torch.ones(2))
        assert double.peek() == 4.0
        double.deregister()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ForwardMonitor(Mean), ReducerTypeError, r"write Mean\(\), not Mean"),
        (lambda: ForwardMonitor(torch.mean), ReducerTypeError, "needs a reducer such as"),
        (lambda: ForwardMonitor(Mean(), "layer"), TargetError, "needs a torch.nn.Module"),
        (lambda: ForwardMonitor(Mean()).register(), TargetError, "got None"),
        (lambda: ForwardMonitor(Mean(), every=0), ValueError, "at least 1"),
        (lambda: ForwardMonitor(Mean(), every_step=True), ValueError, "a whole number of steps"),
        (lambda: ForwardMonitor(Mean(), on_error="ignore"), ValueError, "'raise', 'warn' or 'disable'"),
        (lambda: ForwardMonitor(Mean(), op_=3), TypeError, "op_ must be callable"),
    ],
)
def test_mistakes_at_construction_say_what_to_do(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


def test_numbers_of_numpy_are_whole_numbers_of_calls_and_steps() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Mean(), layer, every=np.int64(2), every_step=np.int64(1))
    for _ in range(3):
        layer(torch.ones(1))
    assert monitor.samples == 2
    assert monitor.constructor == ForwardMonitor.partialconstructor(Mean(), every=2)


class Text(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "text"


MISTAKES = [
    (nn.Identity(), {}, Mean("b c h w -> c"), "needs 4 axes"),
    (Text(), {}, Mean(), "no tensor to record in str"),
    (nn.Identity(), {"map_": lambda o, i: [o]}, Mean(), "map_ must return a tensor, or a tuple"),
    (nn.Identity(), {"op_": lambda o, i, more: o}, Mean(), "positional argument"),
    (nn.Identity(), {"filter_": lambda o, i: o.nothing}, Mean(), "nothing"),
    (nn.Identity(), {"condition": lambda: 1 / 0}, Mean(), "division by zero"),
]


@pytest.mark.parametrize(("module", "options", "reducer", "message"), MISTAKES, ids=[m[3] for m in MISTAKES])
def test_failures_in_capture_follow_on_error(module: nn.Module, options: dict[str, object], reducer: object, message: str) -> None:
    x = torch.ones(2, 3)
    for policy in ("warn", "disable", "raise"):
        monitor = ForwardMonitor(reducer, module, on_error=policy, **options)  # type: ignore[arg-type]
        monitor.name = "the/name"
        if policy == "raise":
            with pytest.raises(MonitorError, match=message):
                module(x)
        else:
            with pytest.warns(RecordingWarning, match=message) as caught:
                module(x)
                module(x)
            assert len(caught) == 1
            assert f"ForwardMonitor 'the/name' on {type(module).__name__}" in str(caught[0].message)
            assert monitor.registered is (policy == "warn")
        assert monitor.last_error is not None
        assert monitor.state == {}
        monitor.deregister()


def test_a_failure_keeps_what_was_recorded_before() -> None:
    layer = nn.Identity()
    monitor = ForwardMonitor(Mean("b c -> c"), layer)
    layer(torch.ones(2, 3))
    before = monitor.state
    with pytest.warns(RecordingWarning, match=r"keeps shape \(3,\).*operands: output \(2, 5\) float32"):
        layer(torch.ones(2, 5))
    assert all(monitor.state[key] is before[key] for key in before)
    layer(torch.full((2, 3), 3.0))
    assert monitor.peek().tolist() == [2.0, 2.0, 2.0]


def test_one_failing_leaf_leaves_all_leaves_of_that_call_out() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x[0]

    layer = Two()
    monitor = ForwardMonitor(Mean("b c -> c"), layer)
    with pytest.warns(RecordingWarning, match="needs 2 axes"):
        layer(torch.ones(2, 3))
    assert monitor.states == {}


def test_a_disabled_monitor_warns_once_and_records_no_more() -> None:
    layer = nn.Linear(2, 2)
    monitors = [
        ParameterGradientMonitor(Mean("a b c -> a"), None, layer, on_error="disable"),
        CallMonitor(Mean("a b c -> a"), on_error="disable"),
    ]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.warns(RecordingWarning, match="has been taken off") as caught:
        for size in (2, 2, 2):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            monitors[1].push(torch.ones(size))
        monitors[1].push(torch.ones(1, 1, 1))
    assert len(caught) == 2
    assert [monitor.samples for monitor in monitors] == [0, 0]
    monitors[1].clear()
    monitors[1].push(torch.ones(1, 1, 1))
    assert monitors[1].samples == 1


def test_a_number_that_no_tensor_holds_is_left_out_with_a_warning() -> None:
    monitor = CallMonitor(Mean())
    with pytest.warns(RecordingWarning, match="Overflow"):
        monitor.push(2**70)
    monitor.push(3)
    assert (monitor.samples, monitor.peek().item()) == (1, 3.0)
