"""Two recorded runs: the first step, phase and layer at which they part, and nothing if they do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recorders import ForwardMonitor, Recorder, Recording, Timeline, bisect_steps, divergence, load, presets
from recorders.cli import main
from recorders.errors import SelectionError
from reducers import Collect, Digest, Fingerprints, Norm, PerObservation

WIDTH, WORDS = 16, 10


class Block(nn.Module):
    def __init__(self, scale: float = 0.25, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH, eps=eps), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.ff = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.scale = nn.GELU(), scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT * self.scale).softmax(-1) @ v)
        return x + self.act(self.ff(x))


def build(**second: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(**second), nn.Linear(WIDTH, WORDS))


Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    net: nn.Module | None = None,
    rate: float = 1e-3,
    steps: int = 4,
    seed: int = 1,
    loss: Loss = nn.functional.cross_entropy,
    every: int = 1,
    parts: int = 1,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    before_step: Callable[[nn.Module, int], object] = lambda net, step: None,
    groups: tuple[str, ...] | None = None,
) -> Recording:
    net = build() if net is None else net
    stepper = optimizer(net.parameters(), lr=rate)  # type: ignore[call-arg]
    generator = torch.Generator().manual_seed(seed)
    with presets.fingerprints(every).modules(net, groups=groups) as recorder:
        for step in range(steps):
            for x in torch.randint(WORDS, (8, 7), generator=generator).chunk(parts):
                (loss(net(x).float().flatten(0, 1), x.flatten()) / parts).backward()
            before_step(net, step)
            stepper.step()
            stepper.zero_grad()
    return recorder.snapshot()


@pytest.fixture(scope="module")
def healthy() -> Recording:
    return train()


def frozen(net: nn.Module) -> nn.Module:
    net[1].ff.bias.requires_grad_(False)  # type: ignore[index,union-attr]
    return net


def scaled(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        net[1].ff.weight.mul_(1.01)  # type: ignore[index,union-attr]
    return net


def halved(net: nn.Module, step: int) -> None:
    if step == 2:
        net[2].out.weight.grad *= 0.5  # type: ignore[index,union-attr]


PLANTED: dict[str, tuple[dict[str, Any], tuple[str, int, str], str]] = {
    "rate": ({"rate": 1.01e-3}, ("update", 0, "0.weight"), "1.01 times"),
    "another optimizer": ({"optimizer": torch.optim.SGD}, ("update", 0, "0.weight"), "its update"),
    "scale": ({"net": lambda: build(scale=1.0)}, ("forward", 0, "2"), "what 2.out gets"),
    "eps": ({"net": lambda: build(eps=1e-3)}, ("forward", 0, "2.norm"), "its output"),
    "loss": ({"loss": lambda y, t: 2 * nn.functional.cross_entropy(y, t)}, ("backward", 0, ""), "2 times"),
    "frozen": ({"net": lambda: frozen(build())}, ("backward", 0, "1.ff"), "bias, which the second run does not have"),
    "weights": ({"net": lambda: scaled(build())}, ("parameters", 0, "1.ff.weight"), "1.01 times"),
    "data": ({"seed": 2}, ("input", 0, ""), "what the net gets"),
    "one gradient": ({"before_step": halved}, ("backward", 2, "2.out"), "weight is 0.5 times"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_place_is_named(healthy: Recording, name: str) -> None:
    options, place, words = PLANTED[name]
    net = options["net"]() if "net" in options else build()
    found = divergence(healthy, train(**{**options, "net": net}))
    assert (found.phase, found.step, found.name) == place
    assert words in found.differs
    assert found.distance > found.allowed
    assert words in str(found)


def test_runs_that_repeat_do_not_part(healthy: Recording) -> None:
    found = divergence(healthy, train())
    assert not found
    assert found.distance == 0
    assert "equal, bit for bit" in str(found)


def test_rounding_is_no_difference(healthy: Recording) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        found = divergence(healthy, train(build().to(dtype)))
        assert not found, found
        assert "bits differ first at step 0" in str(found)


def test_a_repeat_shows_that_there_is_no_noise(healthy: Recording) -> None:
    fault = train(build(eps=9e-6))
    assert not divergence(healthy, fault)
    found = divergence(healthy, fault, repeat=train())
    assert (found.phase, found.step, found.name) == ("forward", 0, "2.norm")
    assert not divergence(healthy, train(), repeat=train())


def test_a_repeat_shows_noise(healthy: Recording) -> None:
    """What moves as far in a repeat is no difference."""
    found = divergence(healthy, train(build(eps=1e-3)), repeat=train(build(eps=1e-3)))
    assert found.name != "2.norm"


def test_the_same_batches_in_another_order_are_told() -> None:
    batches = [torch.randint(WORDS, (4, 7)) for _ in range(3)]

    def run(order: list[int]) -> Recording:
        net = build()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with presets.fingerprints().modules(net) as recorder:
            for index in order:
                net(batches[index]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return recorder.snapshot()

    found = divergence(run([0, 1, 2]), run([0, 2, 1]))
    assert (found.phase, found.step) == ("input", 1)
    assert any("in another order" in note for note in found.notes)


def test_steps_of_several_calls_are_compared_call_by_call() -> None:
    first, second = (train(rate=rate, parts=2) for rate in (1e-3, 1.01e-3))
    assert first["output/1"].samples == 8
    found = divergence(first, second)
    assert (found.phase, found.step, found.name) == ("update", 0, "0.weight")
    assert [row.step for row in found.growth] == [0, 1, 2, 3]


def test_other_cadences_are_compared_at_common_steps() -> None:
    first, second = train(steps=9), train(build(), steps=9, every=3, before_step=lambda net, step: late(net, step, 4))
    found = divergence(first, second)
    assert (found.phase, found.step) == ("between", 6)
    assert [row.step for row in found.growth] == [0, 3, 6]
    assert "step that was not recorded" in str(found)


def late(net: nn.Module, step: int, at: int) -> None:
    if step == at:
        for parameter in net.parameters():
            parameter.grad *= -3  # type: ignore[operator]


def test_other_names_are_found_by_what_modules_compute(healthy: Recording) -> None:
    class Renamed(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            first, one, two, last = build(scale=scale)
            self.head, self.late, self.early, self.words = last, two, one, first

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.late(self.early(self.words(x))))

    assert not divergence(healthy, train(Renamed(0.25)))
    found = divergence(healthy, train(Renamed(1.0)))
    assert (found.phase, found.name, found.name_b) == ("forward", "2", "late")
    mapped = divergence(healthy, train(Renamed(1.0)), names={"1": "early", "2": "late"})
    assert (mapped.name, mapped.name_b) == ("2", "late")
    with pytest.raises(SelectionError, match="second run has no module 'nothing'"):
        divergence(healthy, train(Renamed(1.0)), names={"1": "nothing"})


def test_a_transposed_parameter_is_the_same() -> None:
    class Transposed(nn.Module):
        def __init__(self, given: nn.Linear) -> None:
            super().__init__()
            self.kernel = nn.Parameter(given.weight.detach().T.clone())
            self.bias = nn.Parameter(given.bias.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.flatten(0, -2), self.kernel).view(*x.shape[:-1], -1)

    net = build()
    net[1].qkv = Transposed(net[1].qkv)  # type: ignore[index,union-attr,arg-type]
    found = divergence(train(), train(net))
    assert not found, found


def test_a_net_whose_parts_alone_are_recorded() -> None:
    """What modules make that are not recorded is told by where it arrives."""
    runs = []
    for scale in (0.25, 1.0):
        net = build(scale=scale)
        with Recorder(ForwardMonitor(Fingerprints())).modules(net, leaves=True) as recorder:
            net(torch.arange(7)[None])
        runs.append(recorder)
    found = divergence(*runs)
    assert (found.phase, found.name, found.unit) == ("forward", "2.out", "observation")


def test_digests_alone_tell_that_bits_differ() -> None:
    runs = []
    for shift in (0.0, 1e-3):
        net = build()
        with torch.no_grad():
            net[3].weight += shift  # type: ignore[index,operator]
        with Recorder(ForwardMonitor(PerObservation(Digest(), Collect()))).modules(net) as recorder:
            net(torch.arange(7)[None])
        runs.append(recorder)
    found = divergence(*runs)
    assert (found.phase, found.name) == ("forward", "3")
    assert math.isinf(found.distance)


def test_nonfinite_numbers_are_a_difference(healthy: Recording) -> None:
    net = build()
    net[2].register_forward_hook(lambda module, args, output: output.where(output < output.max(), torch.nan))
    found = divergence(healthy, train(net, steps=1))
    assert (found.phase, found.name) == ("forward", "2")
    assert math.isinf(found.distance)


def test_numbers_over_time_part_where_they_jump() -> None:
    timelines = []
    for shift in (0.0, 0.5):
        timeline = Timeline()
        for tick in range(5):
            noise = 1e-7 * shift * tick
            timeline.append(tick, {"loss": {"mean": 1 / (1 + tick) + noise}, "norm": {"max": 2.0 + shift * (tick > 2)}})
        timelines.append(timeline)
    found = divergence(*timelines)
    assert (found.phase, found.step, found.name, found.unit) == ("value", 3, "norm", "tick")
    assert "2.5, and 2 in the first run" in found.differs
    assert not divergence(timelines[0], timelines[0])


def test_what_cannot_be_compared_is_told(healthy: Recording) -> None:
    net = nn.Linear(2, 1)
    with Recorder(ForwardMonitor(Norm())).modules(net) as recorder:
        net(torch.ones(1, 2))
    with pytest.raises(SelectionError, match=r"the second run tells nothing step by step: record it with presets.fingerprints\(\)"):
        divergence(healthy, recorder)
    with pytest.raises(TypeError, match="one of each"):
        divergence(healthy, Timeline())
    late_one = Timeline()
    late_one.append(7, {"loss": {"mean": 1.0}})
    early = Timeline()
    early.append(1, {"loss": {"mean": 1.0}})
    with pytest.raises(SelectionError, match="no tick in common: 1 to 1 and 7 to 7"):
        divergence(early, late_one)


def test_what_was_saved_is_compared_alike(healthy: Recording, tmp_path: Path) -> None:
    healthy.save(tmp_path / "a")
    train(rate=1.01e-3).save(tmp_path / "b")
    found = divergence(load(tmp_path / "a"), load(tmp_path / "b"))
    assert str(found) == str(divergence(healthy, train(rate=1.01e-3)))


def test_a_picture_shows_steps_and_layers(healthy: Recording, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = divergence(healthy, train(build(eps=1e-3)))
    over_steps, over_layers = found.figure().axes
    assert [line.get_label() for line in over_steps.get_lines()][:3] == ["output", "gradients of parameters", "parameters"]
    assert [text.get_text() for text in over_layers.get_xticklabels()] == ["(net)", *list(found.by_layer)[1:]]
    divergence(healthy, healthy).figure().savefig(tmp_path / "equal.png")


# Steps that were not recorded


def replay(run: str, start: int, stop: int, every: int) -> Recorder:
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(stop + 1):
        if step == start:
            recorder = presets.fingerprints(every).modules(net)
        if step == 37 and run == "second":
            optimizer.param_groups[0]["lr"] = 0.02
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return recorder.deregister()


@pytest.mark.parametrize("most", [3, 4, 16, 200])
def test_replays_find_the_step(most: int) -> None:
    calls: list[tuple[int, int, int]] = []

    def counted(run: str, start: int, stop: int, every: int) -> Recorder:
        calls.append((start, stop, every))
        assert (stop - start) // every < most
        return replay(run, start, stop, every)

    found = bisect_steps(counted, 0, 100, most=most)
    assert (found.phase, found.step) == ("update", 37)
    assert len(calls) <= 2 * (2 + math.ceil(math.log(100) / math.log(most - 1)))


def test_replays_that_do_not_part_say_so() -> None:
    assert not bisect_steps(lambda run, *steps: replay("first", *steps), 0, 20)
    for wrong in ((5, 5), (-1, 3)):
        with pytest.raises(ValueError, match="the runs are equal before one step, and differ later"):
            bisect_steps(replay, *wrong)
    with pytest.raises(ValueError, match="three steps"):
        bisect_steps(replay, 0, 9, most=2)


# The command line


def test_diff_says_where_runs_part(
    healthy: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    healthy.save("a")
    train(rate=1.01e-3).save("b")
    assert main(["diff", "a", "b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Forward and gradients agree, the runs part in the update of 0.weight, at step 0."
    assert not any("no difference" in line for line in lines)
    assert main(["diff", "a", "b", "--json", "--fail-over", "0"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["parted"]["phase"], shown["parted"]["step"], shown["changes"]) == ("update", 0, [])
    assert [row["step"] for row in shown["parted"]["growth"]] == [0, 1, 2, 3]
    assert main(["diff", "a", "a", "--fail-over", "0", "--repeat", "b", "--map", "1=1"]) == 0
    capsys.readouterr()
    assert main(["diff", "a", "b", "--map", "none=1"]) == 1
    assert "the first run has no module 'none'" in capsys.readouterr().err
    assert main(["diff", "a", "b", "--map", "none"]) == 2
    assert "NAME=NAME" in capsys.readouterr().err


def test_diff_draws_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for run, name in (("first", "a"), ("second", "b")):
        replay(run, 0, 60, 20).save(name)
    folder = str(Path(__file__).parent)
    (tmp_path / "again.py").write_text(f"import sys\nsys.path[:0] = [{folder!r}]\nfrom test_runs import replay\n")
    assert main(["diff", "a", "b", "--picture", "growth.png"]) == 0
    first = "The runs part in a step that was not recorded, before they differ in weight, at step 40."
    assert capsys.readouterr().out.startswith(first)
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["diff", "a", "b", "--bisect-steps", "again.py:replay"]) == 0
    assert "the runs part in the update of weight, at step 37" in capsys.readouterr().out
    for wrong, why in {"again.py": "give a file and a function", "no.py:replay": "no.py", "again.py:none": "none"}.items():
        assert main(["diff", "a", "b", "--bisect-steps", wrong]) == 2
        assert why in capsys.readouterr().err


def test_diff_of_what_tells_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with Recorder(ForwardMonitor(Norm())).modules(nn.Linear(2, 1)) as recorder:
        recorder.save("a")
    assert main(["diff", "a", "a", "--picture", "x.png"]) == 2
    assert "tell nothing step by step" in capsys.readouterr().err
