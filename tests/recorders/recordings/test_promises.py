"""What recordings in files promise beside the round trip: what is damaged, missing, stopped or strange costs only itself."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from recorders import ForwardMonitor, Recorder, Recording, Subrecording, load, merge, repair, save, verify
from recorders.errors import CorruptRecordingError, MergeError, NotARecordingError, RecordingWarning, StorageError
from recorders.recordings import atomic_files
from recorders.recordings.storage import commit
from recorders.recordings.storage.commit import Commit
from reducers import Last, Mean, Quantile, Reducer, Sum, Summary

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


def part(value: float, reducer: Reducer | None = None) -> Subrecording:
    reducer = Sum() if reducer is None else reducer
    return Subrecording(reducer, {"": reducer.update({}, torch.full((3,), value))}, samples=1, monitor="ForwardMonitor")


def recording(count: int, value: float = 1.0, first: int = 0) -> Recording:
    return Recording({f"layer.{index}": part(value + index) for index in range(first, first + count)}, step=7)


def files(root: Path) -> list[Path]:
    return sorted(root.glob("generation-*/*"))


def results(found: Recording) -> dict[str, float]:
    return {name: float(value) for name, value in found.compute().items()}


class TestDamaged:
    @pytest.mark.parametrize("index", [0, 4, 9])
    @pytest.mark.parametrize("harm", ["flipped", "missing", "cut", "pipe"])
    def test_one_damaged_file_costs_one_subrecorder(self, tmp_path: Path, index: int, harm: str) -> None:
        root = save(recording(10), tmp_path / "run")
        target = files(root)[index]
        raw = target.read_bytes()
        target.unlink()
        if harm == "pipe":
            os.mkfifo(target)
        elif harm != "missing":
            target.write_bytes(raw[:-1] if harm == "cut" else raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(CorruptRecordingError, match=f"0000{index}-layer-{index}"):
            load(root)
        with pytest.warns(RecordingWarning, match=f"1 parts of it are left out: 'layer.{index}'"):
            found = load(root, damaged="skip")
        whole = results(recording(10))
        del whole[f"layer.{index}"]
        assert results(found) == whole
        assert list(found.damaged) == list(verify(root)) == [f"layer.{index}"]
        assert list(repair(root, tmp_path / "new")) == [f"layer.{index}"]
        assert results(load(tmp_path / "new")) == whole
        with pytest.raises(NotARecordingError, match="exists already"):
            repair(root, tmp_path / "new")

    def test_a_damaged_line_of_the_manifest_costs_one_subrecorder(self, tmp_path: Path) -> None:
        root = save(recording(10), tmp_path / "run")
        raw = (root / "manifest.json").read_bytes()
        lines = raw.split(b"\n")
        for place in range(0, len(lines[4]), 7):
            damaged = bytearray(lines[4])
            damaged[place] ^= 1
            (root / "manifest.json").write_bytes(b"\n".join([*lines[:4], bytes(damaged), *lines[5:]]))
            with pytest.raises(CorruptRecordingError, match="checksum"):
                load(root)
            assert list(verify(root)) == ["line 5 of the manifest"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecordingWarning)
                found = load(root, damaged="skip")
            assert list(found) == [f"layer.{index}" for index in range(10) if index != 3]

    def test_a_sound_recording_has_lost_nothing(self, tmp_path: Path) -> None:
        root = save(recording(3), tmp_path / "run")
        assert verify(root) == {}
        assert load(root, damaged="skip").damaged == {}

    def test_a_damaged_packed_file_is_an_error(self, tmp_path: Path) -> None:
        root = save(recording(3), tmp_path / "run", layout="packed")
        raw = files(root)[0].read_bytes()
        for place in range(0, len(raw), 5):
            files(root)[0].write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
            with pytest.raises(CorruptRecordingError, match="0-packed"):
                load(root)


class TestPacked:
    @pytest.mark.parametrize("mmap", [False, True])
    def test_it_is_the_same_recording(self, tmp_path: Path, mmap: bool) -> None:
        net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        recorder = Recorder(a=ForwardMonitor(Summary("b c -> c")), q=ForwardMonitor(Quantile())).modules(net)
        with recorder:
            for _ in range(5):
                net(torch.randn(2, 4))
        one, two = load(recorder.save(tmp_path / "one")), load(recorder.save(tmp_path / "two", layout="packed"), mmap=mmap)
        assert list(one) == list(two)
        assert len(files(tmp_path / "two")) == 1
        for name, ours in two.items():
            theirs = one[name]
            assert (ours.samples, ours.reducer, ours.monitor, ours.module) == (
                theirs.samples,
                theirs.reducer,
                theirs.monitor,
                theirs.module,
            )
            for key, tensor in ours.states[""].items():
                assert torch.equal(tensor, theirs.states[""][key])
                assert tensor.dtype == theirs.states[""][key].dtype
            assert ours.merge(theirs).samples == 10

    def test_any_program_reads_it(self, tmp_path: Path) -> None:
        root = save(
            Recording({"a": part(2.0), "z": Subrecording(None, {"": {"z": torch.tensor([1j])}})}), tmp_path, layout="packed"
        )
        tensors = load_file(files(root)[0])
        assert tensors["0/value"].item() == 6.0
        assert tensors["1/state/z"].tolist() == [[0.0, 1.0]]
        assert load(root)["z"].states[""]["z"].item() == 1j

    def test_an_empty_one(self, tmp_path: Path) -> None:
        assert len(load(save(Recording({}), tmp_path, layout="packed"))) == 0

    def test_it_outlives_its_file_and_survives_a_save_over_it(self, tmp_path: Path) -> None:
        save(recording(4), tmp_path, layout="packed")
        found = load(tmp_path, mmap=True)
        save(recording(4, 9.0), tmp_path, layout="packed")
        assert results(found) == results(recording(4))
        assert results(load(tmp_path)) == results(recording(4, 9.0))

    def test_the_layout_may_change_with_each_save(self, tmp_path: Path) -> None:
        for value, layout in enumerate(("folder", "packed", "folder", "folder", "packed")):
            save(recording(3, float(value)), tmp_path, layout=layout)  # type: ignore[arg-type]
            assert results(load(tmp_path)) == results(recording(3, float(value)))
        with pytest.raises(ValueError, match="layout='zip'"):
            save(recording(1), tmp_path, layout="zip")  # type: ignore[arg-type]


class TestAgain:
    def test_a_save_over_another_holds_what_is_there_now(self, tmp_path: Path) -> None:
        first = recording(5)
        save(first, tmp_path)
        changed = Recording({**first.subrecordings, "layer.3": part(100.0)})
        fewer = Recording({name: changed[name] for name in ("layer.4", "layer.3")})
        aliased = Recording(first.subrecordings, {"alias": "layer.1"}, 8)
        for now in (changed, fewer, first, first, aliased):
            save(now, tmp_path)
            assert results(load(tmp_path)) == results(now)
            assert load(tmp_path).step == now.step
            assert len(files(tmp_path)) == len(now.subrecordings)
            assert verify(tmp_path) == {}

    def test_a_function_of_results_holds_in_the_next_save(self, tmp_path: Path) -> None:
        net = nn.Linear(2, 1)
        recorder = Recorder(ForwardMonitor(Mean())).modules(net)
        net(torch.ones(1, 2))
        recorder.save(tmp_path)
        recorder.apply(lambda result: result * 0 + 5)
        recorder.save(tmp_path)
        assert load(tmp_path)[0].saved_results == {"": torch.tensor(5.0, dtype=torch.float64)}


class TestWaiting:
    @posix
    def test_a_stopped_saver_is_an_error_and_not_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commit, "LOCK_SECONDS", 0.05)
        save(recording(1), tmp_path)
        held = atomic_files.FileLock(tmp_path / commit.LOCK)
        with pytest.raises(StorageError, match="another process has been saving there"):
            save(recording(2), tmp_path)
        held.release()
        save(recording(2), tmp_path)

    @posix
    def test_a_lock_that_cannot_be_given_back_does_not_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        real = fcntl.flock

        def flock(handle: int, operation: int) -> None:
            if operation == fcntl.LOCK_UN:
                raise OSError("no")
            real(handle, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        monkeypatch.setattr(commit, "LOCK_SECONDS", 0.5)
        for value in range(3):
            save(recording(1, float(value)), tmp_path)
        assert results(load(tmp_path)) == {"layer.0": 6.0}

    @posix
    def test_a_pipe_in_place_of_the_manifest(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "manifest.json")
        with pytest.raises(NotARecordingError):
            save(recording(1), tmp_path)
        with pytest.raises(CorruptRecordingError):
            load(tmp_path)

    @posix
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the file that closes itself
    def test_interrupted_at_any_line_the_next_save_works(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(commit, "LOCK_SECONDS", 60.0)
        save(recording(1), tmp_path)
        line = done = 0
        while not done:
            line += 1
            done = interrupted_at(line, tmp_path)
            if line % 5 == 0 or done:
                save(recording(1, float(line)), tmp_path)
                assert results(load(tmp_path)) == {"layer.0": 3.0 * line}
        gc.collect()
        assert line > 100
        assert len(list(tmp_path.glob("generation-*"))) == 1


def interrupted_at(number: int, root: Path) -> bool:
    """Interrupts a save at the n-th line that `commit.py` or `atomic_files.py` executes; returns whether it was done before."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in (commit.__file__, atomic_files.__file__):
            return None
        if event == "line":
            count += 1
            if count == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save(recording(1, -1.0), root)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


class TestKilled:
    def test_killed_first_saves_do_not_pile_up(self, tmp_path: Path) -> None:
        for _ in range(6):
            left = tmp_path / f"generation-{os.urandom(16).hex()}"
            left.mkdir()
            (left / "00000.safetensors").write_bytes(b"half")
        with Commit(tmp_path):
            assert len(list(tmp_path.glob("generation-*"))) == 1

    def test_of_a_damaged_manifest_the_generation_stays_that_it_names(self, tmp_path: Path) -> None:
        root = save(recording(2), tmp_path)
        live = files(root)[0].parent
        raw = bytearray((root / "manifest.json").read_bytes())
        raw[-10] ^= 1
        (root / "manifest.json").write_bytes(raw)
        (root / f"generation-{'0' * 32}").mkdir()
        (root / f"generation-{'1' * 32}").mkdir()
        with Commit(root) as running:
            assert {path.name for path in root.glob("generation-*")} == {live.name, running.generation}

    def test_names_are_flushed_before_the_manifest_that_needs_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        events: list[str] = []
        flush, replace = commit.flush_folder, os.replace
        monkeypatch.setattr(commit, "flush_folder", lambda folder: (events.append(Path(folder).name), flush(folder))[1])
        monkeypatch.setattr(os, "replace", lambda *names: (events.append("rename"), replace(*names))[1])
        save(recording(1), tmp_path / "run")
        generation = files(tmp_path / "run")[0].parent.name
        assert events[-4:] == [generation, "run", "rename", "run"]


class TestStrange:
    @pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
    def test_paths_that_are_none(self, tmp_path: Path, path: str) -> None:
        with pytest.raises(StorageError):
            save(recording(1), tmp_path / path)
        with pytest.raises(StorageError):
            load(tmp_path / path)

    def test_under_modes(self, tmp_path: Path) -> None:
        whole = recording(2)
        with FakeTensorMode():
            save(whole, tmp_path / "run")
            found = load(tmp_path / "run")
        assert results(found) == results(whole)
        with torch.inference_mode():
            found = load(tmp_path / "run")
        assert not any(tensor.is_inference() for one in found.values() for tensor in one.states[""].values())
        with torch.device("meta"):
            assert results(load(save(whole, tmp_path / "other"))) == results(whole)

    def test_fake_tensors_are_left_out_with_a_warning(self, tmp_path: Path) -> None:
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.ones(2))
        with pytest.warns(RecordingWarning, match="'fake'.*no data"):
            save(Recording({"fake": Subrecording(None, {"": {"x": fake}}), "sound": part(1.0)}), tmp_path)
        assert list(load(tmp_path)) == ["sound"]

    def test_keys_of_one_text_are_kept_apart(self) -> None:
        class Both(nn.Module):
            def forward(self, x: Tensor) -> dict[Any, Tensor]:
                return {1: x, "1": x + 1, 2: x + 2}

        net = Both()
        recorder = Recorder(ForwardMonitor(Last())).modules(net)
        net(torch.zeros(1))
        assert {path: float(value) for path, value in recorder[0].peek().items()} == {"int(1)": 0.0, "1": 1.0, "2": 2.0}

    def test_more_axes_than_can_be_stored(self, tmp_path: Path) -> None:
        deep = torch.ones((1,) * 65)
        with pytest.warns(RecordingWarning, match="65 axes"):
            save(Recording({"deep": Subrecording(None, {"": {"x": deep}}), "sound": part(1.0)}), tmp_path)
        assert list(load(tmp_path)) == ["sound"]


class TestMerge:
    @pytest.mark.parametrize("layout", ["folder", "packed"])
    def test_many_recordings_are_one(self, tmp_path: Path, layout: Any) -> None:
        paths = [save(recording(4, float(task)), tmp_path / str(task), layout=layout) for task in range(5)]
        merged = merge(paths)
        by_hand = load(paths[0])
        for path in paths[1:]:
            by_hand = by_hand.merge(load(path))
        assert results(merged) == results(by_hand)
        assert results(load(merged.save(tmp_path / "all"))) == results(by_hand)
        assert load(tmp_path / "all").samples["layer.2"] == 5

    def test_what_does_not_fit_is_named(self, tmp_path: Path) -> None:
        one, two = save(recording(2), tmp_path / "one"), save(recording(2, first=1), tmp_path / "two")
        with pytest.raises(MergeError, match=r"layer\.0.*layer\.2"):
            merge([one, two])
        assert list(merge([one, two], missing="keep")) == ["layer.0", "layer.1", "layer.2"]
        other = save(Recording({"layer.0": part(1.0, Mean()), "layer.1": part(1.0)}), tmp_path / "other")
        with pytest.raises(MergeError, match=r"other does not fit .*subrecorder 'layer\.0'"):
            merge([one, other]).save(tmp_path / "all")
        assert not list((tmp_path / "all").glob("manifest*"))
        with pytest.raises(MergeError, match="nothing to merge"):
            merge([])


class TestBackground:
    def test_what_is_saved_is_what_was_recorded_at_the_call(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        net = nn.Linear(2, 1)
        recorder = Recorder(ForwardMonitor(Sum())).modules(net)
        go = threading.Event()
        enter = Commit.__enter__
        monkeypatch.setattr(Commit, "__enter__", lambda self: (go.wait(60), enter(self))[1])
        net(torch.ones(1, 2))
        saving = recorder.save_in_background(tmp_path / "run")
        for _ in range(200):
            net(torch.ones(1, 2))
        assert not saving.done()
        go.set()
        assert saving.result(60) == tmp_path / "run"
        assert load(tmp_path / "run").samples[0] == 1
        assert recorder[0].samples == 201

    def test_errors_come_with_the_result(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        saving = Recorder(ForwardMonitor(Sum())).modules(nn.Linear(1, 1)).save_in_background(tmp_path / "file")
        with pytest.raises(NotARecordingError):
            saving.result(60)


PEAK = """
import resource, sys, torch
from recorders import Recording, Subrecording, load
from reducers import Last
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = Last().update({}, torch.ones(64, 2**18))  # 64 MiB
recording = Recording({"a": Subrecording(Last(), {"": x}, samples=1)})
recording.save(sys.argv[2] + "/small")
before = peak()
if sys.argv[1] == "save":
    recording.save(sys.argv[2] + "/run")
else:
    load(sys.argv[2] + "/small")
print((peak() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts KiB")
@pytest.mark.parametrize(("what", "most"), [("save", 2**24), ("load", 2 * 2**26 + 2**24)])
def test_memory_at_the_peak(tmp_path: Path, what: str, most: int) -> None:
    command = [sys.executable, "-c", PEAK, what, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert int(done.stdout) <= most
