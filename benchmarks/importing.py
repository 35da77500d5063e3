"""How long `import torch, recorders` takes, beside `import torch` alone: each in fresh processes, in turns.

Processor time of the process is measured: what else the machine does counts less. Byte code is kept in a folder of its own, where a
first start, which is not counted, has written it. A third program finds that of torch there, but none of this project: the start
after an install that compiled nothing. Run: python benchmarks/importing.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import spread, write

ROOT = Path(__file__).parent.parent
TURNS = 7
BARE, BOTH, FIRST = "import torch", "import torch, recorders", "import torch, recorders; without byte code of this project"
PROGRAM = "import time; started = time.process_time(); {}; print(time.process_time() - started)"


def seconds(what: str, byte_code: Path) -> float:
    """Of a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(byte_code)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if what == FIRST:
        shutil.rmtree(byte_code.joinpath(*ROOT.parts[1:]))
    command = [sys.executable, "-c", PROGRAM.format(what.partition(";")[0])]
    return float(subprocess.run(command, cwd=byte_code, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        byte_code = Path(folder)
        seconds(BOTH, byte_code)
        turns = [{what: seconds(what, byte_code) for what in (BARE, BOTH, FIRST)} for _ in range(TURNS)]
    rows = [{"what": what, "s": spread([turn[what] for turn in turns])} for what in (BARE, BOTH, FIRST)]
    bare = rows[0]["s"]["median"]
    for row in rows[1:]:
        row["s beyond torch"] = row["s"]["median"] - bare
    for row in rows:
        print(f"{row['what']:60} {row['s']['median']:.2f} s, beyond torch {row.get('s beyond torch', 0.0):.2f} s")
    write("import", rows=rows, turns=TURNS)


if __name__ == "__main__":
    main()
