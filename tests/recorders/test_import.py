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


def test_what_watches_trainings_loads_when_it_is_asked_for() -> None:
    before, after = loaded("import recorders", "recorders.Inspector")
    assert not [
        name for name in before if name.startswith(("recorders.watch", "recorders.cli", "torch._dynamo", "torch._inductor"))
    ]
    assert "recorders.watch.inspector" in after


@pytest.mark.parametrize("name", recorders.__all__)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(recorders, name).__name__.rpartition(".")[2] == name
    assert name in dir(recorders)


def test_an_unknown_name_is_an_error_of_the_module() -> None:
    with pytest.raises(AttributeError, match="module 'recorders' has no attribute 'Inspecter'"):
        _ = recorders.Inspecter  # type: ignore[attr-defined]
