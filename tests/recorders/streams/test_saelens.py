"""A stream as the data of SAELens: its trainers take the batches of `endless`, of one place and of several, and go on with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import nn

from recorders import Stream, StreamDataset

pytestmark = pytest.mark.slow
STEPS, BATCH = 8, 32


@pytest.fixture(scope="module")
def sae_lens() -> Any:
    with warnings.catch_warnings():  # its own imports warn
        warnings.simplefilter("ignore")
        return pytest.importorskip("sae_lens")


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("acts")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    with Stream(folder, shard_bytes=1 << 12) as stream, stream.attach(net, ["1", "3"], axes=2), torch.no_grad():
        for step in range(5):
            with stream.given(ids=torch.arange(4) + 4 * step):
                net(torch.randint(50, (4, 7)))
    return folder


def config(steps: int) -> Any:
    from sae_lens.config import SAETrainerConfig

    return SAETrainerConfig(total_training_samples=steps * BATCH, train_batch_size_samples=BATCH, lr=1e-2, lr_end=1e-2)


def autoencoder(sae_lens: Any, width: int) -> Any:
    torch.manual_seed(1)
    return sae_lens.StandardTrainingSAE(sae_lens.StandardTrainingSAEConfig(d_in=width, d_sae=24, l1_coefficient=0.1))


def loss(sae: Any, rows: torch.Tensor) -> float:
    return (sae(rows) - rows).square().mean().item()


def test_a_trainer_takes_batches_without_end(sae_lens: Any, acts: Path) -> None:
    from sae_lens.training.sae_trainer import SAETrainer

    data = StreamDataset(acts, "1")
    assert len(data) == 140  # so that eight batches of 32 are two epochs
    sae = autoencoder(sae_lens, 16)
    before, seen = loss(sae, data[:]), []
    batches = (seen.append(batch) or batch for batch in data.endless(BATCH))  # type: ignore[func-returns-value]
    trainer = SAETrainer(config(STEPS), sae, batches)
    trainer.fit()
    assert (trainer.n_training_steps, trainer.n_training_samples) == (STEPS, STEPS * BATCH)
    assert loss(sae, data[:]) < 0.9 * before
    assert torch.equal(torch.cat(seen[4:]), data.shuffled(1)[: 4 * BATCH])


def test_a_training_goes_on_where_its_checkpoint_ended(sae_lens: Any, acts: Path, tmp_path: Path) -> None:
    from sae_lens.training.sae_trainer import SAETrainer

    data = StreamDataset(acts, "1")
    whole = SAETrainer(config(STEPS), autoencoder(sae_lens, 16), data.endless(BATCH))
    whole.fit()
    begun = SAETrainer(config(5), autoencoder(sae_lens, 16), data.endless(BATCH))
    begun.fit()
    begun.save_trainer_state(tmp_path)
    trainer = SAETrainer(config(STEPS), begun.sae, data.endless(BATCH))
    trainer.load_trainer_state(tmp_path)
    trainer.data_provider = data.endless(BATCH, start=trainer.n_training_steps)
    trainer.fit()
    assert trainer.n_training_steps == STEPS
    for name, weight in whole.sae.state_dict().items():
        assert torch.equal(trainer.sae.state_dict()[name], weight), name


def test_many_layers_are_trained_at_once_on_rows_of_the_same_tokens(sae_lens: Any, acts: Path) -> None:
    from sae_lens.training.multi_sae_trainer import MultiSAETrainer

    data = StreamDataset([acts, acts], ["1", "3"])
    saes = {"first": autoencoder(sae_lens, 16), "last": autoencoder(sae_lens, 4)}
    names = {"first": "1", "last": "3"}
    before = {name: loss(sae, data[:][names[name]]) for name, sae in saes.items()}
    trainer = MultiSAETrainer(config(STEPS), saes, names, data.endless(BATCH))
    trainer.fit()
    assert trainer.n_training_steps == STEPS
    assert all(loss(sae, data[:][names[name]]) < 0.9 * before[name] for name, sae in saes.items())


def test_what_the_page_shows_runs(sae_lens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Stream("acts", dtype=torch.bfloat16) as stream:
        stream.put("1", torch.randn(1000, 32))
    page = (ROOT / "docs" / "streams.md").read_text().partition("## In SAELens")[2]
    found: dict[str, Any] = {}
    exec(page.partition("```py\n")[2].partition("```")[0], found)
    assert all(weight.isfinite().all() for weight in found["sae"].parameters())
