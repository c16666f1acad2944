"""Chromium for tests, and what it finds in a page: faults by axe-core, hosts asked, complaints.

`make build/.browser` brings Chromium, Selenium and axe-core; without them a test says so.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BROWSER = ROOT / "build" / "browser"
AXE = BROWSER / "axe_playwright_python" / "axe.min.js"
WIDTHS = (1280, 390)
LINES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-default-apps", "--no-first-run", "--disable-extensions"),
    # Whatever is not of this machine has nowhere to go.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextlib.contextmanager
def chromium_at(profile: Path) -> Iterator[Any]:
    """A Chromium that asks no other host, and what drives it."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None or not AXE.exists():
        pytest.fail("there is no Chromium or no Selenium here: run `make build/.browser`")
    sys.path.append(str(BROWSER))
    webdriver = importlib.import_module("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for each in (*LINES, f"--user-data-dir={profile}"):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


def asked(driver: Any) -> set[str]:
    """The hosts that pages have asked since the last call, and ports."""
    found = set()
    for line in driver.get_log("performance"):
        message = json.loads(line["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = urllib.parse.urlsplit(message["params"]["request"]["url"])
            if url.scheme not in ("data", "chrome"):
                found.add(url.netloc)
    return found


def complaints(driver: Any) -> list[str]:
    """Return the browser's complaints: refused scripts and styles, errors."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]


def violations(driver: Any) -> list[str]:
    """Return the faults that axe-core finds in a page."""
    # Not through the page, whose policy allows no such script.
    driver.execute_cdp_cmd(
        "Runtime.evaluate", {"expression": AXE.read_text(), "returnByValue": False}
    )
    done = driver.execute_async_script(
        "const done = arguments[arguments.length - 1]; axe.run().then(done, (e) => done({e}));"
    )
    return [
        f"{each['id']}: {node['target']} {node.get('failureSummary', '')}"
        for each in done["violations"]
        for node in each["nodes"]
    ]


def picture(driver: Any, name: str) -> None:
    folder = os.environ.get("EMBERTIDE_PICTURES")
    if folder:
        (Path(folder) / f"{name}.png").write_bytes(driver.get_screenshot_as_png())


def set_theme(driver: Any, theme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def set_width(driver: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
