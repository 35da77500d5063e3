"""What differs first between ranks tells the likely cause."""

from __future__ import annotations

import pytest
import torch

from recorders import Recording, Subrecording, findings
from recorders.recordings.distributed.differing import Differing
from recorders.watch.diagnosis.evidence import evidence
from recorders.watch.diagnosis.steps import FACTS
from reducers import Collect

GRADIENT, VALUE, UPDATE = "ParameterGradientMonitor", "ParameterMonitor", "ParameterUpdateMonitor"
BEFORE = "PreStepParameterMonitor"


def merged(*differing: tuple[str, str, int | None], compared: tuple[str, ...] = (GRADIENT, VALUE)) -> Recording:
    """A recording of three ranks, of layers with two parameters; each that differs is given as monitor, layer/leaf, observation."""
    parts = {}
    for monitor in compared:
        for layer in ("0", "2"):
            name = f"{monitor}/{layer}"
            found = tuple(
                Differing(name, leaf.partition("/")[2], kind, (1,), (0, 1, 2), observation)
                for kind, leaf, observation in differing
                if (kind, leaf.partition("/")[0]) == (monitor, layer)
            )
            state = Collect().update({}, torch.ones(3))
            parts[name] = Subrecording(Collect(), {"weight": state}, 3, monitor=monitor, ranks=(0, 1, 2), copies=2, differing=found)
    return Recording(parts)


ALL = ("0/weight", "0/bias", "2/weight", "2/bias")
CAUSES = {
    "not-reduced": merged(*((GRADIENT, leaf, 3) for leaf in ALL), *((VALUE, leaf, 4) for leaf in ALL)),
    "silent-corruption": merged((VALUE, "2/weight", 2)),
    "changed-on-one-rank": merged(*((VALUE, leaf, 2) for leaf in ALL)),
    "ranks-start-apart": merged(*((VALUE, leaf, 0) for leaf in ALL)),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_differs_first_tells_the_cause(cause: str) -> None:
    (found,) = (one for one in findings(CAUSES[cause]) if one.kind == "replicas-differ")
    assert found.cause == cause


def told(recording: Recording) -> str:
    (found,) = (one for one in findings(recording) if one.kind == "replicas-differ")
    return f"{found.layer}: {found.what}"


def test_it_says_what_differs_first_and_how_much_else() -> None:
    several = merged((VALUE, "0/weight", 4), (GRADIENT, "2/bias", 4), (VALUE, "2/weight", None))
    on = "differs on rank 1, unlike ranks 0 and 2"
    assert told(several) == f"2: the gradient of bias {on}, from observation 4 on, and 2 more parameters in 2 layers"
    assert told(merged((UPDATE, "2/weight", None), compared=(UPDATE,))) == f"2: the update of weight {on}"
    both = merged((GRADIENT, "2/weight.value", 2), (GRADIENT, "2/weight.gradient", 3))  # as presets.fingerprints() records them
    assert told(both) == "2: weight differs on rank 1, unlike ranks 0 and 2, from observation 2 on"
    other = merged(("ForwardMonitor", "2/", 1), compared=("ForwardMonitor",))
    assert told(other).startswith("2: what ForwardMonitor recorded differs on rank 1")


def with_steps(recording: Recording, *steps: float) -> Recording:
    """The same, and the steps of its observations."""
    rows = torch.zeros(len(steps), len(FACTS))
    rows[:, FACTS.index("step")] = torch.tensor(steps)
    facts = Subrecording(Collect(), {"": Collect().update({}, rows)}, len(steps), monitor="StepMonitor", ranks=(0, 1, 2), copies=2)
    return Recording({"steps": facts, **recording.subrecordings})


@pytest.mark.parametrize(
    ("written", "steps", "causes"),
    [
        (ALL, (0, 1, 2), ("changed-on-one-rank", "silent-corruption")),
        (("2/weight",), (0, 1, 2), ("silent-corruption", "changed-on-one-rank", "not-reduced")),
        (ALL, (0, 1, 8), ("not-reduced", "silent-corruption")),  # the gradients of steps between may have differed
    ],
)
def test_what_was_written_to_between_two_steps_explains_the_gradients(
    written: tuple[str, ...], steps: tuple[float, ...], causes: tuple[str, ...]
) -> None:
    differing = [*((BEFORE, leaf, 2) for leaf in written), *((GRADIENT, leaf, 2) for leaf in ALL)]
    recording = with_steps(merged(*differing, compared=(GRADIENT, VALUE, BEFORE)), *steps)
    (found,) = (one for one in findings(recording) if one.kind == "replicas-differ")
    assert (found.causes, found.since) == (causes, int(steps[2]))
    assert f"{written[0][2:]} before the step differs on rank 1" in found.what


def test_weights_that_differ_before_the_first_step_explain_its_gradients() -> None:
    differing = [*((BEFORE, leaf, 0) for leaf in ALL), *((GRADIENT, leaf, 0) for leaf in ALL)]
    (found,) = (one for one in findings(merged(*differing, compared=(GRADIENT, BEFORE))) if one.kind == "replicas-differ")
    assert found.causes[0] == "ranks-start-apart"


def test_steps_may_differ_and_those_of_the_first_rank_count() -> None:
    rows = torch.zeros(6, len(FACTS))
    rows[:, FACTS.index("step")] = torch.tensor([0.0, 1, 2, 0, 1, 2])
    differing = (Differing("steps", "", "StepMonitor", (1,), (0, 1), 1),)
    steps = Subrecording(
        Collect(), {"": Collect().update({}, rows)}, 6, monitor="StepMonitor", ranks=(0, 1), copies=1, differing=differing
    )
    found = evidence(Recording({"steps": steps}))
    assert found.steps is not None
    assert found.steps["step"].values == [0, 1, 2]
    assert not found.differing
    of_parameters = merged((VALUE, "2/weight", 1)).subrecordings
    (one,) = (one for one in findings(Recording({"steps": steps, **of_parameters})) if one.kind == "replicas-differ")
    assert one.since == 1
