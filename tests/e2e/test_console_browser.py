"""The console in Chromium: every page in light and dark and at 390 px, by axe-core and by keyboard.

`make build/.browser` brings Chromium, Selenium and axe-core; without them the test says so.
EMBERTIDE_PICTURES=docs/pictures writes the pictures of the pages.
"""

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
from consoles import PATHS, Served, made
from made_fleet import MadeFleet, Names, answers
from waiting import wait_until

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

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None or not AXE.exists():
        pytest.fail("there is no Chromium or no Selenium here: run `make build/.browser`")
    sys.path.append(str(BROWSER))
    webdriver = importlib.import_module("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
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


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Served, MadeFleet]]:
    with made(answers(3, bits=8, dead=1, names=Names(message="no route to host"))) as each:
        yield each


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


def log_in(driver: Any, there: Served) -> None:
    driver.delete_all_cookies()
    driver.get(f"http://{there.address}/login")
    driver.find_element("css selector", "input[name=token]").send_keys("good")
    driver.find_element("css selector", "button.primary").click()
    wait_until(lambda: bool(driver.find_elements("css selector", "#live")))


def picture(driver: Any, name: str) -> None:
    folder = os.environ.get("EMBERTIDE_PICTURES")
    if folder:
        (Path(folder) / f"console_{name}.png").write_bytes(driver.get_screenshot_as_png())


def set_theme(driver: Any, theme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": theme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def set_width(driver: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def test_every_page_in_light_and_dark_asks_nobody_else(
    driver: Any, fleet: tuple[Served, MadeFleet]
) -> None:
    there, _ = fleet
    log_in(driver, there)
    faults, colours = [], set()
    for width in WIDTHS:
        set_width(driver, width)
        for theme in ("light", "dark"):
            set_theme(driver, theme)
            for path in PATHS:
                driver.get(f"http://{there.address}{path}")
                name = f"{path.strip('/') or 'health'}_{theme}_{width}"
                wide = driver.execute_script("return document.documentElement.scrollWidth")
                if wide > width:
                    faults.append(f"{name} is {wide} px wide")
                colours.add(
                    driver.execute_script("return getComputedStyle(document.body).backgroundColor")
                )
                picture(driver, name)
                faults += [f"{name}: {each}" for each in violations(driver)]
    assert not faults, "\n".join(faults)
    assert len(colours) == 2
    assert asked(driver) == {there.address}
    assert complaints(driver) == []


def test_pages_refresh_themselves_and_say_when_nobody_answers(
    driver: Any, fleet: tuple[Served, MadeFleet]
) -> None:
    there, made_fleet = fleet
    log_in(driver, there)

    def text() -> str:
        return str(driver.execute_script("return document.getElementById('live').innerText"))

    before = made_fleet.calls.count("GetStatus")
    wait_until(lambda: made_fleet.calls.count("GetStatus") > before + 1)
    assert "Live nodes" in text()
    made_fleet.die()
    try:
        wait_until(lambda: "does not answer; these figures are" in text())
    finally:
        made_fleet.refusal = None
    wait_until(lambda: "does not answer; these figures are" not in text())
    driver.find_element("id", "pause").click()
    assert driver.find_element("id", "pause").get_attribute("aria-pressed") == "true"
    driver.find_element("id", "theme").click()
    chosen = driver.execute_script("return document.documentElement.dataset.theme")
    driver.get(f"http://{there.address}/load")
    assert driver.execute_script("return document.documentElement.dataset.theme") == chosen
    drawn = "return document.getElementById('heat').width > 300"
    wait_until(lambda: bool(driver.execute_script(drawn)))
    driver.execute_script("localStorage.clear()")
    assert complaints(driver) == []


def test_the_keyboard_reaches_everything(driver: Any, fleet: tuple[Served, MadeFleet]) -> None:
    there, _ = fleet
    log_in(driver, there)
    driver.get(f"http://{there.address}/operations")
    keys = importlib.import_module("selenium.webdriver.common.keys").Keys
    reached = []
    for _ in range(60):
        driver.switch_to.active_element.send_keys(keys.TAB)
        reached.append(
            driver.execute_script(
                "const at = document.activeElement; return at.ariaLabel || at.innerText || at.name"
            )
        )
        if "Preview" in reached:
            break
    assert reached[0] == "Skip to the figures"
    for name in ("Health", "Drift", "Pause updates", "Log out", "Pause move-1", "Preview"):
        assert name in reached, reached
