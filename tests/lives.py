"""The life of a recorder: what happens to it is drawn by chance, beside a twin of the net that plain PyTorch observes."""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import torch
from cases import CASES, Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders import (
    BackwardInputMonitor,
    BackwardMonitor,
    ForwardInputMonitor,
    ForwardMonitor,
    Monitor,
    ParameterGradientMonitor,
    ParameterMonitor,
    ParameterUpdateMonitor,
    Recorder,
    Recording,
    Subrecording,
    load,
)
from reducers import Mean

__all__ = ["Life", "some"]

ROWS = 4
Log = Callable[["Block", str, Any], None]


class Block(nn.Module):
    """A layer whose inputs, outputs and weight have the shape that a reducer of `cases.py` takes.

    Attributes:
        log: called with the block, "input" or "output", and these, in the twin.
    """

    def __init__(self, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, *trailing, dtype=torch.float64).to(dtype))
        self.log: Log | None = None

    def forward(self, x: Tensor) -> Any:
        if self.log is not None:
            self.log(self, "input", x)
        y = self.computed(x)
        if self.log is not None:
            self.log(self, "output", y)
        return y

    def computed(self, x: Tensor) -> Any:
        return x * self.weight.mean(0)


class Bent(Block):
    def computed(self, x: Tensor) -> Tensor:
        return (x + self.weight[0]).tanh()


class RectifiedInPlace(Block):
    def computed(self, x: Tensor) -> Tensor:
        return (x * self.weight[1]).clone().relu_()


class HalvesItsInput(Block):
    """It writes into what it gets."""

    def computed(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) * self.weight[2]


class Several(Block):
    """It returns nested tensors."""

    def computed(self, x: Tensor) -> dict[str, Any]:
        return {"a": x * self.weight[3], "b": [x - 1, x.sin()]}


class Around(Block):
    """It has a block in it."""

    def __init__(self, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(trailing, dtype)
        self.inner = Block(trailing, dtype)

    def computed(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x) * self.weight[0]
        return out


class Matrix(Block):
    """Autocast computes it in bfloat16."""

    def computed(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return x @ self.weight.flatten().repeat(width)[: width * width].view(width, width).to(x.dtype)


def some(quick: int, slow: int) -> list[Any]:
    """Seeds for a test, of which some are tried only if slow tests are."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, slow))]


class FailsHere(Exception):
    """What the net raises if it is told to."""


class Net(nn.Module):
    """Blocks in some order, perhaps several times.

    Attributes:
        fails_at: before which of the calls of blocks it raises an error.
        checkpointed: whether each of them is checkpointed.
    """

    def __init__(self, kinds: list[type[Block]], order: list[int], trailing: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(trailing, dtype) for kind in kinds)
        self.order = order
        self.fails_at = -1
        self.checkpointed = [False] * len(order)

    def forward(self, x: Any) -> Any:
        for call, index in enumerate(self.order):
            if call == self.fails_at:
                raise FailsHere
            block = self.blocks[index]
            if isinstance(block, HalvesItsInput):
                x = block(x * 1)
            else:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed[call] else block(x)
            x = x["a"] + x["b"][0] * x["b"][1] if isinstance(x, dict) else x
        return x


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in it, by the paths that a recorder gives them."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, f"{path}.{key}" if path else str(key))


def each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same, with the function applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: each(part, function) for key, part in value.items()}
    return [each(part, function) for part in value]


def doubled(*operands: Any) -> Any:
    return each(operands[0], lambda x: 2 * x)


def is_positive(*operands: Any) -> bool:
    return bool(next(leaves(operands[0]))[1].double().sum() > 0)


KINDS: dict[str, type[Monitor]] = {
    "output": ForwardMonitor,
    "input": ForwardInputMonitor,
    "output gradient": BackwardMonitor,
    "input gradient": BackwardInputMonitor,
    "value": ParameterMonitor,
    "gradient": ParameterGradientMonitor,
    "update": ParameterUpdateMonitor,
}


class Expected:
    """What one monitor should have recorded: what passes the gates, by leaf, in float64."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.forget()

    def forget(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        self.passed: dict[str, int] = {}

    def observe(self, value: Any, train: bool, step: int, path: str = "", stream: str = "") -> None:
        """An observation, of which `path` is where its tensors are; it is counted for `every` in its stream."""
        options = self.options
        if not options.get("train_update" if train else "eval_update", True) or step % options.get("every_step", 1):
            return
        self.passed[stream] = self.passed.get(stream, 0) + 1
        if (self.passed[stream] - 1) % options.get("every", 1) or ("filter_" in options and not is_positive(value)):
            return
        for leaf, x in leaves(doubled(value) if "op_" in options else value, path):
            if x.numel():
                self.seen.setdefault(leaf, []).append(x.cpu().double())


OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    partial(torch.optim.SGD, lr=0.01, foreach=True),
    partial(torch.optim.Adam, lr=0.01),
    partial(torch.optim.AdamW, lr=0.01, fused=True),
)
UNTOLD = ("left out", "not finite", "functions given", "cannot hold", "has no recipe", "without its reducer", "The .grad attribute")
"""Warnings that a life may give: of results without numbers, of reducers that are no data, and PyTorch's own while it compiles."""


class Life:
    """A net with a recorder of one to four kinds of monitors, and its twin.

    Args:
        seed: what happens.
        compiled: whether the net is called compiled.
        device: where the net is.
        most: rows that a big batch has.
        accuracy: of what is recorded, relative and absolute.
    """

    def __init__(self, seed: int, compiled: bool = False, *, device: str = "cpu", most: int = 100, accuracy: float = 1e-7) -> None:
        self.chance = chance = random.Random(seed)
        torch.manual_seed(seed)
        self.happened: list[str] = []
        self.device, self.most, self.accuracy = device, most, accuracy
        taking_floats = [case for case in CASES if torch.float32 in case.dtypes]
        self.trailing = chance.choice(taking_floats).trailing
        self.dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        fitting = [case for case in taking_floats if case.trailing == self.trailing and self.dtype in case.dtypes]
        self.kinds = {f"monitor{number}": chance.choice(list(KINDS)) for number in range(chance.randint(1, 4))}
        self.cases: dict[str, Case] = {name: chance.choice(fitting) for name in self.kinds}
        self.options = {name: self._options(kind) for name, kind in self.kinds.items()}
        self.rows = chance.choice([1, 3, 5, 40]) if any(case.same_shape for case in self.cases.values()) else None

        blocks = [Block, Bent, RectifiedInPlace, HalvesItsInput, Several, Around] + [Matrix] * (not compiled)
        kinds = [chance.choice(blocks) for _ in range(chance.randint(1, 4))]
        order = [*range(len(kinds))] + [chance.randrange(len(kinds)) for _ in range(chance.randint(0, 2))]
        self.net = Net(kinds, order, self.trailing, self.dtype).to(device)
        if len(kinds) > 1 and chance.random() < 0.2:
            self.net.blocks[0].requires_grad_(False)
        self.twin, self.compiled, self.call = copy.deepcopy(self.net), compiled, self.net
        if compiled:
            torch._dynamo.reset()
            self.call = torch.compile(self.net, backend="aot_eager")
        make = chance.choice(OPTIMIZERS)
        self.optimizer, self.twins_optimizer = make(self.net.parameters()), make(self.twin.parameters())

        self.names = {id(module): name for name, module in self.twin.named_modules() if isinstance(module, Block)}
        self.expected = {
            (name, block): Expected(options) for name, options in self.options.items() for block in self.names.values()
        }
        self.recorder, self.on, self.step = self._new_recorder(), True, 0

    def _options(self, kind: str) -> dict[str, Any]:
        chance, options = self.chance, dict[str, Any]()
        for name, share, value in (
            ("every", 0.3, chance.randint(2, 3)),
            ("every_step", 0.3, chance.randint(2, 3)),
            ("eval_update", 0.2, False),
            ("train_update", 0.1, False),
            ("op_", 0.2 * (kind != "update"), doubled),  # its operands are two
            ("filter_", 0.2 * (kind != "update"), is_positive),
        ):
            if chance.random() < share:
                options[name] = value
        return options

    def _new_recorder(self) -> Recorder:
        made = {
            name: KINDS[kind](self.cases[name].reducer, on_error="raise", **self.options[name]) for name, kind in self.kinds.items()
        }
        return Recorder(**made).modules(self.net, types=Block).attach(self.optimizer)

    def __str__(self) -> str:
        blocks = [type(block).__name__ for block in self.net.blocks]
        monitors = "; ".join(f"{name}: {kind} by {self.cases[name]} {self.options[name]}" for name, kind in self.kinds.items())
        return f"{blocks} in the order {self.net.order}, {self.dtype}; {monitors}; {'; '.join(self.happened)}"

    # What the twin shows

    def _observe(self, kind: str, block: str, value: Any, train: bool, path: str = "", stream: str = "", step: int = -1) -> None:
        for name, one in self.kinds.items():
            if one == kind and self.on:
                self.expected[name, block].observe(value, train, self.step if step < 0 else step, path, stream)

    def _log(self, block: Block, kind: str, value: Any) -> None:
        name, train, step = self.names[id(block)], block.training, self.step
        self._observe(kind, name, each(value, lambda x: x.detach().clone()), train)
        for path, x in leaves(value):
            if torch.is_grad_enabled() and x.requires_grad:
                x.register_hook(
                    lambda gradient, path=path: self._observe(
                        f"{kind} gradient", name, gradient.detach().clone(), train, path, path, step
                    )
                )

    def _call_twin(self, x: Tensor) -> Any:
        blocks = [module for module in self.twin.modules() if isinstance(module, Block)]
        for block in blocks:
            block.log = self._log
        try:
            return self.twin(x)
        finally:
            for block in blocks:
                block.log = None

    # What happens

    def _batch(self, *kinds: str) -> Tensor:
        chance = self.chance
        rows = self.rows or chance.choice([1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 8, 8, 8, 8, 8, self.most])
        x = torch.randn(rows, *self.trailing, dtype=torch.float64)
        kind = chance.choice(kinds or ("normal",))
        if kind == "offset":
            x = x + 100
        elif kind in ("zeros", "holes"):
            x = torch.where(torch.rand(x.shape) < 0.2, 0.0 if kind == "zeros" else torch.nan, x)
        x, layout = x.to(self.device, self.dtype), chance.random()
        if layout < 0.15:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return x.repeat_interleave(2, dim=-1)[..., ::2] if layout < 0.3 else x

    def train(self) -> None:
        chance = self.chance
        train, clears, autocast = chance.random() < 0.85, chance.random() < 0.8, False
        if not self.compiled:
            self.net.checkpointed = [chance.random() < 0.2 for _ in self.net.order]
            autocast = self.dtype is torch.float32 and chance.random() < 0.2
        for net, optimizer in ((self.net, self.optimizer), (self.twin, self.twins_optimizer)):
            net.train(train)
            optimizer.zero_grad(set_to_none=clears)
        before = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        for _ in range(chance.choice([1, 1, 2])):
            x, needs = self._batch(), chance.random() < 0.5
            for call in (self.call, self._call_twin):
                with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
                    out = call(x.clone().requires_grad_(needs))
                if out.requires_grad:
                    out.float().square().mean().backward()
        self.net.checkpointed = [False] * len(self.net.order)
        if chance.random() < 0.9:
            self.optimizer.step()
            self.twins_optimizer.step()
            for name, value in self.net.named_parameters():
                block, _, attr = name.rpartition(".")
                self._observe("value", block, value.detach().clone(), train, attr)
                self._observe("update", block, value.detach() - before[name], train, attr)
                if value.grad is not None:
                    self._observe("gradient", block, value.grad.clone(), train, attr)
            self.step += 1
        for one, other in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            exact = {} if self.compiled else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text: f"the training is another one: {text}", **exact)
        self.twin.load_state_dict(self.net.state_dict())

    def evaluate(self) -> None:
        mode = self.chance.choice([nullcontext, torch.no_grad, torch.inference_mode])
        x, train = self._batch("normal", "offset", "zeros", "holes"), self.chance.random() < 0.2
        if self.chance.random() < 0.15:
            x = x.to(self.chance.choice([torch.float64, torch.float32, torch.float16]))
        if self.rows is None and self.chance.random() < 0.05:
            x = x[:0]
        self.net.train(train)
        self.twin.train(train)
        with mode():
            torch.testing.assert_close(self.call(x.clone()), self._call_twin(x.clone()), equal_nan=True)

    def in_a_thread(self) -> None:
        raised = list[BaseException]()

        def run() -> None:
            try:
                self.evaluate()
            except BaseException as error:  # it is raised by the one who waits
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    def fail(self) -> None:
        """The user's forward raises; compiled, what a graph breaks at is not what is tested here."""
        if self.compiled:
            return
        self.net.fails_at = self.twin.fails_at = self.chance.randrange(len(self.net.order))
        self.net.train()
        self.twin.train()
        x = self._batch()
        for call in (self.net, self._call_twin):
            try:
                call(x.clone())
            except FailsHere:
                continue
        self.net.fails_at = self.twin.fails_at = -1

    def look(self) -> None:
        name = self.chance.choice([*self.recorder])
        self.check(name, self.recorder[name].snapshot())

    def reset(self) -> None:
        self.recorder.reset()
        for expected in self.expected.values():
            expected.forget()

    def off_and_on(self) -> None:
        self.recorder.deregister()
        self.on = False
        self.chance.choice([self.evaluate, self.train])()
        self.recorder.register()
        self.on = True

    def save(self) -> None:
        self.check_all(self._saved(self.chance.choice(["folder", "packed"])))

    def _saved(self, layout: Any) -> Recording:
        reducers = {name: self.cases[name.partition("/")[0]].reducer for name in self.recorder}
        with tempfile.TemporaryDirectory() as folder:
            self.recorder.save(Path(folder) / "run", layout=layout)
            return load(Path(folder) / "run", reducers=reducers)

    def resume(self) -> None:
        saved = self._saved("folder")
        self.recorder.deregister()
        self.recorder = self._new_recorder().resume(saved)

    def go_through_a_state_dict(self) -> None:
        state = self.recorder.state_dict()
        self.recorder.reset()
        self.recorder.load_state_dict(state)

    def copies(self) -> None:
        with torch.no_grad():
            copy.deepcopy(self.net)(self._batch())
        if all(case.data for case in self.cases.values()):
            self.check_all(pickle.loads(pickle.dumps(self.recorder)).snapshot())

    def merge(self) -> None:
        if all(case.merges for case in self.cases.values()):
            snapshot = self.recorder.snapshot()
            self.check_all(snapshot.merge(snapshot), times=2)

    def take_in(self) -> None:
        """It adds what another recorder has, which has recorded the same."""
        if any(not case.merges for case in self.cases.values()) or any("every" in options for options in self.options.values()):
            return
        if any(len(xs) > 20 for expected in self.expected.values() for xs in expected.seen.values()):
            return  # each doubles them, and references are slow
        self.recorder.merge(self.recorder.snapshot())
        for expected in self.expected.values():
            expected.seen = {leaf: 2 * xs for leaf, xs in expected.seen.items()}

    def beside_another(self) -> None:
        other = Recorder(ForwardMonitor(Mean())).modules(self.net, types=Block)
        self.evaluate()
        other.deregister()

    # What is checked

    def check_all(self, recording: Recording, times: int = 1) -> None:
        assert set(recording) == set(self.recorder)
        distinct = {(kind, id(self.cases[name]), str(self.options[name])) for name, kind in self.kinds.items()}
        groups = {name.partition("/")[0] for name in recording}
        assert len(groups) == len(distinct), f"{groups} of {[*self.kinds]}"  # equal monitors are one
        for name, part in recording.items():
            self.check(name, part, times)

    def check(self, name: str, part: Subrecording, times: int = 1) -> None:
        """What was recorded is what the twin showed, so many times over."""
        group, _, block = name.partition("/")
        case, expected = self.cases[group], self.expected[group, block.removesuffix(".weight")]
        states = {leaf: state for leaf, state in part.states.items() if state}
        assert states.keys() == expected.seen.keys(), f"{name} has {[*states]}, and should have {[*expected.seen]}"
        for leaf, xs in expected.seen.items():
            found = case.reducer.compute({key: value.cpu() for key, value in states[leaf].items()})
            if isinstance(found, dict):
                found = {
                    key: value for key, value in found.items() if key != "eps"
                }  # of the dtype, which the reference does not see
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wanted = case.reference([x.numpy() for x in xs * times])
            try:
                laws.close(found, wanted, self.accuracy, self.accuracy)
            except AssertionError as error:
                raise AssertionError(f"{name} {leaf!r}, after {len(xs)} observations: {error}") from None

    def live(self, moments: int = 24) -> None:
        """So many things happen; at the end all that was recorded is compared."""
        things = {
            self.train: 6.0,
            self.evaluate: 4.0,
            self.look: 2.0,
            self.in_a_thread: 1.0,
            self.fail: 1.0,
            self.off_and_on: 1.0,
            self.save: 1.0,
            self.resume: 1.0,
            self.copies: 0.7,
            self.merge: 0.7,
            self.take_in: 0.7,
            self.go_through_a_state_dict: 0.7,
            self.beside_another: 0.6,
            self.reset: 0.5,
        }
        with warnings.catch_warnings():
            for text in UNTOLD:
                warnings.filterwarnings("ignore", message=f"(?s).*{text}")
            try:
                for thing in self.chance.choices([*things], [*things.values()], k=moments):
                    self.happened.append(thing.__name__)
                    thing()
                self.check_all(self.recorder.snapshot())
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}\nin the life of {self}") from error
            finally:
                self.recorder.deregister()
