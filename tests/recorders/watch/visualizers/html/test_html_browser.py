"""The page in a browser: it opens from a file, asks for nothing, and does what it says."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import BROWSER, DRIVER, browser, complaints, opened, requests
from pages import charted, filled
from test_html_page import HOSTILE, empty
from torch import nn

from recorders import Inspector, lenses
from recorders.watch.charts import Chart, ChartView
from recorders.watch.diagnosis.finding import Finding, Findings, fault
from recorders.watch.lenses import Across
from recorders.watch.timeline import Timeline
from recorders.watch.visualizers.html import HtmlVisualizer, Run, write_report

pytest.importorskip("selenium")
if not (BROWSER and DRIVER):
    pytest.skip("no chromium or no chromedriver", allow_module_level=True)

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[Open]:
    """Writes a page, opens it, and at the end asserts that it neither complained nor asked for anything else."""
    path = tmp_path / "report.html"

    def show(*runs: Any, fragment: str = "", title: str = "Training report") -> Any:
        return opened(driver, write_report(path, *runs, title=title), fragment)

    driver.get("about:blank")
    complaints(driver), requests(driver)
    yield show
    assert complaints(driver) == []
    assert {address.partition("#")[0] for address in requests(driver)} <= {path.as_uri()}
    driver.execute_script("document.documentElement.dataset.theme || 0; try { localStorage.clear() } catch {}")


def texts(driver: Any, selector: str) -> list[str]:
    return [found.text for found in driver.find_elements(By.CSS_SELECTOR, selector)]


def listed(driver: Any) -> list[str]:
    """The layers in the table, from top to bottom."""
    script = "return [...document.querySelectorAll('.row.body')].sort((a, b) => a.dataset.at - b.dataset.at)"
    return list(driver.execute_script(f"{script}.map((row) => row.querySelector('.link').textContent)"))


def press(driver: Any, *keys: str) -> None:
    for key in keys:
        driver.switch_to.active_element.send_keys(key)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within five seconds")


def settled(driver: Any) -> None:
    """Waits until the page, which scrolls smoothly, stands still for a quarter of a second."""
    script = """
const done = arguments[0];
let before = -1, still = 0;
(function look() {
  still = scrollY === before ? still + 1 : 0;
  before = scrollY;
  if (still > 5) done(); else setTimeout(look, 50);
})();"""
    driver.execute_async_script(script)


def pixel(driver: Any, selector: str, x: int, y: int) -> list[int]:
    """The red, green and blue of a canvas at a place in CSS pixels."""
    script = """
const canvas = document.querySelector(arguments[0]), scale = canvas.width / canvas.clientWidth;
draw(canvas);
const copy = new OffscreenCanvas(1, 1).getContext("2d");
copy.drawImage(canvas, arguments[1] * scale, arguments[2] * scale, 1, 1, 0, 0, 1, 1);
return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3)"""
    return list(driver.execute_script(script, selector, x, y))


def test_a_page_shows_findings_first_then_charts_then_layers(page: Open) -> None:
    dead = Finding("net.b", "3 of 4 units are dead", "Nothing passes.", "a smaller rate")
    driver = page(Run(filled(), "", [dead]), title="My run")
    assert driver.title == driver.find_element(By.ID, "title").text == "My run"
    assert texts(driver, "h2")[:3] == ["Findings", "The whole network", "Layers over time"]
    assert texts(driver, ".finding")[0] == "error net.b 3 of 4 units are dead\nNothing passes. Try: a smaller rate."
    assert texts(driver, "#overall h3, #heat h3") == ["Loss", "Norm"]
    assert driver.find_element(By.ID, "summary").text.startswith("4 layers · 5 ticks, 0 to 4 · written ")
    assert texts(driver, "#overall .legend")[0] == "train: 0.2"
    assert listed(driver) == ["net.a", "net.b", "net.c", "other"]
    driver.find_element(By.CSS_SELECTOR, ".finding .link").click()
    assert texts(driver, "#panel h2") == ["net.b"]
    assert "3 of 4 units are dead" in driver.find_element(By.ID, "panel").text


def test_a_finding_has_its_severity_and_its_likely_causes(page: Open) -> None:
    found = [fault("dead-units", "net.b", "all are dead"), fault("odd-momentum", "optimizer", "its momentum is 1")]
    found = [replace(found[0], severity="error"), replace(found[1], severity="warning")]
    driver = page(Run(filled(), "", [*found, replace(found[0], layer="net.c", severity="warning")]))
    cards = driver.find_elements(By.CSS_SELECTOR, "#findings .finding")
    assert [card.get_attribute("class") for card in cards] == ["card finding error", *["card finding warning"] * 2]
    assert [card.text.split("\n")[0] for card in cards] == [
        "error net.b all are dead",
        "warning optimizer its momentum is 1",
        "warning net.c all are dead",
    ]
    for card, one in zip(cards, found, strict=False):
        assert card.text.split("\n")[1] == f"{one.why} Likely: {one.likely}. Try: {one.remedy}."
    marks = driver.execute_script("return [...document.querySelectorAll('.row .name [role=img]')].map((mark) => mark.className)")
    assert marks == ["bad", "warn"]
    driver.execute_script("openPanel(2)")
    assert texts(driver, "#panel .finding")[0].startswith("warning")


def test_a_finding_names_its_page_which_is_text(page: Open) -> None:
    dead = [fault("dead-units", name, "all are dead", 2) for name in ("net.b", "net.c")]
    momentum = fault("odd-momentum", "net.b", "its momentum is 1")
    own = [replace(momentum, kind=kind, layer="net.a") for kind in ("of-my-own", "")]
    driver = page(Run(filled(), "", [*dead, momentum, *own]))
    see = "See docs/findings/{}.md in the repository of torch-recorders."
    cards = texts(driver, "#findings .finding")
    assert [card.split("\n")[-1] for card in cards[:2]] == [see.format("dead-units"), see.format("odd-momentum")]
    assert len(cards) == 3  # one cause is told once; kinds without a page are told together, apart from those that have one
    assert "docs/findings" not in cards[2]
    driver.execute_script("openPanel(layers.indexOf('net.b'))")
    assert texts(driver, "#panel .finding .page") == [see.format("dead-units"), see.format("odd-momentum")]
    assert texts(driver, "#panel .legend")[0].endswith("\u2506 dead-units since tick 2")
    assert driver.execute_script("return document.links.length") == 0


def test_a_page_that_is_markup_is_shown_as_text(page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recorders.watch.visualizers.html.page.KINDS", HOSTILE)
    driver = page(Run(filled(), "", [Finding("net.b", "odd", name, "remedy", kind=name) for name in HOSTILE]))
    driver.execute_script("openPanel(layers.indexOf('net.b'))")
    shown = "return [...document.querySelectorAll(arguments[0])].map((code) => code.textContent)"
    for box in ("#findings", "#panel"):
        assert driver.execute_script(shown, f"{box} .page code") == [f"docs/findings/{name}.md" for name in HOSTILE]
    assert driver.execute_script("return [window.hacked ?? null, document.images.length]") == [None, 0]


def test_the_moment_since_when_is_marked_on_the_charts_of_the_layer(page: Open) -> None:
    dead = replace(fault("dead-units", "net.b", "all are dead", 2), severity="error")
    rises = replace(fault("loss-rises", "train", "the loss rose", 3), severity="warning")
    driver = page(Run(filled(), "", [dead, rises, fault("odd-momentum", "net.c", "since a step that is no tick", 77)]))
    loss = driver.find_element(By.CSS_SELECTOR, "#overall canvas.lines")
    assert (loss.get_attribute("aria-label") or "").endswith("warning: the loss rose, since tick 3")
    assert texts(driver, "#overall .legend") == ["train: 0.2\n\u2506 loss-rises since tick 3"]
    assert "since when something was found" in texts(driver, "#heat .note")[0]
    place = "return marksOf(runs[0], layers.indexOf('{}')).map((mark) => [mark.tick, mark.at, mark.style])"
    assert driver.execute_script(place.format("net.b")) == [[2, 2, "bad"]]
    assert driver.execute_script(place.format("net.a")) == []
    assert driver.execute_script(place.format("net.c")) == []
    assert "since a step that is no tick, since step 77" in driver.find_element(By.ID, "findings").text
    press(driver, "l")
    driver.execute_script("openPanel(1)")
    assert texts(driver, "#panel .legend")[0].endswith("\u2506 dead-units since tick 2")
    (item,) = driver.find_elements(By.CSS_SELECTOR, "#panel .legend .bad")
    assert item.get_attribute("title") == "error: all are dead, since tick 2"
    chart = driver.find_element(By.CSS_SELECTOR, "#panel canvas.lines")
    width = driver.execute_script("return arguments[0].clientWidth", chart)
    bad = driver.execute_script("return colour('--bad').match(/\\d+/g).map(Number)")
    middle = 58 + (width - 10 - 58) / 2  # of ticks 0 to 4
    assert bad in [pixel(driver, "#panel canvas.lines", middle + by, 7) for by in (0, 1, 2, 3)]  # the flag
    driver.execute_script("arguments[0].focus()", chart)
    press(driver, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert driver.find_element(By.ID, "tip").text.split("\n")[0] == "tick 2"
    assert driver.find_element(By.ID, "tip").text.endswith("error: all are dead, since tick 2")
    press(driver, Keys.ARROW_LEFT)
    assert "dead" not in driver.find_element(By.ID, "tip").text


def test_search_and_order_apply_to_table_and_heat_maps(page: Open) -> None:
    driver = page(filled())
    search = driver.find_element(By.ID, "search")
    search.send_keys("NET b")
    assert driver.find_element(By.ID, "count").text == "1 of 4"
    assert listed(driver) == ["net.b"]
    assert "1 layers over 5 ticks" in (driver.find_element(By.CSS_SELECTOR, "canvas.map").get_attribute("aria-label") or "")
    search.send_keys(Keys.ESCAPE)
    assert len(listed(driver)) == 4
    press(driver, "l")  # brings the table into view
    settled(driver)
    driver.find_elements(By.CSS_SELECTOR, ".titles button")[1].click()
    assert listed(driver) == ["other", "net.c", "net.b", "net.a"]
    assert driver.find_elements(By.CSS_SELECTOR, ".titles [aria-sort]")[1].get_attribute("aria-sort") == "descending"
    driver.find_element(By.ID, "reverse").click()
    assert listed(driver) == ["net.a", "net.b", "net.c", "other"]
    address = driver.current_url
    driver.refresh()
    opened(driver, Path(address.partition("#")[0].removeprefix("file://")), f"#{address.partition('#')[2]}")
    assert driver.find_element(By.ID, "sort").get_attribute("value") == "last 0"


def test_layers_without_a_value_come_last_in_both_directions(page: Open) -> None:
    rows = {f"N/{name}": {0: {"mean": value}} for name, value in {"low": 1.0, "nan": math.nan, "high": 9.0}.items()}
    charts = [Chart("M", ("x",), ranges=None), Chart("N", ("x",), ranges=None)]
    driver = page(charted(charts, {"M/none": {0: {"mean": 0.0}}, **rows}))
    for keys, order in ((None, ["nan", "high", "low", "none"]), ("d", ["low", "high", "nan", "none"])):
        if keys is None:
            driver.execute_script("sortBy('last 1')")
        else:
            press(driver, keys)
        assert listed(driver) == order


def test_keys_do_what_the_help_says(page: Open) -> None:
    driver = page(filled())
    press(driver, "?")
    assert "search layers" in driver.find_element(By.ID, "help").text
    press(driver, Keys.ESCAPE)
    until(lambda: driver.switch_to.active_element.tag_name == "body")  # a key sent before is for the closed list
    press(driver, "/")
    assert driver.switch_to.active_element.get_attribute("id") == "search"
    press(driver, "net", Keys.ESCAPE, "j", "j")
    assert driver.switch_to.active_element.text == "net.b"
    press(driver, "k", Keys.ARROW_DOWN, Keys.ENTER)
    assert texts(driver, "#panel h2") == ["net.b"]
    press(driver, "j")
    assert texts(driver, "#panel h2") == ["net.c"]
    press(driver, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert texts(driver, "#panel h2") == ["net.a"]
    press(driver, Keys.ESCAPE)
    assert not driver.execute_script("return document.getElementById('panel').open")
    press(driver, "s")
    assert driver.switch_to.active_element.get_attribute("id") == "sort"


def test_dark_and_light_follow_the_system_and_the_switch(page: Open) -> None:
    driver = page(filled())
    ground = "return getComputedStyle(document.body).backgroundColor"
    emulated = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    light = driver.execute_script(ground)
    emulated["features"][0]["value"] = "dark"
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    assert driver.execute_script(ground) != light
    until(lambda: driver.find_element(By.ID, "theme").text == "Light")
    press(driver, "t")
    assert driver.execute_script(ground) == light
    driver.refresh()
    until(lambda: bool(driver.execute_script("return document.documentElement.dataset.ready")))
    assert driver.execute_script(ground) == light
    driver.find_element(By.ID, "theme").click()
    assert driver.execute_script(ground) != light
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_two_runs_stand_side_by_side_on_the_same_axes(page: Open) -> None:
    first, second = filled(), filled(times=2.0, ticks=4)
    second.append(9, {"Norm/net.b": {"mean": 1000.0}})
    driver = page(Run(first, "one"), Run(second, "two", ()))
    assert texts(driver, "#heat figcaption") == ["one", "two"]
    left, right = driver.find_elements(By.CSS_SELECTOR, "#heat canvas.map")
    assert left.rect["y"] == right.rect["y"]
    assert left.rect["x"] + left.rect["width"] < right.rect["x"]
    driver.execute_script("sortBy('runs 0')")
    assert listed(driver)[0] == "net.b"
    driver.execute_script("openPanel(layers.indexOf('net.b'))")
    assert texts(driver, "#panel figcaption") == ["one", "two"]
    axes = driver.execute_script("return [axisOf(layered[0], layers.indexOf('net.b')).high, span()]")
    assert axes[0] >= 1000
    assert axes[1] == [0, 9]
    assert texts(driver, "#overall .legend")[0].split("\n") == ["train, one: 0.2", "train, two: 0.25"]


def test_hostile_names_are_shown_and_do_nothing(page: Open) -> None:
    findings = [Finding(name, name, name, name, kind=name) for name in HOSTILE]
    driver = page(Run(filled(HOSTILE), HOSTILE[0], findings), Run(filled(HOSTILE), HOSTILE[1]), title=HOSTILE[0])
    assert listed(driver) == list(HOSTILE)
    assert driver.execute_script("return document.getElementById('title').textContent") == HOSTILE[0]
    for layer in range(len(HOSTILE)):
        driver.execute_script(f"openPanel({layer})")
        assert driver.execute_script("return document.getElementById('panel-title').textContent") == HOSTILE[layer]
    assert driver.execute_script("return [window.hacked ?? null, document.images.length]") == [None, 0]
    assert driver.execute_script("return document.querySelectorAll('script').length") == 2


def test_the_page_cannot_be_made_to_run_markup(driver: Any, tmp_path: Path) -> None:
    opened(driver, write_report(tmp_path / "report.html", filled()))
    script = "try { document.body.innerHTML = '<img src=x onerror=1>'; return 'done' } catch (error) { return error.name }"
    assert driver.execute_script(script) == "TypeError"
    complaints(driver)


def test_values_that_are_not_finite_are_marked_and_missing_ones_are_not(page: Open) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, 2.0]
    rows = {"N/a": {tick: {"mean": value} for tick, value in enumerate(values)}, "N/b": {0: {"mean": 1.0}, 4: {"mean": 2.0}}}
    driver = page(charted([Chart("N", ("x",), ranges=None)], rows))
    script = "return [...series(layered[0], runs[0], layers.indexOf(arguments[0]), 'mean')].map(shown)"
    assert driver.execute_script(script, "a") == ["1", "NaN", "∞", "\u2212∞", "2"]
    assert driver.execute_script(script, "b") == ["1", "\u2013", "\u2013", "\u2013", "2"]
    assert driver.execute_script("return badAt(layered[0], runs[0], 0)") == [1, 2, 3]
    assert "NaN or infinite in 1 layer, first in a at tick 1" in driver.find_element(By.CSS_SELECTOR, "#heat .note").text
    assert "NaN or infinite values since tick 1, at 3 ticks" in driver.find_element(By.ID, "findings").text
    bad, hatch = driver.execute_script("return ['--bad', '--hatch'].map((name) => colour(name).match(/\\d+/g).map(Number))")
    assert pixel(driver, "canvas.map", 150 + 60, 9) == bad
    assert pixel(driver, "canvas.map", 150 + 60, 27) == hatch
    assert pixel(driver, "canvas.map", 150 + 20, 9) not in (bad, hatch)
    driver.execute_script("openPanel(0)")
    assert "NaN or infinite values" in driver.find_element(By.CSS_SELECTOR, "#panel .legend").text


def test_maps_of_zeros_are_dark_and_those_of_bounded_values_use_all_colours(page: Open) -> None:
    bounded = Chart("Share", ("x",), ranges=None, limits=(0.0, 1.0))
    rows = {f"Share/{layer}": {0: {"mean": value}} for layer, value in (("a", 0.01), ("b", 0.02))}
    rows |= {f"Zero/{layer}": {0: {"mean": 0.0}} for layer in "ab"}
    signed = Chart("Cosine", ("x",), ranges=None, limits=(-1.0, 1.0))
    rows |= {f"Cosine/{layer}": {0: {"mean": value}} for layer, value in (("a", -0.1), ("b", 0.05))}
    driver = page(charted([bounded, Chart("Zero", ("x",), ranges=None), signed], rows))
    dark, bright, brown = driver.execute_script("return [table(CIVIDIS)[0], table(CIVIDIS)[255], table(DIVERGING)[0]]")
    share, zero, cosine = (f"#heat .card:nth-child({number}) canvas.map" for number in (1, 2, 3))
    assert [pixel(driver, share, 170, y) for y in (9, 27)] == [dark, bright]
    assert [pixel(driver, zero, 170, y) for y in (9, 27)] == [dark, dark]
    assert pixel(driver, cosine, 170, 9) == brown
    notes = texts(driver, "#heat .note")
    assert "of possible 0 to 1" in notes[0]
    assert notes[1] == "all are 0"
    assert "of possible \u22121 to 1" in notes[2]


def test_what_is_not_in_view_is_drawn_for_print(page: Open) -> None:
    charts = [Chart(f"Norm {number}", ("x",), ranges=None) for number in range(30)]
    rows = {f"Norm {number}/{layer}": {0: {"mean": 1.0}, 1: {"mean": 2.0}} for number in range(30) for layer in "ab"}
    driver = page(charted(charts, rows))
    blank = """const pen = new OffscreenCanvas(8, 8).getContext("2d", { willReadFrequently: true });
return [...document.querySelectorAll("canvas.map")].filter((canvas) => {
  pen.clearRect(0, 0, 8, 8);
  pen.drawImage(canvas, 0, 0, 8, 8);
  return pen.getImageData(0, 0, 8, 8).data.every((byte) => byte === 0);
}).length"""
    assert driver.execute_script(blank) > 10
    driver.execute_cdp_cmd("Page.printToPDF", {})
    assert driver.execute_script(blank) == 0


def test_classes_are_shown_and_found_and_the_axis_has_its_name(page: Open) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with Inspector(net, lenses.NonFinite()) as inspector:
        for _ in inspector.range(3):
            net(torch.ones(2, 2))
    driver = page(inspector.timeline)
    assert texts(driver, ".row.body .kind") == ["Linear", "Tanh"]
    assert driver.find_element(By.ID, "summary").text.startswith("2 layers · 3 epochs, 0 to 2 · ")
    assert driver.execute_script("return axisName") == "epoch"
    driver.execute_script("document.querySelector('canvas.map').focus()")
    press(driver, Keys.ARROW_DOWN)
    assert driver.find_element(By.ID, "tip").text == "0\nepoch 2: 0"
    driver.execute_script("openPanel(1)")
    assert "Tanh" in texts(driver, "#panel h2")[0]
    driver.execute_script("document.querySelector('#panel').close()")
    driver.find_element(By.ID, "search").send_keys("linear")
    assert listed(driver) == ["0"]


def written(driver: Any, selector: str) -> list[str]:
    """The texts that are drawn on a canvas."""
    script = """
const kept = CanvasRenderingContext2D.prototype.fillText, found = [];
CanvasRenderingContext2D.prototype.fillText = function (text) { found.push(text); };
draw(document.querySelector(arguments[0]));
CanvasRenderingContext2D.prototype.fillText = kept;
return found"""
    return list(driver.execute_script(script, selector))


def drag(driver: Any, selector: str, start: float, end: float) -> None:
    """Drags the pointer over a part of the width of a canvas."""
    script = """
const canvas = document.querySelector(arguments[0]), box = canvas.getBoundingClientRect();
canvas.setPointerCapture = () => {};
const at = (kind, share) => canvas.dispatchEvent(new PointerEvent(kind, {
  bubbles: true, pointerId: 1, clientX: box.left + 58 + share * (box.width - 68), clientY: box.top + 50 }));
at("pointermove", arguments[1]);
at("pointerdown", arguments[1]);
at("pointermove", arguments[2]);
at("pointerup", arguments[2]);"""
    driver.execute_script(script, selector, start, end)


def test_the_axis_has_its_name_in_lines_and_maps(page: Open) -> None:
    driver = page(filled())
    driver.execute_script("openPanel(0)")
    assert "tick" in written(driver, "canvas.map")
    assert "tick" in written(driver, "#panel canvas.lines")


def test_ticks_that_are_dragged_over_are_all_that_charts_show(page: Open) -> None:
    rows = {f"Norm/{layer}": {tick: {"mean": 100.0 + tick if tick < 50 else 1.0} for tick in range(101)} for layer in "ab"}
    rows |= {"Loss/train": {tick: {"mean": float(tick)} for tick in range(101)}}
    driver = page(charted([Chart("Norm", ("x",), ranges=None), Chart("Loss", ("loss",), ranges=None)], rows))
    assert not driver.find_element(By.ID, "whole").is_displayed()
    assert "all are" not in texts(driver, "#heat .note")[0]
    drag(driver, "#overall canvas.lines", 0.6, 0.9)
    assert driver.execute_script("return zoom") == [60, 90]
    assert driver.execute_script("return within(runs[0].ticks)") == [60, 91]
    assert "31 ticks" in driver.execute_script("return document.querySelector('canvas.map').getAttribute('aria-label')")
    assert texts(driver, "#heat .note")[0] == "all are 1"
    assert {"60", "90", "tick"} <= set(written(driver, "#overall canvas.lines"))
    assert "0" not in written(driver, "#overall canvas.lines")
    address = driver.execute_script("return location.hash")
    driver.find_element(By.ID, "whole").click()
    assert driver.execute_script("return zoom") is None
    drag(driver, "#overall canvas.lines", 0.5, 0.5)  # a click is no range
    assert driver.execute_script("return zoom") is None
    assert page(charted([Chart("Loss", ("loss",), ranges=None)], rows), fragment=address).execute_script("return zoom") == [60, 90]
    press(driver, "0")
    assert driver.execute_script("return zoom") is None
    driver.execute_script("document.querySelector('#overall canvas.lines').focus()")
    press(driver, Keys.ARROW_LEFT, Keys.ENTER, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    assert driver.execute_script("return zoom") == [98, 100]


def test_every_chart_has_a_logarithmic_axis_if_it_is_chosen(page: Open) -> None:
    rows = {f"Norm/{layer}": {tick: {"mean": 10.0**tick} for tick in range(5)} for layer in "ab"}
    driver = page(charted([Chart("Norm", ("x",), ranges=None)], rows))
    driver.execute_script("openPanel(0)")
    plain = written(driver, "#panel canvas.lines")
    box = driver.find_element(By.CSS_SELECTOR, "#panel input.log")
    assert not box.is_selected()
    box.click()
    assert {"1", "100", "1.00e4".replace(".00", "")} & set(written(driver, "#panel canvas.lines"))
    assert "100" in written(driver, "#panel canvas.lines")
    assert "100" not in plain
    assert driver.find_element(By.CSS_SELECTOR, "#heat input.log").is_selected()  # it is that of the chart, not of the card
    box.click()
    assert written(driver, "#panel canvas.lines") == plain


def test_times_have_a_zone(page: Open) -> None:
    driver = page(filled())
    assert re.search(r"written \d{4}-\d\d-\d\d \d\d:\d\d UTC[+-]\d\d:\d\d", driver.find_element(By.ID, "summary").text)


def test_arrow_keys_read_a_heat_map_and_enter_opens_its_layer(page: Open) -> None:
    driver = page(filled())
    driver.execute_script("document.querySelector('canvas.map').focus()")
    press(driver, Keys.ARROW_DOWN)
    assert driver.find_element(By.ID, "tip").text == "net.a\ntick 4: 5"
    press(driver, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    assert driver.find_element(By.ID, "tip").text == "net.b\ntick 3: 8"
    press(driver, Keys.ENTER)
    assert texts(driver, "#panel h2") == ["net.b"]
    driver.execute_script("document.querySelector('#panel canvas.lines').focus()")
    press(driver, Keys.ARROW_RIGHT)
    assert driver.find_element(By.ID, "tip").text.startswith("tick 4\nmean: 10\n")
    press(driver, Keys.ARROW_LEFT)
    assert driver.find_element(By.ID, "tip").text.startswith("tick 3\nmean: 8\n")
    assert texts(driver, "#panel h2") == ["net.b"]


def test_charts_that_compare_equal_those_of_python(page: Open) -> None:
    rows = {
        "N/a": {0: {"mean": 1.0}, 1: {"mean": math.nan}, 2: {"mean": 2.0}},
        "N/b": {0: {"mean": 3.0}, 1: {"mean": 4.0}, 2: {"mean": 2.0}},
    }
    compared = [
        Chart("Shares", (), across=(Across("N", "share"),)),
        Chart("Ends", (), across=(Across("N", "min"), Across("N", "max"))),
    ]
    timeline = charted([Chart("N", ("x",), ranges=None), *compared], rows)
    driver = page(timeline)
    for tick in range(3):
        shares = {point.layer: point.value for point in ChartView(compared[0], timeline, ("a", "b")).points(tick)}
        for layer in "ab":
            script = f"return shown(series(charts[1], runs[0], layers.indexOf('{layer}'), 'share')[{tick}])"
            assert driver.execute_script(script) == (f"{shares[layer]:.4g}" if layer in shares else "\u2013")
        points = [(p.line, p.layer, p.value) for p in ChartView(compared[1], timeline, ("a", "b")).points(tick)]
        script = f"return extremes(charts[2], runs[0]).map((line) => [line.name, layers[line.from[{tick}]], line.values[{tick}]])"
        assert [tuple(line) for line in driver.execute_script(script)] == points


def test_distributions_have_bands_within_the_limits(page: Open) -> None:
    row = {"mean": 0.9, "std": 0.3, "median": 0.8, "Q1": 0.7, "Q3": 0.95, "min": 0.1, "max": 1.0}
    chart = Chart("C", ("x",), lines=("mean", "median"), ranges=("std", "min-max", "Q1-Q3"), limits=(0.0, 1.0))
    driver = page(charted([chart], {"C/a": dict.fromkeys(range(3), row)}))
    driver.execute_script("openPanel(0)")
    assert texts(driver, "#panel .legend")[0].split("\n") == ["mean", "median", "min to max", "mean ± std", "Q1 to Q3"]
    low, high = driver.execute_script("const ends = band(charts[0], runs[0], 0, 'std'); return [ends.low[0], ends.high[0]]")
    assert (low, high) == (pytest.approx(0.6), 1.0)


@pytest.mark.parametrize("ticks", [0, 1])
def test_no_tick_and_one_tick_can_be_opened(page: Open, ticks: int) -> None:
    driver = page(filled(ticks=1) if ticks else empty())
    assert ("1 tick" if ticks else "0 ticks") in driver.find_element(By.ID, "summary").text
    assert len(listed(driver)) == (4 if ticks else 0)
    if ticks:
        driver.execute_script("openPanel(0)")
        assert texts(driver, "#panel h2") == ["net.a"]


def test_no_findings_are_told_from_none_computed(page: Open) -> None:
    driver = page(Run(filled(), "one", ()), Run(filled(), "two"))
    found = texts(driver, "#findings .card")
    assert found == ["No fault was found.", "No findings were computed for this page."]


def test_an_empty_list_says_what_was_examined(page: Open) -> None:
    notice = Finding("net.b", "3 of 8 units are dead", "why", "remedy")
    judged = Findings([], ["saturation: record Saturation"], ["dead units: 2 of 4"], [notice])
    driver = page(Run(filled(), "one", judged), Run(filled(), "two", Findings([], ["dead units: record Activity"])))
    fine, unknown = driver.find_elements(By.CSS_SELECTOR, "#findings .card")
    assert (fine.text, fine.get_attribute("class")) == ("No fault was found.", "card fine")
    assert (unknown.text, unknown.get_attribute("class").strip()) == ("Nothing was examined, so no fault could be found.", "card")
    assert texts(driver, "#findings .note") == [
        "Notice: net.b: 3 of 8 units are dead",
        "Examined: dead units: 2 of 4 layers",
        "Not examined: saturation: record Saturation",
        "Not examined: dead units: record Activity",
    ]


def test_each_run_has_its_own_values_that_are_not_finite(page: Open) -> None:
    rows = {"N/a": {0: {"mean": math.nan}, 1: {"mean": 1.0}}, "N/b": {0: {"mean": 1.0}}}
    sick = charted([Chart("N", ("x",), ranges=None)], rows)
    driver = page(
        Run(sick, "sick", ()), Run(charted([Chart("N", ("x",), ranges=None)], {"N/a": {0: {"mean": 1.0}}}), "healthy", ())
    )
    first, second = texts(driver, "#findings .card")
    assert first.startswith("a NaN or infinite values since tick 0, at 1 tick\n")
    assert second == "No fault was found."


def test_a_key_leads_to_the_table_before_heat_maps_were_drawn(page: Open) -> None:
    rows = {f"{title}/layer{i}": {0: {"mean": i}} for title in "ABCDEFGH" for i in range(60)}
    driver = page(charted([Chart(title, ("x",), ranges=None) for title in "ABCDEFGH"], rows))
    press(driver, "l")
    heading = "return document.getElementById('h-layers').getBoundingClientRect().top"
    until(lambda: 0 <= driver.execute_script(heading) < 500)


def test_a_page_of_500_layers_and_1000_ticks_opens(driver: Any, tmp_path: Path) -> None:
    timeline, names = Timeline(), [f"block{i // 5}.part{i % 5}" for i in range(500)]
    for tick in range(1_000):
        timeline.append(tick, {f"N/{name}": {"mean": (i + 1.0) * (tick + 1)} for i, name in enumerate(names)})
    view = ChartView(Chart("N", ("x",), ranges=None), timeline, tuple(names))
    path = write_report(tmp_path / "report.html", Run(timeline, charts=[view]))
    opened(driver, path)
    assert path.stat().st_size < 3_000_000
    assert driver.find_element(By.ID, "count").text == "500 of 500"
    assert len(listed(driver)) < 60
    driver.find_element(By.ID, "search").send_keys("block99.")
    assert listed(driver) == names[-5:]
    assert driver.execute_script("return series(layered[0], runs[0], 499, 'mean')[999]") == pytest.approx(5e5, rel=2**-11)
    assert complaints(driver) == []


def test_rows_appear_when_the_table_is_scrolled(page: Open) -> None:
    driver = page(filled([f"layer{i}" for i in range(300)], ticks=2))
    assert len(listed(driver)) < 60
    driver.execute_script("document.getElementById('table').scrollTop = 1e6")
    until(lambda: listed(driver)[-1] == "layer299")
    assert len(listed(driver)) < 120


def test_a_page_of_a_training_that_goes_on_can_be_followed(driver: Any, tmp_path: Path) -> None:
    timeline = filled()
    visualizer = HtmlVisualizer(tmp_path / "report.html")
    views = Run(timeline).views()
    visualizer.show(0, views)
    opened(driver, visualizer.path)
    assert "the training goes on" in driver.find_element(By.ID, "summary").text
    press(driver, "r")
    assert driver.find_element(By.ID, "follow").is_selected()
    visualizer.show(1, views)
    visualizer.flush()
    opened(driver, visualizer.path)
    assert not driver.find_element(By.ID, "follow").is_displayed()
    assert complaints(driver) == []
    driver.execute_script("localStorage.clear()")


def test_everything_that_can_be_used_has_a_name(page: Open) -> None:
    driver = page(Run(filled(), "one"), Run(filled(), "two"))
    driver.execute_script("openPanel(0)")
    script = """
const named = (one) => one.textContent.trim() || one.ariaLabel || one.getAttribute("aria-labelledby") || one.labels?.length;
return [...document.querySelectorAll("button, select, input, canvas:not([aria-hidden]), [role=table], dialog[open]")]
  .filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 80))"""
    assert driver.execute_script(script) == []


def test_colours_stand_out_from_their_ground(page: Open) -> None:
    driver = page(filled())
    script = """
const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const inks = ["ink", "soft", "accent", "bad", "warn", "first", "second"].map((one) => [one, 4.5]);
const lines = ["mean", "median", "min", "max", "std", "Q1", "Q3", "other", "focus"].map((one) => [one, 3]);
const low = [];
for (const name of ["light", "dark"]) {
  theme(name);
  for (const [ink, least] of [...inks, ...lines]) {
    for (const ground of ["--card", "--ground"]) {
      const [a, b] = [light(colour(`--${ink}`)), light(colour(ground))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < least) low.push([name, ink, ground, ratio]);
    }
  }
}
return low"""
    assert driver.execute_script(script) == []
