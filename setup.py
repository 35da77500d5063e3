"""Builds the libraries in C++ with the package, and names a wheel that has them; all else is in setup.cfg."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def loaded(path: str) -> Any:
    """Return a module by its path: the package that it is in imports PyTorch, which is missing here."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = loaded("reducers/kernels/cpp/build.py")


class BuildPy(build_py):
    """Builds the libraries beside the modules; without a compiler the package works by PyTorch's own operations, and says so."""

    def run(self) -> None:
        super().run()
        why = build.build(ROOT if self.editable_mode else Path(self.build_lib))
        if why:
            self.warn(f"the loops in C++ are not built: {why}")


class Wheel(bdist_wheel):
    """A wheel for this platform if it has the libraries, for any version of Python; without them one for any platform."""

    def run(self) -> None:
        self.run_command("build")
        folder = Path(self.get_finalized_command("build").build_lib)
        self.root_is_pure = not all((folder / library.path).is_file() for library in build.libraries())
        self.distribution.has_ext_modules = lambda: not self.root_is_pure
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return ("py3", "none", platform)


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
