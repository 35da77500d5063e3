"""Recordings at URLs: the promises hold when any request fails, when two save at once, and when a save replaces what is read."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from recorders import (
    CorruptRecordingError,
    ForwardMonitor,
    MergeError,
    MissingExtraError,
    NotARecordingError,
    Recorder,
    Recording,
    RecordingNotFoundError,
    RecordingWarning,
    SchemaError,
    StorageError,
    Subrecording,
    load,
    merge,
    repair,
    save,
    verify,
)
from reducers import Mean


def recording(value: float, count: int = 3) -> Recording:
    parts = {
        f"layer.{n}": Subrecording(Mean(), {"": Mean().update({}, torch.tensor([value + n]))}, samples=1) for n in range(count)
    }
    return Recording(parts)


def value_of(found: Recording) -> float:
    """The value that a recording was made with, if all of it is there."""
    values = [part.peek().item() for part in found.values()]
    assert values == [values[0] + n for n in range(3)]
    return values[0]


@pytest.fixture
def url() -> Iterator[str]:
    place = f"memory://{uuid.uuid4().hex}/run"
    yield place
    fsspec.filesystem("memory").rm(os.path.dirname(place.removeprefix("memory:/")), recursive=True)


def files(url: str) -> list[str]:
    return fsspec.filesystem("memory").find(url.removeprefix("memory:/"))


class Failing:
    """Raises at one request of many: what a lost connection, or a kill, looks like to the store."""

    REQUESTS = ("cat_file", "ls", "put_file", "pipe_file", "get_file", "rm")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.left, self.error = at, error
        for name in self.REQUESTS:
            monkeypatch.setattr(MemoryFileSystem, name, self.counted(getattr(MemoryFileSystem, name)))

    def counted(self, request: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise self.error
            return request(*args, **kwargs)

        return counting


@pytest.mark.parametrize("layout", ["folder", "packed"])
def test_what_is_saved_at_a_url_comes_back(url: str, layout: Any) -> None:
    assert save(recording(1.0), url, layout=layout) == url
    assert value_of(load(url)) == value_of(load(url, mmap=True)) == 1.0
    assert verify(url) == {}
    net = torch.nn.Linear(2, 1)
    first = Recorder(ForwardMonitor(Mean(), every=2)).modules(net).resume(url + "/other", missing="start")  # nothing is there
    with first:
        net(torch.ones(3, 2))
    assert first.save_in_background(url + "/other", layout=layout).result() == url + "/other"
    resumed = Recorder(ForwardMonitor(Mean(), every=2)).modules(net).resume(url + "/other")
    assert resumed.compute() == first.compute()


@pytest.mark.parametrize("store", ["file", "local", "dir"])
def test_stores_with_real_folders_get_theirs_made(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{store}://{tmp_path}/a/run"
    if store == "dir":  # as those of a server with folders, whose root is elsewhere
        inner = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
        monkeypatch.setattr("recorders.recordings.storage.remote._opened", lambda url: (inner, "a/run"))
    for value in (1.0, 2.0):
        assert save(recording(value), place) == place
        assert value_of(load(place)) == value
    assert value_of(load(tmp_path / "a" / "run")) == 2.0
    assert sorted(path.name for path in (tmp_path / "a" / "run").iterdir())[1:] == ["manifest.json"]
    assert verify(place) == {}


def test_a_store_that_cannot_rename_gets_its_manifest_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.mv", refuse)
    save(recording(1.0), f"file://{tmp_path}/run")
    assert [path.name for path in sorted((tmp_path / "run").iterdir())][1:] == ["manifest.json"]
    assert value_of(load(tmp_path / "run")) == 1.0
    (tmp_path / "manifest.json.generation-other").write_text("x")
    with pytest.raises(NotARecordingError):
        save(recording(1.0), f"file://{tmp_path}")


def test_the_generation_before_is_removed(url: str) -> None:
    for value in (1.0, 2.0, 3.0):
        save(recording(value), url)
    assert len(files(url)) == 4
    assert value_of(load(url)) == 3.0


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [1.0, None], ids=["over another", "the first"])
def test_a_save_that_fails_at_any_request_leaves_the_last_one(
    url: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], before: float | None
) -> None:
    if before is not None:
        save(recording(before), url)
    known, expected = {before}, (KeyboardInterrupt if error is KeyboardInterrupt else StorageError)
    for at in itertools.count(1):
        with monkeypatch.context() as patch:
            failing = Failing(patch, at, error("lost"))
            with contextlib.suppress(expected):
                save(recording(2.0), url)
                known = {2.0}  # what fails after the manifest was replaced, the removal of the one before, fails silently
        if known == {None}:
            with pytest.raises(StorageError, match=r"nothing at|holds no manifest"):
                load(url)
        else:
            found = value_of(load(url))
            assert found in known | {2.0}
            known = {found}
        if failing.left > 0:  # it had no so many requests
            break
    assert at > 6
    assert known == {2.0}


def test_a_load_that_fails_at_any_request_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(recording(1.0), url)
    for at in range(1, 6):  # the manifest, the names of the files, three files
        with monkeypatch.context() as patch:
            Failing(patch, at, TimeoutError("no answer"))
            with pytest.raises(StorageError, match=f"^cannot load {url}: TimeoutError: no answer$"):
                load(url)
    assert value_of(load(url)) == 1.0


def test_readers_and_savers_at_once_see_whole_recordings(url: str) -> None:
    save(recording(0.0), url)
    errors: list[BaseException] = []

    def work(run: Callable[[], None]) -> None:
        try:
            for _ in range(15):
                run()
        except BaseException as error:
            errors.append(error)

    runs: list[Callable[[], None]] = [lambda n=n: save(recording(10.0 * n), url) and None for n in (1, 2)]  # type: ignore[misc]
    threads = [threading.Thread(target=work, args=(run,)) for run in [*runs, lambda: value_of(load(url)) and None]]  # type: ignore[list-item]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert value_of(load(url)) in {10.0, 20.0}


def test_damage_is_named_by_the_url(url: str, tmp_path: Path) -> None:
    save(recording(1.0), url)
    store, broken = fsspec.filesystem("memory"), files(url)[1]
    data = store.cat_file(broken)
    for wrong in (data[:-1] + b"?", data[:-1], data + b"?"):
        store.pipe_file(broken, wrong)
        with pytest.raises(CorruptRecordingError, match=url):
            load(url)
        ((name, reason),) = verify(url).items()
        assert name == "layer.1"
        assert url in reason
        assert tempfile.gettempdir() not in reason
    with pytest.warns(RecordingWarning, match=url):
        assert list(load(url, damaged="skip")) == ["layer.0", "layer.2"]
    assert list(repair(url, tmp_path / "repaired")) == ["layer.1"]
    assert len(load(tmp_path / "repaired")) == 2
    store.rm(broken)
    assert list(verify(url)) == ["layer.1"]


def test_merge_takes_urls_and_folders_and_leaves_no_copy(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    save(recording(1.0), url)
    save(recording(3.0), tmp_path / "run", layout="packed")
    merged = merge([url, tmp_path / "run"])
    assert value_of(merged) == 2.0
    assert list(copies.iterdir()) != []
    assert value_of(load(merged.save(url + "/merged"))) == 2.0
    del merged
    gc.collect()
    assert list(copies.iterdir()) == []
    with pytest.raises(MergeError, match="given twice"):
        merge([url, url])


def test_urls_of_something_else_are_refused(url: str) -> None:
    store, root = fsspec.filesystem("memory"), url.removeprefix("memory:/")
    with pytest.raises(RecordingNotFoundError, match=f"nothing at {url}"):
        load(url)
    store.pipe_file(f"{root}/thesis.tex", b"years of work")
    with pytest.raises(NotARecordingError, match="holds no manifest"):
        load(url)
    with pytest.raises(NotARecordingError, match="thesis"):
        save(recording(1.0), url)
    store.pipe_file(f"{root}/manifest.json", b'{"name": "a browser extension"}')
    with pytest.raises(NotARecordingError, match="something else"):
        save(recording(1.0), url)
    save(recording(1.0), url + "/run")
    raw = store.cat_file(f"{root}/run/manifest.json")
    store.pipe_file(f"{root}/run/manifest.json", raw.replace(b'"schema": 1', b'"schema": 9', 1))
    with pytest.raises(SchemaError, match="schema 9"):
        save(recording(1.0), url + "/run")
    with pytest.raises(SchemaError, match="schema 9"):
        load(url + "/run")


def test_what_cannot_be_at_a_url_says_so(url: str) -> None:
    with pytest.raises(StorageError, match="this needs a path"):
        save(recording(1.0), url)
        repair(url, url + "/repaired")
    with pytest.raises(StorageError, match="Protocol not known: nowhere"):
        load("nowhere://bucket/run")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="Install s3fs"):
            load("s3://bucket/run")


def test_the_command_line_takes_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from recorders.cli import main

    save(recording(1.0), url)
    save(recording(3.0), url + "/other")
    merging = ["merge", url, url + "/other", "-o", url + "/both"]
    for command in (["show", url], ["check", url], ["diff", url, url + "/other"], merging):
        assert main(command) == 0
    assert url in capsys.readouterr().out
    assert value_of(load(url + "/both")) == 2.0
