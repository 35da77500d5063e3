"""Every script in examples/ runs as it stands, without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
ARGUMENTS = {"digits.py": ["out", "1"], "inspect_gradients.py": ["out"], "rewrite.py": ["rewrite", "out"]}
"""What keeps a script small, or tells it where to write; the others get none."""
NEEDED = {"map_reduce_with_dask.py": "dask", "rewrite.py": "transformers"}
"""Libraries that the test command does not install; `.ci/run` does."""


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs(script: str, tmp_path: Path) -> None:
    if script in NEEDED:
        pytest.importorskip(NEEDED[script])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MPLCONFIGDIR": str(tmp_path / "mpl"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *ARGUMENTS.get(script, [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout
    assert (tmp_path / "out").is_dir() == (script in ARGUMENTS)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in listed


FAULTS = {
    "healthy": {},
    "dead_relus": {"3": "48 of 64 units are dead|75% of the units are dead"},
    "exploding_gradients": {"1": "gradients explode"},
    "rate_too_small": {"optimizer": "in 0 and 3 more of 4 layers"},
    "nan_in_the_middle": {"2": "observation 39|in observation 19 of the tick"},
    "saturated": {"1": "64 of 64 units are saturated|100% of the units are saturated"},
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_findings_name_the_planted_fault_and_nothing_else(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import find_faults

    assert set(find_faults.FAULTS) == set(FAULTS)
    once, over_time = find_faults.examine(fault)
    assert once.unexamined == ()
    for found in (once, over_time):
        assert [finding.layer for finding in found] == list(FAULTS[fault])
        for finding, what in zip(found, FAULTS[fault].values(), strict=True):
            assert any(each in finding.what for each in what.split("|"))
    assert {finding.since for finding in over_time} <= {1 if fault == "nan_in_the_middle" else 0}


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.long)])
def test_training_over_several_processes(processes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "distributed/train.py"],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    one, ddp, fsdp2 = done.stdout.splitlines()
    assert ddp.startswith(f"{processes} processes under DDP")
    assert one.partition(":")[2] == ddp.partition(":")[2] == fsdp2.partition(":")[2]


REWRITE = (ROOT / "docs" / "rewrite.md").read_text()


def shown_there(name: str) -> list[str]:
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)```", REWRITE, flags=re.DOTALL)
    assert found is not None
    return found[1].splitlines()


@pytest.mark.slow
def test_three_commands_find_the_fault(tmp_path: os.PathLike[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("rich")
    commands = re.findall(r"```shell\n(.*?)```", REWRITE, flags=re.DOTALL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), "COLUMNS": "300"}
    printed = []
    for command in [*commands[0].splitlines(), commands[1]]:
        text = command.replace("python ", f"{sys.executable} ").replace("examples/", f"{ROOT}/examples/")
        text = text.replace("recorders diff", f"{sys.executable} -m recorders.cli diff")
        done = subprocess.run(text, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert [line for line in shown_there("answer") if line not in printed[2]] == []
    operators = "\n".join(printed[3])
    assert [line for line in shown_there("operators") if line not in operators] == []
