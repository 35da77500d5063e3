"""Where the compiled loops are kept: each is verified before it is loaded, and compiled again if it is damaged.

A library whose file was cut short ends the process when it is loaded. So the name of a file has its size and checksum, a file gets
its name when it is whole, and one that is not as its name says is compiled again. Several processes may do so at once.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["FOLDER", "in_order", "library", "state"]

FOLDER = Path(__file__).parent
TIMEOUT_S = 60.0
NOTICE_S = 1.0  # after which a user is told what the update waits for

LOGGER = logging.getLogger("reducers")

_FLAGS = ("-std=c++17", "-O2", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi", "-Wl,--as-needed")
_WITHOUT = "PyTorch's own operations reduce CPU tensors, which takes several times as long"
_said: dict[str, str] = {}  # what is wrong, each said once in a process
_noticed: list[bool] = []  # whether it was said that the compiler takes long


def library(source: str | Path, defines: Sequence[str], linked: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library of a source, compiled if it is not kept yet; None if that cannot be, which is said once.

    Args:
        source: the name of a file in `FOLDER`, or the path of one elsewhere, which finds its headers there.
        linked: the libraries of PyTorch that it is linked with, besides that of OpenMP.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    why = ""
    for find in (_cache, _own_folder):
        folder = find()
        if folder is None:
            continue
        try:
            found = ctypes.CDLL(str(_compiled(compiler, FOLDER / source, defines, linked, folder)))
        except subprocess.CalledProcessError as error:
            why = f"{compiler} failed: {_last_line(error)}"
            if not _is_full(error):
                break
        except subprocess.SubprocessError as error:
            why = f"{compiler} failed: {error}"
            break
        except OSError as error:  # such as a folder from which nothing may be loaded: the other one may do
            why = f"{type(error).__name__}: {error}"
        else:
            if why:
                _say_not_kept(why)
            return found
    _say("failed", f"the loops in C++ cannot be compiled: {why or 'no folder can be written'}; {_WITHOUT}")
    return None


def state() -> str:
    """Return which compiler there is, where the loops are kept, and what is wrong; nothing is compiled for it."""
    compiler = _compiler()
    if compiler is None:
        return _said.get("compiler", f"the loops in C++ are for Linux; {_WITHOUT}")
    if "failed" in _said:
        return _said["failed"]
    folder = _cache()
    if "cache" in _said:
        return _said["cache"]
    return f"the loops in C++ are compiled by {compiler} and kept in {folder}"


def in_order() -> bool:
    """Return whether nothing that was said keeps the loops from being used, and kept."""
    return not _said


def _say(kind: str, message: str) -> None:
    """Say what is wrong once in a process, as a line of the log: a warning could be an error in the middle of a training."""
    if _said.setdefault(kind, message) is message:
        LOGGER.warning(message)


def _say_not_kept(why: str) -> None:
    _say(
        "cache",
        f"the loops in C++ are compiled again in every process, which takes seconds, because they cannot be kept: {why}. "
        "Set the environment variable XDG_CACHE_HOME to a folder that can be written",
    )


@lru_cache(maxsize=1)
def _compiler() -> str | None:
    """The C++ compiler that CXX names, or one of the usual names; None if there is none, or the system is not Linux."""
    if sys.platform != "linux":
        return None
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    found = next((found for name in names if (found := shutil.which(name))), None)
    if found is None:
        _say(
            "compiler",
            f"there is no C++ compiler ({', '.join(dict.fromkeys(names))}), so {_WITHOUT}: install one, or name it by the "
            "environment variable CXX",
        )
    return found


def _compiled(compiler: str, source: Path, defines: Sequence[str], linked: Sequence[str], folder: Path) -> Path:
    """Return the path of the library, which is compiled if the folder does not have it, or not whole."""
    flags = [*_FLAGS, *defines, f"-I{FOLDER}", *(["-march=native"] if platform.machine() == "x86_64" else [])]
    # The same OpenMP as PyTorch's, whose threads would otherwise be in the way of another's.
    pytorch = Path(torch.__file__).parent / "lib"
    libraries = sorted(str(path) for name in ("libgomp*.so*", *linked) for path in pytorch.glob(name))
    text = b"".join(path.read_bytes() for path in (source, *sorted(FOLDER.glob("*.h"))))
    told = (compiler, str(os.stat(compiler).st_mtime_ns), *flags, *libraries, _processor())
    key = hashlib.sha256(b"\0".join((text, *(part.encode() for part in told)))).hexdigest()[:32]
    kept = _kept(folder, key)
    if kept is not None:
        return kept
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run([compiler, *flags, str(source), *libraries, "-o", name], folder)
        with open(name, "rb+") as file:
            path = folder / _name(key, file.read())
            os.fsync(file.fileno())  # otherwise the name may be on the disk before the bytes are
        os.replace(name, path)  # several processes may compile it at once
    finally:
        Path(name).unlink(missing_ok=True)
    return path


def _kept(folder: Path, key: str) -> Path | None:
    """Return the library of this key if it is in the folder, and whole; delete what is not."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        with suppress(OSError):
            if path.name == _name(key, path.read_bytes()):
                return path
            path.unlink()
    return None


def _name(key: str, content: bytes) -> str:
    """Return the name of a file with this content."""
    return f"{key}-{len(content)}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def _run(command: Sequence[str], folder: Path, again: bool = True) -> None:
    """Run the compiler, and say so if it takes long; once more if it was killed, such as by Ctrl-C in another thread."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            try:
                _, errors = process.communicate(timeout=NOTICE_S)
            except subprocess.TimeoutExpired:
                if not _noticed:
                    _noticed.append(True)
                    LOGGER.warning(
                        "compiling the loops in C++ for this processor, which takes seconds; they are kept in %s", folder
                    )
                _, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            process.wait()  # an interrupt ends the context without it
            raise
    if process.returncode < 0 and again:
        _run(command, folder, again=False)
    elif process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=errors)


def _is_full(error: subprocess.CalledProcessError) -> bool:
    """Return whether the compiler failed because there is no room on the disk: another folder may be on another disk."""
    return any(told in (error.stderr or b"").lower() for told in (b"no space left", b"quota exceeded"))


def _last_line(error: subprocess.CalledProcessError) -> str:
    """Return the line that says most of why the compiler failed."""
    lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else f"exit status {error.returncode}")


@lru_cache(maxsize=1)
def _cache() -> Path | None:
    """The folder for libraries in the user's cache; None if there is none, others may write there, or this user cannot."""
    named = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(named).expanduser() / "torch_recorders"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            why = f"{folder} belongs to others, or others may write to it"
        elif not os.access(folder, os.W_OK):
            why = f"{folder} cannot be written"
        else:
            return folder
    except RuntimeError:  # a user without an entry in passwd, and without HOME
        why = f"{named} is of a user who has no home"
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
    _say_not_kept(why)
    return None


@lru_cache(maxsize=1)
def _own_folder() -> Path | None:
    """A folder of this process; None if none can be made."""
    try:
        own = tempfile.mkdtemp(prefix="torch_recorders_")
    except OSError:
        return None
    atexit.register(_remove, own, os.getpid())  # a library that is loaded stays when its file is gone
    return Path(own)


def _remove(folder: str, process: int) -> None:
    """Delete the folder of this process, not that of the process from which this one was forked."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _processor() -> str:
    """What the processor can do: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
