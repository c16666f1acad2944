"""The console in Chromium: every page and button of fleets of every kind, by axe-core and keyboard.

`make build/.browser` brings Chromium, Selenium and axe-core; without them the test says so.
EMBERTIDE_PICTURES=docs/pictures writes the pictures of the pages.

Pages are compared with tests/golden/console: one small picture a theme, of all pages side by side.
They are so small that fonts, and times of day, make no difference. A test that finds another one
writes it to build/.
"""

import functools
import importlib
import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from browsing import (
    ROOT,
    WIDTHS,
    asked,
    complaints,
    picture,
    set_theme,
    set_width,
    violations,
)
from consoles import PATHS, Served, made
from made_fleet import MadeFleet, Names, answers
from PIL import Image
from waiting import wait_until

GOLDEN = ROOT / "tests" / "golden" / "console"
TILE = (160, 112)
MOST_DIFFERENT = 3.0
# The heat map is wider than a canvas is before it is drawn; the chart of staleness has none before.
DRAWN = """
const heat = document.getElementById("heat");
const chart = document.getElementById("staleness");
const drawn = (!heat || heat.width > 300) && (!chart || chart.firstChild);
return document.readyState == "complete" && drawn;
"""
pytestmark = pytest.mark.long


SAID = Names(message="no route to host")
FLEETS = {
    "three nodes, a dead one": functools.partial(answers, 3, bits=8, dead=1, names=SAID),
    "two nodes": functools.partial(answers, 2, bits=8, names=SAID),
    "1,000 nodes and 2^20 buckets": functools.partial(answers, 1000, bits=20, dead=3, names=SAID),
    "no nodes": functools.partial(answers, 0, names=SAID),
}
AWAY = "does not answer; these figures are"


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Served, MadeFleet]]:
    with made(FLEETS["three nodes, a dead one"]()) as each:
        yield each


def log_in(driver: Any, there: Served) -> None:
    driver.delete_all_cookies()
    driver.get(f"http://{there.address}/login")
    driver.find_element("css selector", "input[name=token]").send_keys("good")
    driver.find_element("css selector", "button.primary").click()
    wait_until(lambda: bool(driver.find_elements("css selector", "#live")))


def looked_at(driver: Any, there: Served, told: str) -> list[str]:
    """Look at every page in each width and theme; return the faults."""
    faults, colours = [], set()
    for width, theme in itertools.product(WIDTHS, ("light", "dark")):
        set_width(driver, width)
        set_theme(driver, theme)
        for path in PATHS:
            driver.get(f"http://{there.address}{path}")
            name = f"{path.strip('/') or 'health'}_{theme}_{width}"
            wide = driver.execute_script("return document.documentElement.scrollWidth")
            if wide > width:
                faults.append(f"{name} is {wide} px wide")
            if told not in driver.find_element("css selector", "body").text and path != "/sizing":
                faults.append(f"{name} does not say {told!r}")
            colours.add(
                driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            )
            picture(driver, f"console_{name}")
            faults += [f"{name}: {each}" for each in violations(driver)]
    assert len(colours) == 2
    return faults


@pytest.mark.parametrize("which", FLEETS)
def test_every_page_in_light_and_dark_asks_nobody_else(driver: Any, which: str) -> None:
    with made(FLEETS[which]()) as (there, _):
        log_in(driver, there)
        assert looked_at(driver, there, "") == []
        assert asked(driver) == {there.address}
        assert complaints(driver) == []


def shown(driver: Any, there: Served) -> str:
    driver.get(f"http://{there.address}/")
    return str(driver.find_element("css selector", "body").text)


def test_pages_of_a_dead_control_plane_are_whole_and_say_so(driver: Any) -> None:
    with made(FLEETS["two nodes"]()) as (there, made_fleet):
        log_in(driver, there)
        for path in PATHS:  # so that there are figures to show
            driver.get(f"http://{there.address}{path}")
        made_fleet.die()
        wait_until(lambda: AWAY in shown(driver, there))  # an answer is kept for a moment
        assert looked_at(driver, there, AWAY) == []
        assert asked(driver) == {there.address}
        assert complaints(driver) == []


def open_still(driver: Any, url: str) -> None:
    """Open a page whose parts are not replaced while a test looks for them."""
    driver.get(url)
    pause = driver.find_elements("css selector", "#pause:not([hidden])")
    for each in pause:
        each.click()


def buttons(driver: Any) -> list[Any]:
    found = driver.find_elements("css selector", "button")
    return [each for each in found if each.is_displayed() and each.text != "Log out"]


@pytest.mark.parametrize("which", FLEETS)
def test_every_button_leads_to_a_page_or_changes_one(driver: Any, which: str) -> None:
    pressed = set()
    with made(FLEETS[which]()) as (there, _):
        log_in(driver, there)
        set_width(driver, WIDTHS[0])
        for path in PATHS:
            open_still(driver, f"http://{there.address}{path}")
            for at in range(len(buttons(driver))):
                open_still(driver, f"http://{there.address}{path}")
                button = buttons(driver)[at]
                pressed.add(button.text)
                fields = "input[type=text]:invalid, input:not([type]):invalid, textarea:invalid"
                for empty in driver.find_elements("css selector", fields):
                    empty.send_keys("node-0")
                button.click()
                wait_until(lambda: bool(driver.find_elements("css selector", "h1")))
                # In one step: an element of the page before is gone once the next one is there.
                body = str(driver.execute_script("return document.body.innerText"))
                assert "Internal Server Error" not in body, (path, button)
                assert driver.title, path
                # A page tells why it, or the control plane, refuses; the browser notes the status.
                severe = [
                    each
                    for each in complaints(driver)
                    if "status of 4" not in each and "status of 502" not in each
                ]
                assert severe == [], path
    assert {"Search", "Compute", "Preview"} <= pressed, pressed


def sheet(driver: Any, there: Served) -> Image.Image:
    """Return a picture of all pages, small."""
    columns = 4
    made_up = Image.new("RGB", (columns * TILE[0], -(-len(PATHS) // columns) * TILE[1]))
    for at, path in enumerate(PATHS):
        driver.get(f"http://{there.address}{path}")
        wait_until(lambda: bool(driver.execute_script(DRAWN)))
        shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
        small = shot.resize(TILE, Image.Resampling.BOX)
        made_up.paste(small, (at % columns * TILE[0], at // columns * TILE[1]))
    return made_up


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return by how much the tile that differs most does, in levels of 255 a pixel."""
    assert one.size == other.size
    between = np.abs(np.asarray(one, np.int16) - np.asarray(other, np.int16)).mean(axis=2)
    tiles = between.reshape(one.size[1] // TILE[1], TILE[1], one.size[0] // TILE[0], TILE[0])
    return float(tiles.mean(axis=(1, 3)).max())


def test_pages_look_as_they_did(driver: Any, fleet: tuple[Served, MadeFleet]) -> None:
    there, _ = fleet
    log_in(driver, there)
    set_width(driver, WIDTHS[0])
    found = {}
    for theme in ("light", "dark"):
        set_theme(driver, theme)
        found[theme] = sheet(driver, there)
    found["dark"].save(ROOT / "build" / "console_dark.png")
    found["light"].save(ROOT / "build" / "console_light.png")
    for theme, now in found.items():
        before = Image.open(GOLDEN / f"{theme}.png")
        assert difference(now, before) < MOST_DIFFERENT, (
            f"pages look otherwise: compare build/console_{theme}.png with {GOLDEN}/{theme}.png, "
            "and copy it there if that is meant"
        )
    assert difference(found["light"], found["dark"]) > 10 * MOST_DIFFERENT
    # Without its style sheets a page looks otherwise.
    driver.get(f"http://{there.address}{PATHS[0]}")
    driver.execute_script("for (const each of document.styleSheets) each.disabled = true")
    bare = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    first = Image.open(GOLDEN / "dark.png").crop((0, 0, *TILE))
    assert difference(bare.resize(TILE, Image.Resampling.BOX), first) > MOST_DIFFERENT


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
        wait_until(lambda: AWAY in text())
    finally:
        made_fleet.refusal = None
    wait_until(lambda: AWAY not in text())
    driver.find_element("id", "pause").click()
    assert driver.find_element("id", "pause").get_attribute("aria-pressed") == "true"
    driver.find_element("id", "theme").click()
    chosen = driver.execute_script("return document.documentElement.dataset.theme")
    driver.get(f"http://{there.address}/load")
    assert driver.execute_script("return document.documentElement.dataset.theme") == chosen
    wait_until(lambda: bool(driver.execute_script(DRAWN)))
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
