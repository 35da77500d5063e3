"""StepMonitor: what each step of an optimizer, and what happened since the step before, tells of a training."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recorders.capture.calls import Call
from recorders.capture.switching import remove
from recorders.monitors.base import Monitor
from recorders.monitors.optimizers import OptimizerMonitor, ask_each
from recorders.monitors.options import MonitorOptions
from recorders.schedule.steps import tell_no_longer, tell_of_each_step
from recorders.schedule.table import CHANGE, Reading
from reducers import Reducer

if TYPE_CHECKING:
    from typing_extensions import Unpack

FACTS = (
    "step",  # of the clock
    "optimizer",  # its number, in the order in which optimizers were seen
    "rate",  # the largest learning rate of its parameter groups
    "decay",  # the largest weight decay
    "coupled",  # whether the decay is added to gradients that are then divided by their scale, as by Adam, and not by AdamW
    "ascends",  # whether it maximizes
    "held",  # parameters of the net that it holds
    "trainable",  # parameters of the net that require a gradient
    "foreign",  # parameters that it holds and the net does not
    "without gradient",  # of those held
    "kept",  # whether the gradients of the step before were still there when new ones were added
    "written",  # whether weights were written to since the last step that was recorded, other than by steps
    "discarded",  # how many times gradients were cleared since the step before, and not followed by a step
    "evaluating",  # the share of dropouts, batch norms and the like that are in evaluation mode
    "coarse",  # the share of the elements held that have 16 bits or fewer
    "norms",  # batch norms with running statistics
    "still",  # batch norms whose running statistics do not move
    "dropout",  # the largest share that a dropout leaves out
    "epsilon",  # of Adam and the like
    "momentum",  # or the first beta
    "second momentum",  # the second beta
    "age",  # how many steps its state has seen
)
"""The columns of what `StepMonitor` records; NaN if a thing is not known."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
COUPLED = ("Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop")
LEAST_ALIKE = 8
"""The steps that must write to the weights as often as each other, to tell how often those do that are not recorded."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Early:
    """Chooses the first steps, and later ones ever more seldom: most faults show in the beginning. For `steps=` of a monitor.

    After the first steps these are two at each power of two and half-way to the next, and from `every` on two of every so many.
    Two steps in a row, because some things are seen between two steps.

    >>> [step for step in range(100) if Early(first=3, every=32)(step)]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 64, 65, 96, 97]
    """

    first: int = 24
    every: int = 128

    def __call__(self, step: int) -> bool:
        return step < self.first or self._begins(step) or self._begins(step - 1)

    def pause_after(self, step: int) -> int:
        """The number of steps between `step` and the next one that is chosen: in these the clock asks nobody.

        >>> [Early(first=3, every=16).pause_after(step) for step in (0, 2, 5, 9, 13, 16, 17)]
        [0, 0, 0, 2, 2, 0, 14]
        """
        following = step + 1
        if self(following):
            return 0
        if following > self.every:
            return -following % self.every
        power = 1 << (following.bit_length() - 1)  # the last power of two
        half = power + power // 2
        return min(half if following <= half else 2 * power, -(-following // self.every) * self.every) - following

    def _begins(self, step: int) -> bool:
        """Whether a pair of steps begins here."""
        if step < 1 or step >= self.every:
            return step >= 0 and step % self.every == 0
        return step & (step - 1) == 0 or (step % 3 == 0 and step // 3 & (step // 3 - 1) == 0)


class _SinceStep:
    """What happened since the last step of one optimizer.

    Attributes:
        number: of the optimizer, in the order in which they were seen.
        kept: 1 if the gradients of the step were still there when new ones were added, else 0; NaN if not known.
        written: 1 if weights were written to since the step, other than by steps that were not recorded, else 0; NaN if not known.
        taken: how many steps the optimizer has made.
        discarded: how many times gradients were cleared since the first backward after the step; NaN if not known.
        probe: the handle of the hook on the gradient of one parameter; None if there is none.
    """

    def __init__(self, number: int) -> None:
        self.number, self.kept, self.written, self.discarded = number, math.nan, math.nan, math.nan
        self._stepping = False  # a closure may clear gradients in the step, as that of L-BFGS does
        self.taken = self._taken = 0
        self._each: Counter[int] = Counter()  # by how much the versions of all weights grow in a step, and in how many
        self._trained = (0, 0)  # the weights that are trained, and the sum of their versions, after the step
        self._step, self._before, self._version = -1, 0, 0
        self._gradient: weakref.ref[Tensor] | None = None
        self.probe: Any = None

    def begin(self, step: int, leaves: Sequence[tuple[str, nn.Parameter]]) -> nn.Parameter | None:
        """Notes the weights after a step, and the gradient of one parameter, which it returns."""
        self._step, self._trained, self.kept, self.discarded = step, _versions(leaves), math.nan, math.nan
        self._each[self._trained[1] - self._before] += 1
        self._stepping = False
        self.end()
        for _, parameter in leaves:
            if parameter.grad is not None:
                self._gradient, self._version = weakref.ref(parameter.grad), parameter.grad._version
                return parameter
        return None

    def see(self, step: int, leaves: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Looks at the weights before the next step."""
        self.kept = self.kept if 0 <= self._step == step - 1 else math.nan
        (trained, self._before), between, self._taken = _versions(leaves), self.taken - self._taken - 1, self.taken
        self._stepping = True
        self.written = math.nan
        if self._step < 0 or trained != self._trained[0]:  # some were frozen, or no longer are
            return
        more = self._before - self._trained[1]
        if not between:
            self.written = float(more != 0)
        elif len(self._each) == 1 and self._each.total() >= LEAST_ALIKE:
            (each,) = self._each
            if more >= between * each:  # less if some weights had no gradient
                self.written = float(more > between * each)

    def accumulated(self, parameter: nn.Parameter) -> None:
        """Called when a gradient was added: one that was cleared in place since has two versions more, not one.

        The backward of another loss may add to gradients before they are cleared, as to those of a discriminator. So each is seen.
        """
        gradient = parameter.grad
        if self._gradient is None or gradient is None:
            return
        added = gradient is self._gradient() and gradient._version == self._version + 1
        if self.kept != 0:
            self.kept = float(added)
        if not self._stepping:
            self.discarded = 0.0 if math.isnan(self.discarded) else self.discarded + (not added)
        self._gradient, self._version = weakref.ref(gradient), gradient._version

    def end(self) -> None:
        """Takes the hook off."""
        if self.probe is not None:
            remove(self.probe)
        self.probe = self._gradient = None


class StepMonitor(OptimizerMonitor):
    """Records `FACTS` after each optimizer step: one row. Reads no tensors, so it waits for no device.

    Unless an optimizer or the user advances the clock, the first optimizer that steps does from then on.

    Attributes:
        steps_anywhere: the number of steps of all optimizers of the process while the monitor was on, also of those that hold no
            parameter of the net. It is not saved.

    >>> from recorders import Recorder
    >>> from reducers import Collect
    >>> net = torch.nn.Linear(2, 1)
    >>> recorder = Recorder(steps=StepMonitor(Collect())).modules(net)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    >>> for _ in range(3):
    ...     net(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> recorder["steps"].peek()[:, FACTS.index("kept")]
    tensor([nan, 1., 1.], dtype=torch.float64)
    """

    reading = Reading(CHANGE, ask_each)

    def __init__(self, reducer: Reducer, module: nn.Module | None = None, **options: Unpack[MonitorOptions]) -> None:
        options.setdefault("op_", _as_row)
        super().__init__(reducer, module, **options)
        self._since: weakref.WeakKeyDictionary[Optimizer, _SinceStep] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self.steps_anywhere = 0
        self._stepping: weakref.ref[Optimizer] | None = None

    def register(self, module: nn.Module | None = None) -> Monitor:
        """Puts the hooks on; see `Monitor.register`."""
        tell_no_longer(self)  # if it was registered before
        super().register(module)
        tell_of_each_step(self)
        return self

    def stepped(self, optimizer: Optimizer) -> None:
        """Called after each step of any optimizer of the process."""
        self.steps_anywhere += 1
        since = self._since.get(optimizer)
        if since is not None:
            since.taken += 1

    def switch(self, active: bool, error: Exception | None) -> None:
        if not active:  # what happens until the next step that is recorded is not what happened since the step before that
            for since in self._since.values():
                since.end()
        super().switch(active, error)

    def deregister(self) -> Monitor:
        tell_no_longer(self)
        for since in self._since.values():
            since.end()
        return super().deregister()

    def notified(self, module: nn.Module, optimizer: Optimizer, leaves: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Before the step: sees what happened since the last one."""
        clock = self.clock
        if not clock.attached and clock.step == 0:
            clock.attach(optimizer)
        self._stepping = weakref.ref(optimizer)
        if optimizer not in self._since:
            self._since[optimizer] = _SinceStep(next(self._numbers))
        self._since[optimizer].see(clock.step, leaves)

    def changed(self, module: nn.Module, mine: Container[int], *paths: str) -> None:
        """After the step: records it."""
        optimizer = None if self._stepping is None else self._stepping()
        since = None if optimizer is None else self._since.get(optimizer)
        if optimizer is None or since is None:
            return
        leaves = [(path, parameter) for path, parameter in self._parameters(module) if id(parameter) in mine]
        if self._due(module, self._training(module), weakref.ref(optimizer)):
            self._see(Call("step", module, values=(self._facts(module, optimizer, since, leaves),)))
        if (parameter := since.begin(self.clock.step, leaves)) is not None:
            hook = self._hook(since.accumulated)
            since.probe = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _facts(
        self, module: nn.Module, optimizer: Optimizer, since: _SinceStep, leaves: Sequence[tuple[str, nn.Parameter]]
    ) -> dict[str, float]:
        groups = optimizer.param_groups
        of_net = {id(parameter): parameter for parameter in module.parameters()}
        held = [parameter for _, parameter in leaves]
        elements = sum(parameter.numel() for parameter in held)
        coarse = sum(parameter.numel() for parameter in held if parameter.is_floating_point() and parameter.element_size() < 4)
        norms = [norm for norm in module.modules() if isinstance(norm, BATCH_NORMS) and norm.track_running_stats]
        return {
            "step": float(self.clock.step),
            "optimizer": float(since.number),
            "rate": max((_number(group.get("lr")) for group in groups), default=math.nan),
            "decay": max((_number(group.get("weight_decay", 0.0)) for group in groups), default=0.0),
            "coupled": float(any("eps" in group and not _is_decoupled(optimizer, group) for group in groups)),
            "ascends": float(any(group.get("maximize", False) for group in groups)),
            "held": float(len(held)),
            "trainable": float(sum(parameter.requires_grad for parameter in of_net.values())),
            "foreign": float(sum(id(parameter) not in of_net for group in groups for parameter in group["params"])),
            "without gradient": float(sum(parameter.grad is None for parameter in held)),
            "kept": since.kept,
            "written": since.written,
            "discarded": since.discarded,
            "evaluating": 1.0 - share_in_mode(module),
            "coarse": coarse / elements if elements else 0.0,
            "norms": float(len(norms)),
            "still": float(sum(norm.momentum == 0 for norm in norms)),
            "dropout": max((inner.p for inner in module.modules() if isinstance(inner, DROPOUTS)), default=0.0),
            "epsilon": max((_number(group.get("eps")) for group in groups), default=math.nan),
            "momentum": max((_number(group.get("momentum", group.get("betas", (0.0,))[0])) for group in groups), default=math.nan),
            "second momentum": min((_number(group.get("betas", (None, None))[1]) for group in groups), default=math.nan),
            "age": _age(optimizer, held),
        }


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer takes the weight decay off the weights themselves. Others than PyTorch's are known by their names."""
    return bool(group.get("decoupled_weight_decay", type(optimizer).__name__ not in COUPLED))


def _as_row(facts: dict[str, float]) -> Tensor:
    return torch.tensor([[facts[name] for name in FACTS]], dtype=torch.float64, device="cpu")


def _number(value: Any) -> float:
    """A Python number, or a tensor on the CPU, as a number; NaN of one on a device, for which one would have to wait."""
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def _versions(leaves: Sequence[tuple[str, nn.Parameter]]) -> tuple[int, int]:
    """How many parameters are trained, and a number that grows whenever one of them is written to."""
    versions = [parameter._version for _, parameter in leaves if parameter.requires_grad]
    return len(versions), sum(versions)


def _age(optimizer: Optimizer, held: Sequence[nn.Parameter]) -> float:
    """How many steps the state of the first parameter that has one has seen; NaN if it does not say so."""
    states = (optimizer.state[one] for one in held if one in optimizer.state)
    state = next(states, None)
    return _number(state.get("step")) if isinstance(state, Mapping) else math.nan


def share_in_mode(module: nn.Module) -> float:
    """The share of the modules that depend on the mode, such as dropout, that are in training mode; NaN if there are none.

    Those of a base that is frozen do not count: people keep it in evaluation mode on purpose.
    """
    modes = [
        inner.training
        for outer in module.modules()
        for inner in outer.children()
        if _depends_on_mode(inner) and _trains(outer, inner)
    ]
    return sum(modes) / len(modes) if modes else math.nan


def _trains(outer: nn.Module, inner: nn.Module) -> bool:
    own = [*inner.parameters()] or outer.parameters()
    return any(parameter.requires_grad for parameter in own)


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, DROPOUTS):
        return module.p > 0
    if isinstance(module, BATCH_NORMS):
        return module.track_running_stats
    return getattr(module, "dropout", 0) != 0 and isinstance(module, (nn.RNNBase, nn.MultiheadAttention))
