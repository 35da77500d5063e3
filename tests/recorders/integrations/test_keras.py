"""`Model.fit` of Keras, on PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recorders import (
    BackwardMonitor,
    CallMonitor,
    ForwardMonitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    attached,
    detach_all,
)
from recorders.capture.contents import all_modules
from recorders.errors import RecorderError, SelectionError
from reducers import Collect, Count, Last, Mean, Norm, PerObservation

os.environ.setdefault("KERAS_BACKEND", "torch")  # before it is imported
keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("keras runs on another backend", allow_module_level=True)
from recorders.integrations.keras import RecorderCallback  # noqa: E402  # imports keras

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # keras's own
layers = keras.layers


def in_sequence() -> Any:
    return keras.Sequential(
        [layers.Dense(5, activation="relu", name="a"), layers.BatchNormalization(name="n"), layers.Dense(1, name="b")]
    )


def functional() -> Any:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="gelu", name="a")(inputs)
    both = layers.Add(name="sum")([hidden, layers.Dense(5, name="b")(hidden)])
    return keras.Model(inputs, layers.Dense(1, name="c")(both))


class Subclassed(keras.Model):  # type: ignore[misc,name-defined]
    """Layers as an attribute, in a list, and within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(4)
        self.blocks = [layers.Dense(4, name="block_0"), layers.Dense(4, name="block_1")]
        self.attention = layers.MultiHeadAttention(2, 2)
        self.last = layers.Dense(1)

    def call(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = x[:, None]
        return self.last(self.attention(x, x)[:, 0])


class WithTorch(keras.Model):  # type: ignore[misc,name-defined]
    """A module of PyTorch within a model of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.last = layers.Dense(1)

    def call(self, x: Any, training: bool | None = None) -> Any:  # without it Keras leaves `inner` in training mode
        return self.last(self.inner(x, training=training))


ATTENTION = [
    f"attention.{name}" for name in ("_query_dense", "_key_dense", "_value_dense", "_softmax", "_dropout_layer", "_output_dense")
]
NETS: dict[Callable[[], Any], list[str]] = {
    in_sequence: ["", "a", "n", "b"],
    functional: ["", "a", "b", "sum", "c"],
    Subclassed: ["", "first", "block_0", "block_1", "attention", *ATTENTION, "last"],
    WithTorch: ["", "inner", "inner.module", "inner.module.0", "inner.module.1", "last"],
}


def built(make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(0)
    net = make()
    net(torch.zeros(2, 4))
    net.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return net


def fit(net: Any, *callbacks: Any, batches: int = 4, epochs: int = 2) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4 * batches, 4, generator=generator), torch.randn(4 * batches, 1, generator=generator)
    net.fit(x.numpy(), y.numpy(), epochs=epochs, batch_size=4, verbose=0, shuffle=False, callbacks=[*callbacks])


def everything(net: nn.Module) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Mean("channels")),
        back=BackwardMonitor(Norm()),
        grad=ParameterGradientMonitor(PerObservation(Norm())),
        update=ParameterUpdateMonitor(Norm()),
        value=ParameterMonitor(Last()),
        loss=CallMonitor(Collect()),
    ).modules(net)


@pytest.mark.parametrize("make", NETS)
def test_all_layers_are_selected(make: Callable[[], Any]) -> None:
    recorder = Recorder(ForwardMonitor(Count())).modules(net := built(make))
    assert list(recorder) == NETS[make]
    assert [one.place for one in attached(net)] == NETS[make]
    assert detach_all(net) == len(NETS[make])


@pytest.mark.slow
@pytest.mark.parametrize("make", NETS)
def test_a_fit_is_the_same_to_the_bit_and_each_step_is_recorded(make: Callable[[], Any]) -> None:
    bare, recorded = built(make), built(make)
    fit(bare)
    callback = RecorderCallback(everything)
    fit(recorded, callback)
    for mine, theirs in zip(recorded.variables, bare.variables, strict=True):
        assert mine.value.equal(theirs.value)
    assert callback.recorder.clock.step == 8
    called = {row.name: row.samples for row in callback.recorder.report().rows if row.samples}
    quiet = {f"{group}/{name}" for group in ("out", "back") for name in ("attention._softmax", "attention._dropout_layer")}
    assert {*callback.recorder} - {*called} == quiet & {*callback.recorder}
    assert {*called.values()} == {8}
    assert len(callback.recorder["loss"].peek()) == 8
    weights = callback.recorder.snapshot()["value/last" if make in (Subclassed, WithTorch) else "value/b"].leaves()
    assert [*weights] == ["kernel", "bias"]
    layer = recorded.last if make in (Subclassed, WithTorch) else recorded.get_layer("b")
    assert weights["kernel"].equal(layer.kernel.value)
    assert "apply" not in vars(recorded.optimizer)  # Keras has its own optimizer back


def test_gradients_and_updates_are_those_of_the_step() -> None:
    net = built(in_sequence)
    before = net.get_layer("a").kernel.value.detach().clone()
    recorder = Recorder(grad=ParameterGradientMonitor(Last(), "kernel"), change=ParameterUpdateMonitor(Last(), "kernel")).modules(
        net, types=layers.Dense
    )
    fit(net, RecorderCallback(recorder), batches=1, epochs=1)
    kernel = net.get_layer("a").kernel.value
    assert recorder["change/a"].peek().equal(kernel.detach() - before)
    assert recorder["grad/a"].peek().equal(kernel.grad)


def test_parameters_are_selected_by_the_names_of_keras() -> None:
    recorder = Recorder(ParameterMonitor(Count())).parameters(built(in_sequence), types=layers.Dense)
    assert list(recorder) == ["a.kernel", "a.bias", "b.kernel", "b.bias"]
    with pytest.raises(SelectionError, match=r"did you mean 'a.kernel'"):
        recorder.parameters(built(in_sequence), names="a.kernl")


def test_channels_are_the_last_axis_of_convolutions_of_keras() -> None:
    net = keras.Sequential([layers.Conv2D(3, 2, name="conv"), layers.ReLU(name="act"), layers.MaxPooling2D(name="pool")])
    net(torch.zeros(1, 5, 5, 2))
    with Recorder(ForwardMonitor(Mean("channels"))).modules(net) as recorder:
        net(torch.randn(1, 5, 5, 2))
    assert {name: tuple(result.shape) for name, result in recorder.compute().items()} == dict.fromkeys(
        ["", "conv", "act", "pool"], (3,)
    )


@pytest.mark.parametrize("make", NETS)
def test_validation_is_evaluation(make: Callable[[], Any]) -> None:
    bare, net, x = built(make), built(make), torch.randn(12, 4).numpy()
    monitors = {"train": ForwardMonitor(Count(), eval_update=False), "valid": ForwardMonitor(Count(), train_update=False)}
    callback = RecorderCallback(lambda model: Recorder(**monitors).modules(model))
    y, valid = x[:, :1], (x[:8], x[:8, :1])
    for fitted, callbacks in ((bare, []), (net, [callback])):
        fitted.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=valid, callbacks=callbacks)
    found = {row.name: row.samples for row in callback.recorder.report().rows if row.samples}
    assert {count for name, count in found.items() if name.startswith("train")} == {6}
    assert {count for name, count in found.items() if name.startswith("valid")} == {4}
    assert [module.training for module in all_modules(net)] == [module.training for module in all_modules(bare)]


def test_the_loss_of_a_batch_is_the_mean_of_the_epoch_so_far() -> None:
    net = built(in_sequence)
    recorder = Recorder(loss=CallMonitor(Collect()), out=ForwardMonitor(Collect())).modules(net, names="(net)")
    generator = torch.Generator().manual_seed(0)
    _, y = torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator)
    fit(net, RecorderCallback(recorder), epochs=1)
    each = (recorder["out"].peek() - y).square().reshape(4, 4).mean(1)
    torch.testing.assert_close(recorder["loss"].peek(), each.cumsum(0) / torch.arange(1, 5), rtol=1e-5, atol=0, check_dtype=False)


def test_a_fit_that_raises_leaves_the_next_one_whole() -> None:
    class Stops(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyError("stop")

    net = built(in_sequence)
    callback = RecorderCallback(Recorder(ParameterUpdateMonitor(Count(), "kernel")).modules(net, names="a"))
    with pytest.raises(KeyError):
        fit(net, callback, Stops())
    fit(net, callback, epochs=1)
    assert callback.recorder["a"].samples == callback.recorder.clock.step == 5
    fit(net, epochs=1)
    assert callback.recorder["a"].samples == callback.recorder.clock.step == 5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_fit_is_recorded(fresh_compiler: None) -> None:
    bare, recorded = built(in_sequence), built(in_sequence)
    for net in (bare, recorded):
        net.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", jit_compile=True)
    fit(bare)
    callback = RecorderCallback(everything)
    fit(recorded, callback)
    for mine, theirs in zip(recorded.variables, bare.variables, strict=True):
        torch.testing.assert_close(mine.value, theirs.value, rtol=1e-5, atol=1e-6)
    assert {row.samples for row in callback.recorder.report().rows} == {8}


def test_another_backend_is_told() -> None:
    callback = RecorderCallback(everything)
    callback.set_model(object())
    with pytest.raises(RecorderError, match="KERAS_BACKEND=torch"):
        callback.on_train_begin()
