"""Runs the tests on several versions of torch, each in a virtual environment of its own, and writes what passed.

    python benchmarks/torch_versions.py --folder /tmp/torch-versions 2.8.0 2.13.0 2.15.0

An environment that is in the folder already (`<folder>/<version>`) is used as it is. A new one takes about 6 GB if the index has
only builds with CUDA. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results")
LIBRARIES = ("numpy", "scipy", "pytest>=8.2", "hypothesis", "einops", "safetensors")
COMPILES_FROM = (2, 13)
EAGER = ("monitors", "gradients", "attributes", "parameters", "recorder", "storage", "reducers")
COMPILED = ("compiled",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="versions of torch, as pip knows them")
    parser.add_argument("--folder", type=Path, required=True, help="where the virtual environments are, or are made")
    given = parser.parse_args()
    rows = [row for version in given.versions for row in suites(version, environment(given.folder, version))]
    result = {"what": "tests on several versions of torch, on a CPU", "python": platform.python_version(), "rows": rows}
    (RESULTS / "torch_versions.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(row["failed"] for row in rows))


def environment(folder: Path, version: str) -> Path:
    """The interpreter of an environment with this version of torch."""
    python = folder / version / "bin" / "python"
    if not python.exists():
        venv.create(folder / version, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={version}", *LIBRARIES]
        subprocess.run(pip, check=True)
    return python


def suites(version: str, python: Path) -> list[dict[str, Any]]:
    """One row in eager mode, and one inside `torch.compile` if this version can record there."""
    code = "import torch; print(torch.__version__)"
    build = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    rows = [{"torch": build, "suite": "eager", **run(python, EAGER, "not compile")}]
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= COMPILES_FROM:
        rows.append({"torch": build, "suite": "compiled", **run(python, COMPILED, "")})
    return rows


def run(python: Path, names: tuple[str, ...], keyword: str) -> dict[str, Any]:
    """Counts of what passed, failed and was skipped, and the names of what failed."""
    files = [str(next((ROOT / "tests").rglob(f"test_{name}.py")).relative_to(ROOT)) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", keyword, *files]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    counts = {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}
    return {"tests": " ".join(files), **counts, "failures": failed}


if __name__ == "__main__":
    main()
