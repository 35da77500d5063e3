"""A headless Chromium for pages, and what it says about them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "DRIVER", "browser", "complaints", "opened", "requests"]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """A driver of a new browser that keeps its files in `profile`, and logs its console and all network requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for switch in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "disable-dev-shm-usage",
        "hide-scrollbars",
        f"user-data-dir={profile}",
        f"window-size={width},{height}",
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def opened(driver: Any, page: Path, fragment: str = "") -> Any:
    """Opens a file and waits until its script has drawn it."""
    driver.get("about:blank")
    driver.get(page.absolute().as_uri() + fragment)
    wait = (
        "const done = arguments[0]; (function look() { document.documentElement.dataset.ready ? done() : setTimeout(look, 20) })()"
    )
    driver.execute_async_script(wait)
    return driver


def complaints(driver: Any) -> list[str]:
    """What the console logged since it was last asked, except plain messages."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


def requests(driver: Any) -> list[str]:
    """The addresses that were requested since this was last asked."""
    import json

    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]  # not those of the first tab
