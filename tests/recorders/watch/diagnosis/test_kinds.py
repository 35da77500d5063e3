"""Every kind of finding has a planted case, in which it is found; and a healthy training has none of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.diagnosis.planted import CASES, FEATURES, Setup, planted
from recorders import findings, presets
from recorders.watch.diagnosis.causes import CAUSES, KINDS
from recorders.watch.diagnosis.explaining import ORDER
from recorders.watch.diagnosis.finding import Finding
from recorders.watch.diagnosis.steps import StepMonitor


def test_a_healthy_training_has_no_finding() -> None:
    assert planted("").run() == []


@pytest.mark.parametrize("kind", CASES)
def test_a_planted_case_is_found(kind: str) -> None:
    found = planted(kind).run()
    assert kind in {one.kind for one in [*found, *found.notices]}, found


def test_every_kind_has_a_case_and_a_place_in_the_order() -> None:
    assert set(CASES) == set(KINDS) - {"left-range"}
    assert sorted(kind for kinds in ORDER for kind in kinds) == sorted(KINDS)


def test_every_cause_that_a_kind_names_is_known_and_has_a_remedy() -> None:
    assert {cause for kind in KINDS.values() for cause in kind.causes} <= set(CAUSES)
    for cause in CAUSES.values():
        assert cause.text
        assert cause.remedy


def test_a_finding_says_all_that_is_known() -> None:
    (first, *_) = planted("not-cleared").run()
    assert isinstance(first, Finding)
    assert (first.kind, first.layer, first.cause, first.severity) == ("not-cleared", "optimizer", "gradients-not-cleared", "error")
    assert "Likely: gradients are never cleared. Try: optimizer.zero_grad()" in str(first)


# Other ways to the same kinds


def every(steps: int, change: Callable[[Setup], Any]) -> Callable[[Setup], None]:
    """A fault that something does every so many steps, but for the first, as at the end of an epoch."""

    def plant(setup: Setup) -> None:
        setup.steps = 130

        def before(step: int, optimizer: Any) -> None:
            if step and step % steps == 0:
                change(setup)

        setup.before = before

    return plant


def begins_anew(setup: Setup) -> None:
    for module in setup.net.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def average_is_evaluated(setup: Setup) -> None:
    """Other weights are put in the place of those that are trained, and these come back."""
    held = {name: weight.detach().clone() for name, weight in setup.net.named_parameters()}
    with torch.no_grad():
        for weight in setup.net.parameters():
            weight.mul_(0.9)
    setup.net.load_state_dict(held)


def forgets(setup: Setup) -> None:
    setup.before = lambda step, optimizer: optimizer.state.clear()


class Hidden(nn.Module):
    """A net that keeps its first layers in a list."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.first, self.last = [net[0], nn.ReLU()], net[-1]

    def forward(self, x: Tensor) -> Any:
        for layer in self.first:
            x = layer(x)
        return self.last(x)


def in_a_list(setup: Setup) -> None:
    setup.net = Hidden(setup.net)  # type: ignore[arg-type]


def sigmoids(setup: Setup) -> None:
    setup.steps = 120  # a net with sigmoids that learns may begin slowly
    for place in (1, 4):
        setup.net[place] = nn.Sigmoid()  # type: ignore[index]


def slow_statistics(setup: Setup) -> None:
    setup.steps, setup.net[2] = 110, nn.BatchNorm1d(24, momentum=1e-3)  # type: ignore[index]


def cleared_before_the_step(setup: Setup) -> None:
    setup.before = lambda step, optimizer: optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad()) and None


def random_recurrence(setup: Setup) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.head = nn.GRU(FEATURES, 24, batch_first=True).requires_grad_(False), nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.read(x[:, None])[0][:, -1])

    setup.net = Recurrent()


def normalised(setup: Setup, **how: Any) -> list[nn.LayerNorm]:
    """Two normalisations in place of the dropout and before the last layer."""
    norms = [nn.LayerNorm(24, **how), nn.LayerNorm(24)]
    layers = [*setup.net]  # type: ignore[misc]
    setup.net = nn.Sequential(*layers[:2], norms[0], *layers[3:5], norms[1], layers[5])
    return norms


def small_before_a_norm(setup: Setup) -> None:
    normalised(setup, eps=0.02)
    setup.rate = 3e-4
    with torch.no_grad():
        setup.net[0].weight.mul_(0.1)  # type: ignore[index]
        setup.net[0].bias.zero_()  # type: ignore[index]


def norms_of_zero(setup: Setup) -> None:
    for norm in normalised(setup):
        nn.init.zeros_(norm.weight)


def norm_with_a_shift(setup: Setup) -> None:
    nn.init.ones_(normalised(setup)[1].bias)


def random_middle(setup: Setup, bias: bool = True) -> None:
    """A net as Hugging Face begins it, of which the middle is frozen."""
    layers = [nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64, bias=bias), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4)]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias) if layer.bias is not None else None
    setup.net = nn.Sequential(*layers)
    setup.net[2].requires_grad_(False)
    setup.net.config = SimpleNamespace(initializer_range=0.1)  # type: ignore[assignment]


def both_factors_zero(setup: Setup) -> None:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Parameter(torch.zeros(4, 24)), nn.Parameter(torch.zeros(24, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + x @ self.down.T @ self.up.T

    setup.net[2] = Factors()  # type: ignore[index]


def huge_weights(setup: Setup) -> None:
    for place in (0, 3, 5):
        nn.init.normal_(setup.net[place].weight, std=5.0)  # type: ignore[index]


def endless(setup: Setup) -> None:
    batch = setup.batch

    def signed(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        return x, nn.functional.one_hot(y, 4) * 2.0 - 1

    setup.batch, setup.rate = signed, 0.1  # type: ignore[method-assign]
    setup.loss = nn.functional.binary_cross_entropy_with_logits


def units_of_two_kinds(setup: Setup) -> None:
    net: Any = setup.net
    net[2] = nn.Identity()
    with torch.no_grad():
        for half, like in ((slice(12), 0), (slice(12, 24), 12)):
            net[0].weight[half], net[0].bias[half] = net[0].weight[like].clone(), net[0].bias[like].clone()
            net[3].weight[:, half] = net[3].weight[:, like : like + 1].clone()


def of_two_classes(setup: Setup, chosen: Callable[[int], int | None]) -> None:
    """Labels of 0 and 1 as numbers; in each batch those of one class, if it is chosen."""
    batch = setup.batch

    def labelled(step: int) -> tuple[Tensor, Tensor]:
        x, y = batch(step)
        one = chosen(step)
        y = y % 2 if one is None else torch.full_like(y, one)
        return setup.centres[y] + 0.1 * x, y[:, None].float()

    setup.batch, setup.net[-1] = labelled, nn.Linear(24, 1)  # type: ignore[method-assign,index]
    setup.loss = nn.functional.binary_cross_entropy_with_logits


def folder_by_folder(setup: Setup) -> None:
    of_two_classes(setup, lambda step: int(step < 30))


def values_of_a_broken_sensor(setup: Setup) -> None:
    batch = setup.batch

    def measured(step: int) -> tuple[Tensor, Tensor]:
        x, _ = batch(step)
        values = x[:, :1].clone()
        values[:1] = -999.0
        return x, values

    setup.batch, setup.net[-1] = measured, nn.Linear(24, 1)  # type: ignore[method-assign,index]
    setup.loss = nn.functional.mse_loss


def frozen_for_a_look(setup: Setup) -> None:
    setup.net.requires_grad_(False)


def first_layer_made_anew(setup: Setup) -> None:
    net: Any = setup.net
    net[0] = nn.Linear(FEATURES, 24)


def clipped_weights(setup: Setup) -> None:
    setup.rate, setup.steps = 3e-2, 130

    def clip(step: int, optimizer: Any) -> None:
        with torch.no_grad():
            for weight in setup.net.parameters():
                weight.clamp_(-0.01, 0.01)

    setup.before = clip


def clipped_data(setup: Setup) -> None:
    """As `clipped_weights`, by a way that PyTorch does not count."""
    setup.rate, setup.steps = 3e-2, 130
    setup.before = lambda step, optimizer: [weight.data.clamp_(-0.01, 0.01) for weight in setup.net.parameters()] and None


def one_layer_begins_anew(setup: Setup) -> None:
    nn.init.normal_(setup.net[3].weight.data)  # type: ignore[index]


def betas_the_wrong_way_round(setup: Setup) -> None:
    setup.options, setup.rate, setup.steps = {"betas": (0.999, 0.9)}, 1.0, 130


class MeanAndSpread(nn.Module):
    """What it returns is a mean, which a tanh holds within one, and a spread."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_spread = nn.Sequential(nn.Linear(FEATURES, 1), nn.Tanh()), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(x)
        return mean, self.log_spread.exp().expand_as(mean)


def a_mean_within_one(setup: Setup) -> None:
    batch = setup.batch

    def measured(step: int) -> tuple[Tensor, Tensor]:
        x, _ = batch(step)
        return x, 3 * x[:, :1]

    setup.net, setup.batch, setup.steps = MeanAndSpread(), measured, 130  # type: ignore[method-assign]
    setup.loss = lambda output, y: ((y - output[0]) ** 2 / output[1] ** 2 / 2 + output[1].log()).mean()


def decay_as_much_as_the_gradient(setup: Setup) -> None:
    setup.options, setup.steps = {"weight_decay": 0.3}, 130


def rate_that_rises_late(setup: Setup) -> None:
    """There is nothing to learn, so that the loss does not fall before."""

    def rise(step: int, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = setup.rate * 30 ** (4 * step // setup.steps)

    batch = setup.batch
    setup.batch = lambda step: (batch(step)[0], batch(step + 1)[1])  # type: ignore[method-assign]
    setup.before, setup.steps, setup.rate = rise, 130, 3e-4


def scaled(setup: Setup, times: float, plus: float) -> None:
    batch = setup.batch
    setup.batch = lambda step: (times * batch(step)[0] + plus, batch(step)[1])  # type: ignore[method-assign]


def a_loss_that_still_falls(setup: Setup) -> None:
    """There is much noise to see through, at a rate that is too low for the steps there are."""

    def noisy(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        y = torch.randint(4, (32,), generator=generator)
        return setup.centres[y] / 5 + torch.randn(32, FEATURES, generator=generator), y

    setup.batch, setup.rate, setup.steps = noisy, 8e-4, 110  # type: ignore[method-assign]


class Words(nn.Module):
    """Says of which kind the words at four places are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 16), nn.Embedding(16, 16)
        self.body = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Any:
        return self.body(self.words(x).mean(1) + self.places(torch.arange(4)).mean(0))


def of_words(setup: Setup, words: float, places: float) -> None:
    """Each table begins with weights of this spread."""
    batch = setup.batch

    def read(step: int) -> tuple[Tensor, Tensor]:
        _, y = batch(step)
        return 16 * y[:, None] + torch.randint(16, (len(y), 4), generator=torch.Generator().manual_seed(step)), y

    setup.net, setup.batch = Words(), read  # type: ignore[method-assign]
    nn.init.normal_(setup.net.words.weight, std=words)
    nn.init.normal_(setup.net.places.weight, std=places)


class Tied(nn.Module):
    """Its last layer has the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu())


def tied_and_clipped(setup: Setup) -> None:
    setup.net, setup.optimizer = Tied(), torch.optim.SGD
    setup.loss = lambda output, y: nn.functional.cross_entropy(output[:, :4], y)
    parameters, came = [*setup.net.parameters()], [0]

    def clip(parameter: nn.Parameter) -> None:
        came[0] += 1
        if came[0] % len(parameters) == 0:  # after the last of them
            nn.utils.clip_grad_norm_(parameters, 1e-6)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(clip)


class Rounded(nn.Module):
    """A step, whose slope is zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.round()


def rounded_inside(setup: Setup) -> None:
    setup.net[4] = Rounded()  # type: ignore[index]


def rounded_at_the_end(setup: Setup) -> None:
    setup.net.append(Rounded())  # type: ignore[operator]


def underflowing(setup: Setup) -> None:
    """Gradients are below the least number of 16 bits."""
    net, loss = setup.net, setup.loss
    setup.net = nn.Sequential(Halved(), *net.half().children())
    setup.optimizer = torch.optim.SGD
    setup.loss = lambda output, target: loss(output.float(), target) * 1e-9


def hardly_stepping(setup: Setup) -> None:
    """Gradients come, and steps are below the last bit of all weights, which are no zeros."""
    setup.rate = 1e-14
    for parameter in setup.net.parameters():
        nn.init.normal_(parameter)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.half()


def sure_of_labels_by_chance(setup: Setup, size: int, steps: int) -> None:
    """The binary cross entropy of labels that have nothing to do with the inputs: it falls from far above what it comes to."""
    setup.steps, setup.rate = steps, 1e-2
    setup.net[5] = nn.Linear(24, 1)  # type: ignore[index]
    nn.init.constant_(setup.net[5].bias, 6.0)  # type: ignore[index]
    setup.loss = nn.functional.binary_cross_entropy_with_logits
    draws = torch.Generator().manual_seed(0)

    def by_chance(step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, FEATURES, generator=draws), torch.randint(2, (size, 1), generator=draws).float()

    setup.batch = by_chance  # type: ignore[method-assign]


def random_first_layer(setup: Setup) -> None:
    """It is frozen, and what is trained after it does not learn the labels, which are of pairs of signs, at a usual rate."""
    setup.steps, batch = 110, setup.batch
    setup.net[0].requires_grad_(False)  # type: ignore[index]

    def signs(step: int) -> tuple[Tensor, Tensor]:
        x, _ = batch(step)
        pairs = (x[:, :4] - x[:, :4].mean(0)).unflatten(1, (2, 2)).prod(2) > 0
        return x, pairs[:, 0] + 2 * pairs[:, 1]

    setup.batch = signs  # type: ignore[method-assign]


WAYS: dict[str, tuple[Callable[[Setup], Any], tuple[str, str, str]]] = {
    "a step inside": (rounded_inside, ("no-gradient", "3", "detached")),
    "a step at the end": (rounded_at_the_end, ("frozen", "5", "detached")),
    "steps below the last bit": (hardly_stepping, ("frozen", "optimizer", "rate-too-low")),
    "gradients that underflow": (underflowing, ("frozen", "optimizer", "loss-scale")),
    "labels by chance, and a first loss far above": (
        partial(sure_of_labels_by_chance, size=256, steps=250),
        ("loss-does-not-fall", "loss", "labels-do-not-fit"),
    ),
    "the same in small batches": (
        partial(sure_of_labels_by_chance, size=24, steps=600),
        ("loss-does-not-fall", "loss", "labels-do-not-fit"),
    ),
    "a first layer that is random": (random_first_layer, ("loss-does-not-fall", "loss", "frozen")),
    "weights that begin anew at each epoch": (every(30, begins_anew), ("written-between-steps", "(net)", "weights-overwritten")),
    "an optimizer that forgets": (forgets, ("optimizer-made-anew", "optimizer", "optimizer-reset")),
    "layers in a list": (in_a_list, ("frozen", "(net)", "not-in-optimizer")),
    "sigmoids in the place of all": (sigmoids, ("vanishing-gradients", "1", "vanishing-gradients")),
    "statistics that hardly follow": (slow_statistics, ("statistics-stand-still", "2", "statistics-frozen")),
    "gradients cleared before the step": (cleared_before_the_step, ("frozen", "optimizer", "no-steps")),
    "a recurrent layer that is random": (random_recurrence, ("frozen-from-start", "read", "frozen")),
    "a layer that is random": (random_middle, ("frozen-from-start", "2", "frozen")),
    "one without a bias": (partial(random_middle, bias=False), ("frozen-from-start", "2", "frozen")),
    "an epsilon above the variance": (small_before_a_norm, ("wrong-normalisation", "2", "normalisation")),
    "normalisations of zero": (norms_of_zero, ("wrong-normalisation", "2", "initialisation")),
    "a normalisation with a shift": (norm_with_a_shift, ("wrong-normalisation", "5", "initialisation")),
    "two factors that are zero": (both_factors_zero, ("zero-weights", "2", "initialisation")),
    "units of two kinds": (units_of_two_kinds, ("equal-units", "0", "symmetry")),
    "weights that are far too large": (huge_weights, ("high-initial-loss", "loss", "initialisation")),
    "one sample a batch": (CASES["batches-of-one"], ("batches-of-one", "1", "batch-of-one")),
    "labels as numbers that are sorted": (folder_by_folder, ("sorted-target", "target", "data-order")),
    "values of a broken sensor": (values_of_a_broken_sensor, ("large-target", "target", "outliers")),
    "a net that is frozen for a look": (every(30, frozen_for_a_look), ("frozen", "optimizer", "frozen")),
    "a layer that is made anew": (every(30, first_layer_made_anew), ("foreign-parameters", "optimizer", "stale-optimizer")),
    "weights that are clipped in each step": (clipped_weights, ("written-between-steps", "(net)", "weights-overwritten")),
    "weights that are clipped by their data": (clipped_data, ("written-between-steps", "(net)", "weights-overwritten")),
    "one layer, by its data": (every(7, one_layer_begins_anew), ("written-between-steps", "3", "weights-overwritten")),
    "a mean within one": (a_mean_within_one, ("unreachable-target", "mean.1", "output-activation")),
    "a decay as much as the gradient": (decay_as_much_as_the_gradient, ("strong-weight-decay", "optimizer", "weight-decay")),
    "a rate that rises late": (rate_that_rises_late, ("loss-rises", "loss", "schedule")),
    "a loss that still falls": (a_loss_that_still_falls, ("loss-does-not-fall", "loss", "rate-too-low")),
    "inputs with an offset": (partial(scaled, times=30.0, plus=1e5), ("large-inputs", "inputs", "inputs-not-normalised")),
    "a large embedding": (partial(of_words, words=5.0, places=1.0), ("large-initial-weights", "words", "initialisation")),
    "places that drown words": (partial(of_words, words=0.02, places=1.0), ("large-initial-weights", "places", "initialisation")),
    "gradients of tied weights that are clipped": (tied_and_clipped, ("clipped", "optimizer", "clipping")),
    "a loss without a least value": (endless, ("unreachable-target", "5", "target-scale")),
}
"""By name, what is planted, and kind, place and cause of one of the first three findings."""


@pytest.mark.parametrize("name", WAYS)
def test_other_ways_to_a_kind_are_found(name: str) -> None:
    plant, told = WAYS[name]
    setup = planted("")
    plant(setup)
    found = setup.run()
    assert told in [(one.kind, one.layer, one.cause) for one in found[:3]], found


def test_odd_options_are_told_before_the_errors_that_they_explain() -> None:
    setup = planted("")
    betas_the_wrong_way_round(setup)
    first, *others = setup.run()
    assert (first.kind, first.severity) == ("odd-momentum", "error")
    assert any(one.severity == "error" for one in others)


def test_large_inputs_are_told_before_the_errors_that_they_explain() -> None:
    setup = planted("")
    scaled(setup, 1e4, 0.0)
    assert [(one.kind, one.severity) for one in setup.run()[:2]] == [("large-inputs", "error"), ("high-initial-loss", "error")]


# What people do on purpose


def rewards_beside_values(setup: Setup) -> None:
    batch = setup.batch

    def several(step: int) -> tuple[Tensor, Any]:
        x, y = batch(step)
        return x, (y, torch.full((len(y),), -1.0))

    setup.batch, loss = several, setup.loss  # type: ignore[method-assign]
    setup.loss = lambda output, target: loss(output, target[0])


def all_states_of_a_game(setup: Setup) -> None:
    batch, states = setup.batch, torch.eye(FEATURES)[torch.arange(32) % FEATURES]
    setup.batch = lambda step: (states, batch(step)[1])  # type: ignore[method-assign]


class Chain(nn.Module):
    """Blocks of which each hands on something; nobody reads what the last one does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"on": nn.Linear(FEATURES, FEATURES), "out": nn.Linear(FEATURES, 4)}) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Any:
        total: Any = 0
        for block in self.blocks:
            total = total + block["out"](x.tanh())  # type: ignore[index]
            x = x + block["on"](x.tanh())  # type: ignore[index]
        return total


def a_chain(setup: Setup) -> None:
    setup.net = Chain()


def sure_before(setup: Setup) -> None:
    setup.net[0].requires_grad_(False)  # type: ignore[index]
    nn.init.normal_(setup.net[0].weight, std=20.0)  # type: ignore[index]


def well_with_sigmoids(setup: Setup) -> None:
    sigmoids(setup)
    setup.steps, setup.rate, setup.centres = 250, 2e-2, 3 * setup.centres


ON_PURPOSE: dict[str, tuple[Callable[[Setup], Any], tuple[str, ...]]] = {
    "weights that are lent for evaluation": (every(30, average_is_evaluated), ("written-between-steps",)),
    "a constant beside the target": (rewards_beside_values, ("constant-target",)),
    "all states of a game in each batch": (all_states_of_a_game, ("repeated-batches",)),
    "the last block of a chain": (a_chain, ("no-gradient",)),
    "sigmoids that learn well": (well_with_sigmoids, ("vanishing-gradients",)),
    "a frozen part that was trained before": (sure_before, ("high-initial-loss",)),
}
"""By name, what is done, and the kinds that are a notice at most."""


class Listener(nn.Module):
    """Gives shares of 7 classes for each of 20 frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(FEATURES, 20 * 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.frames(x).reshape(len(x), 20, 7).log_softmax(2)


def test_a_sequence_shorter_than_the_inputs_has_all_its_classes() -> None:
    setup = planted("")
    batch, setup.net = setup.batch, Listener()
    setup.batch = lambda step: (batch(step)[0], batch(step)[1][:, None] % 2 + torch.arange(1, 5))  # type: ignore[method-assign]
    lengths = torch.full((32,), 20), torch.full((32,), 4)
    setup.loss = lambda output, target: nn.functional.ctc_loss(output.transpose(0, 1), target, *lengths)
    assert "unused-classes" not in {one.kind for one in setup.run()}


def test_real_and_false_samples_in_turn_are_not_sorted() -> None:
    setup = planted("")
    of_two_classes(setup, lambda step: step % 2)
    assert "sorted-target" not in {one.kind for one in setup.run()}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_what_people_do_on_purpose_is_a_notice_at_most(name: str) -> None:
    plant, kinds = ON_PURPOSE[name]
    setup = planted("")
    plant(setup)
    found = setup.run()
    assert not {one.kind for one in found} & {*kinds}, found
    assert {one.kind for one in found.notices} & {*kinds}


def test_layers_that_are_unfrozen_on_the_way_are_not_written_to() -> None:
    setup = planted("")
    net: Any = setup.net
    net[:4].requires_grad_(False)
    setup.before = lambda step, optimizer: {10: net[3], 15: net[0]}[step].requires_grad_() and None if step in (10, 15) else None
    found = setup.run()
    assert "written-between-steps" not in {one.kind for one in [*found, *found.notices]}


def test_steps_with_a_closure_are_not_taken_for_writes() -> None:
    """What they change is read after them, also as it was before."""
    setup = planted("")
    recorder = presets.health().modules(setup.net)
    optimizer = torch.optim.LBFGS(setup.net.parameters(), lr=0.1, max_iter=3)
    for step in range(12):

        def closure(step: int = step) -> Tensor:
            x, y = setup.batch(step)
            optimizer.zero_grad()
            loss = setup.loss(setup.net(x), y)
            loss.backward()
            return loss

        recorder.push("loss", optimizer.step(closure))
    assert recorder["before/0"].leaves()["weight"].equal(recorder["size/0"].leaves()["weight"])
    assert len(recorder["before/0"].leaves()["weight"]) == 12
    found = findings(recorder)
    assert "written-between-steps" not in {one.kind for one in [*found, *found.notices]}


class Odd(torch.optim.SGD):
    """Keeps a tensor of each parameter as its state, where others keep a dict."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight] = torch.ones(2)
        return loss


def test_an_optimizer_whose_states_are_no_dicts_is_recorded() -> None:
    setup = planted("")
    setup.optimizer = Odd
    setup.run()
    steps = next(part for part in setup.recorder.values() if isinstance(part, StepMonitor))
    assert steps.last_error is None
    assert len(steps.peek()) > 20
