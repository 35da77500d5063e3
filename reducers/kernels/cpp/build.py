"""Builds the libraries in C++ when the package is built, or by `python reducers/kernels/cpp/build.py` after a source changed.

Setuptools runs it without PyTorch, so it imports nothing of the package. The loops are one library for each instruction set: if all
were one, the linker would keep one copy of each template of the standard library, in whatever instructions, for all of them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GRAPHS", "LOOPS", "READING", "ROOT", "Library", "build", "hash_of_sources", "libraries", "loops_for"]

LOOPS = Path("reducers/kernels/cpp")
GRAPHS = Path("recorders/graphs")
READING = GRAPHS / "libreading.so"
ROOT = Path(__file__).parents[len(LOOPS.parts)]

_ELEMENTS = ("Float32", "BFloat16", "Float16")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", *_AVX2)
INSTRUCTION_SETS = {"x86_64": {"AVX512": _AVX512, "AVX2": _AVX2}}
"""For each kind of processor the flags of the compiler by instruction set, named as PyTorch names what a processor can do."""


@dataclass(frozen=True)
class Library:
    """A library to build.

    Attributes:
        path: from the root on.
        objects: what it is linked of: a source, and the arguments of the compiler.
        sources: what identifies its sources, which it contains.
    """

    path: Path
    objects: tuple[tuple[Path, tuple[str, ...]], ...]
    sources: str

    def is_built(self, into: Path) -> bool:
        """Return whether it is there already, built from the present sources."""
        path = into / self.path
        return path.is_file() and self.sources.encode() in path.read_bytes()


def loops_for(instructions: str) -> Path:
    """Return the path of the loops in an instruction set, from the root on."""
    return LOOPS / f"libloops_{instructions.lower()}.so"


def libraries() -> list[Library]:
    """Return what is built for this kind of processor."""
    found, loops, both = [], hash_of_sources(LOOPS), hash_of_sources(LOOPS, GRAPHS)
    for name, flags in INSTRUCTION_SETS.get(platform.machine(), {"DEFAULT": ()}).items():
        objects = [
            (LOOPS / source, (*flags, f"-DELEMENTS={elements}"))
            for source in ("sweeping.cpp", "weighting.cpp", "binned.cpp", "sketch.cpp")
            for elements in (*_ELEMENTS, *(("Float64",) if source == "sketch.cpp" else ()))
        ]
        common = LOOPS / "common.cpp", (*flags, f'-DSOURCES="{loops}"')
        found.append(Library(loops_for(name), (*objects, (LOOPS / "digest.cpp", flags), common), loops))
    reading = GRAPHS / "reading.cpp", (f"-I{ROOT / LOOPS}", f'-DSOURCES="{both}"')
    return [*found, Library(READING, (reading,), both)]


def hash_of_sources(*folders: Path) -> str:
    """Return what identifies the sources in these folders, and how they are built; "" if there are none, as in a wheel."""
    found = sorted(path for folder in folders for suffix in ("cpp", "h") for path in (ROOT / folder).glob(f"*.{suffix}"))
    whole = [path.read_bytes() for path in (*found, Path(__file__))]
    return hashlib.sha256(b"\0".join(whole)).hexdigest()[:32] if found else ""


def build(into: Path, flags: Sequence[str] = ()) -> str:
    """Build all libraries that are not there yet, each at its path below a folder; return "", or why there are none.

    Args:
        flags: more of them, for the compiler and the linker, such as `-fsanitize=address`.
    """
    if not sys.platform.startswith("linux"):
        return "they are for Linux"
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        return f"there is no C++ compiler ({', '.join(dict.fromkeys(names))})"
    try:
        with tempfile.TemporaryDirectory() as work:
            wanted = [library for library in libraries() if flags or not library.is_built(into)]
            linked = _compiled(compiler, wanted, flags, Path(work))
            for library, objects in linked.items():
                _link(compiler, objects, flags, into / library.path)
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {_last_line(error.stderr)}"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compiled(compiler: str, wanted: Iterable[Library], more: Sequence[str], work: Path) -> dict[Library, list[Path]]:
    """Compile all objects, several at once; return them by library."""
    commands, found = [], {}
    for library in wanted:
        found[library] = [work / f"{library.path.name}-{number}.o" for number in range(len(library.objects))]
        for (source, flags), path in zip(library.objects, found[library], strict=True):
            commands.append((compiler, *_FLAGS, *flags, *more, "-c", str(ROOT / source), "-o", str(path)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    return found


def _link(compiler: str, objects: Sequence[Path], flags: Sequence[str], library: Path) -> None:
    """Link a library, which gets its name when it is whole: another process may load the one before."""
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        _run((compiler, *(flags or ("-s",)), "-shared", *map(str, objects), "-o", name, "-ldl", "-pthread"))
        os.chmod(name, 0o755)
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)


def _last_line(errors: str) -> str:
    """Return the line that says most of why the compiler failed."""
    lines = errors.strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "it said nothing")


if __name__ == "__main__":
    sys.exit(build(ROOT) or 0)
