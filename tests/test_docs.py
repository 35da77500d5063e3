"""What the documents show is what happens: every Python block in them is run, and prints the text block that follows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from paths import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

RUN = [page for page in PAGES if "```python" in page.read_text() and page.name != "cookbook.md" and page.parent.name != "findings"]
"""Pages whose blocks are run one after another. `test_cookbook.py` runs each recipe by itself, and `test_pages.py` what confirms a
finding, on a training that has it."""

NEEDED = {
    "generating.md": ("transformers",),
    "trainers.md": ("lightning", "transformers", "accelerate", "ignite", "keras", "tensorboard"),
}
"""Libraries that the test command does not install; `.ci/run` does."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Python blocks, each with the output that is shown right below it; "" if none is."""
    pattern = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    return re.findall(pattern, page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for library in NEEDED.get(page.name, ()):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # whatever ran before in this process
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for number, (block, shown) in enumerate(blocks(page)):
            exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
            printed = capsys.readouterr().out
            assert not shown or printed == shown
    finally:
        namespace.clear()  # callables of monitors hold it, and with it all nets and recorders of the page


OURS = """
finding gate inspector leaf lens lift monitor observation operand pattern preset recorder recording reducer ring state subrecorder
tick timeline
"""
"""Words of the project, or of the field with a meaning of its own here."""


def test_the_quickstart_uses_no_word_that_it_did_not_explain() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text().partition("## Go on")[0]  # links, each named for what it is
    for noise in (r"^```.*?^```", r"`[^`]*`", r"\]\([^)]*\)", r"^#.*?$"):
        page = re.sub(noise, "", page, flags=re.MULTILINE | re.DOTALL)
    for word in OURS.split():
        first = re.search(rf"\*?\b{word}s?\b\*?", page, flags=re.IGNORECASE)
        assert first is None or re.fullmatch(r"\*\w+\*", first[0]), f"{first[0]!r} is not explained where it comes first"


def test_every_picture_is_shown_and_a_command_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pictures

    named = {name for page in PAGES for name in re.findall(r"\]\((?:docs/)?images/([^)]+)\)", page.read_text())}
    files = {path.name: path.stat().st_size for path in (ROOT / "docs" / "images").iterdir()}
    assert named == files.keys() == pictures.PICTURES.keys() == pictures.SHOWN.keys()
    assert max(files.values()) < 300_000


def test_every_block_of_output_stands_below_the_code_that_prints_it() -> None:
    found = {page: [shown for _, shown in blocks(page) if shown] for page in PAGES}
    assert found[ROOT / "README.md"]
    for page in PAGES:
        assert len(found[page]) == page.read_text().count("\n```text\n"), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_tree_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_parts_are_what_was_measured_and_what_the_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import table

    for page, text in table.written():
        assert page.read_text() == text, f"{page.name} is out of date: python benchmarks/table.py"


def test_the_tables_of_the_architecture_name_every_package_and_no_file_that_is_gone() -> None:
    rows = [line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if line.startswith("|")]
    named = set(re.findall(r"`(\w+\.py|\w+/)`", "\n".join(rows)))
    files = [path for package in ("reducers", "recorders") for path in (ROOT / package).rglob("*.py")]
    packages = {f"{path.parent.name}/" for path in files if path.name == "__init__.py"} - {"reducers/", "recorders/"}
    assert named - {path.name for path in files} - packages == set()
    assert packages - named == set()


def test_every_reducer_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import floor

    assert floor.without_row() == []
