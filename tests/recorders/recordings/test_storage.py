"""Storage: what is saved comes back bit for bit, a save is all or nothing, and files from anywhere give data or one typed error."""

from __future__ import annotations

import copy
import errno
import gc
import json
import os
import stat
import subprocess
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import (
    bits,
    damaged_bytes_are_never_believed,
    facts,
    files,
    forge,
    forge_file,
    forged_files_give_a_typed_error_or_data,
    forged_manifests_give_a_typed_error_or_data,
    observe,
    sample,
    tree_bits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT
from safetensors.torch import load_file
from torch import Tensor

from recorders.errors import (
    CorruptRecordingError,
    MergeError,
    NotARecordingError,
    RecordingNotFoundError,
    RecordingWarning,
    SchemaError,
    StorageError,
)
from recorders.recordings.recording import Recording, Subrecording
from recorders.recordings.storage import schema
from recorders.recordings.storage.commit import Commit
from recorders.recordings.storage.load import load
from recorders.recordings.storage.save import save
from recorders.recordings.storage.tools import merge
from reducers import Count, Mean, NoHistoryError, Product, Reducer, Statistic, Sum
from reducers.core.reducer import registry

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


def lone(reducer: Reducer, state: dict[str, Tensor], **rest: Any) -> Recording:
    return Recording({"loss": Subrecording(reducer, {"": state}, **rest)})


def plain(tensors: Mapping[str, Tensor]) -> Recording:
    """A recording whose states are these tensors, whatever they are."""
    return Recording({"x": Subrecording(None, {"": dict(tensors)})})


@dataclass(frozen=True)
class Gone(Statistic):
    """A reducer whose class is defined in some processes only."""

    def lift(self, x: Tensor, axes: tuple[int, ...]) -> dict[str, Tensor]:
        return {"sum": x.sum(dim=axes)}

    def join(self, a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": a["sum"] + b["sum"]}

    def read(self, state: dict[str, Tensor]) -> Tensor:
        return state["sum"]


class TestRoundTrip:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        recording = sample()
        path = recording.save(tmp_path / "runs" / "first")
        assert path == tmp_path / "runs" / "first"
        loaded = load(str(path))
        assert facts(loaded) == facts(recording)
        assert loaded["out/tied"] is loaded["out/encoder"]
        assert list(loaded["state"].states) == ["logits", "hidden/0", "empty"]
        assert loaded["never"].peek() is None

    def test_no_subrecorders(self, tmp_path: Path) -> None:
        assert facts(load(save(Recording({}), tmp_path / "run"))) == ([], {})

    @pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 3), (3, 0, 2)])
    def test_every_dtype_bit_for_bit(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        names = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
        names += " float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for name in [name for name in names.split() if hasattr(torch, name)]:
            dtype = getattr(torch, name)
            size = torch.empty(shape, dtype=dtype).nbytes
            raw = torch.randint(0, 2 if name == "bool" else 256, (size,), generator=generator, dtype=torch.uint8)
            tensors[name] = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        loaded = load(save(plain(tensors), tmp_path / "run"))
        assert tree_bits(loaded["x"].states[""]) == tree_bits(tensors)

    def test_complex_half(self, tmp_path: Path) -> None:
        tensor = torch.view_as_complex(torch.tensor([[1.0, 2.0]], dtype=torch.float16))
        assert load(save(plain({"z": tensor}), tmp_path / "run"))["x"].states[""]["z"].dtype == torch.complex32

    def test_special_values_keep_their_bits(self, tmp_path: Path) -> None:
        odd = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
        assert bits(load(save(plain({"odd": odd}), tmp_path / "run"))["x"].states[""]["odd"]) == bits(odd)

    def test_awkward_memory(self, tmp_path: Path) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        z = torch.tensor([1 + 2j, 3 - 4j])
        tensors = {
            "shared": base,
            "transposed": base.t(),
            "slice": base[:, 1],
            "same": base,
            "expanded": torch.tensor(3.0).expand(2, 5),
            "one of a strided tensor": torch.arange(6.0)[1::3][:1],
            "conj": z.conj(),
            "neg": z.conj().imag,
            "parameter": torch.nn.Parameter(torch.ones(2)) * 2,
            "flipped": base.flip(0),
        }
        assert tensors["conj"].is_conj()
        assert tensors["neg"].is_neg()
        before = tree_bits(tensors)
        loaded = load(save(plain(tensors), tmp_path / "run"))["x"].states[""]
        assert tree_bits(loaded) == before == tree_bits(tensors)
        loaded["shared"].zero_()
        assert tree_bits(loaded["same"]) == before["same"]

    def test_loaded_tensors_outlive_the_files(self, tmp_path: Path) -> None:
        recording = sample()
        loaded = load(save(recording, tmp_path / "run"))
        save(sample(7.0), tmp_path / "run")
        assert facts(loaded) == facts(recording)

    def test_saving_what_was_loaded_is_the_same_recording(self, tmp_path: Path) -> None:
        first = load(save(sample(), tmp_path / "a"))
        assert facts(load(save(first, tmp_path / "b"))) == facts(first)

    def test_a_thousand_subrecorders(self, tmp_path: Path) -> None:
        both = Product(mean=Mean(), n=Count())
        parts = {f"layer.{i}": Subrecording(both, {"": observe(both, torch.tensor([float(i)]))}, samples=i) for i in range(1000)}
        loaded = load(save(Recording(parts), tmp_path / "run"))
        assert facts(loaded) == facts(Recording(parts))
        assert gc.isenabled()

    @pytest.mark.parametrize("steps", [0, 1, 3, 6])
    def test_resume_is_what_an_uninterrupted_run_gives(self, tmp_path: Path, steps: int) -> None:
        both = Product(mean=Mean("b c -> c"), total=Sum("b c -> c"), n=Count())
        batches = [torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) for step in range(6)]
        loaded = load(save(lone(both, observe(both, *batches[:steps])), tmp_path / "run"))["loss"]
        state = dict(loaded.states[""])
        assert loaded.reducer == both
        for batch in batches[steps:]:
            state = loaded.reducer.update(state, batch)
        assert tree_bits(state) == tree_bits(observe(both, *batches))

    def test_merging_loaded_halves_is_merging_the_halves(self, tmp_path: Path) -> None:
        left, right = sample(), sample(-3.0)
        loaded = load(save(left, tmp_path / "a")).merge(load(save(right, tmp_path / "b")))
        assert facts(loaded) == facts(left.merge(right))


class TestFiles:
    def test_values_are_plain_safetensors(self, tmp_path: Path) -> None:
        recording = sample()
        root = save(recording, tmp_path / "run")
        assert [path.name for path in files(root)] == [
            "00000-out-encoder.safetensors",
            "00001-state.safetensors",
            "00002-never.safetensors",
        ]
        first, second, third = (load_file(path) for path in files(root))
        assert torch.equal(first["value/mean"], torch.tensor([2.0, 3.5], dtype=torch.float64))
        assert first["value/n"].item() == 4
        assert {name for name in first if name.startswith("state")} == {
            f"state/{key}" for key in recording["out/encoder"].states[""]
        }
        assert {name for name in second if name.startswith("value")} == {"value/logits", "value/hidden/0"}
        assert third == {}

    def test_a_lone_tensor_is_called_value(self, tmp_path: Path) -> None:
        root = save(lone(Sum(), observe(Sum(), torch.ones(3))), tmp_path / "run")
        assert load_file(files(root)[0]).keys() == {"value", "state/count", "state/nonfinite", "state/sum"}

    def test_nested_leaves_and_mappings(self, tmp_path: Path) -> None:
        both = Product(mean=Mean(), n=Count())
        part = Subrecording(both, {"logits": observe(both, torch.ones(3))})
        root = save(Recording({"x": part}), tmp_path / "run")
        assert {"value/logits/mean", "value/logits/n"} < load_file(files(root)[0]).keys()

    def test_header_leaves_each_tensor_aligned(self, tmp_path: Path) -> None:
        tensors = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(3)}
        raw = files(save(plain(tensors), tmp_path / "run"))[0].read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        assert size % 8 == 0
        assert header["state/b"]["data_offsets"][0] % 8 == header["state/c"]["data_offsets"][0] % 4 == 0

    def test_manifest_says_who_wrote_it(self, tmp_path: Path) -> None:
        data = json.loads((save(sample(), tmp_path / "run") / "manifest.json").read_text())
        assert data["format"] == "torch-recorders"
        assert data["schema"] == 1
        assert data["versions"]["torch"] == str(torch.__version__)
        assert data["reducers"][data["subrecorders"][0]["reducer"]]["type"] == "Product"

    @posix
    def test_modes_follow_the_umask(self, tmp_path: Path) -> None:
        old = os.umask(0o027)
        try:
            root = save(sample(), tmp_path / "run")
        finally:
            os.umask(old)
        assert {stat.S_IMODE(path.stat().st_mode) for path in [*files(root), root / "manifest.json"]} == {0o640}
        assert stat.S_IMODE(files(root)[0].parent.stat().st_mode) == 0o750

    def test_parts_may_collide_in_readable_names(self, tmp_path: Path) -> None:
        leaves = {"": {"a/b": torch.tensor(1), "": torch.tensor(2)}, "a": {"b": torch.tensor(3)}, "a/b": {"": torch.tensor(4)}}
        values = {"": {"x": torch.tensor(5)}, "x": torch.tensor(6), "x/": {"": torch.tensor(7)}}
        recording = Recording({"x": Subrecording(None, leaves, saved_results=values)})
        assert facts(load(save(recording, tmp_path / "run"))) == facts(recording)


NASTY = {
    "the root": "",
    "slash": "/",
    "dots": "..",
    "escape": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "drive": "C:\\windows\\system32",
    "nul": "a\0b",
    "newline": "a\nb\r\n",
    "long": "encoder." * 40,
    "lower": "layer",
    "upper": "LAYER",
    "composed": unicodedata.normalize("NFC", "é"),
    "decomposed": unicodedata.normalize("NFD", "é"),
    "metadata": "__metadata__",
    "reserved": "CON",
    "surrogate": "\udc80",
    "emoji": "🔥",
    "quote": '"',
    "manifest": "manifest.json",
    "tilde": "~",
    "glob": "*",
}


class TestNames:
    def test_all_nasty_names_at_once(self, tmp_path: Path) -> None:
        names = list(NASTY.values())
        state = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
        parts = {
            name: Subrecording(
                None, {name: {**state, "mine": torch.tensor(i)}}, saved_results={name: state}, monitor=name, attr=name
            )
            for i, name in enumerate(names)
        }
        recording = Recording(parts, {f"alias {name}": name for name in names})
        root = save(recording, tmp_path / "run")
        assert facts(load(root)) == facts(recording)
        assert len(files(root)) == len(names)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
        for path in files(root):
            assert path.name.isascii()
            assert len(path.name) < 80
            assert load_file(path)

    @given(st.lists(st.text(st.characters(), max_size=8), unique=True, max_size=5), st.text(st.characters(), max_size=8))
    @settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_name(self, tmp_path: Path, names: list[str], key: str) -> None:
        recording = Recording({name: Subrecording(None, {key: {name: torch.ones(1)}}, saved_results={name: {}}) for name in names})
        assert facts(load(save(recording, tmp_path / "run", overwrite=True))) == facts(recording)

    def test_names_that_are_no_text(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="'name' must be a text and is 3"):
            save(Recording({3: Subrecording(Mean())}), tmp_path / "run")  # type: ignore[dict-item]


class TestReducers:
    def test_a_function_is_not_stored_and_may_be_given_again(self, tmp_path: Path) -> None:
        root_mean = Mean().postmap(torch.sqrt)
        state = observe(root_mean, torch.tensor([4.0, 14.0]))
        path = save(lone(root_mean, state, samples=1), tmp_path / "run")
        alone = load(path)
        assert alone["loss"].reducer is None
        assert alone["loss"].peek().item() == 3.0
        assert tree_bits(alone["loss"].states[""]) == tree_bits(state)
        with pytest.raises(MergeError, match="pass it"):
            alone.merge(alone)
        for reducers in (root_mean, {"loss": root_mean}, {"l*": root_mean}):
            loaded = load(path, reducers=reducers)
            assert loaded.merge(loaded)["loss"].peek().item() == 3.0
            assert loaded.merge(loaded).samples["loss"] == 2

    def test_the_text_of_a_function_survives_saving_again(self, tmp_path: Path) -> None:
        first = load(save(lone(Mean().premap(torch.abs), observe(Mean(), torch.ones(1))), tmp_path / "a"))
        again = load(save(first, tmp_path / "b"))
        assert again["loss"].recipe == first["loss"].recipe
        assert "Premap" in str(again["loss"].recipe)

    def test_a_reducer_unknown_here_loses_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        state = observe(Gone(), torch.ones(3))
        path = save(lone(Gone(), state), tmp_path / "run")
        key = next(name for name, known in registry.items() if known is Gone)
        monkeypatch.delitem(registry, key)
        todo = f"reducer 'Gone' is not defined here: import the module '{__name__}', which defines it"
        with pytest.warns(RecordingWarning, match=f"'loss', were loaded without their reducer.*{todo}"):
            loaded = load(path)
        assert loaded["loss"].reducer is None
        assert loaded["loss"].peek().item() == 3.0
        assert tree_bits(loaded["loss"].states[""]) == tree_bits(state)
        again = save(loaded, tmp_path / "again")
        for merged in (lambda: loaded.merge(loaded), lambda: merge([path, again]).compute()):
            with pytest.raises(MergeError, match=f"subrecorder 'loss'.*{todo}"):
                merged()
        with pytest.raises(NoHistoryError, match=todo):
            loaded["loss"].latest()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load(path, reducers=Gone())["loss"].reducer == Gone()
        monkeypatch.setitem(registry, key, Gone)
        assert load(again)["loss"].reducer == Gone()
        with pytest.raises(MergeError, match="the reducer was not known here when this was loaded, or"):
            loaded.merge(loaded)

    def test_many_unknown_reducers_are_one_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = {f"{i}": Subrecording(Gone(), {"": observe(Gone(), torch.ones(1))}) for i in range(5)}
        path = save(Recording(parts), tmp_path / "run")
        monkeypatch.delitem(registry, next(name for name, known in registry.items() if known is Gone))
        with pytest.warns(RecordingWarning) as caught:
            load(path)
        assert len(caught) == 1
        assert "5 subrecorders" in str(caught[0].message)
        assert caught[0].filename == __file__


class TestResults:
    def test_functions_are_applied_in_the_values(self, tmp_path: Path) -> None:
        part = Subrecording(Sum(), {"": observe(Sum(), torch.ones(6))}, samples=3, functions=(lambda result, n: result / n,))
        loaded = load(save(Recording({"x": part}), tmp_path / "run"))["x"]
        assert loaded.saved_results is not None
        assert loaded.saved_results[""].item() == 2.0
        assert loaded.peek().item() == 6.0
        assert loaded.functions == ()

    def test_numbers_become_tensors(self, tmp_path: Path) -> None:
        result = {"yes": True, "n": 2**53 + 1, "x": 0.1, "z": 1 + 2j, "deep": {"er": -0.0}, "none": {}}
        part = Subrecording(Sum().postmap(lambda _: result), {"": observe(Sum(), torch.ones(1))})
        loaded = load(save(Recording({"x": part}), tmp_path / "run"))["x"].peek()
        assert tree_bits(loaded) == {
            "yes": bits(torch.tensor(True)),
            "n": bits(torch.tensor(2**53 + 1)),
            "x": bits(torch.tensor(0.1, dtype=torch.float64)),
            "z": bits(torch.tensor(1 + 2j, dtype=torch.complex128)),
            "deep": {"er": bits(torch.tensor(-0.0, dtype=torch.float64))},
            "none": {},
        }

    @pytest.mark.parametrize(
        ("result", "reason"),
        [
            (None, "NoneType"),
            ("text", "str"),
            ([torch.ones(1)], "list"),
            ({"a": (1, 2)}, "value/a.*tuple"),
            ({1: torch.ones(1)}, "keys must be texts"),
            (2**64, "does not fit"),
            (torch.eye(2).to_sparse(), "to_dense"),
            (torch.ones(2, device="meta"), "no data"),
            (torch.empty(2, dtype=torch.bits8), "dtype bits8"),
        ],
        ids=["none", "str", "list", "tuple", "int key", "big", "sparse", "meta", "bits"],
    )
    def test_what_cannot_be_stored_names_the_subrecorder(self, tmp_path: Path, result: Any, reason: str) -> None:
        save(sample(), tmp_path / "run")
        part = Subrecording(Sum().postmap(lambda _: result), {"": observe(Sum(), torch.ones(1))})
        with pytest.warns(RecordingWarning, match=f"encoder.3.*{reason}"):
            save(Recording({"encoder.3": part, **sample().subrecordings}), tmp_path / "run")
        loaded = load(tmp_path / "run")
        assert loaded["encoder.3"].peek() is None
        assert tree_bits(loaded["encoder.3"].states) == tree_bits(part.states)
        assert facts(Recording({name: loaded[name] for name in list(loaded)[1:]})) == facts(Recording(sample().subrecordings))

    def test_too_deep(self, tmp_path: Path) -> None:
        deep: Any = torch.ones(1)
        for _ in range(200):
            deep = {"a": deep}
        with pytest.warns(RecordingWarning, match="nested deeper"):
            save(Recording({"x": Subrecording(None, saved_results={"": deep})}), tmp_path / "run")

    def test_a_result_that_fails_names_the_subrecorder(self, tmp_path: Path) -> None:
        part = Subrecording(Sum().postmap(lambda value: {}["missing"]), {"": observe(Sum(), torch.ones(1))})
        with pytest.warns(RecordingWarning, match=r"encoder\.3.*cannot be computed"):
            save(Recording({"encoder.3": part}), tmp_path / "run")
        again = load(tmp_path / "run", reducers=Sum())
        assert again["encoder.3"].peek().item() == 1.0

    def test_a_state_that_is_no_tensor(self, tmp_path: Path) -> None:
        wrong = Subrecording(None, {"": {"n": 3}})  # type: ignore[dict-item]
        with pytest.warns(RecordingWarning, match=r"'x'.*'state/n' is a int"):
            save(Recording({"x": wrong, **sample().subrecordings}), tmp_path / "run")
        assert facts(load(tmp_path / "run"))[0] == facts(sample())[0]


def same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


class TestFolder:
    def test_saving_again_leaves_one_generation(self, tmp_path: Path) -> None:
        for scale in range(3):
            save(sample(float(scale)), tmp_path / "run")
            assert facts(load(tmp_path / "run")) == facts(sample(float(scale)))
        assert sorted(path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()) == [
            ".lock",
            "generation",
            "manifest.json",
        ]

    def test_an_empty_folder_is_fine(self, tmp_path: Path) -> None:
        assert facts(load(save(sample(), tmp_path))) == facts(sample())

    def test_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert facts(load(save(sample(), "a/b"))) == facts(sample())

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        with pytest.raises(NotARecordingError, match="is a file"):
            save(sample(), tmp_path / "run")
        with pytest.raises(StorageError, match="cannot save"):
            save(sample(), tmp_path / "run" / "deeper")
        with pytest.raises(NotARecordingError):
            load(tmp_path / "run")
        assert (tmp_path / "run").read_text() == "mine"

    @pytest.mark.parametrize("name", ["thesis.tex", "manifest.json", "generation-1", ".git"])
    def test_a_folder_of_something_else_is_refused_and_left_alone(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text('{"name": "web app"}')
        with pytest.raises(NotARecordingError, match="save into a new folder"):
            save(sample(), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == '{"name": "web app"}'

    def test_other_files_in_a_recording_are_left_alone(self, tmp_path: Path) -> None:
        save(sample(), tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "generation-old").mkdir()
        save(sample(2.0), tmp_path)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert (tmp_path / "generation-old").exists()

    @pytest.mark.parametrize("length", [0, 10, 200])
    def test_a_damaged_recording_may_be_saved_over(self, tmp_path: Path, length: int) -> None:
        save(sample(), tmp_path)
        raw = (tmp_path / "manifest.json").read_bytes()
        (tmp_path / "manifest.json").write_bytes(raw[:length])
        save(sample(2.0), tmp_path)
        assert facts(load(tmp_path)) == facts(sample(2.0))
        assert len(list(tmp_path.glob("generation-*"))) == 1

    def test_leftovers_of_killed_saves_go_before_new_files_come(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(sample(), tmp_path)
        orphan = tmp_path / f"generation-{'0' * 32}"
        orphan.mkdir()
        (orphan / "00000.safetensors").write_bytes(b"half")
        (tmp_path / f"manifest-{'0' * 32}.tmp").write_bytes(b"half")
        seen: list[list[str]] = []
        write = Commit.write

        def watch(commit: Commit, file: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
            seen.append(sorted(path.name for path in tmp_path.iterdir()))
            return write(commit, file, chunks)

        monkeypatch.setattr(Commit, "write", watch)
        save(sample(2.0), tmp_path)
        assert len(seen[0]) == 4  # the lock, the manifest, the generation in force and the new one
        assert orphan.name not in seen[0]
        assert facts(load(tmp_path)) == facts(sample(2.0))

    def test_leftovers_of_a_first_save_are_no_obstacle(self, tmp_path: Path) -> None:
        (tmp_path / f"generation-{'0' * 32}").mkdir()
        (tmp_path / ".lock").touch()
        with pytest.raises(NotARecordingError, match="no manifest"):
            load(tmp_path)
        assert facts(load(save(sample(), tmp_path))) == facts(sample())

    @posix
    def test_without_locks_only_the_replaced_generation_goes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import fcntl

        def unsupported(*_: object) -> None:
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", unsupported)
        for scale in (1.0, 2.0, 3.0):
            save(sample(scale), tmp_path / "run")
        another = tmp_path / "run" / f"generation-{'0' * 32}"
        another.mkdir()
        save(sample(4.0), tmp_path / "run")
        assert facts(load(tmp_path / "run")) == facts(sample(4.0))
        assert len(list((tmp_path / "run").glob("generation-*"))) == 2
        assert another.exists()

    @posix
    def test_a_process_forked_meanwhile_does_not_keep_the_lock(self, tmp_path: Path) -> None:
        with Commit(tmp_path) as commit:
            [lock] = [handle for handle in range(3, 1024) if same_file(handle, tmp_path / ".lock")]
            kept = os.dup(lock)  # what a fork leaves a child with
            commit.write("00000.safetensors", [])
        try:
            save(sample(), tmp_path)
        finally:
            os.close(kept)

    def test_no_file_stays_open(self, tmp_path: Path) -> None:
        handles = Path("/proc/self/fd")
        if not handles.exists():
            pytest.skip("needs /proc")
        save(sample(), tmp_path / "run")
        before = len(list(handles.iterdir()))
        for _ in range(5):
            load(save(sample(), tmp_path / "run"))
            with pytest.raises(StorageError), Commit(tmp_path / "run") as commit:
                commit.write("00000.safetensors", [b""])
                raise StorageError
        assert len(list(handles.iterdir())) == before

    def test_threads_take_turns(self, tmp_path: Path) -> None:
        threads = [threading.Thread(target=save, args=(sample(float(i)), tmp_path / "run")) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert facts(load(tmp_path / "run")) in [facts(sample(float(i))) for i in range(6)]
        assert len(list((tmp_path / "run").glob("generation-*"))) == 1

    @pytest.mark.slow
    def test_saving_at_exit(self, tmp_path: Path) -> None:
        script = (
            "import atexit, sys, torch\nfrom recorders import Recording, Subrecording\nfrom reducers import Sum\n"
            "part = Subrecording(Sum(), {'': Sum().update({}, torch.ones(3))})\n"
            "atexit.register(Recording({'a': part, 'b': part, 'c': part}).save, sys.argv[1])\n"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True, cwd=ROOT, timeout=300)
        assert load(tmp_path / "run")["c"].peek().item() == 3.0


class TestReaders:
    @pytest.mark.parametrize("damaged", ["error", "skip"])
    def test_a_reader_overtaken_by_a_save_reads_the_new_recording(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: Any
    ) -> None:
        save(sample(), tmp_path)
        real, overtaken = schema.read_manifest, list[Path]()

        def slow(root: str, skip: bool) -> Any:
            found = real(root, skip=skip)
            if not overtaken:
                overtaken.append(save(sample(2.0), tmp_path))
            return found

        monkeypatch.setattr("recorders.recordings.storage.load.read_manifest", slow)
        assert facts(load(tmp_path, damaged=damaged)) == facts(sample(2.0))
        assert overtaken

    def test_readers_beside_a_saver(self, tmp_path: Path) -> None:
        save(sample(0.0), tmp_path)
        stop = threading.Event()

        def keep_saving() -> None:
            scale = 0
            while not stop.is_set():
                scale = (scale + 1) % 4
                save(sample(float(scale)), tmp_path)

        saver = threading.Thread(target=keep_saving)
        saver.start()
        try:
            known = [facts(sample(float(scale))) for scale in range(4)]
            assert all(facts(load(tmp_path)) in known for _ in range(30))
        finally:
            stop.set()
            saver.join()

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(RecordingNotFoundError, match="nothing at") as caught:
            load(tmp_path / "run")
        assert isinstance(caught.value, FileNotFoundError)
        assert isinstance(caught.value, StorageError)

    @pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b'{"name": "app", "icons": []}', b"\xff\xfe", b"PK\x03\x04"])
    def test_something_else(self, tmp_path: Path, content: bytes | None) -> None:
        if content is not None:
            (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(NotARecordingError):
            load(tmp_path)


Change = Callable[[dict[str, Any]], object]


def first(**fields: Any) -> Change:
    return lambda data: data["subrecorders"][0].update(fields)


FORGERIES: dict[str, Change] = {
    "traversal": first(file="../../secret.safetensors"),
    "absolute": first(file="/etc/passwd"),
    "nul": first(file="0\0.safetensors"),
    "device": first(file="NUL"),
    "generation traversal": lambda data: data.update(generation="../elsewhere"),
    "generation absolute": lambda data: data.update(generation="/"),
    "generation number": lambda data: data.update(generation=3),
    "generation missing": lambda data: data.pop("generation"),
    "no subrecorders": lambda data: data.pop("subrecorders"),
    "subrecorders number": lambda data: data.update(subrecorders=3),
    "subrecorders null": lambda data: data.update(subrecorders=None),
    "subrecorders object": lambda data: data.update(subrecorders={"a": 1}),
    "entry list": lambda data: data["subrecorders"].append([1]),
    "entry null": lambda data: data["subrecorders"].append(None),
    "entry field missing": lambda data: data["subrecorders"][0].pop("states"),
    "entry field extra": first(extra=1),
    "duplicate name": lambda data: data["subrecorders"][1].update(name=data["subrecorders"][0]["name"]),
    "duplicate file": lambda data: data["subrecorders"][1].update(file=data["subrecorders"][0]["file"]),
    "missing file": first(file="77777-other.safetensors"),
    "name": first(name=None),
    "monitor": first(monitor=["x"]),
    "attr": first(attr=1),
    "module": first(module=None),
    "samples negative": first(samples=-1),
    "samples true": first(samples=True),
    "samples float": first(samples=1.5),
    "samples text": first(samples="many"),
    "bytes huge": first(bytes=2**80),
    "bytes small": first(bytes=1),
    "bytes text": first(bytes="10"),
    "sha short": first(sha256="ab"),
    "sha null": first(sha256=None),
    "reducer list": first(reducer=[1]),
    "states list": first(states=[]),
    "states flat": first(states={"": "state/mean"}),
    "states number": first(states={"": {"mean": 3}}),
    "states missing tensor": lambda data: data["subrecorders"][0]["states"][""].popitem(),
    "states other tensor": first(states={"": {"mean": "state/absent"}}),
    "tensor named twice": first(states={"": {"a": "value/mean", "b": "value/mean"}}),
    "values list": first(values=[["value"]]),
    "values number": first(values={"": {"mean": 1}}),
    "values null": first(values=None),
    "dtypes list": first(dtypes=[]),
    "dtypes unknown tensor": first(dtypes={"absent": "complex64"}),
    "dtypes unknown dtype": first(dtypes={"value/mean": "load"}),
    "dtypes misfit": first(dtypes={"value/mean": "complex64"}),
    "dtypes bits misfit": first(dtypes={"value/mean": "uint16"}),
    "aliases list": lambda data: data.update(aliases=["a"]),
    "alias of nothing": lambda data: data.update(aliases={"a": "absent"}),
    "alias number": lambda data: data.update(aliases={"a": 1}),
    "versions text": lambda data: data.update(versions="3"),
    "schema zero": lambda data: data.update(schema=0),
    "schema text": lambda data: data.update(schema="1"),
    "schema true": lambda data: data.update(schema=True),
    "schema null": lambda data: data.update(schema=None),
}


def deep(depth: int) -> dict[str, Any]:
    tree: Any = "value/mean"
    for _ in range(depth):
        tree = {"a": tree}
    return {"": tree}


class TestHostile:
    @pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
    def test_forged_manifests(self, tmp_path: Path, change: Change) -> None:
        save(sample(), tmp_path / "run")
        (tmp_path / "secret.safetensors").write_bytes(files(tmp_path / "run")[0].read_bytes())
        forge(tmp_path / "run", change)
        with pytest.raises(CorruptRecordingError, match=r"manifest\.json|\.safetensors"):
            load(tmp_path / "run")

    def test_the_helper_forges_well(self, tmp_path: Path) -> None:
        forge(save(sample(), tmp_path / "run"), first(samples=77))
        assert load(tmp_path / "run").samples[0] == 77

    @pytest.mark.parametrize("schema", [2, 10**6])
    def test_newer_schema(self, tmp_path: Path, schema: int) -> None:
        root = save(sample(), tmp_path / "run")
        head = {"format": "torch-recorders", "schema": schema, "crc32": "0" * 8, "all": "different"}
        (root / "manifest.json").write_text(json.dumps(head))
        with pytest.raises(SchemaError, match=r"newer version.*upgrade torch-recorders"):
            load(root)
        with pytest.raises(SchemaError, match=r"would replace what it cannot read"):
            save(sample(), root)
        assert json.loads((root / "manifest.json").read_text()) == head

    @pytest.mark.parametrize(
        "body",
        [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"NaN", b'{"a": 1, "a": 2}', b'"\xff"', b"", b'1e999999999, "x"'],
        ids=["lists", "objects", "number", "nan", "twice", "utf-8", "end", "float"],
    )
    def test_hostile_json(self, tmp_path: Path, body: bytes) -> None:
        root = save(sample(), tmp_path / "run")
        raw = b'{"format": "torch-recorders", "schema": 1, "crc32": "' + b"0" * 8 + b'", "more": ' + body + b"}"
        (root / "manifest.json").write_bytes(raw)
        with pytest.raises(CorruptRecordingError, match=r"manifest\.json"):
            load(root)

    @pytest.mark.parametrize("depth", [33, 200, 400])
    def test_deep_values(self, tmp_path: Path, depth: int) -> None:
        forge(save(sample(), tmp_path / "run"), first(values=deep(depth)))
        with pytest.raises(CorruptRecordingError):
            load(tmp_path / "run")

    @pytest.mark.parametrize(
        "recipe",
        [
            {"type": "Product"},
            {"type": "Product", "parts": 3},
            {"type": "Product", "parts": []},
            {"type": "Product", "parts": [["a", {"type": "Mean", "pattern": 3}]]},
            {"type": "Mean", "pattern": "b c -> ) c"},
            {"type": "Mean", "pattern": {"float": "x"}},
            {"type": "Mean", "__class__": "os.system"},
            {"type": "os:system", "command": "true"},
            {"type": "Statistic"},
            {"type": 3},
            {},
            {"type": "Premap", "reducer": {"type": "Mean"}, "function": "os.system"},
            deep(300) | {"type": "Product"},
        ],
        ids=str,
    )
    def test_hostile_recipes_load_as_values(self, tmp_path: Path, recipe: dict[str, Any]) -> None:
        root = save(sample(), tmp_path / "run")
        forge(root, first(reducer=recipe))
        with pytest.warns(RecordingWarning, match="without their reducer"):
            loaded = load(root)
        assert loaded[0].reducer is None
        assert tree_bits(loaded[0].leaves()) == tree_bits(sample()[0].leaves())
        assert tree_bits(loaded[0].states) == tree_bits(sample()[0].states)

    def test_a_huge_manifest_is_not_read(self, tmp_path: Path) -> None:
        root = save(sample(), tmp_path / "run")
        os.truncate(root / "manifest.json", 2**40)  # sparse: a tebibyte that takes no room
        with pytest.raises(CorruptRecordingError, match="1099511627776 bytes long"):
            load(root)

    def test_a_huge_file_is_not_read(self, tmp_path: Path) -> None:
        root = save(sample(), tmp_path / "run")
        os.truncate(files(root)[0], 2**40)
        with pytest.raises(CorruptRecordingError, match="00000-out-encoder"):
            load(root)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\0" * 7,
            b"\xff" * 8,
            (2**63).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"[]",
            (2).to_bytes(8, "little") + b"{}",
            (2).to_bytes(8, "little") + b"{}" + b"surplus",
        ],
        ids=["empty", "short", "ones", "huge header", "list", "no tensors", "surplus"],
    )
    def test_forged_files(self, tmp_path: Path, content: bytes) -> None:
        root = save(sample(), tmp_path / "run")
        forge_file(root, content)
        with pytest.raises(CorruptRecordingError, match="00000-out-encoder"):
            load(root)

    @pytest.mark.parametrize(
        ("dtype", "shape", "end"),
        [
            ("F64", [2**40], 16),
            ("F64", [-1], 16),
            ("F64", [2**63, 2**63], 16),
            ("F64", [0, 2**63], 0),
            ("F63", [2], 16),
            ("F64", [2], 2**62),
            ("F4", [32], 16),
            ("F64", "2", 16),
        ],
    )
    def test_forged_headers(self, tmp_path: Path, dtype: str, shape: Any, end: int) -> None:
        root = save(lone(Sum(), observe(Sum(), torch.ones(1))), tmp_path / "run")
        about = {"value": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
        header = json.dumps(about, separators=(",", ":")).encode()
        forge_file(root, len(header).to_bytes(8, "little") + header + bytes(min(end, 16)))
        forge(root, first(states={}))
        with pytest.raises(CorruptRecordingError, match="00000-loss"):
            load(root)

    def test_extra_tensors(self, tmp_path: Path) -> None:
        root = save(sample(), tmp_path / "run")
        forge(root, first(values={}))
        with pytest.raises(CorruptRecordingError, match="manifest names"):
            load(root)

    @pytest.mark.parametrize("damage", ["truncated", "grown", "flipped", "missing", "swapped"])
    def test_damaged_files(self, tmp_path: Path, damage: str) -> None:
        root = save(sample(), tmp_path / "run")
        one, two, _ = files(root)
        raw = one.read_bytes()
        if damage == "truncated":
            one.write_bytes(raw[:-1])
        elif damage == "grown":
            one.write_bytes(raw + b"\0")
        elif damage == "flipped":
            one.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        elif damage == "missing":
            one.unlink()
        else:
            one.write_bytes(two.read_bytes())
        with pytest.raises(CorruptRecordingError, match="00000-out-encoder"):
            load(root)

    @posix
    @pytest.mark.parametrize("what", ["file", "generation", "manifest"])
    def test_links_are_not_followed(self, tmp_path: Path, what: str) -> None:
        root = save(sample(), tmp_path / "run")
        target = {"file": files(root)[0], "generation": files(root)[0].parent, "manifest": root / "manifest.json"}[what]
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CorruptRecordingError, match="symbolic link"):
            load(root)

    @posix
    @pytest.mark.parametrize("what", ["file", "manifest"])
    def test_pipes_and_folders(self, tmp_path: Path, what: str) -> None:
        root = save(sample(), tmp_path / "run")
        target = files(root)[0] if what == "file" else root / "manifest.json"
        target.unlink()
        os.mkfifo(target)
        with pytest.raises(CorruptRecordingError, match="not a regular file"):
            load(root)
        target.unlink()
        target.mkdir()
        with pytest.raises(StorageError):
            load(root)

    @posix
    def test_unreadable(self, tmp_path: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        root = save(sample(), tmp_path / "run")
        files(root)[0].chmod(0)
        with pytest.raises(StorageError, match="cannot load"):
            load(root)


fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestFuzz:
    @given(st.data())
    @fuzz
    def test_damaged_bytes_are_never_believed(self, tmp_path: Path, data: st.DataObject) -> None:
        damaged_bytes_are_never_believed(tmp_path, data)

    @given(st.data())
    @fuzz
    def test_forged_manifests_give_a_typed_error_or_data(self, tmp_path: Path, data: st.DataObject) -> None:
        forged_manifests_give_a_typed_error_or_data(tmp_path, data)

    @pytest.mark.slow
    @given(st.data())
    @fuzz
    def test_forged_files_give_a_typed_error_or_data(self, tmp_path: Path, data: st.DataObject) -> None:
        forged_files_give_a_typed_error_or_data(tmp_path, data)


def test_saving_changes_nothing_in_the_recording(tmp_path: Path) -> None:
    recording = sample()
    before = copy.deepcopy(facts(recording))
    save(recording, tmp_path / "run")
    assert facts(recording) == before
    assert facts(replace(recording)) == before


def test_files_of_other_monitors_under_one_name_do_not_merge(tmp_path: Path) -> None:
    state = Mean().update({}, torch.ones(2))
    seen: dict[str, tuple[str, str | None]] = {
        "out": ("ForwardMonitor", None),
        "in": ("ForwardInputMonitor", None),
        "weight": ("StateMonitor", "weight"),
        "bias": ("StateMonitor", "bias"),
        "unknown": ("", None),
    }
    for name, (monitor, attr) in seen.items():
        save(Recording({"fc": Subrecording(Mean(), {"": state}, 1, monitor=monitor, attr=attr)}), tmp_path / name)
    told = "StateMonitor of weight and StateMonitor of bias"
    for first, second, why in (("out", "in", "ForwardMonitor and ForwardInputMonitor"), ("weight", "bias", told)):
        with pytest.raises(MergeError, match=f"'fc': {why} look at different things"):
            _ = merge([tmp_path / first, tmp_path / second])["fc"]
        with pytest.raises(MergeError, match=f"'fc': {why} look at different things"):
            load(tmp_path / first).merge(load(tmp_path / second))
    assert merge([tmp_path / "out", tmp_path / "unknown"])["fc"].samples == 2
