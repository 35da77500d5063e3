"""The rules of other tools that diagnose trainings, to compare with: rebuilt from the published rules by us.

AutoTrainer and DeepDiagnosis are callbacks of old versions of Keras, and do not run on PyTorch. What is here is no code of theirs
but their rules, in the order and with the thresholds that they publish, on plain PyTorch hooks. Where PyTorch has no counterpart,
the docstrings say what stands for it.

- AutoTrainer: X. Zhang, J. Zhai, S. Ma, C. Shen, "AUTOTRAINER: An Automatic DNN Training Problem Detection and Repair System", ICSE
  2021. Thresholds: `default_param` in AutoTrainer/utils/utils.py, rules: AutoTrainer/utils/monitor.py of
  https://github.com/shiningrain/AUTOTRAINER, commit 04f4033a.
- DeepDiagnosis: M. Wardat, B. Dantas Cruz, W. Le, H. Rajan, "DeepDiagnosis: Automatically Diagnosing Faults and Recommending
  Actionable Fixes in Deep Learning Programs", ICSE 2022, https://arxiv.org/abs/2112.04036. Thresholds and rules: class
  `mapFaluireToFix` in callback/callbacks.py of https://github.com/DeepDiagnosis/ICSE2022, commit 500b0176.

Neither looks for overfitting in the code that was published (AutoTrainer has the rule, switched off). monitorch has lenses but no
rules about what they show, so there is nothing of it here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .training import Training

__all__ = ["PEERS", "AutoTrainerRules", "DeepDiagnosisRules"]

EPOCHS = 30  # both count in epochs, of which trainings here have none: a 30th of the steps stands for one
Found = tuple[str, str]


class _Rules:
    """A `Watch` that looks once per epoch, and reports once: both tools stop the training at the first problem that they find.

    Here the training goes on, so that its score can be told.
    """

    def __init__(self) -> None:
        self._found: list[Found] = []
        self._losses: list[float] = []
        self._scores: list[float] = []

    def found(self) -> list[Found]:
        """What was found until now: causes, each with the layer that it was found in, or with "" if the rule names none."""
        return list(self._found)

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        """Called before the first step."""
        self._training, self._optimizers = training, optimizers
        self._net = training.net
        self._steps_an_epoch = max(1, training.steps // EPOCHS)

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        """Called after each step; looks after the last of an epoch, until something was found."""
        if self._ends_epoch(step) and not self._found:
            self._losses.append(float(loss))
            self._scores.append(self._score())
            self._found = list(dict.fromkeys(self._look(inputs, target, last=step + 1 == self._training.steps)))
        return None

    def _look(self, inputs: Any, target: Any, *, last: bool) -> list[Found]:
        raise NotImplementedError

    def _ends_epoch(self, step: int) -> bool:
        return (step + 1) % self._steps_an_epoch == 0

    def _score(self) -> float:
        try:
            net = deepcopy(self._net)  # a score leaves traces: states that are carried on, statistics of a net in training mode
        except RuntimeError:  # it holds a tensor with a graph, which cannot be copied
            net = self._net
        net.train(self._training.evaluates)
        with torch.no_grad(), torch.random.fork_rng():
            return float(self._training.score(net))


def _kernels(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The weights that have gradients, by the names of their layers: both tools look at kernels rather than at biases."""
    kernels = [(name, weight) for name, weight in net.named_parameters() if weight.ndim > 1 and weight.grad is not None]
    return [(name.rpartition(".")[0], weight) for name, weight in kernels]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().float()


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in tensors)


class AutoTrainerRules(_Rules):
    """The rules of AutoTrainer (ICSE 2021): rebuilt from the published rules by us, with the published default thresholds.

    Each third epoch, in this order:

    - exploding gradients: NaN or infinity in the loss, a gradient or a weight, or a loss of 1e5 and more.
    - if it does not converge, which is an accuracy that never was 0.7 (`Theta`), or slow convergence, the first of: dying ReLU (of
      all gradients, 0.7 are zero, `gamma`), exploding gradients (the norm of the gradient of the first kernel is more than 70 times
      that of the last, `beta_3`), vanishing gradients (less than 1e-3 times, `beta_1`, and itself less than 1e-4, `beta_2`),
      slow convergence (from no epoch to the next the accuracy rose by 0.01, `delta`).
    - else oscillating loss: of the pairs of a local maximum and a local minimum of the accuracy, as many as 0.2 of the epochs
      (`eta`) are 0.03 apart (`zeta`).

    What is about the accuracy is looked at after 0.3 of the epochs (`judgment_point`).

    What stands for what: the gradients are those of the last step rather than of the first batch. The score stands for the
    accuracy, clipped to 0 to 1; there is none of the training data. If no score ever was above 0 it is no accuracy: AutoTrainer is
    for classifiers, so that the rules about accuracy are left out, and those about gradients always hold. Repairs tell the causes:
    slow convergence is first repaired by a higher rate, oscillating loss by a lower one. It names no layers.
    """

    ratio_low, norm_low, ratio_high = 1e-3, 1e-4, 70.0
    zeros, oscillation, oscillating_share = 0.7, 0.03, 0.2
    slow, converged = 0.01, 0.7
    judgment_point, every, loss_high = 0.3, 3, 1e5

    def _look(self, inputs: Any, target: Any, *, last: bool) -> list[Found]:
        if (len(self._losses) - 1) % self.every:
            return []
        kernels = _kernels(self._net)
        gradients = [_gradient(each) for each in self._net.parameters() if each.grad is not None]
        losses = torch.tensor(self._losses)
        if not _finite([losses, *gradients, *(each.detach() for each in self._net.parameters())]) or losses[-1] >= self.loss_high:
            return [("exploding-gradients", "")]
        judged = len(self._losses) >= self.judgment_point * EPOCHS
        accuracies = [min(max(score, 0.0), 1.0) for score in self._scores]
        if max(self._scores) <= 0:
            return self._of_gradients(kernels, gradients)
        rises = [later - earlier for earlier, later in pairwise(accuracies)]
        slow = judged and max(rises, default=0.0) < self.slow
        if slow or (judged and max(accuracies) < self.converged):
            return self._of_gradients(kernels, gradients) or ([("rate-too-low", "")] if slow else [])
        return [("rate-too-high", "")] if judged and self._oscillates(accuracies) else []

    def _of_gradients(self, kernels: list[tuple[str, nn.Parameter]], gradients: list[Tensor]) -> list[Found]:
        if not kernels:
            return []
        if sum(int((each == 0).sum()) for each in gradients) >= self.zeros * sum(each.numel() for each in gradients):
            return [("dead-units", "")]
        first, last = (float(_gradient(kernels[at][1]).norm()) for at in (0, -1))
        if first > self.ratio_high * last:
            return [("exploding-gradients", "")]
        if first < self.ratio_low * last and first < self.norm_low:
            return [("vanishing-gradients", "")]
        return []

    def _oscillates(self, accuracies: list[float]) -> bool:
        threes = list(zip(accuracies, accuracies[1:], accuracies[2:], strict=False))
        highs = [here for before, here, behind in threes if here >= before and here >= behind]
        lows = [here for before, here, behind in threes if here <= before and here <= behind]
        apart = sum(high - low >= self.oscillation for high, low in zip(highs, lows, strict=False))
        return apart >= self.oscillating_share * len(accuracies)


class DeepDiagnosisRules(_Rules):
    """The symptoms of DeepDiagnosis (ICSE 2022): rebuilt from the published rules by us, with the published thresholds.

    After each epoch, the first symptom of these, in this order:

    - after the first epoch, out of range: the target has values that the activation of the last layer cannot have, or without one
      the outputs spread 10 times as far as the targets.
    - numerical error: the mean of what a layer returns is NaN, infinite or 0.
    - dead node, in the last epoch: of what a ReLU returns, 0.7 are not above 0 (`threshold_layer_1`).
    - saturated activation, each 5th epoch (`N`): of what a sigmoid or a tanh gets, more than 0.5 (`threshold_layer`) are beyond -5
      or 5 (`min_threshold_tanh`, ...).
    - unchanged tensor, each 5th epoch: the mean of what a layer returns was the same in 5 epochs.
    - invalid loss: NaN or infinite. Loss not decreasing, each 5th epoch: the same in 5 epochs.
    - invalid accuracy: NaN, infinite or 0. Accuracy not increasing, each 20th epoch (`FRQ`): the same in 20 epochs.
    - from the last layer to the first: numerical error in a gradient (a mean that is NaN, infinite or 0), vanishing gradient (a
      mean of the absolutes less than 1e-7, `threshold_VG`), numerical error in a weight, and, each 5th epoch, the mean of a
      gradient or of a weight was the same in 5 epochs.

    Then it says what to change, which is the second cause: poor weights if the variance of a weight is not within 1e-5 and 10
    (`min_threshold`, `max_threshold`), the data if inputs are not within -1 and 1, the rate if its step is less than 1e-5 or more
    than 0.1 of the weights (`LearnRate_threshold`, 1e-3, a hundredth and a hundred times).

    What stands for what: what layers return is taken from the last step of an epoch, by hooks on modules without children, so that
    functions of `torch.nn.functional` are not seen. Activations of the last layer are compared with the target only for targets
    of floating point: for classes, the rule asks for a softmax, which in PyTorch is in the loss. The score stands for the accuracy.
    The variance and the step are those of the weights, as the paper has it; the code takes those of their means. What it calls an
    exploding tensor is what is not finite.
    """

    dead, saturated, beyond = 0.7, 0.5, 5.0
    vanishing = 1e-7
    variance = (1e-5, 10.0)
    step_share = (1e-5, 0.1)
    every, every_accuracy = 5, 20
    spread = 10.0
    ranges = ((nn.Sigmoid, 0.0, 1.0), (nn.Tanh, -1.0, 1.0), (nn.ReLU, 0.0, float("inf")), (nn.ELU, -1.0, float("inf")))

    def begin(self, training: Training, optimizers: Sequence[Optimizer]) -> None:
        """Called before the first step."""
        super().begin(training, optimizers)
        self._means: dict[str, list[float]] = defaultdict(list)
        self._calls: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
        self._due = self._steps_an_epoch == 1
        torch.compiler.reset()  # what was compiled for a net without hooks would be taken for this one: hooks are not guarded
        for name, module in training.net.named_modules():
            if not any(module.children()):
                module.register_forward_hook(self._hook(name))

    def after(self, step: int, loss: Tensor, inputs: Any, target: Any) -> bool | None:
        """Called after each step."""
        super().after(step, loss, inputs, target)
        self._calls.clear()
        self._due = self._ends_epoch(step + 1) and not self._found
        return None

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            given, returned = _first_tensor(inputs), _first_tensor(output)
            if self._due and torch.is_grad_enabled() and returned is not None and returned.is_floating_point():
                self._calls.pop(name, None)  # so that the last is the last that was called
                self._calls[name] = (module, returned if given is None else given.detach(), returned.detach().float())

        uncompiled: Callable[[nn.Module, Any, Any], None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        return uncompiled

    def _look(self, inputs: Any, target: Any, *, last: bool) -> list[Found]:
        symptom = self._of_outputs(target, last) or self._of_course() or self._of_weights()
        return [*symptom, *self._to_change(inputs)] if symptom else []

    def _of_outputs(self, target: Any, last: bool) -> list[Found]:
        names = list(self._calls)
        if names and len(self._losses) == 1 and self._out_of_range(*self._calls[names[-1]][::2], target):
            return [("output-activation", names[-1])]
        for name, (module, given, returned) in self._calls.items():
            mean = float(returned.mean())
            self._means[name].append(mean)
            if error := _numerical_error(mean, "dead-units"):
                return [(error, name)]
            if last and isinstance(module, nn.ReLU) and float((returned <= 0).float().mean()) >= self.dead:
                return [("dead-units", name)]
            squashes = isinstance(module, nn.Sigmoid | nn.Tanh)
            if squashes and self._fifth() and float((given.abs() >= self.beyond).float().mean()) > self.saturated:
                return [("saturation", name)]
        for name in names[:-1]:
            if self._fifth() and self._same(self._means[name]) and not isinstance(self._calls[name][0], nn.Flatten):
                return [("rate-too-low", name)]
        return []

    def _of_course(self) -> list[Found]:
        loss, score = self._losses[-1], self._scores[-1]
        if _numerical_error(loss, "") or _numerical_error(score, ""):
            return [("nonfinite", "")]
        if score == 0:
            return [("wrong-loss", "")]
        unmoved = len(self._scores) % self.every_accuracy == 0 and len(set(self._scores[-self.every_accuracy :])) == 1
        return [("rate-too-low", "")] if unmoved or (self._fifth() and self._same(self._losses)) else []

    def _of_weights(self) -> list[Found]:
        for name, weight in reversed(_kernels(self._net)):
            gradient = _gradient(weight)
            gradients, weights = self._means[f"{name} gradient"], self._means[f"{name} weight"]
            gradients.append(float(gradient.mean()))
            weights.append(float(weight.detach().float().mean()))
            if error := _numerical_error(gradients[-1], "vanishing-gradients"):
                return [(error, name)]
            if float(gradient.abs().mean()) < self.vanishing:
                return [("vanishing-gradients", name)]
            if error := _numerical_error(weights[-1], "initialisation"):
                return [(error, name)]
            if self._fifth() and (self._same(gradients) or self._same(weights)):
                return [("frozen", name)]
        return []

    def _to_change(self, inputs: Any) -> list[Found]:
        kernels = _kernels(self._net)
        for name, weight in kernels:
            if not self.variance[0] <= float(weight.detach().float().var()) <= self.variance[1]:
                return [("initialisation", name)]
        given = _first_tensor(inputs)
        if given is not None and given.is_floating_point() and float(given.abs().max()) > 1:
            return [("inputs-not-normalised", "")]
        rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]
        for name, weight in kernels:
            share = max(rates, default=0.0) * float(_gradient(weight).norm() / weight.detach().float().norm())
            if not self.step_share[0] <= share <= self.step_share[1]:
                return [("rate-too-low" if share < self.step_share[0] else "rate-too-high", name)]
        return []

    def _out_of_range(self, module: nn.Module, returned: Tensor, target: Any) -> bool:
        wanted = _first_tensor(target)
        if wanted is None or not wanted.is_floating_point():
            return False
        low, high = float(wanted.min()), float(wanted.max())
        for kind, least, most in self.ranges:
            if isinstance(module, kind):
                return low < least or high > most
        # a target that does not vary is compared with what varies: the code does so too
        return float(returned.max() - returned.min()) > self.spread * (high - low)

    def _fifth(self) -> bool:
        return len(self._losses) % self.every == 0

    def _same(self, values: Sequence[float]) -> bool:
        return len(values) >= self.every and len(set(values[-self.every :])) == 1


def _numerical_error(value: float, zero: str) -> str:
    """The cause if a figure is NaN or infinite, or if it is zero; "" if it is neither."""
    if value != value or abs(value) == float("inf"):
        return "nonfinite"
    return zero if value == 0 else ""


def _first_tensor(given: Any) -> Tensor | None:
    if isinstance(given, Tensor):
        return given
    values: Iterable[Any] = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    return next((found for value in values if (found := _first_tensor(value)) is not None), None)


PEERS: dict[str, Callable[[], AutoTrainerRules | DeepDiagnosisRules]] = {
    "AutoTrainer": AutoTrainerRules,
    "DeepDiagnosis": DeepDiagnosisRules,
}
