"""The life of a stream: what happens to its folder is drawn by chance, beside lists that keep the same."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recorders import Stream, StreamDataset
from recorders.errors import OperandError

__all__ = ["StreamLife"]

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
SHAPES = ((), (1,), (7,), (3, 5), (300,), (2, 0))


@dataclass
class Batch:
    """Rows by place, each with its id, as they were put."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    ids: dict[str, Tensor] = field(default_factory=dict)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy(force=True).tobytes() if x.numel() else b""


class StreamLife:
    """A folder with a stream that is written, closed, opened again and killed, and what should be in it.

    The places "a" and "b" come together, with the same ids; all others by themselves.

    Args:
        folder: where the stream is.
        seed: what happens.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance, self.path = random.Random(seed), folder / str(seed)
        torch.manual_seed(seed)
        self.happened: list[str] = []
        self.batches: list[Batch] = []
        chance = self.chance
        self.dtype = chance.choice([None, None, torch.bfloat16, torch.float32])
        self.kinds = {name: (chance.choice(SHAPES), chance.choice(DTYPES)) for name in ("a", "b", "layer/0", "ü ", "")}
        self.axes, self.next_id = chance.choice([1, 1, 2]), 0
        self.next_numbers: dict[str, int] = {}
        self.stream = self._opened()
        self.reader: StreamDataset | None = None

    def _opened(self) -> Stream:
        sizes = 1, 200, 5000, 1 << 20
        return Stream(self.path, dtype=self.dtype, shard_bytes=self.chance.choice(sizes), queue_bytes=self.chance.choice(sizes))

    # What happens

    def _drawn(self, place: str, lead: tuple[int, ...]) -> Tensor:
        shape, dtype = self.kinds[place]
        x = (torch.randn(*lead, *shape) * 9).to(dtype)
        return x.transpose(0, -1).contiguous().transpose(0, -1) if self.chance.random() < 0.2 and x.ndim else x

    def _kept(self, x: Tensor) -> Tensor:
        found = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        return found.reshape(math.prod(x.shape[: self.axes]), *x.shape[self.axes :]).clone()

    def _lead(self) -> tuple[int, ...]:
        return tuple(self.chance.choice([0, 1, 2, 3, 8, 30 // 2**axis]) for axis in range(self.axes))

    def put(self, stream: Stream | None = None) -> None:
        """A batch of one or two places, with ids or without."""
        stream, lead, batch = stream or self.stream, self._lead(), Batch()
        within = torch.cartesian_prod(*map(torch.arange, lead)).view(-1, self.axes)
        if self.chance.random() < 0.6:
            places, ids = ("a", "b"), torch.arange(lead[0]) * 3 + self.next_id
            self.next_id += 3 * lead[0] + 1
            ids = ids[torch.randperm(len(ids))]
            with stream.given(ids=ids if self.chance.random() < 0.5 else ids.tolist()):
                for place in places:
                    x = self._drawn(place, lead)
                    assert stream.put(place, x, self.axes) == len(within)
                    batch.rows[place] = self._kept(x)
                    batch.ids[place] = torch.cat((ids[within[:, :1]], within[:, 1:]), dim=1) if len(within) else within
                    x.zero_()  # it was copied
        else:
            place = self.chance.choice(["layer/0", "ü ", ""])
            x, first = self._drawn(place, lead), self.next_numbers.get(place, 0)
            with stream.given():
                assert stream.put(place, x, self.axes) == len(within)
            batch.rows[place] = self._kept(x)
            batch.ids[place] = torch.cat((within[:, :1] + first, within[:, 1:]), dim=1)
            self.next_numbers[place] = first + lead[0]
        self.batches.append(batch)

    def put_what_does_not_fit(self) -> None:
        place = self.chance.choice([*self.kinds])
        if self._rows(place)[0]:
            wrong = torch.zeros(*(2,) * self.axes, *self.kinds[place][0], 2, dtype=self.kinds[place][1])
            with pytest.raises(OperandError), self.stream.given():
                self.stream.put(place, wrong, self.axes)
            self.batches.append(Batch())

    def flush(self) -> None:
        self.stream.flush()
        assert self.stream.batches == len(self.batches)

    def close_and_open(self) -> None:
        self.stream.close()
        self.stream = self._opened()
        assert self.stream.batches == len(self.batches)

    def be_killed(self) -> None:
        """A process that goes on with the stream is killed: some of its batches are there, those that it put first."""
        self.stream.close()
        before, pipe = len(self.batches), multiprocessing.get_context("fork").SimpleQueue()
        wait = self.chance.choice([0, 0.002, 0.02])

        def goes_on() -> None:
            stream = self._opened()
            for _ in range(6):
                self.put(stream)
                if self.chance.random() < 0.3:
                    stream.flush()
                    pipe.put(len(self.batches))
            pipe.put(-1)
            time.sleep(wait)
            os.kill(os.getpid(), signal.SIGKILL)

        state, numbers = self.chance.getstate(), torch.get_rng_state()
        process = multiprocessing.get_context("fork").Process(target=goes_on)
        process.start()
        flushed = before
        while (found := pipe.get()) >= 0:
            flushed = found
        process.join()
        # The same once more, beside another stream that nobody reads, to know what it put.
        self.chance.setstate(state)
        torch.set_rng_state(numbers)
        numbered = [dict(self.next_numbers)]
        path, self.path = self.path, self.path.with_name(f"{self.path.name} aside {before}")
        with self._opened() as aside:
            for _ in range(6):
                self.put(aside)
                numbered.append(dict(self.next_numbers))
                self.chance.random()
        self.path = path
        self.stream = self._opened()
        there = self.stream.batches
        assert flushed <= there <= len(self.batches)
        self.next_numbers, self.batches = numbered[there - before], self.batches[:there]

    # What is checked

    def _rows(self, place: str) -> tuple[list[Tensor], list[Tensor]]:
        rows = [row for batch in self.batches if place in batch.rows for row in batch.rows[place]]
        return rows, [one for batch in self.batches if place in batch.ids for one in batch.ids[place]]

    def look(self) -> None:
        """At one place, or at the two that come together, after what waits was written."""
        self.stream.flush()
        places = self.chance.choice([("a", "b"), *((name,) for name in self.kinds)])
        wanted = {name: self._rows(name) for name in places}
        if not all(rows for rows, _ in wanted.values()):
            return
        data = StreamDataset(self.path, places if len(places) > 1 else places[0], ids=True)
        self.check(data, wanted, len(places) > 1)
        if self.reader is None:
            self.reader = data
        else:  # opened when less was there
            assert self.reader.refresh() == len(self._rows(self.reader.places[0])[0])
            again = {name: self._rows(name) for name in self.reader.places}
            self.check(self.reader, again, len(self.reader.places) > 1)

    def check(self, data: StreamDataset, wanted: dict[str, tuple[list[Tensor], list[Tensor]]], several: bool) -> None:
        chance, number = self.chance, len(next(iter(wanted.values()))[0])
        assert len(data) == number
        some = [chance.randrange(-number, number) for _ in range(5)]
        for index in (slice(None), slice(chance.randrange(number), None, chance.choice([1, 2, -1, -3])), some):
            chosen = [*range(number)][index] if isinstance(index, slice) else some
            self._check_rows(data[index], wanted, chosen, several)
        rows, ids = data[some[0]]
        self._check_rows(
            ({name: x[None] for name, x in rows.items()} if several else rows[None], ids[None]), wanted, some[:1], several
        )
        for shuffled, window in self._orders(data):
            at = self._positions(shuffled, wanted)
            assert sorted(at) == [*range(number)], f"window {window}"

    def _orders(self, data: StreamDataset) -> Iterator[tuple[Any, int | None]]:
        size = max(self.chance.choice([1, 3, 64, 1000]), len(data) // 30)
        window = self.chance.choice([1, 5, 1 << 16, None])
        batches = data.shuffled(self.chance.randrange(1 << 40), window).batches(size)
        yield batches, window
        if self.chance.random() < 0.3:
            yield DataLoader(batches, batch_size=None, shuffle=True), window

    def _positions(self, batches: Any, wanted: dict[str, tuple[list[Tensor], list[Tensor]]]) -> list[int]:
        """Where the rows of all batches were put; ids tell, as no two rows of a place have the same."""
        _, ids = next(iter(wanted.values()))
        places = {tuple(one.tolist()): place for place, one in enumerate(ids)}
        assert len(places) == len(ids)
        found = list[int]()
        for rows, some in batches:
            at = [places[tuple(one.tolist())] for one in some]
            self._check_rows((rows, some), wanted, at, isinstance(rows, dict))
            found += at
        return found

    def _check_rows(self, found: Any, wanted: dict[str, tuple[list[Tensor], list[Tensor]]], at: list[int], several: bool) -> None:
        rows, ids = found
        for name, (all_rows, all_ids) in wanted.items():
            own = rows[name] if several else rows
            shape, dtype = self.kinds[name]
            dtype = self.dtype if self.dtype is not None and dtype.is_floating_point else dtype
            assert (own.shape, own.dtype) == ((len(at), *shape), dtype)
            assert bits(own) == b"".join(bits(all_rows[place]) for place in at), name
            assert ids.tolist() == [all_ids[place].tolist() for place in at]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            told = "; ".join(self.happened)
            raise AssertionError(f"{type(error).__name__}: {error}\nin the life of a stream of {self.kinds}: {told}") from error

    def live(self, moments: int = 30) -> None:
        """So many things happen; at the end all is compared."""
        things = {
            self.put: 10.0,
            self.put_what_does_not_fit: 0.5,
            self.flush: 2.0,
            self.look: 4.0,
            self.close_and_open: 1.5,
            self.be_killed: 0.4,
        }
        with self._told():
            for thing in self.chance.choices([*things], [*things.values()], k=moments):
                self.happened.append(thing.__name__)
                thing()
            self.close_and_open()
            for _ in range(3):
                self.look()
            self.stream.close()
