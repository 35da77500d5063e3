"""What `import recorders` loads, and what it leaves until somebody asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import recorders


def loaded(*lines: str) -> list[set[str]]:
    """The modules that are loaded in a new process after each of these lines."""
    code = "\n".join(("import sys", *(f"{line}\nprint(*sys.modules)" for line in lines)))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return [set(names.split()) for names in done.stdout.splitlines()]


LATER = ("recorders.watch", "recorders.cli", "torch._dynamo", "torch._inductor", "triton", "sympy", "torch.distributed.tensor")
"""What a recorder needs only for some uses."""


def test_what_watches_trainings_loads_when_it_is_asked_for() -> None:
    bare, before, after = loaded("import torch", "import recorders", "recorders.Inspector")
    assert not [name for name in before - bare if name.startswith(LATER)]
    assert "recorders.watch.inspector" in after


def test_few_modules_load_beyond_those_of_torch() -> None:
    bare, before = loaded("import torch", "import recorders")
    others = {name.partition(".")[0] for name in before - bare} - sys.stdlib_module_names
    assert others <= {"recorders", "reducers", "einops", "safetensors", "torch"}
    assert len(before - bare) < 300  # it was 204; benchmarks/importing.py measures how long it takes


@pytest.mark.parametrize("name", recorders.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(recorders, name).__name__.rpartition(".")[2] == name
    assert name in dir(recorders)


def test_an_unknown_name_is_an_error_of_the_module() -> None:
    with pytest.raises(AttributeError, match="module 'recorders' has no attribute 'Inspecter'"):
        _ = recorders.Inspecter  # type: ignore[attr-defined]
