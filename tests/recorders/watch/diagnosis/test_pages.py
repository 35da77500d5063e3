"""Each kind of finding has a page that names its causes, shows a picture, and has code that tells the planted case from health."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from paths import ROOT

from benchmarks.diagnosis.planted import CASES, Setup, planted, without_fault
from recorders.watch.diagnosis import limits
from recorders.watch.diagnosis.causes import CAUSES, KINDS
from recorders.watch.diagnosis.finding import Findings, fault

PAGES = ROOT / "docs" / "findings"
HEADINGS = (
    "What was seen",
    "Why it matters",
    "How to confirm it",
    "Likely causes",
    "When it is no fault",
    "Threshold",
)


def page(kind: str) -> str:
    return (PAGES / f"{kind}.md").read_text()


def test_every_kind_has_a_page_and_every_page_a_kind() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*KINDS, "index"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_says_the_same_things_in_the_same_order(kind: str) -> None:
    text = page(kind)
    assert tuple(re.findall("^## (.*)$", text, flags=re.MULTILINE)) == HEADINGS
    assert KINDS[kind].why in text
    for cause in KINDS[kind].causes:
        assert CAUSES[cause].remedy in text
    for part in text.split("\n## "):
        assert re.sub("<!--.*?-->", "", part.partition("\n")[2]).strip(), part  # no heading without a text
    assert len(text.splitlines()) < 75


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_has_a_picture_that_is_small(kind: str) -> None:
    (picture,) = re.findall(r"!\[.+\]\((pictures/[a-z-]+\.png)\)", page(kind))
    assert picture == f"pictures/{kind}.png"
    assert (PAGES / picture).stat().st_size < 25_000


def test_there_is_no_picture_without_a_page() -> None:
    assert {path.stem for path in (PAGES / "pictures").iterdir()} == {*KINDS}


def test_the_generated_parts_are_those_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import findings_pages

    for path, text in findings_pages.written():
        assert path.read_text() == text, f"{path.name} is out of date: python benchmarks/findings_pages.py"


@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_on_a_page_have_the_values_that_the_code_has(kind: str) -> None:
    threshold = page(kind).rpartition("## Threshold")[2]
    for name, shown in re.findall(r"`([A-Z_]{3,}(?:\.[a-z]+)?)(?: = ([^`]+))?`", threshold):
        value = limits
        for part in name.split("."):
            value = getattr(value, part)
        assert not shown or eval(shown) == value, f"{name} is {value}"


@cache
def health() -> Setup:
    setup = Setup()
    setup.train()
    return setup


def printed(setup: Setup, kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the code on a page prints after a training."""
    setup.train()
    names = {
        "net": setup.net,
        "optimizer": setup.made,
        "criterion": setup.loss,
        "loader": [setup.batch(step) for step in range(setup.steps)],
        "recorder": setup.recorder,
        "good": health().recorder,
        "train": lambda steps: setup.go_on(steps),
        "torch": torch,
    }
    x, y = setup.batch(setup.steps - 1)  # of which the gradients are
    (code,) = re.findall(r"```python\n(.*?)```", page(kind), flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 9
    exec(compile(code, f"{kind}.md", "exec"), {**names, "x": x, "y": y})
    return capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_code_on_a_page_tells_the_planted_case_from_health(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = planted(kind) if kind in CASES else Setup()
    if kind not in CASES:
        faulty.rate /= 10
    assert printed(faulty, kind, capsys).endswith("True")
    assert printed(without_fault(kind), kind, capsys).endswith("False")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_page_names_the_causes_that_the_planted_case_is_told_with(kind: str) -> None:
    found = planted(kind).run()
    for one in [*found, *found.notices]:
        if one.kind == kind:
            assert [cause for cause in one.causes if f"(`{cause}`)" not in page(kind)] == []


def test_findings_name_their_pages_in_one_line() -> None:
    one, other = fault("dead-units", "3", "all"), fault("clipped", "optimizer", "tiny")
    assert one.page == "docs/findings/dead-units.md"
    assert (ROOT / one.page).is_file()
    assert str(Findings([one, one, other], [])).splitlines()[3:] == ["pages: docs/findings/dead-units.md, clipped.md"]
