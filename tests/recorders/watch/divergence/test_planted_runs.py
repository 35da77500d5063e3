"""Faults that were planted in one of two recorded trainings: the step, the phase and the layer that are named."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from planted_divergences import PLANTED, Planted
from planted_runs import PLANTED_RUNS, PlantedRun, Training, next_word, twin_run
from torch import Tensor, nn

from recorders import Recording, RunDivergence, divergence

BELOW_NOISE = "eps of the layer norm"
"""From 1e-5 to 1e-4 moves what this layer returns by 1e-6, which float32 rounds at: it is named if a repeat shows no noise."""

QUICK = ("no scale of attention", "bias dropped", "detached", "stale buffer")
QUICK_RUNS = (
    "rate 1 % higher", "no weight decay", "other betas", "momentum not loaded", "labels smoothed", "other dropout",
)  # fmt: skip

_RECORDED: dict[Training, Recording] = {}


def recorded(training: Training) -> Recording:
    """A healthy training; most faults are of the same."""
    if training not in _RECORDED:
        _RECORDED[training] = training.recorded()
    return _RECORDED[training]


def named(fault: PlantedRun, *, repeat: bool = False) -> RunDivergence:
    return divergence(recorded(fault.healthy), fault.faulty.recorded(), repeat=fault.healthy.recorded() if repeat else None)


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_of_a_net_is_named(name: str) -> None:
    fault = twin_run(next(planted for planted in PLANTED if planted.name == name))
    found = named(fault)
    assert fault.is_right(found), found


@pytest.mark.parametrize("name", QUICK_RUNS)
def test_a_fault_of_a_training_is_named(name: str) -> None:
    fault = next(fault for fault in PLANTED_RUNS if fault.name == name)
    found = named(fault)
    assert fault.is_right(found), found


@pytest.mark.slow
@pytest.mark.parametrize("rewritten", [False, True], ids=["same names", "other names"])
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_each_fault_of_a_net_is_named(planted: Planted, rewritten: bool) -> None:
    fault = twin_run(planted, rewritten)
    found = named(fault)
    assert fault.is_right(found, rewritten) or (planted.name == BELOW_NOISE and not found), found


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED_RUNS, ids=lambda fault: fault.name)
def test_each_fault_of_a_training_is_named(fault: PlantedRun) -> None:
    found = named(fault)
    assert fault.is_right(found), found


def test_a_fault_below_rounding_is_named_if_a_repeat_shows_that_the_run_repeats() -> None:
    fault = twin_run(next(planted for planted in PLANTED if planted.name == BELOW_NOISE))
    assert not named(fault)
    found = named(fault, repeat=True)
    assert fault.is_right(found), found


def test_what_is_clipped_after_the_backward_is_said_so() -> None:
    found = named(next(fault for fault in PLANTED_RUNS if fault.name == "no clipping"))
    assert "its gradient as the optimizer gets it is" in found.differs
    assert "times that of the first run: clipped, scaled, summed or averaged after the backward" in found.differs
    assert found.equal == ("the gradients that go through the net",)


def test_batches_in_parts_are_no_fault_if_the_gradients_agree() -> None:
    whole = Training(net=_without_dropout, batches=Training().batches[:1])
    parts = Training(net=_without_dropout, batches=tuple(tuple(words.chunk(2)) for (words,) in whole.batches))
    assert not divergence(whole.recorded(), parts.recorded())
    twice = Training(net=_without_dropout, batches=parts.batches, loss=lambda output, words: 2 * next_word(output, words))
    found = divergence(whole.recorded(), twice.recorded())
    assert (found.phase, found.name) == ("input", "")
    assert found.differs == "how often the net is called in a step: 2 times, and 1 in the first run"


def test_a_loss_that_is_scaled_and_unscaled_is_no_fault() -> None:
    def unscale(net: nn.Module, *_: object) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024)

    scaled = Training(loss=lambda output, words: 1024 * next_word(output, words), before_step=unscale)
    assert not divergence(Training().recorded(), scaled.recorded())


def test_an_element_at_the_threshold_of_relu_is_no_fault() -> None:
    def net(near: float) -> nn.Module:
        made = nn.Sequential(nn.Embedding(30, 8), nn.ReLU(), nn.Linear(8, 30))
        with torch.no_grad():
            made[0].weight[3, 0] = near  # type: ignore[index, operator]
        return made

    first, second = (Training(net=partial(net, near)).recorded() for near in (1e-9, -1e-9))
    found = divergence(first, second)
    assert not found, found
    assert found.growth[0].gradient > 1e-3


def test_layers_of_another_dtype_are_noted_as_their_rounding_is_noise() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), _Single(), nn.Linear(8, 30))

    def half() -> nn.Module:
        made = net()
        made[1].register_forward_hook(lambda module, args, output: output.bfloat16())  # type: ignore[index]
        return made

    first, second = (Training(net=made, batches=Training().batches[:2]).recorded() for made in (net, half))
    found = divergence(first, second)
    assert not found, found
    assert found.notes[0] == "1 of 5 modules return another dtype in the second run, first 1"


class _Single(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def _without_dropout() -> nn.Module:
    net = Training().net()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net
