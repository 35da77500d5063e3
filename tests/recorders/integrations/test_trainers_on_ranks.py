"""Trainers over two processes: what their ranks record together is what one process records."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from trainings import ROWS, new_net, new_optimizer, new_recorder

from recorders import Recorder, load, merge

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")

RANKS, STEPS, BATCH = 2, 3, 4
"""Each rank takes every second row of 24, in batches of 4, so three steps of 8 rows."""


def in_lightning(folder: Path) -> Recorder:
    import lightning
    from torch.utils.data import DataLoader

    from recorders.integrations.lightning import RecorderCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = new_net().body

        def training_step(self, batch: Any, index: int) -> Any:
            return self.body(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return new_optimizer(self)

    callback = RecorderCallback(new_recorder)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=RANKS, max_epochs=1, callbacks=[callback], logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(ROWS[trainer.global_rank :: RANKS], batch_size=BATCH))
    trainer.save_checkpoint(folder / "one.ckpt")
    return callback.recorder


def in_accelerate(folder: Path) -> Recorder:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from recorders.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    net = new_net()
    net, optimizer, rows = accelerator.prepare(net, new_optimizer(net), DataLoader(ROWS, batch_size=BATCH))
    with attach(accelerator, new_recorder(net), optimizer) as recorder:
        for batch in rows:
            accelerator.backward(net(batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return recorder


def in_transformers(folder: Path) -> Recorder:
    import transformers
    from torch.optim.lr_scheduler import LambdaLR

    from recorders.integrations.transformers import RecorderCallback

    net = new_net()
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1, max_grad_norm=0, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no", save_strategy="epoch",
    )  # fmt: skip

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(range(len(ROWS)))

    callback, optimizer = RecorderCallback(new_recorder), new_optimizer(net)
    data = [{"x": row} for row in ROWS]
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    InOrder(net, arguments, train_dataset=data, callbacks=[callback], optimizers=(optimizer, schedule)).train()
    return callback.recorder


def in_ignite(folder: Path) -> Recorder:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint

    from recorders.integrations.ignite import RecorderHandler

    idist.initialize("gloo")
    net = new_net()
    optimizer = new_optimizer(net)
    wrapped = idist.auto_model(net)

    def update(engine: Any, batch: Any) -> None:
        optimizer.zero_grad()
        wrapped(batch)["loss"].backward()
        optimizer.step()

    trainer = Engine(update)
    handler = RecorderHandler(new_recorder(net), optimizer)
    handler.attach(trainer)
    trainer.add_event_handler(Events.COMPLETED, Checkpoint({"net": net, "recorder": handler}, str(folder)))
    trainer.run(list(ROWS[idist.get_rank() :: RANKS].split(BATCH)), max_epochs=1)
    return handler.recorder


TRAINERS = {"lightning": in_lightning, "accelerate": in_accelerate, "transformers": in_transformers, "ignite": in_ignite}


def main(trainer: str, folder: Path) -> None:
    torch.set_num_threads(1)
    recorder = TRAINERS[trainer](folder)
    recorder.save(folder / f"own-{dist.get_rank()}")
    together = recorder.sync(to=0)
    if together is not None:
        together.save(folder / "together")
    told = {"step": recorder.clock.step, "names": list(recorder), "micro": recorder.clock.micro_batch}
    (folder / f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def alone() -> Recorder:
    """The same in one process, without a trainer."""
    net = new_net()
    optimizer = new_optimizer(net)
    with new_recorder(net).attach(optimizer) as recorder:
        for rows in ROWS.split(BATCH * RANKS):
            optimizer.zero_grad()
            net(rows)["loss"].backward()
            optimizer.step()
    return recorder


def run_on_two_ranks(trainer: str, folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in places.items()}, "MASTER_ADDR": "127.0.0.1"}
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "ACCELERATE_USE_CPU": "true",
            "TORCHELASTIC_RUN_ID": "tests",
        }
        command = [sys.executable, __file__, trainer, str(folder)]
        processes.append(
            subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)


@pytest.mark.parametrize(
    "trainer", ["ignite", *(pytest.param(name, marks=pytest.mark.long) for name in ("lightning", "accelerate", "transformers"))]
)
def test_two_ranks_of_a_trainer_record_what_one_process_records(trainer: str, tmp_path: Path) -> None:
    pytest.importorskip(trainer)
    run_on_two_ranks(trainer, tmp_path)
    expected, together = alone(), load(tmp_path / "together")
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(RANKS)]
    assert told == [{"step": STEPS, "names": list(expected), "micro": 0}] * RANKS
    torch.testing.assert_close(together.compute(), expected.compute(), rtol=1e-5, atol=1e-6)  # it trains in float32
    own = ("train", "first")
    assert dict(together.samples) == {
        name: monitor.samples * (RANKS if name.startswith(own) else 1) for name, monitor in expected.items()
    }
    torch.testing.assert_close(
        merge([tmp_path / f"own-{rank}" for rank in range(RANKS)]).compute(), together.compute(), rtol=0, atol=0
    )
    check_checkpoint(trainer, tmp_path)


def check_checkpoint(trainer: str, folder: Path) -> None:
    """accelerate and transformers keep what each rank recorded, Lightning and Ignite what rank 0 did."""
    if trainer in ("accelerate", "transformers"):
        saved = folder / "recorder" if trainer == "accelerate" else folder / f"checkpoint-{STEPS}" / "recorder"
        for rank in range(RANKS):
            torch.testing.assert_close(
                load(saved / f"rank-{rank}").compute(), load(folder / f"own-{rank}").compute(), rtol=0, atol=0
            )
        return
    (path,) = folder.glob("*.ckpt" if trainer == "lightning" else "checkpoint_*.pt")
    whole = torch.load(path, weights_only=True)
    state = next(iter(whole["callbacks"].values())) if trainer == "lightning" else whole["recorder"]
    assert (state["rank"], state["ranks"]) == (0, RANKS)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
