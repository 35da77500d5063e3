"""Stream: what is written, from where, with which ids, and what is refused; queues that are full; streams that go on."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled import our_calls_of
from safetensors.torch import load_file
from torch import Tensor, nn

from recorders import BackwardMonitor, ForwardInputMonitor, OperandError, RecordingWarning, SelectionError, Stream, StreamDataset
from recorders.errors import NotARecordingError, StorageError
from recorders.recordings.storage.tensors import as_bytes
from recorders.streams.parts import PartWriter


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))


def ids_of(data: StreamDataset) -> list[Any]:
    return [row.tolist() for row in data[:][1]]


@contextmanager
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The writer waits before each write, until the event is set."""
    go, real = threading.Event(), PartWriter.append

    def append(self: PartWriter, rows: Tensor, ids: Tensor) -> None:
        assert go.wait(300)
        real(self, rows, ids)

    monkeypatch.setattr(PartWriter, "append", append)
    try:
        yield go
    finally:
        go.set()


def test_rows_with_their_ids_are_plain_safetensors(tmp_path: Path) -> None:
    net, batches = network(), [torch.randn(5, 3) for _ in range(12)]
    expected: dict[str, list[Tensor]] = {"0": [], "2": []}
    with Stream(tmp_path / "acts", shard_bytes=600) as stream, stream.attach(net, ["0", "2"]) as recorder:
        for step, batch in enumerate(batches):
            with stream.given(ids=torch.arange(5) + 100 * step):
                hidden = net[0](batch)
                expected["0"].append(hidden.detach().clone())
                expected["2"].append(net[2](torch.relu(hidden)).detach())
    assert recorder["0"].peek() == 60
    assert stream.rows == {"0": 60, "2": 60}
    assert stream.batches == 12
    ids = torch.cat([torch.arange(5) + 100 * step for step in range(12)])
    for place in ("0", "2"):
        data = StreamDataset(tmp_path / "acts", place, ids=True)
        assert torch.equal(data[:][0], torch.cat(expected[place]))
        assert torch.equal(data[:][1], ids[:, None])
        files = sorted((tmp_path / "acts").glob(f"*-{place}.safetensors"))
        assert len(files) > 2
        loaded = [load_file(file) for file in files]
        assert torch.equal(torch.cat([each["rows"] for each in loaded]), torch.cat(expected[place]))
        assert torch.equal(torch.cat([each["ids"] for each in loaded])[:, 0], ids)


EXACT = [
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex32 complex64 complex128",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu",
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", " ".join(EXACT).split())
def test_every_dtype_is_kept_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (7, 3 * dtype.itemsize), dtype=torch.uint8)
    rows = raw.view(dtype)
    with Stream(tmp_path) as stream:
        stream.put("x", rows)
    data = StreamDataset(tmp_path, "x")
    assert data[:].dtype is dtype
    assert torch.equal(as_bytes(data[:]), as_bytes(rows))
    (file,) = tmp_path.glob("*.safetensors")
    assert torch.equal(as_bytes(load_file(file)["rows"]), as_bytes(rows))


def test_only_floating_point_rows_are_converted_and_lazy_views_are_resolved(tmp_path: Path) -> None:
    z = torch.randn(4, 2, dtype=torch.complex64)
    with Stream(tmp_path, dtype=torch.bfloat16) as stream:
        stream.put("float", torch.randn(4, 2, dtype=torch.float64))
        stream.put("int", torch.arange(8).view(4, 2).T)
        stream.put("conj", z.conj())
        stream.put("scalar", torch.randn(4, dtype=torch.float16))
    assert {place: StreamDataset(tmp_path, place)[:].dtype for place in stream.rows} == {
        "float": torch.bfloat16,
        "int": torch.int64,
        "conj": torch.complex64,
        "scalar": torch.bfloat16,
    }
    assert torch.equal(StreamDataset(tmp_path, "conj")[:], z.conj().resolve_conj())
    assert torch.equal(StreamDataset(tmp_path, "int")[:], torch.arange(8).view(4, 2).T)


def test_leading_axes_are_rows_with_ids_of_sample_and_index(tmp_path: Path) -> None:
    net = nn.Identity()
    batch = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    with Stream(tmp_path) as stream, stream.attach(net, axes=2):
        with stream.given(ids=[7, 9]):
            net(batch)
        net(batch)
    data = StreamDataset(tmp_path, "", ids=True)
    assert torch.equal(data[:][0], batch.view(6, 4).repeat(2, 1))
    assert ids_of(data)[:6] == [[7, 0], [7, 1], [7, 2], [9, 0], [9, 1], [9, 2]]
    assert ids_of(data)[6:8] == [[0, 0], [0, 1]]


def test_rows_without_numbers_and_batches_without_rows_are_kept(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        for ids in ([7, 3], [], [5]):
            with stream.given(ids=ids):
                stream.put("empty", torch.zeros(len(ids), 2, 0))
                stream.put("x", torch.tensor(ids, dtype=torch.float32))
    data = StreamDataset(tmp_path, ["empty", "x"], ids=True)
    rows, ids = data[::-1]
    assert (rows["empty"].shape, rows["empty"].dtype, rows["x"].tolist()) == ((3, 2, 0), torch.float32, [5, 3, 7])
    assert ids.flatten().tolist() == [5, 3, 7]
    with pytest.raises(OperandError, match="whole numbers"), stream.given(ids=torch.zeros(0)):
        pass


def test_what_is_recorded_does_not_change_with_the_users_tensors(tmp_path: Path) -> None:
    x, ids = torch.zeros(2, 2), torch.tensor([3, 4])
    with Stream(tmp_path) as stream, stream.given(ids=ids):
        stream.put("x", x)
        x.fill_(9)
        ids.fill_(9)
    data = StreamDataset(tmp_path, ids=True)
    assert data[:][0].abs().sum() == 0
    assert ids_of(data) == [[3], [4]]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"a": x, "b": (x + 1, None)}


def test_each_leaf_of_an_output_is_a_place_unless_op_picks_one(tmp_path: Path) -> None:
    net = nn.Sequential(Nested())
    with Stream(tmp_path) as stream, stream.attach(net, "0"), stream.attach(net, "0", op_=lambda out: out["a"], group="picked"):
        net(torch.ones(2, 3))
    assert stream.rows == {"0/a": 2, "0/b.0": 2, "picked/0": 2}


def test_gradients_and_inputs_and_gates_are_those_of_monitors(tmp_path: Path) -> None:
    net = network()
    with Stream(tmp_path) as stream:
        gradients = stream.attach(net, "2", kind=BackwardMonitor, group="gradient")
        inputs = stream.attach(net, types=nn.ReLU, kind=ForwardInputMonitor, every=2, eval_update=False)
        with gradients, inputs:
            for _ in range(4):
                net(torch.randn(5, 3)).sum().backward()
            net.eval()(torch.randn(5, 3))
    assert stream.rows == {"1": 10, "gradient/2": 20}
    assert torch.equal(StreamDataset(tmp_path, "gradient/2")[:], torch.ones(20, 4))
    with Stream(tmp_path) as stream, pytest.raises(SelectionError, match="no module named 'nothing'"):
        stream.attach(net, "nothing")


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_networks_write_what_eager_ones_do(tmp_path: Path, fullgraph: bool) -> None:
    batches = [torch.randn(5, 3) for _ in range(4)]
    for mode in ("eager", "compiled"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        net = network()
        run = torch.compile(net, backend="aot_eager", fullgraph=fullgraph) if mode == "compiled" else net
        with Stream(tmp_path / mode) as stream, stream.attach(net, ["0", "2"]):
            gradients = stream.attach(net, "2", kind=BackwardMonitor, group="gradient")
            for step, batch in enumerate(batches):
                with stream.given(ids=torch.arange(5) + 5 * step):
                    run(batch).square().sum().backward()
            gradients.deregister()
        assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == (mode == "compiled")
    for place in ("0", "2", "gradient/2"):
        eager, compiled = (StreamDataset(tmp_path / mode, place, ids=True)[:] for mode in ("eager", "compiled"))
        assert torch.equal(eager[1], compiled[1])
        torch.testing.assert_close(eager[0], compiled[0])
    torch._dynamo.reset()


def test_inference_mode_and_autocast_change_nothing(tmp_path: Path) -> None:
    net = network()
    with Stream(tmp_path) as stream, stream.attach(net, "0"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        out = net[0](torch.ones(2, 3))
    assert torch.equal(StreamDataset(tmp_path)[:], out.clone())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3).to_sparse(), "layout torch.sparse_coo"),
        (torch.ones(2, 3, device="meta"), "not a real tensor"),
        (torch.tensor(1.0), "has no 1 leading axes"),
        (torch.ones(2, 5), r"has rows of shape \(3,\) in float32 .* got rows of shape \(5,\)"),
        (torch.ones(2, 3).long(), "in float32 .* in int64"),
        ("text", "a str is no tensor"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    with Stream(tmp_path) as stream:
        stream.put("x", torch.zeros(1, 3))
        with pytest.raises(OperandError, match=f"'x'.*{message}"):
            stream.put("x", value)
    assert stream.rows == {"x": 1}


@pytest.mark.parametrize("axes", [0, -1, True, "1", 1.0])
def test_axes_that_are_no_number_of_rows_spoil_no_stream(tmp_path: Path, axes: Any) -> None:
    with Stream(tmp_path) as stream:
        stream.put("x", torch.zeros(1, 3))
        with pytest.raises(ValueError, match=r"put\(axes=.*\): give the number of leading axes that are rows, at least 1"):
            stream.put("y", torch.zeros(2, 3), axes=axes)
    assert len(StreamDataset(tmp_path, "x")) == 1  # an index with a negative number of ids could not be read


def test_ids_beyond_int64_are_refused(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        with stream.given(ids=torch.tensor([7, 2**63 - 1], dtype=torch.uint64)):
            stream.put("x", torch.zeros(2, 3))
        beyond = torch.tensor([1, 2**63 + 1], dtype=torch.uint64)
        with pytest.raises(OperandError, match=r"ids of at most 2\*\*63 - 1"), stream.given(ids=beyond):
            pass
    assert StreamDataset(tmp_path, "x", ids=True)[:][1].flatten().tolist() == [7, 2**63 - 1]


def test_a_stream_over_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "acts"):
        with pytest.raises(StorageError, match=r"cannot write a stream to .*notes\.txt"):
            Stream(path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_in_hooks_a_refusal_is_one_warning_and_the_network_goes_on(tmp_path: Path) -> None:
    net = network()
    with Stream(tmp_path) as stream, stream.attach(net, "0") as recorder:
        with pytest.warns(RecordingWarning, match=r"ForwardMonitor '0'.* 5 samples .* ids of 4 samples") as caught:
            for _ in range(3):
                with stream.given(ids=range(4)):
                    assert net(torch.randn(5, 3)).shape == (5, 4)
        assert recorder["0"].peek() is None
    assert len(caught) == 1
    assert stream.rows == {}


def test_ids_and_options_that_make_no_sense_are_errors(tmp_path: Path) -> None:
    with Stream(tmp_path / "a") as stream:
        for ids in ([0.5], [True], 3, [[[1]]], "abc", [2**64], {"a": 1}, [[1], [2, 3]]):
            with pytest.raises(OperandError, match="whole numbers of shape"), stream.given(ids=ids):  # type: ignore[arg-type]
                pass
        with stream.given(), pytest.raises(RuntimeError, match="within another"), stream.given():
            pass
        with stream.given(), pytest.raises(RuntimeError, match="whole batches"):
            stream.flush()
        with pytest.raises(ValueError, match="at least 1"):
            stream.attach(network(), axes=0)
        with pytest.raises(StorageError, match="another Stream is writing"):
            Stream(tmp_path / "a")
    for options in ({"dtype": torch.int8}, {"when_full": "panic"}, {"shard_bytes": 0}, {"queue_bytes": 1.5}):
        with pytest.raises(ValueError, match=f"Stream\\({next(iter(options))}="):
            Stream(tmp_path / "b", **options)  # type: ignore[arg-type]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(NotARecordingError, match="notes"):
        Stream(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_queue_waits_and_holds_no_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = []
    with stalled(monkeypatch) as go, Stream(tmp_path, queue_bytes=10_000) as stream:
        queue = stream._writer.queue

        def work() -> None:
            put.extend(stream.put("x", torch.full((10, 25), float(number))) for number in range(50))

        thread = threading.Thread(target=work)
        thread.start()
        with queue.changed:
            assert queue.changed.wait_for(lambda: queue.held == 10_000, 300)
        assert thread.is_alive()
        assert queue.held == 10_000
        go.set()
        thread.join(300)
        assert stream.put("x", torch.zeros(1000, 25)) == 1000  # larger than the bound: it passes alone
    assert put == [10] * 50
    assert queue.peak == 100_000
    data = StreamDataset(tmp_path)
    assert len(data) == 1500
    assert torch.equal(data[:500][:, 0], torch.arange(50.0).repeat_interleave(10))


def test_a_full_queue_drops_whole_batches_counts_them_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(tmp_path, queue_bytes=4_000, when_full="drop")
    with pytest.warns(RecordingWarning, match="drops batches") as caught, stalled(monkeypatch) as go, stream:
        queue = stream._writer.queue
        for step in range(10):
            with stream.given(ids=[2 * step, 2 * step + 1]):
                accepted = [stream.put(place, torch.full((2, 100), float(step))) for place in ("a", "b")]
            assert accepted in ([2, 2], [0, 0])
        dropped = stream.dropped
        go.set()
        with queue.changed:
            assert queue.changed.wait_for(lambda: queue.held == 0, 300)
        with stream.given(ids=[100, 101]):
            assert [stream.put(place, torch.ones(2, 100)) for place in ("a", "b")] == [2, 2]
    assert len(caught) == 1
    assert queue.peak <= 4_000
    assert dropped == 40 - 2 * 2 * 2
    assert f"{dropped} rows dropped" in repr(stream)
    last = json.loads((tmp_path / "index.jsonl").read_text().splitlines()[-1])
    assert (last["dropped"], last["batches"]) == (dropped, 11)
    data = StreamDataset(tmp_path, ["a", "b"], ids=True)
    assert ids_of(data) == [[0], [1], [2], [3], [100], [101]]
    with Stream(tmp_path) as stream:
        assert stream.dropped == dropped
        assert stream.batches == 11


def test_a_stream_goes_on_where_it_was_committed(tmp_path: Path) -> None:
    for run in range(3):
        with Stream(tmp_path, shard_bytes=200) as stream:
            assert stream.batches == 4 * run
            assert stream.rows == ({"x": 20 * run} if run else {})
            for step in range(4 * run, 4 * run + 4):
                stream.put("x", torch.full((5, 2), float(step)))
            with pytest.raises(OperandError, match="rows of shape"):
                stream.put("x", torch.ones(5, 3))
    data = StreamDataset(tmp_path, ids=True)
    assert [row.item() for row in data[:][0][:, 0]] == [step for step in range(12) for _ in range(5)]
    assert ids_of(data) == [[row] for row in range(60)]


def test_without_given_a_batch_ends_when_a_place_comes_again(tmp_path: Path) -> None:
    with Stream(tmp_path, shard_bytes=1) as stream:
        for step in range(3):
            for place in ("a", "b"):
                stream.put(place, torch.full((2, 1), float(step)))
        stream.flush()
        assert stream.batches == 3
        assert len((tmp_path / "index.jsonl").read_text().splitlines()) == 4
        stream.flush()
        assert stream.batches == 3
    assert StreamDataset(tmp_path, ["a", "b"])[:]["a"].tolist() == [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]]


def test_a_closed_stream_says_once_that_nothing_is_written(tmp_path: Path) -> None:
    net = network()
    stream = Stream(tmp_path)
    recorder = stream.attach(net, "0")
    net(torch.randn(2, 3))
    stream.close()
    stream.close()
    with pytest.warns(RecordingWarning, match="is closed") as caught:
        net(torch.randn(2, 3))
        net(torch.randn(2, 3))
    assert len(caught) == 1
    recorder.deregister()
    assert stream.rows == {"0": 2}
    assert stream.dropped == 4


def test_a_stream_that_nobody_holds_is_committed_and_unlocked(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.put("x", torch.ones(3, 1))
    stream.put("x", torch.ones(2, 1))  # a batch that nothing has ended
    del stream
    gc.collect()
    with Stream(tmp_path) as stream:
        assert (stream.rows, stream.batches) == ({"x": 5}, 2)


def test_a_stream_that_its_own_thread_collects_is_committed(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    writer = stream._writer
    stream.put("x", torch.ones(3, 1))
    writer.queue.call(writer.close)  # as a garbage collection in the thread would
    writer._thread.join(300)
    assert not writer._thread.is_alive()
    stream.close()
    assert len(StreamDataset(tmp_path)) == 3


def run(script: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_is_left_at_exit_is_committed(tmp_path: Path) -> None:
    run("import sys, torch, recorders\ns = recorders.Stream(sys.argv[1])\ns.put('x', torch.ones(3, 1))", tmp_path)
    assert len(StreamDataset(tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_forked_process_neither_writes_nor_keeps_the_lock(tmp_path: Path) -> None:
    script = """
import os, sys, time, torch, recorders, warnings
stream = recorders.Stream(sys.argv[1])
stream.put('x', torch.ones(3, 1))
there, back = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert stream.put('x', torch.ones(3, 1)) == 0
    assert "another one" in str(caught[0].message), caught
    os.write(there[1], b'.')
    os.read(back[0], 1)
    stream.close()
    os._exit(0)
os.read(there[0], 1)
stream.close()
with recorders.Stream(sys.argv[1]) as again:
    print(dict(again.rows))
os.write(back[1], b'.')
assert os.waitpid(child, 0)[1] == 0
"""
    assert run(script, tmp_path) == "{'x': 3}\n"
    assert len(StreamDataset(tmp_path)) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_no_hook_waits_for_the_device(tmp_path: Path) -> None:
    net = network().cuda()
    batches = [torch.randn(64, 3, device="cuda") for _ in range(20)]
    net(batches[0]).sum().backward()
    expected = []
    with Stream(tmp_path, dtype=torch.bfloat16) as stream, stream.attach(net, "0"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                with stream.given(ids=torch.arange(64, device="cuda")):
                    out = net[0](batch)
                    expected.append(out.detach().to(torch.bfloat16))
                    out.detach().fill_(-1)  # in place, right after the hook
        finally:
            torch.cuda.set_sync_debug_mode("default")
    data = StreamDataset(tmp_path, ids=True)
    assert torch.equal(data[:][0], torch.cat(expected).cpu())
    assert ids_of(data) == [[row] for row in range(64)] * 20


def test_a_shard_that_could_not_be_read_back_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorders.streams.index.MAX_LINE", 2_000)
    with Stream(tmp_path, shard_bytes=1) as stream:
        stream.put("x", torch.ones(1))
        stream.flush()
        with (
            pytest.warns(RecordingWarning, match=r"stopped: StorageError: a line of \d+ bytes cannot be read back"),
            stream.given(),
        ):
            for place in range(20):
                stream.put(f"place {place}", torch.ones(1))
            stream._writer.queue.call(stream._writer._commit)
            queue = stream._writer.queue
            with queue.changed:
                assert queue.changed.wait_for(lambda: queue.stopped, 300)
            stream.put("x", torch.ones(1))
    assert StreamDataset(tmp_path)[:].tolist() == [1.0]


def test_rows_of_a_dtype_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this PyTorch has no such dtype")
    with Stream(tmp_path) as stream:
        stream.put("y", torch.ones(1))
        with pytest.raises(OperandError, match=r"'x': rows of torch\.float4_e2m1fn_x2 cannot be stored"):
            stream.put("x", torch.zeros(2, 2, dtype=torch.uint8).view(dtype))
    assert stream.rows == {"y": 1}


def test_what_the_disk_has_no_room_for_is_counted_as_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PartWriter, "append", full)
    stream = Stream(tmp_path)
    assert stream.put("x", torch.ones(3, 1)) == 3
    stream._writer._thread.join(60)
    with pytest.warns(RecordingWarning, match="No space left"):
        stream.close()
    assert (stream.dropped, stream.rows) == (3, {})


def test_a_stream_is_not_closed_in_the_midst_of_a_batch(tmp_path: Path) -> None:
    with Stream(tmp_path) as stream:
        with stream.given(ids=[1, 2]):
            stream.put("x", torch.ones(2, 1))
            with pytest.raises(RuntimeError, match=r"close after the block of stream\.given"):
                stream.close()
            stream.put("y", torch.ones(2, 1))
        assert stream.batches == 0
    assert (stream.batches, stream.rows) == (1, {"x": 2, "y": 2})


def test_a_row_of_many_shards_takes_as_many_calls_as_one_of_few(tmp_path: Path) -> None:
    calls = []
    for shards in (2, 30):
        with Stream(tmp_path / str(shards), shard_bytes=1) as stream:
            for step in range(shards):
                stream.put("x", torch.full((2, 1), float(step)))
        data = StreamDataset(tmp_path / str(shards))
        assert data[[2 * shards - 1, 2, 3, 2]].flatten().tolist() == [shards - 1.0, 1.0, 1.0, 1.0]
        calls.append(our_calls_of(lambda data=data: data[3]))
    assert calls[0] == calls[1]
