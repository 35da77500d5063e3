"""The documentation as a site: what its search finds first, which names have a place in it, and how long its pages are."""

from __future__ import annotations

import os
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

import recorders
import reducers
from recorders import calibration, lenses, presets, visualizers

pytestmark = pytest.mark.slow

FIRST = {
    "gradient norm": "cookbook.html#the-norm-of-each-gradient-at-each-step",  # the recipe, with a table and a picture
    "dead relu": "findings/dead-units.html",  # what it means and what to try
    "nan": "findings/nonfinite.html",
    "vanishing gradients": "findings/vanishing-gradients.html",
    "kurtosis": "reducers.html#moments-mean-variance-skewness-kurtosis",  # what computes it, with its result
    "histogram": "reducers.html#distributions-quantiles-and-histograms",
    "hook": "capture.html",  # what hooks see, and when they are called
    "compile": "capture.html#torch-compile",
    "save": "recordings.html#saving-and-loading",
    "overhead": "speed.html#if-it-costs-too-much",  # figures are above it, on the same page
    "attention": "presets.html#attention-entropy",  # one line that records it
    "outliers": "presets.html#outliers",
    "fsdp": "distributed.html",
    "wandb": "wandb-watch.html",
    "transformerlens": "other-tools.html#transformerlens",
    "captum": "other-tools.html#captum",
}
"""What people type, and the page, or the section of it, that answers."""

LONG = 5200
"""Pixels, at a width of 1280, up to which a page of the API reference may be high."""

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


@pytest.mark.parametrize("query", FIRST)
def test_the_search_finds_the_right_page_first(driver: Any, site: Path, query: str) -> None:
    page, _, section = FIRST[query].partition("#")
    address = first_result(driver, site, query)
    found, _, anchor = address.partition("#")
    assert found.partition("?")[0] == page
    if section:
        driver.get(f"{site.as_uri()}/{address}")
        assert driver.execute_script("return document.getElementById(arguments[0]).closest('section').id", anchor) == section


def test_every_public_name_has_a_place_in_the_reference(site: Path) -> None:
    packed = (site / "objects.inv").read_bytes().split(b"\n", maxsplit=4)[4]  # below four lines that say what it is
    there = {line.partition(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    modules = {"calibration", "lenses", "presets", "visualizers"}
    for place, module in MODULES.items():
        for name in set(module.__all__) - modules - {"Result", "State"}:  # two aliases of types
            assert f"{place}.{name}" in there or f"recorders.{name}" in there


def test_pages_of_the_reference_are_short(driver: Any, site: Path) -> None:
    heights = {}
    for page in sorted((site / "api").rglob("*.html")):
        driver.get(page.as_uri())
        heights[page.name] = driver.execute_script("return document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > LONG} == {}
