"""The demo's page in Chromium, opened as a file: light and dark, wide and narrow, by keyboard.

`make build/.browser` brings Chromium, Selenium and axe-core; without them the test says so.
EMBERTIDE_PICTURES=docs/pictures writes the pictures of the page.
"""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import WIDTHS, asked, complaints, picture, set_theme, set_width, violations
from made_reports import planned, recorded, unmoved, with_silent_hours

from embertide.server.cli.demo.report import page

REPORTS: dict[str, Callable[[], dict[str, Any]]] = {
    "recorded": recorded,
    "silent": lambda: planned(with_silent_hours(recorded(), 5, 6, 30)),
    "unmoved": lambda: unmoved(recorded()),
}
# Each canvas as colours by pixel, and how many of them there are.
COLOURS = """
return [...document.querySelectorAll("canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
});
"""

pytestmark = pytest.mark.long


@pytest.mark.parametrize("which", REPORTS)
def test_the_page_opens_as_a_file_in_light_and_dark(
    driver: Any, which: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(REPORTS[which]()), encoding="utf-8")
    faults, colours = [], set()
    for width, theme in itertools.product(WIDTHS, ("light", "dark")):
        name = f"report_{which}_{theme}_{width}"
        set_width(driver, width)
        set_theme(driver, theme)
        driver.get(file.as_uri())
        if driver.execute_script("return document.documentElement.scrollWidth") > width:
            faults.append(f"{name} is too wide")
        assert min(driver.execute_script(COLOURS)) > 3, f"{name} has an empty chart"
        colours.add(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
        picture(driver, name)
        faults += [f"{name}: {each}" for each in violations(driver)]
        for each in driver.find_elements("css selector", "summary"):
            each.click()
        assert driver.find_elements("css selector", "details table")[0].is_displayed()
        faults += [f"{name}, tables open: {each}" for each in violations(driver)]
    assert faults == []
    assert len(colours) == 2
    assert asked(driver) == {""}, "the file alone"
    assert complaints(driver) == []


def test_the_theme_is_chosen_and_tables_are_opened_by_keyboard(driver: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(recorded()), encoding="utf-8")
    set_width(driver, WIDTHS[0])
    set_theme(driver, "light")
    driver.get(file.as_uri())
    keys = importlib.import_module("selenium.webdriver.common.keys").Keys
    text = "const at = document.activeElement; return at.ariaLabel || at.innerText"
    reached = []
    for _ in range(20):
        driver.switch_to.active_element.send_keys(keys.TAB)
        reached.append(driver.execute_script(text))
        if reached[-1] == "Dark":
            driver.switch_to.active_element.send_keys(keys.ENTER)
        if "table" in reached[-1]:
            driver.switch_to.active_element.send_keys(keys.ENTER)
            break
    assert reached[:2] == ["Skip to the figures", "Quality"]
    assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert driver.find_element("css selector", "details table").is_displayed()
    driver.execute_script("localStorage.clear()")


def test_hours_without_a_question_look_otherwise(driver: Any, tmp_path: Path) -> None:
    """The hatching is there: the middle of the hours has more colours in a column of pixels."""
    set_width(driver, WIDTHS[0])
    set_theme(driver, "light")
    changes = []
    for report in (recorded(), with_silent_hours(recorded(), 20, 21)):
        file = tmp_path / "report.html"
        file.write_text(page(report), encoding="utf-8")
        driver.get(file.as_uri())
        column = driver.execute_script(
            "const canvas = document.querySelectorAll('canvas')[2];"
            "const x = Math.round(56 + (canvas.width - 56) / 2);"
            "return [...canvas.getContext('2d').getImageData(x, 5, 1, 150).data];"
        )
        changes.append(int(np.any(np.diff(np.reshape(column, (-1, 4)), axis=0), axis=1).sum()))
    assert changes[1] > 2 * changes[0] + 10, changes
