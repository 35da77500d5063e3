"""Trainings that are odd but healthy, as they are found in practice, have no findings."""

from __future__ import annotations

import pytest

from benchmarks.diagnosis.cases import program_of
from benchmarks.diagnosis.training import run
from benchmarks.diagnosis.watch import Health

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ODD = (
    "distillation",  # a teacher in evaluation mode
    "divides-by-255",  # inputs that the net scales itself
    "full-batch",  # the same batch in every step
    "graph",  # that, and labels that do not count
    "lbfgs",  # gradients are cleared several times in a step
    "mean-teacher",  # weights that follow, and are written to
    "norm-first",
    "prices",  # outputs that the net scales itself
    "probabilities-out",
    "skip-gram",  # the same target for all samples
    "spectral",  # weights that are computed
    "two-optimizers",
    "wasserstein",  # weights are clipped between steps
    "character-lstm",  # a state goes on from batch to batch
    "cox-survival",  # a loss near that of a mean square error
    "grid-q-learning",  # all states in each batch, and a constant reward
    "low-rank-adaptation",  # a net that was trained before, and is sure
    "molecule-graphs",  # linear layers read what a linear layer gives
    "small-wavenet",  # the last block hands on what nobody reads
    "sorting-pointer",  # the decoder is given the target
    "sound-recogniser",  # targets shorter than the inputs
)


@pytest.mark.parametrize(
    ("name", "seed"),
    [*((name, 0) for name in ODD), ("rare-positives", 1)],  # there the loss of a batch is mostly how many positives are in it
)
def test_an_odd_training_that_learns_has_no_findings(name: str, seed: int) -> None:
    program = program_of(name)
    watch = Health()
    score = run(program.make(seed), watch)  # 0 is another seed than that of `benchmarks.diagnosis.variants`
    assert score >= program.learns
    assert list(watch.end()) == []
