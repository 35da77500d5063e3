"""The documentation as a site: what its search finds first, which names have a place in it, and how long its pages are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import BROWSER, DRIVER, browser
from paths import ROOT
from searched import FIRST

import recorders
import reducers
from recorders import calibration, lenses, presets, visualizers

pytestmark = pytest.mark.slow

LONG = 5200
"""Pixels, at a width of 1280, up to which a page may be high."""

WHOLE = {
    "cookbook": "recipes, each of which stands by itself",
    "presets": "a section for each preset",
    "reducers": "an example of each reducer",
    "trainers": "a section for each library, of which a reader has one",
    "visualizers": "pictures, side by side",
    "accuracy": "for developers: one table of all errors that were measured",
    "architecture": "for developers: one table of all files",
    "capture": "for developers: one list of what hooks meet",
    "speed": "for developers: all figures, of one machine",
    "genindex": "the index",
}
"""Pages that are longer, each with the reason why it is not split."""

MODULES = {
    "reducers": reducers,
    "recorders": recorders,
    "recorders.watch.calibration": calibration,
    "recorders.watch.lenses": lenses,
    "recorders.watch.presets": presets,
    "recorders.watch.visualizers": visualizers,
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site: that in the folder `RECORDERS_SITE`, or a new one."""
    if built := os.environ.get("RECORDERS_SITE"):
        return Path(built)
    for needed in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("selenium")
    if BROWSER is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver")
    with browser(tmp_path_factory.mktemp("profile"), width=1280) as driver:
        yield driver


def first_result(driver: Any, site: Path, query: str) -> str:
    """The address of the first result, without the site's."""
    driver.get((site / "search.html").as_uri() + f"?q={quote(query)}")
    done = """
        const done = arguments[0];
        (function look() {
            const summary = document.querySelector("#search-results .search-summary");
            /found|did not match/.test(summary?.textContent) ? done() : setTimeout(look, 20);
        })()
    """
    driver.execute_async_script(done)
    found: str = driver.execute_script("return document.querySelector('#search-results li > a')?.href ?? ''")
    return found.removeprefix(site.as_uri() + "/")


def section_of(page: str, anchor: str) -> str:
    """The innermost section of a page, an HTML text, that has the anchor."""
    before = page[: page.index(f'id="{anchor}"') + len(anchor) + 6]
    inside: list[str] = []
    for opened in re.findall(r'<section id="([^"]+)"|</section>', before):
        inside = [*inside, opened] if opened else inside[:-1]
    return inside[-1]


@pytest.fixture(scope="module")
def without_browser(site: Path) -> dict[str, str]:
    """By query the address of the first result, as the scripts of the site find it in node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    said = subprocess.run([node, str(ROOT / "tests" / "search.js"), str(site), *FIRST], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(said.stdout)
    return found


def check(site: Path, query: str, address: str) -> None:
    """Checks that an address is on the page, and in the section, that answers a query."""
    page, _, section = FIRST[query].partition("#")
    found, _, anchor = address.partition("#")
    assert found.partition("?")[0] == page
    if section:
        assert section_of((site / page).read_text(), anchor) == section


@pytest.mark.parametrize("query", FIRST)
def test_the_search_finds_the_right_page_first(without_browser: dict[str, str], site: Path, query: str) -> None:
    check(site, query, without_browser[query])


@pytest.mark.parametrize("query", FIRST)
def test_a_browser_shows_the_same_result_first(driver: Any, site: Path, query: str) -> None:
    check(site, query, first_result(driver, site, query))


def test_every_public_name_has_a_place_in_the_reference(site: Path) -> None:
    packed = (site / "objects.inv").read_bytes().split(b"\n", maxsplit=4)[4]  # below four lines that say what it is
    there = {line.partition(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    modules = {"calibration", "lenses", "presets", "visualizers"}
    for place, module in MODULES.items():
        for name in set(module.__all__) - modules - {"Result", "State"}:  # two aliases of types
            assert f"{place}.{name}" in there or f"recorders.{name}" in there


def test_pages_are_short_or_have_a_reason_to_be_long(driver: Any, site: Path) -> None:
    heights = {}
    for page in sorted(site.rglob("*.html")):
        driver.get(page.as_uri())
        heights[str(page.relative_to(site).with_suffix(""))] = driver.execute_script("return document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > LONG and name not in WHOLE} == {}
    short = {name for name in WHOLE if heights[name] <= 0.9 * LONG}  # other fonts make a page some percent shorter or longer
    assert short == set(), "short by now: take it off the list"
