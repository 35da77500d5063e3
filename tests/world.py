"""Processes with gloo on loopback, in which tests run scenarios; see the fixture `world` in conftest.py, of three."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["SIZE", "Place", "Raised", "World", "alike", "returned"]

SIZE = 3
SECONDS = 240
"""No collective waits longer, and no test unless it compiles; a healthy rank needs milliseconds, but machines may be busy."""

Place = tuple[int, Any]
"""What a scenario is told: its rank, and the group it is to sync with."""


@dataclass(frozen=True)
class Raised:
    """What a scenario raised on one rank."""

    kind: str
    text: str
    cause: str


# The compiler and what is spread over ranks, too: that nothing of it is imported too early is tested in processes of their own.
IMPORTED = ["world", "recorders", "cases", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]


def beginning() -> BaseContext:
    """How processes begin: as copies of one that has imported what scenarios need, and has done nothing else.

    An interpreter of their own needs three seconds for that, and the tests begin dozens of them.
    """
    if sys.platform != "linux":  # elsewhere a copy of a process that has loaded PyTorch may not live long
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # what it imports is what the tests import
        forkserver.ensure_running()
    return context


def serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """Lives in a process of its own: joins the world, then runs the scenarios it is sent."""
    gc.freeze()  # as in conftest.py
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "a recorder no longer exists")  # scenarios drop their recorders
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    known = [(0, 1), (1, 2), *((one,) for one in range(size))]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in known if ranks[-1] < size}
    while True:
        job = pickle.loads(pipe.recv_bytes())
        if job is None:
            dist.destroy_process_group()
            return
        scenario, ranks, arguments = job
        try:
            answer = scenario((rank, groups.get(ranks)), *arguments)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), type(error.__cause__).__name__)
        pipe.send_bytes(pickle.dumps(answer))


class World:
    """Several processes. `run` has some of them act a scenario and returns what each returned or raised."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        context = beginning()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, str(folder / "store"), there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(
        self,
        scenario: Callable[..., Any],
        *arguments: Any,
        ranks: tuple[int, ...] | None = None,
        group: Any = None,
        seconds: float = SECONDS,
    ) -> list[Any]:
        ranks = ranks or tuple(range(len(self.pipes)))
        job = pickle.dumps((scenario, group or ranks, arguments))
        for rank in ranks:
            self.pipes[rank].send_bytes(job)
        answers = []
        for rank in ranks:
            if not self.pipes[rank].poll(seconds):
                self.kill()
                pytest.fail(f"rank {rank} did not answer within {seconds} s; those before it answered {answers}")
            try:
                answers.append(pickle.loads(self.pipes[rank].recv_bytes()))
            except EOFError:  # the scenario ended its process
                answers.append(None)
        return answers

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def returned(answers: list[Any]) -> list[Any]:
    """The answers, of which none is an error."""
    assert not any(isinstance(answer, Raised) for answer in answers), answers
    return answers


def alike(answers: list[Any]) -> Any:
    """The answer that all ranks gave."""
    assert all(answer == answers[0] for answer in returned(answers))
    return answers[0]
