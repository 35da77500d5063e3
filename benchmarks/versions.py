"""Installs a wheel beside each Python and each torch, in an empty environment each, and writes what works there.

    python benchmarks/versions.py dist/torch_recorders-*.whl --folder /tmp/versions \\
        --pythons python3.10 python3.11 python3.12 python3.13 python3.14 --torch 2.8.0 2.15.0

Each environment runs `smoke.py`, and is deleted. Needs the command `uv` (`pip install uv`), and up to 12 GB in the folder: most
builds of torch on the index bring CUDA. What is in the results already stays, unless it is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or ROOT / "benchmarks" / "results") / "versions.json"
NO_WHEEL = "no wheels with a matching Python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are made")
    parser.add_argument("--pythons", nargs="+", required=True, help="interpreters, by command or path")
    parser.add_argument("--torch", nargs="+", required=True, help="versions of torch, as the index knows them")
    given = parser.parse_args()
    environment = {**os.environ, "UV_CACHE_DIR": str(given.folder / "cache")}
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    for version in given.torch:
        for python in given.pythons:
            row = tried(given.wheel, python, version, given.folder / "environment", environment)
            key = row["python"], row["torch"]
            kept = [other for other in found["rows"] if (other["python"], other["torch"]) != key]
            rows = sorted([*kept, row], key=lambda row: [*numbers(row["torch"]), *numbers(row["python"])])
            found = {"what": "a wheel in empty environments, on a CPU", "wheel": given.wheel.name, "rows": rows}
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(row), flush=True)
            uv("cache", "clean", "-q", "torch", environment=environment)
        shutil.rmtree(given.folder / "cache", ignore_errors=True)  # of the CUDA that the next torch may not share
    sys.exit(any(row["outcome"] == "failed" for row in found["rows"]))


def tried(wheel: Path, python: str, version: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What works with this Python and this torch."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    number = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    row: dict[str, Any] = {"python": number, "torch": version}
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "-q", "--python", python, str(folder), environment=environment, check=True)
    interpreter = folder / "bin" / "python"
    installed = uv("pip", "install", "-q", "--python", str(interpreter), str(wheel), f"torch=={version}", environment=environment)
    if installed.returncode:
        why = " ".join(installed.stderr.split())
        row |= {"outcome": "no wheel of torch" if NO_WHEEL in why else "failed", "why": why[-400:]}
    else:
        environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        smoke = [interpreter, ROOT / "benchmarks" / "smoke.py"]
        run = subprocess.run(smoke, env=environment, capture_output=True, text=True)
        try:
            row |= json.loads(run.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            row["why"] = run.stderr[-400:]
        row |= {"python": number, "torch": version, "outcome": "failed" if run.returncode else "passed"}
    shutil.rmtree(folder)
    return row


def uv(*arguments: str, environment: dict[str, str], check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["uv", *arguments], env=environment, check=check, capture_output=True, text=True)


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


if __name__ == "__main__":
    main()
